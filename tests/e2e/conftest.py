"""Whole runs, in this process or in their own, of the shipped quickstart with smaller numbers."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolljax.concurrency import distributed
from rolljax.console.progress import Console

from ..conftest import EMITTERS

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.gin")
SMALL = {
    "ReasoningGym.config": "{'min_word_len': 3, 'max_word_len': 6}",
    "ReasoningGym.partial_credit": "True",
    "Recipe.max_answer_tok": "8",
    "SamplerConfig.slots": "64",
    "SamplerConfig.prefill_chunk": "256",
    "warm_start/Phase.steps": "6",
    "warm_start/Phase.prompts_per_step": "16",
    "warm_start/Phase.eval_every": "0",
    "warm_start/Phase.stop_at_reward": "None",
    "rl/Phase.steps": "14",
    "rl/Phase.prompts_per_step": "8",
    "rl/Phase.group_size": "4",
    "rl/Phase.eval_every": "0",
    "Evaluation.tasks": "16",
    "Recipe.save_every": "3",
}


def arguments(run_dir, **changes):
    """Return command-line arguments of a small quickstart; keys of `changes` spell `/` as `__` and `.` as `_dot_`."""
    settings = SMALL | {k.replace("__", "/").replace("_dot_", "."): str(v) for k, v in changes.items()}
    argv = ["--gin", QUICKSTART, "--run_dir", str(run_dir)]
    return argv + [a for name, value in settings.items() for a in ("--set", f"{name} = {value}")]


RESERVATIONS = []


def free_port():
    """Return a free port of this machine, which no other program is given until the tests end."""
    reservation, port = distributed.reserve_port()
    RESERVATIONS.append(reservation)
    return port


def of_two_processes(devices):
    """Return the environment of two joined processes, without `JAX_PROCESS_ID`; each has `devices` CPU devices."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))} | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {EMITTERS}",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
        "JAX_NUM_PROCESSES": "2",
    }


def rows(run_dir):
    path = Path(run_dir) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_conserved(rows):
    """Check that groups started = trained + dropped + replaced + cancelled + waiting, at every step. The phases must
    end with no group waiting."""
    waiting = 0
    gone = ("trained", "dropped_credit", "dropped_failed", "no_signal", "spare_failed", "late")
    for row in rows:
        ended = sum(row[f"groups/{name}_n"] for name in gone)
        assert waiting + row["groups/started_n"] == ended + row["groups/waiting_n"]
        waiting = row["groups/waiting_n"]


def summary(run_dir):
    return json.loads((Path(run_dir) / "summary.json").read_text())


def child_of(parent):
    """Return the id of the process that trains for a `--restarts` parent; None if none does now."""
    for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"rolljax.train" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)


@pytest.fixture(scope="session")
def start():
    """Start `python -m rolljax.train` in a separate process with this number of CPU devices."""

    def run(argv, devices=1):
        env = os.environ | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {EMITTERS}",
        }
        command = [sys.executable, "-m", "rolljax.train", *argv]
        return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    return run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train briefly in this process and return the run folder."""
    from rolljax.commands.train import main as train

    run_dir = tmp_path_factory.mktemp("trained") / "run"
    changes = {
        "warm_start__Phase_dot_steps": 24,
        "warm_start__Phase_dot_prompts_per_step": 32,
        "rl__Phase_dot_steps": 8,
        "Recipe_dot_save_every": 32,
        "MeshSpec_dot_data": 1,
    }
    assert train(arguments(run_dir, **changes)) == 0
    return run_dir


@pytest.fixture(scope="session")
def ray_cluster():
    """Start a Ray cluster of two nodes on this host once, one of which seems to have TPUs, and connect this process.
    Returns a function for the ids of the nodes with actors."""
    import ray
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    cluster.add_node(**node, resources={"TPU": 4})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")

    def nodes_of_actors():
        actors = ray._private.state.actors().values()
        return {actor["Address"]["NodeID"] for actor in actors if actor["State"] == "ALIVE"}

    nodes_of_actors.address, nodes_of_actors.cluster = cluster.address, cluster
    yield nodes_of_actors
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def ray_address(ray_cluster):
    """Return the address of the cluster; this process is disconnected while the test runs."""
    import ray

    ray.shutdown()
    yield ray_cluster.address
    ray.shutdown()
    ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="warning")


class StopAt(Console):
    """Requests a stop at one step."""

    def __init__(self, step):
        super().__init__()
        self.last, self.stopped = step, False

    def step(self, row):
        self.stopped = row["step"] == self.last
