"""Train an agent that brings its own loop (configs/agent_program.gin), and check every call of it on the way.

    python benchmarks/agent_program.py [--seed N] [--set 'name = value' ...]

Every request to the sampler and its result are noted independently of the recorder. At the end every call in the stored
rollouts is compared with them: prompt ids, sampled ids, log-probs and versions must be equal, and none may be missing.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]


def remember_calls() -> dict[tuple[int, ...], tuple[np.ndarray, Any]]:
    """Note every request of every sampler: address -> (prompt ids, pending answer)."""
    from rolljax.sampler.client import Sampler

    asked, submit = {}, Sampler.submit

    def remembering(sampler, prompt_ids, params, address, **options):
        pending = submit(sampler, prompt_ids, params, address, **options)
        asked[address] = (prompt_ids, pending)
        return pending

    Sampler.submit = remembering
    return asked


def compare(run_dir: Path, asked: dict, stream: int) -> tuple[int, int]:
    """Return the number of a phase's calls in the stored rollouts, and how many of them differ from the sampled
    ones."""
    sampled = {a[1:]: v for a, v in asked.items() if a[1] == stream}
    num = wrong = 0
    for path in (run_dir / "rollouts").iterdir():
        for line in path.read_text().splitlines():
            trajectory = json.loads(line)
            key, ids = trajectory["key"], []
            if key["stream"] != stream:
                continue
            for i, turn in enumerate(trajectory["turns"]):
                ids = [] if turn["restart"] else ids
                ids += turn["prompt_ids"]
                prompt, pending = sampled.pop((stream, key["prompt_index"], key["sibling"], i))
                gave = pending.completion.result()
                same = (
                    prompt.tolist() == ids
                    and gave.tokens.tolist() == turn["tokens"]
                    and np.array_equal(gave.sampler_logp, np.float32(turn["sampler_logp"]))
                    and gave.versions.tolist() == turn["versions"]
                )
                ids += turn["tokens"]
                num, wrong = num + 1, wrong + (not same)
    return num, wrong + len(sampled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], help="a setting of the run")
    args = parser.parse_args()
    from rolljax.commands.train import main as train

    os.chdir(ROOT)
    asked, start = remember_calls(), time.perf_counter()
    settings = [f"Recipe.seed = {args.seed}", "MeshSpec.data = 1", *args.set]
    with tempfile.TemporaryDirectory() as folder:
        argv = ["--gin", "configs/agent_program.gin", "--run_dir", f"{folder}/run"]
        assert train(argv + [a for s in settings for a in ("--set", s)]) == 0
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
        num, wrong = compare(Path(folder) / "run", asked, stream=1)
        heldout = json.loads((Path(folder) / "run" / "summary.json").read_text())["heldout_reward"]
    rl = [r for r in rows if r["phase"] == "rl"]
    rollout_s = float(np.median([r["time/rollout_s"] for r in rl]))
    print("reward by step:", " ".join(f"{r['reward/mean']:.2f}" for r in rl))
    print("held out:", " -> ".join(f"{e['mean']:.3f}" for e in heldout), f"({heldout[0]['n']} tasks)")
    print(f"calls: {num}, not as sampled: {wrong}; failed episodes: {sum(r['rollout/fail_frac'] for r in rl):g}")
    print(f"largest log-prob gap of sampler and trainer: {max(r['mismatch/abs_max_nat'] for r in rl):.1e}")
    print(f"rollout of a step: {rollout_s:.1f} s (median); the whole run: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
