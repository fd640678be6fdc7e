"""Fingerprints of short runs, to show that a change of the code changes no number.

    python benchmarks/state_hashes.py > after.json        # and the same in a checkout from before the change

Each is a shipped recipe with fewer steps; its value is `state_sha256`, over every bit of the state that training ended
with. The same code gives the same fingerprints on the same machine and package versions; on another kind of processor
they differ. About five minutes on two cores. `--only NAME` runs one.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FEW = {"Recipe.save_every": "1000", "Evaluation.tasks": "32"}
BOTH = {"warm_start/Phase.stop_at_reward": "None", "warm_start/Phase.eval_every": "0", "rl/Phase.eval_every": "0"}


def steps(warm_start: int, rl: int) -> dict[str, str]:
    return FEW | BOTH | {"warm_start/Phase.steps": str(warm_start), "rl/Phase.steps": str(rl)}


RUNS: dict[str, tuple[str, dict[str, str]]] = {
    "quickstart": ("quickstart", steps(20, 20)),
    "frozen_lake": ("frozen_lake", steps(10, 5)),
    "lora": ("lora", steps(10, 5) | {"Recipe.model": "'{quickstart}/hf'"}),
    "critics": ("reward_model_ppo", steps(20, 10) | {"reward_model/Phase.steps": "4", "Critic.warmup_steps": "2"}),
    "agent_program": ("agent_program", steps(6, 3) | {"rl/Phase.prompts_per_step": "8"}),
    "two_processes": (
        "quickstart",
        steps(4, 4)
        | {
            "SamplerConfig.slots": "64",
            "rl/Phase.prompts_per_step": "16",
            "MeshSpec.data": "2",
            "MeshSpec.fsdp": "2",
            "MeshSpec.tensor": "2",
        },
    ),
}
"""Name -> recipe, and what is set over it; `{quickstart}` is the run folder of that name."""


def environments(name: str) -> list[dict[str, str]]:
    """Return the environment variables of each process of a run."""
    own = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    own |= {"JAX_PLATFORMS": "cpu"}
    if name != "two_processes":
        return [own]
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    own |= {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": "2",
    }
    return [own | {"JAX_PROCESS_ID": str(i)} for i in range(2)]


def run(name: str, folder: Path) -> str:
    """Make one run in `folder`; return its fingerprint."""
    recipe, settings = RUNS[name]
    command = [sys.executable, "-m", "rolljax.train", "--gin", recipe]
    command += ["--run_dir", str(folder / name)]
    for key, value in settings.items():
        command += ["--set", f"{key} = {value.format(quickstart=folder / 'quickstart')}"]
    log = (folder / f"{name}.log").open("w")
    running = [subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log) for env in environments(name)]
    codes = [process.wait() for process in running]
    if any(codes):
        sys.exit(f"{name} ended with {codes}:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    return json.loads((folder / name / "summary.json").read_text())["state_sha256"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=RUNS, help="one run; repeatable (default: all)")
    wanted = parser.parse_args().only or list(RUNS)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if "lora" in wanted and "quickstart" not in wanted:
            wanted.insert(0, "quickstart")
        for name in wanted:
            found[name] = run(name, Path(folder))
            print(f"{name} {found[name]}", file=sys.stderr, flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
