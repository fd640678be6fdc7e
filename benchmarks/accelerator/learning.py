"""A GRPO run of a byte model, with its curve: the quickstart's task, model and settings, `Phase.async_ratio` 0 and 1.

The recipe is made of Python objects and the environment is defined here, so the run needs no gin, Grain, reasoning-gym
or Ray. A supervised warm start comes first, as in the quickstart. The run folders stay in `learning/` next to the JSON
file: `curves.png`, and samples of the trajectories.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Sequence
from typing import Any, ClassVar

from common import Peaks, Piece, main

from rolljax.envs.base import EnvSpec, PureEnv, Runs, StepResult
from rolljax.errors import EnvError
from rolljax.types import Message, Task

RATIOS, SEEDS = (0.0, 1.0), (0, 1)
WARM_STEPS, RL_STEPS, EVAL_EVERY = 160, 100, 10
STEP_S = {"warm_start": 0.06, "rl": 0.3}
"""Of a step of the quickstart on two CPU cores, where the host is as busy: a bound for a device that is faster."""
COMPILE_S = 60.0
"""Taken for the programs of the first run; the later ones find them in the cache."""
RUN_S = 8.0
"""Taken for what a run does apart from its steps: loading, the first evaluation, the last checkpoint, the export."""
TIMES = ("rollout", "pack", "update", "publish", "eval", "save", "checkpoint")
"""Parts of a step (`time/NAME_s`). `rollout` is the wait for the step's groups, also where they are made meanwhile."""


# ---- the task -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Backward(EnvSpec):
    """Words of random letters that are to be spelled backward, with the question that reasoning-gym's `spell_backward`
    asks.

    letters: of a word. seed: of the words.
    """

    runs: ClassVar[Runs] = "inline"
    name = "backward"

    letters: int = 4
    seed: int = 0

    def word(self, index: int) -> str:
        """Return the word of a task."""
        rng = random.Random(self.seed * 1_000_003 + index)
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=self.letters))

    def task(self, index: int) -> Task:
        return Task(self.name, index, f"Spell this word backward (example: sun -> nus): {self.word(index)}")

    def reference(self, task: Task) -> str:
        return self.word(task.index)[::-1]

    def final_answer(self, task: Task, text: str) -> str | None:
        return text.strip() or None

    def make(self) -> BackwardEnv:
        return BackwardEnv(self)


class BackwardEnv(PureEnv):
    """One word, one answer: 1 if it is right, else 0."""

    def __init__(self, spec: Backward) -> None:
        self._spec, self._answer = spec, ""

    def reset(self, task: Task) -> tuple[Message, ...]:
        self._answer = self._spec.reference(task)
        return (Message("user", task.content),)

    def step(self, action: str) -> StepResult:
        right = action.strip() == self.reference_answer()
        self._answer = ""
        return StepResult((), float(right), terminated=True, success=right)

    def reference_answer(self) -> str:
        if not self._answer:
            raise EnvError("step before reset, or after the episode's end")
        return self._answer


# ---- the recipe -----------------------------------------------------------------------------------------------------


def recipe(ratio: float, seed: int, *, tiny: bool) -> Any:
    """Return the quickstart's recipe (configs/quickstart.gin) with this task."""
    from rolljax.model.families.qwen3 import Qwen3Config
    from rolljax.recipe import Evaluation, Phase, Recipe
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.algorithms.sft import Sft
    from rolljax.trainer.credit.shaping import GroupFilter
    from rolljax.trainer.optimizer import AdamW, Muon

    prompts = 8 if tiny else 64
    warm = Phase(
        "warm_start",
        Sft(),
        steps=4 if tiny else WARM_STEPS,
        prompts_per_step=prompts,
        temperature=0.7,
        optimizer=AdamW(lr=3e-3) if tiny else Muon(lr=2e-2),
        eval_every=2 if tiny else 10,
        stop_at_reward=0.3,
    )
    rl = Phase(
        "rl",
        Grpo(aggregation="token-mean", filter=None if tiny else GroupFilter(), clip_high=0.5),
        steps=4 if tiny else RL_STEPS,
        prompts_per_step=prompts,
        group_size=2 if tiny else 8,
        updates_per_step=2,
        optimizer=AdamW(lr=1.5e-3, schedule="linear"),
        async_ratio=ratio,
        eval_every=2 if tiny else EVAL_EVERY,
    )
    sampler = SamplerConfig(slots=512, max_context=80, prefill_chunk=4096)
    return Recipe(
        env=Backward(),
        phases=(warm, rl),
        model=Qwen3Config(init_std=0.1, **({"num_layers": 1} if tiny else {})),
        max_answer_tok=6,
        sampler=SamplerConfig(slots=8, max_context=80, prefill_chunk=64, programs="few") if tiny else sampler,
        evaluation=Evaluation(tasks=16 if tiny else 256),
        seed=seed,
        rollouts_every=50,
    )


# ---- what a run left ------------------------------------------------------------------------------------------------


def figures(rows: Sequence[dict[str, Any]], summary: dict[str, Any]) -> dict[str, Any]:
    """Compute figures of learning and speed from a run's rows of metrics and its summary.

    The first step compiles. Times and rates are medians over the other steps, fractions are relative to all their time.
    """
    rl = [row for row in rows if row["phase"] == "rl"]
    rest = rl[1:]
    median = lambda name: statistics.median(row[name] for row in rest)  # noqa: E731
    total = lambda name: sum(row.get(name, 0.0) for row in rest)  # noqa: E731
    rewards = [entry["mean"] for entry in summary["heldout_reward"]]
    return {
        "heldout_start": rewards[0],
        "heldout_warm": rewards[1],
        "heldout_end": rewards[-1],
        "warm_steps": len(rows) - len(rl),
        "rl_steps": len(rl),
        "step_s": median("time/step_s"),
        "first_step_s": rl[0]["time/step_s"],
        "sampled_tok_s": median("tput/sample_tok_s"),
        "trained_tok_s": median("tput/train_tok_s"),
        "slots_busy": median("sampler/slot_frac"),
        "sampler_idle": median("sampler/idle_frac"),
        "age_mean": median("stale/mean_ver"),
        **{f"{name}_share": total(f"time/{name}_s") / total("time/step_s") for name in TIMES},
    }


def curve(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the held-out reward by step of the phase `rl`, and the mean reward of the samples since the previous
    point."""
    points, since = [], []
    for row in rows:
        if row["phase"] != "rl":
            continue
        since.append(row["reward/mean"])
        if "heldout/reward_mean" in row:
            points.append(
                {
                    "step": int(row["phase_step"]),
                    "sampled": statistics.mean(since),
                    "heldout": row["heldout/reward_mean"],
                }
            )
            since = []
    return points


def estimate(tiny: bool, peaks: Peaks) -> float:
    """Estimate the seconds. The model has 115,000 parameters: host work dominates a step, not the device's peaks."""
    if tiny:
        return 20.0
    run_s = RUN_S + WARM_STEPS / 2 * STEP_S["warm_start"] + RL_STEPS * STEP_S["rl"]
    return COMPILE_S + len(RATIOS) * len(SEEDS) * run_s


def body(piece: Piece) -> None:
    import rolljax

    curves: dict[int, dict[str, Any]] = {}
    longest_s = 0.0
    for seed in SEEDS[: 1 if piece.tiny else None]:
        for ratio in RATIOS:
            name = f"ratio {ratio:g}, seed {seed}"
            row = {"what": "run", "async_ratio": ratio, "seed": seed}
            if not piece.has_time(row, longest_s):
                continue
            folder = piece.path.parent / "learning" / f"ratio{ratio:g}_seed{seed}"
            left_s = piece.left_s
            with piece.attempt(row) as found:
                run = rolljax.train(recipe(ratio, seed, tiny=piece.tiny), run_dir=folder, fresh=True, progress=False)
                rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
                found |= figures(rows, run.summary)
                found["seconds"] = left_s - piece.left_s
                for point in curve(rows):
                    of_step = curves.setdefault(point["step"], {"what": "held-out reward", "step": point["step"]})
                    of_step[name] = point["heldout"]
            longest_s = max(longest_s, left_s - piece.left_s)
    for step in sorted(curves):
        piece.record(curves[step])


if __name__ == "__main__":
    main("learning", body, estimate)
