"""A training step of 200 episodes, each in a live sandbox, while a share of the sandboxes is killed from outside.

    python benchmarks/sandbox_kills.py          # three minutes; needs bubblewrap

Every new sandbox is drawn once: with a probability of `--frac` it gets a SIGKILL at a random moment of its first
`--within_s` seconds, as from an operator or the kernel of a machine without memory. The policy has random weights; what
counts are its episodes: sandboxes, commands, tests. Two runs of the same recipe, without and with kills; the first step
of each, which compiles, does not count. `RolloutConfig.retries` starts lost episodes again from the same task.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import threading
from pathlib import Path

import rolljax
from rolljax.envs.pool.settings import PoolConfig
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.recipes.terminal_bench.number_files import write_tasks
from rolljax.recipes.terminal_bench.terminal import HarborTasks
from rolljax.sampler.settings import SamplerConfig
from rolljax.sandbox import shared_host
from rolljax.sandbox.supervisor import procfs
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.optimizer import AdamW


class Killer(threading.Thread):
    """Kills sandboxes of this process at random."""

    def __init__(self, frac: float, within_s: float) -> None:
        super().__init__(daemon=True)
        self.frac, self.within_s, self.num_killed, self.num_seen = frac, within_s, 0, 0
        self._rng, self._over = random.Random(0), threading.Event()

    def run(self) -> None:
        supervisor, seen = shared_host()._running().process.pid, set[int]()
        while not self._over.wait(0.05):
            new = {pid for pid, (parent, _) in procfs.process_table().items() if parent == supervisor} - seen
            seen |= new
            self.num_seen += len(new)
            for pid in sorted(new):
                if self._rng.random() < self.frac:
                    threading.Timer(self._rng.uniform(0, self.within_s), self._kill, [pid]).start()

    def _kill(self, pid: int) -> None:
        try:
            os.kill(pid, signal.SIGKILL)
            self.num_killed += 1
        except ProcessLookupError:
            pass  # it has ended meanwhile

    def stop(self) -> None:
        self._over.set()
        self.join()


def recipe(tasks: str, episodes: int, steps: int) -> Recipe:
    """Return a recipe of four commands an episode, four episodes a task."""
    env = HarborTasks(path=tasks, prompt="{instruction}", max_turns=4)
    rl = Phase(
        "rl",
        Grpo(),
        steps=steps,
        prompts_per_step=episodes // 4,
        group_size=4,
        optimizer=AdamW(lr=1e-4),
        row_len=256,
        eval_every=0,
    )
    return Recipe(
        env=env,
        phases=(rl,),
        model=Qwen3Config(init_std=0.1),
        max_answer_tok=8,
        pool=PoolConfig(reset_s=120.0),
        sampler=SamplerConfig(slots=64, max_context=256, prefill_chunk=512),
        evaluation=Evaluation(tasks=4, held_out_frac=0.1),
        save_every=1000,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--frac", type=float, default=0.05)
    parser.add_argument("--within_s", type=float, default=3.0)
    args = parser.parse_args()
    print("| killed | sandboxes | step, median (least to most) | episodes lost |\n|---|---|---|---|")
    for frac in (0.0, args.frac):
        with tempfile.TemporaryDirectory() as folder:
            write_tasks(Path(folder, "tasks"), 100)
            killer = Killer(frac, args.within_s)
            killer.start()
            run_dir = Path(folder, "run")
            rolljax.train(recipe(f"{folder}/tasks", args.episodes, args.steps), run_dir=run_dir, progress=False)
            killer.stop()
            rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()][1:]
        times = [row["time/step_s"] for row in rows]
        lost = statistics.mean(row["rollout/fail_frac"] for row in rows)
        spread = f"{statistics.median(times):.1f} s ({min(times):.1f} to {max(times):.1f})"
        print(f"| {killer.num_killed} | {killer.num_seen} | {spread} | {lost:.3f} |", flush=True)


if __name__ == "__main__":
    main()
