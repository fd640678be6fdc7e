"""Whole runs with samplers in other processes: what is trained is what one process trains, whoever is killed meanwhile."""

import contextlib
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rolljax.cluster import launchers
from rolljax.cluster.group import SamplerGroup
from rolljax.commands.train import main as train
from rolljax.errors import HangError
from rolljax.storage.run_reader import RunReader

from ..proxied_run import CUTS
from ..proxies import DOWN, UP, through_proxies
from .conftest import ROOT, rows
from .sandbox_support import eventually
from .test_placement import GIN, assert_the_same, run

REMOTE = ["Recipe.placement = @Remote()", "Remote.samplers = 2", "Remote.heartbeat_s = 0.2", "MeshSpec.data = 1"]
STEPS = 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the rows of a run in one process."""
    return run(tmp_path_factory.mktemp("alone") / "run", "MeshSpec.data = 1")


def sampled(folder):
    """Return the sampled tokens of each step, by the keys of their trajectories."""
    reader = RunReader(folder)
    return {
        step: {
            (t.key.prompt_index, t.key.sibling): [turn.tokens.tolist() for turn in t.turns]
            for t in reader.trajectories(step)
        }
        for step in reader.rollout_steps()
    }


def left_over(folder):
    """Return the processes that name a run folder or one of its samplers."""
    ports = json.loads((folder / "samplers" / "controller.json").read_text())["port"]
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if f"127.0.0.1:{ports}" in words or str(folder) in words:
            found.append(words.replace("\0", " "))
    return found


def assert_ended(folder):
    assert eventually(lambda: not left_over(folder), seconds=60), left_over(folder)


def test_two_samplers_train_what_one_process_trains(alone, tmp_path):
    found, state = run(tmp_path / "run", *REMOTE)
    assert_the_same(found, alone[0])
    assert_ended(tmp_path / "run")


@pytest.mark.sweep
def test_a_repeated_run_is_the_same_to_the_bit(tmp_path):
    first, second = (run(tmp_path / name / "run", *REMOTE) for name in ("a", "b"))
    assert first == second


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("int8", [False, True])
def test_a_sampler_that_is_sent_adapters_alone_samples_what_one_process_does(tmp_path, int8):
    lora = ("Recipe.lora = @Lora()", "Lora.rank = 2", f"Lora.int8_base = {int8}")
    alone, _ = run(tmp_path / "alone" / "run", *lora, "MeshSpec.data = 1")
    found, _ = run(tmp_path / "run", *lora, *REMOTE, "Remote.samplers = 1")
    assert_the_same(found, alone)
    assert sampled(tmp_path / "run") == sampled(tmp_path / "alone" / "run")
    manifests = [json.loads(path.read_text())["arrays"] for path in (tmp_path / "run").rglob("manifest.json")]
    sent = [names for names in manifests if any(name.endswith("_a") for name in names)]
    assert len(sent) == len(manifests) - 1 == 2  # the newest adapters, and the base once
    assert all(name.endswith(("_a", "_b")) for names in sent for name in names)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_a_run_without_samplers_ends_with_a_named_wait(tmp_path, monkeypatch, how):
    """Both samplers are killed whenever they start, or nothing passes between them and the run any more."""
    proxies = through_proxies(monkeypatch)

    def strike():
        if how == "cut off":
            for proxy in proxies.values():
                proxy.swallow(UP, DOWN, later=True)
        for file in (tmp_path / "run" / "samplers").glob("*.pid") if how == "killed" else ():
            with contextlib.suppress(OSError, ValueError, IndexError):
                os.kill(int(file.read_text().split()[0]), signal.SIGKILL)

    with (
        again_and_again(tmp_path / "run", strike),
        pytest.raises(HangError, match="sampler-[01]: (joining|compiling|waits|has not|building|ready)"),
    ):
        run(tmp_path / "run", *REMOTE, "Recipe.wait_s = 60.0", "Phase.steps = 50")
    assert_ended(tmp_path / "run")


@pytest.mark.slow
def test_a_sampler_with_wrong_weights_is_drained_and_started_again(tmp_path, monkeypatch, capsys):
    """The next steps are trained without it, and with it once it is back."""
    command, drain_far, started = launchers.command, SamplerGroup.drain_far, []

    def first_damaged(order, name):
        words = command(order, name)
        started.append(name)
        damaged = name == "sampler-1" and started.count(name) == 1
        return [w.replace("rolljax.sampler_host", "tests.damaged_sampler") if damaged else w for w in words]

    def wait_for_it(group, gaps):
        found = drain_far(group, gaps)
        assert not found or eventually(lambda: group._router.members["sampler-1"].where == "ready", seconds=120)
        return found

    monkeypatch.setattr(launchers, "command", first_damaged)
    monkeypatch.setattr(SamplerGroup, "drain_far", wait_for_it)
    (tmp_path / "small.gin").write_text(GIN)
    argv = ["--gin", str(tmp_path / "small.gin"), "--run_dir", str(tmp_path / "run")]
    for setting in (*REMOTE, "Phase.prompts_per_step = 12"):
        argv += ["--set", setting]
    assert train(argv) == 0
    drained = json.loads((tmp_path / "run" / "summary.json").read_text())["drained_samplers"]
    assert [(d["step"], d["sampler"]) for d in drained] == [(1, "sampler-1")]
    assert drained[0]["gap_nat"] > 0.05 and drained[0]["others_gap_nat"] < 1e-5
    assert "sampler-1 is drained: its log-probs are" in capsys.readouterr().err
    first, *others = rows(tmp_path / "run")
    assert first["sampler/sampler-1/gap_nat"] == pytest.approx(drained[0]["gap_nat"])
    assert len(others) == 2 and all(row["mismatch/abs_max_nat"] < 1e-5 for row in others)
    assert started == ["sampler-0", "sampler-1", "sampler-1"]
    assert {name for name in others[-1] if name.endswith("gap_nat")} == {
        f"sampler/{name}/gap_nat" for name in ("sampler-0", "sampler-1.2")
    }
    assert_ended(tmp_path / "run")


@contextlib.contextmanager
def again_and_again(folder, strike):
    """Call a function again and again, once the run has trained a step."""
    over = threading.Event()

    def run():
        while not over.wait(0.2):
            if rows(folder):
                strike()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def parents():
    """Return the parent of each process of this machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    return found


def words_of(pid):
    """Return the command line of a process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Disturbed:
    """A run in a process of its own, of which something is killed."""

    def __init__(self, folder, *settings, restarts=0, program="rolljax.train"):
        self.folder = folder / "run"
        (folder / "small.gin").write_text(GIN)
        argv = ["--gin", str(folder / "small.gin"), "--run_dir", str(self.folder)]
        for setting in (*REMOTE, f"Phase.steps = {STEPS}", "Recipe.save_every = 2", "Remote.lost_s = 4.0", *settings):
            argv += ["--set", setting]
        if restarts:
            argv += ["--restarts", str(restarts)]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", program, *argv], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def until_step(self, step):
        while len(rows(self.folder)) < step:
            assert self.process.poll() is None, self.process.communicate()[0].decode()
            time.sleep(0.01)

    def signal_sampler(self, index, number):
        file = self.folder / "samplers" / f"sampler-{index}"
        if file.with_suffix(".pid").exists():
            pid = file.with_suffix(".pid").read_text().split()[0]
        else:  # Ray has started it
            pid = re.findall(r"process (\d+) on", file.with_suffix(".log").read_text())[-1]
        os.kill(int(pid), number)

    def kill_trainer(self):
        """Kill the process that trains, which is a child of the one that restarts it."""
        for pid, parent in parents().items():
            if parent == self.process.pid and b"orphan_guard" not in words_of(pid):
                os.kill(pid, signal.SIGKILL)

    def kill_worker(self):
        """Kill a worker process of the environment or of a reward, as soon as there is one."""

        def killed():
            above = parents()
            servers = {pid for pid in above if b"rolljax.envs.pool.fork_server" in words_of(pid)}
            for pid in servers:
                line = [pid]
                while line[-1] in above:
                    line.append(above[line[-1]])
                if line[1] in servers and self.process.pid in line:
                    with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                        os.kill(pid, signal.SIGKILL)
                        return True
            return self.process.poll() is not None

        assert eventually(killed)

    def ended(self):
        said = self.process.communicate()[0].decode()
        assert self.process.returncode == 0, said
        assert_ended(self.folder)
        return said

    def check_consumed(self):
        """Check that all steps are there once, and that no prompt was trained twice."""
        written = rows(self.folder)
        assert [row["step"] for row in written] == list(range(1, STEPS + 1))
        prompts = [key[0] for step in sampled(self.folder).values() for key in {k[:1] for k in step}]
        assert len(prompts) == len(set(prompts))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function for the tokens of a run with these settings, in one process."""

    @functools.cache
    def tokens(*settings):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        run(folder, "MeshSpec.data = 1", f"Phase.steps = {STEPS}", *settings)
        return sampled(folder)

    return tokens


KINDS = {
    "kill a sampler": [],
    "stop a sampler": [],
    "cut off a sampler": [],
    "kill the trainer": [],
    "kill an environment worker": ["PoolConfig.where = 'process'", "PoolConfig.workers = 2"],
    "kill a reward worker": [
        "Recipe.reward = @rolljax.rewards.function.Function()",
        "Function.fn = @tests.synthetic_rewards.letters",
        "Function.workers = 2",
    ],
}
"""What is killed, and the settings that give the run such a process."""


SLOW = {("kill a sampler", 0), ("stop a sampler", 1), ("kill the trainer", 0), ("kill an environment worker", 1)}
"""Those of which the first moment is slow; all others are a sweep."""


def moments():
    for kind in KINDS:
        for ratio in (0, 1):
            for number in range(20):
                mark = pytest.mark.slow if number == 0 and (kind, ratio) in SLOW else pytest.mark.sweep
                launcher = "Ray" if number % 2 and kind != "cut off a sampler" else "Processes"
                yield pytest.param(
                    kind, ratio, number, launcher, marks=mark, id=f"{kind}, ratio {ratio}, {launcher} {number}"
                )


@pytest.mark.parametrize(("kind", "ratio", "number", "launcher"), list(moments()))
def test_no_group_is_lost_or_trained_twice(undisturbed, tmp_path, kind, ratio, number, launcher, request):
    """At ratio 0 the tokens are those of the undisturbed run."""
    rng, placed = random.Random(f"{kind} {ratio} {number}"), []
    if launcher == "Ray":
        address = request.getfixturevalue("ray_cluster").address
        placed = ["Remote.launcher = @Ray()", f"Ray.address = '{address}'", "Ray.cpus = 0.5"]
    restarts = 3 * (kind == "kill the trainer")
    program = "tests.proxied_run" if kind == "cut off a sampler" else "rolljax.train"
    settings = [f"Phase.async_ratio = {ratio}", *KINDS[kind], *placed]
    disturbed = Disturbed(tmp_path, *settings, restarts=restarts, program=program)
    try:
        disturbed.until_step(rng.randrange(1, STEPS - 2))
        time.sleep(0.3 * rng.random())  # within a step
        is_under_way = len(rows(disturbed.folder)) < STEPS - 1
        if kind == "kill the trainer":
            disturbed.kill_trainer()
        elif KINDS[kind]:
            disturbed.kill_worker()
        elif kind == "cut off a sampler":
            disturbed.process.send_signal(rng.choice([*CUTS]))
        else:
            disturbed.signal_sampler(rng.randrange(2), signal.SIGKILL if kind == "kill a sampler" else signal.SIGSTOP)
        said = disturbed.ended()
    finally:
        disturbed.process.kill()
    disturbed.check_consumed()
    if kind == "kill a sampler" and is_under_way:
        assert "is lost" in said
    if ratio == 0:
        assert sampled(disturbed.folder) == undisturbed(*KINDS[kind])


@pytest.mark.sweep
def test_a_run_is_evaluated_without_its_samplers(tmp_path):
    """By a sampler of the process that evaluates."""
    from rolljax.evaluation.models import of_run
    from rolljax.run.policy import policy_recipe

    run(tmp_path / "run", *REMOTE, "Remote.samplers = 1", "Phase.steps = 1")
    with of_run(policy_recipe(tmp_path / "run"), tmp_path / "run") as model:
        assert model.sampler.version == 1
