"""The extractor's reward: the success of later episodes that were shown its experiences (arXiv 2603.17621).

The extractor's run drives the actor's. When all extractions of a step are sampled, their operations make the bank of
the next round, the actor trains this round, and what its episodes earned is the reward of the extractions. All of it
follows from the two run folders and the file of the bank, so that a run that was killed continues as if it were not.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.recipes.complementary.bank import Bank, banks_of
from rolljax.recipes.complementary.experience import PART, bank_at
from rolljax.recipes.complementary.extraction import Extraction
from rolljax.recipes.complementary.operations import Operation, Return, read_operations
from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.trainer.algorithms.base import AlgorithmState
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.credit import estimators as credits
from rolljax.trainer.credit.episodes import Episodes
from rolljax.types import EVAL_STREAM, Task, Trajectory

TRAINED = "trained_before"
"""Part of the reward with the number of earlier extractions of the same experience."""


@dataclasses.dataclass(frozen=True)
class LaterUses(RewardConfig):
    """Mean over the later episodes of the round that were shown an experience of the extraction: 1 for each that was
    solved, -1 for each that was not; 0 without such an episode."""

    actor: str = "complementary/actor"
    """Config of the actor's run, whose environment is `WithExperience`."""
    settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Settings over it, by name."""
    capacity: Annotated[int, Range(low=1)] = 20_000
    """Number of newest experiences that the bank keeps."""
    one_per_title: bool = False
    """Whether the bank keeps only the newest experience of a title: what contradicts it replaces it."""
    malformed: float = -1.0
    """Reward of an answer that is no sequence of operations."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def name(self) -> str:
        return "later_uses"

    def open(self, around: RewardContext) -> RoundScorer:
        if not isinstance(around.env, Extraction) or not (around.env.run and around.env.bank):
            raise ConfigError(
                "needs an actor's run and a bank",
                setting="Recipe.env",
                value=around.env,
                remedy="python -m rolljax.recipes.complementary.training FOLDER",
            )
        return RoundScorer(self, around.env)


class RoundScorer:
    """Scores the extractions of a round together."""

    def __init__(self, cfg: LaterUses, spec: Extraction) -> None:
        self._cfg, self._spec = cfg, spec
        self._rounds: dict[int, tuple[dict[int, Trajectory], asyncio.Future[dict[int, Reward]]]] = {}

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        if trajectory.key.stream == EVAL_STREAM:
            return Reward(trajectory.reward, trajectory.reward_parts, trajectory.success)
        round_, place = divmod(trajectory.key.prompt_index, self._spec.prompts_per_round)
        found = self._rounds.setdefault(round_, ({}, asyncio.get_running_loop().create_future()))
        members, rewards = found
        members[place] = trajectory
        if len(members) == self._spec.prompts_per_round:
            del self._rounds[round_]
            try:
                played = await asyncio.to_thread(self.play, round_, [members[k] for k in sorted(members)])
                rewards.set_result(dict(zip(sorted(members), played, strict=True)))
            except Exception as e:  # border: any fault of the actor's run
                rewards.set_exception(e)
        return (await rewards)[place]

    def counts(self) -> Mapping[str, int]:
        return {}

    async def close(self) -> None:
        pass

    def play(self, round_: int, extractions: Sequence[Trajectory]) -> list[Reward]:
        """Make the bank of the next round from extractions of this one, train the actor for that round, and return the
        reward of each extraction."""
        spec, path = self._spec, Path(self._spec.bank)
        before = bank_at(path, round_)
        bank = before.used({n: len(found) for n, found in self._uses(round_).items()}, round_)
        numbers: list[list[int]] = []
        for t in extractions:
            task = spec.seen(t.key).task
            numbers.append([])
            for operation in read_operations(t.turns[-1].text) or ():
                if not leaks(operation, spec.env.reference(task)):
                    bank, number = bank.applied(operation, task.id)
                    numbers[-1] += [number] if number else []
        bank = dataclasses.replace(
            bank.newest(self._cfg.capacity, one_per_title=self._cfg.one_per_title), round=round_ + 1
        )
        if all(b.round != bank.round for b in banks_of(path)):
            bank.append_to(path)
        train_to(self._cfg.actor, Path(spec.run), self._cfg.settings, spec.steps_per_round * (bank.round + 1))
        uses = self._uses(bank.round)
        return [self._reward(t, own, uses, before) for t, own in zip(extractions, numbers, strict=True)]

    def _reward(self, t: Trajectory, numbers: Sequence[int], uses: Mapping[int, list[bool]], before: Bank) -> Reward:
        found = [1.0 if success else -1.0 for n in numbers for success in uses.get(n, ())]
        old = [e.extractions for n in numbers if (e := before.get(n))]
        parts = {**t.reward_parts, "uses": len(found), TRAINED: max(old, default=0)}
        is_malformed = read_operations(t.turns[-1].text) is None
        value = self._cfg.malformed if is_malformed else float(np.mean(found)) if found else 0.0
        return Reward(value, parts, value > 0)

    def _uses(self, round_: int) -> dict[int, list[bool]]:
        """Return whether each of the actor's episodes of a round was solved, by the experience that it was shown."""
        found: dict[int, list[bool]] = {}
        for t in self._spec.episodes(round_):
            if number := int(t.reward_parts.get(PART, 0)):
                found.setdefault(number, []).append(t.success)
        return found


def train_to(config: str, folder: Path, settings: Mapping[str, object], steps: int) -> Run:
    """Return a run of the actor with `steps` steps or more; train it only as far as it has fewer. An extractor that was
    killed plays its last rounds again, and the actor is ahead of it then."""
    summary = folder / "summary.json"
    if summary.is_file() and (run := Run(folder)).is_finished and run.num_steps >= steps:
        return run
    return train(config, set={**settings, "rl/Phase.steps": steps}, run_dir=folder, progress=False)


def leaks(operation: Operation, answer: str | None) -> bool:
    """Return whether an operation would put the recorded answer of the episode's own task into the bank."""
    if isinstance(operation, Return) or not answer:
        return False
    return answer.strip().lower() in operation.content.lower()


def train_weights(trained_before: np.ndarray, power: float = 0.5) -> np.ndarray:
    """Return the weights `(1 + n)^-power` of samples that were trained n times before (arXiv 2603.17621)."""
    return (1.0 + np.asarray(trained_before, np.float64)) ** -power


@dataclasses.dataclass(frozen=True)
class ExtractorCispo(Cispo):
    """CISPO with the extractor's credit (arXiv 2603.17621): rewards less the mean of the batch, weighed by how often
    the same experience was trained before (`train_weights`)."""

    mean: credits.Mean = "batch"
    std: credits.Std = "none"
    power: float = 0.5
    """Exponent p of the weight `(1 + n)^-p`."""
    train_unused: bool = True
    """Whether extractions of which no later episode was shown an experience are trained, with reward 0. If not, only
    used ones and malformed answers are."""

    paper: ClassVar = {}

    def scores(self, e: Episodes, rewards: np.ndarray, algorithm_state: AlgorithmState) -> np.ndarray:
        before = np.array([parts.get(TRAINED, 0.0) for parts in e.parts])
        weights = train_weights(before, self.power)
        if not self.train_unused:
            weights = weights * ((np.asarray(rewards) != 0) | np.array([parts.get("uses", 0) > 0 for parts in e.parts]))
        return super().scores(e, rewards, algorithm_state) * weights
