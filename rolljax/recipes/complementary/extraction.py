"""The extractor's task: read an episode of the actor, and write operations on the bank (arXiv 2603.17621)."""

from __future__ import annotations

import dataclasses
import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from rolljax.envs.base import NUM_INDICES, Env, EnvSpec, PureEnv, StepResult
from rolljax.envs.checks import HasRandomAction
from rolljax.errors import ConfigError, EnvError, Range, check_fields
from rolljax.library.run import Run
from rolljax.recipes.complementary.bank import similarity
from rolljax.recipes.complementary.experience import PART, bank_at
from rolljax.recipes.complementary.key_rules import KeyRules
from rolljax.recipes.complementary.operations import Add, Operation, Return, Update, read_operations, written
from rolljax.types import EVAL_STREAM, Key, Message, Task, Trajectory

_FORM = "episode "
RETURN_SOLVED = 0.1
"""Share of `return` in the warm start after a solved episode."""
SAME_SITUATION = 0.9
"""Least similarity of a title to the opening text of an episode that it is about."""


@dataclasses.dataclass(frozen=True)
class Extraction(EnvSpec):
    """Episodes of an actor to learn from.

    Observation: the actor's opening text, the experience that it was shown with its number, its answers, the parts of
    their reward, and `solved` or `failed`. Action: operations on the bank (`operations.read_operations`). Reward: 1 if
    an experience is about this situation and its content, as an answer, solves the episode's task. A run has
    `LaterUses` in place of this reward, which knows no reference answers.

    Task number i of the extractor's run sees an episode of the actor's round `i // prompts_per_round`, chosen at
    random. Without a run of an actor, episodes are made up: one random legal answer to a task, every second time with a
    random experience.
    """

    runs = "inline"

    env: EnvSpec = KeyRules()
    """The actor's environment, without experiences; a game of one answer."""
    run: str = ""
    """Run folder of the actor; empty: episodes are made up."""
    bank: str = ""
    """Path of the file of the bank, for the texts of the experiences that the actor was shown."""
    prompts_per_round: Annotated[int, Range(low=1)] = 32
    """Number of extractions of a round."""
    steps_per_round: Annotated[int, Range(low=1)] = 4
    """Number of the actor's steps of a round."""
    rehearse: bool = False
    """Whether the reference answer says what was tried, right or wrong, and is `return` at random, more often after a
    failure (`return_failed`): for a warm start that teaches the form of the operations. The reward is then 1 for any
    operation about the situation."""
    return_failed: Annotated[float, Range(low=0, high=1)] = 0.5
    """Share of `return` in the warm start after a failed episode. The share after a solved one is .1, so the difference
    is a sense of what is worth keeping, as a language model has it."""
    right: str = ""
    """Name of the part of the reward with the number of first words of an answer that are right. The warm start then
    writes these words alone, and `return` if there are none; empty: all words of an answer."""
    solved: Annotated[float, Range(low=0, high=1)] = 0.0
    """Probability that a made-up episode has the right answer, in place of a random one."""
    seed: int = 0
    """Seed of the choice of episodes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.env.make(), HasRandomAction):
            raise ConfigError("has no random legal answers", setting="Extraction.env", value=self.env.name)

    @property
    def name(self) -> str:
        return "extraction"

    def task(self, index: int) -> Task:
        return Task(self.name, index, f"extraction {index}")

    def form(self, task: Task, key: Key) -> Task:
        if not self.run:
            return task
        seen = self.seen(key)
        answers = [turn.text for turn in seen.turns]
        number = int(seen.reward_parts.get(PART, 0))
        content = {"task": seen.task.index, "answers": answers, "number": number, "round": self.round_of(key)}
        return dataclasses.replace(task, content=_FORM + json.dumps(content))

    def round_of(self, key: Key) -> int:
        """Return the round whose episodes an extraction sees."""
        return 0 if key.stream == EVAL_STREAM else key.prompt_index // self.prompts_per_round

    def seen(self, key: Key) -> Trajectory:
        """Return the actor's episode that an extraction sees.

        Raises:
          EnvError: the actor has not completed the round.
        """
        every = self.episodes(self.round_of(key))
        return random.Random(f"{self.seed} {key.stream} {key.prompt_index}").choice(every)

    def episodes(self, round_: int) -> tuple[Trajectory, ...]:
        """Return the actor's episodes of a round that did not fail. Raises `EnvError` as `seen` does."""
        return _episodes(self.run, round_ * self.steps_per_round + 1, self.steps_per_round)

    def make(self) -> Env:
        return ExtractionEpisode(self)

    def bad_actions(self) -> Sequence[str]:
        return (*super().bad_actions(), "<op>", "<op>{}</op>", written(Return()), written(Update(1, "red")))


class ExtractionEpisode(PureEnv):
    """One extraction."""

    def __init__(self, spec: Extraction) -> None:
        self._spec = spec
        self._task: Task | None = None
        self._opening, self._reference = "", ""

    def reset(self, task: Task) -> tuple[Message, ...]:
        spec, rng = self._spec, random.Random(f"{self._spec.seed} {task.content}")
        env: Any = spec.env.make()
        if task.content.startswith(_FORM):
            shown: dict[str, Any] = json.loads(task.content.removeprefix(_FORM))
            self._task = spec.env.task(shown["task"])
            messages, answers = env.reset(self._task), shown["answers"]
        else:
            shown = {"number": 0}
            self._task = spec.env.task(rng.randrange(NUM_INDICES))
            messages, answers = env.reset(self._task), [env.random_action(rng)]
            if spec.solved and rng.random() < spec.solved:
                answers = [env.reference_answer()]
        self._opening = messages[-1].content
        experience = ""
        if shown["number"] and (found := bank_at(Path(spec.bank), shown["round"]).get(shown["number"])):
            experience = f"#{found.number} {found.text}"
        elif not task.content.startswith(_FORM) and rng.random() < 0.5:
            experience = f"#{rng.randrange(1, 1000)} {self._opening}: {env.random_action(rng)}"
        content = answers[-1] if spec.rehearse else env.reference_answer()
        lines = [self._opening, experience] if experience else [self._opening]
        success, parts = False, {}
        for answer in answers:
            result = env.step(answer)
            success, parts = success or result.success, dict(result.reward_parts)
            said = (f"{name} {value:g}" for name, value in parts.items())
            lines += [f"> {answer}", *said, *(m.content for m in result.messages)]
        if spec.rehearse and spec.right:
            content = " ".join(content.split(" ")[: int(parts.get(spec.right, 0))])
        share = RETURN_SOLVED if success else spec.return_failed
        is_return = not content or (spec.rehearse and rng.random() < share)
        self._reference = written(Return() if is_return else Add(self._opening, content))
        return (Message("user", "\n".join([*lines, "solved" if success else "failed"])),)

    def step(self, action: str) -> StepResult:
        if self._task is None:
            raise EnvError("step before reset, or after the episode's end")
        operations = read_operations(action)
        success = any(map(self._solves, operations or ()))
        self._task = None
        parts = {"well_formed": float(operations is not None)}
        return StepResult((), float(success), terminated=True, success=success, reward_parts=parts)

    def _solves(self, operation: Operation) -> bool:
        """Return whether an operation adds an experience about this situation that solves the task; see `rehearse`."""
        if isinstance(operation, Add) and similarity(operation.title, self._opening) >= SAME_SITUATION:
            assert self._task is not None
            env = self._spec.env.make()
            env.reset(self._task)
            return self._spec.rehearse or env.step(operation.content).success
        return self._spec.rehearse and isinstance(operation, Return)

    def reference_answer(self) -> str:
        return self._reference


@functools.lru_cache(maxsize=2)
def _episodes(run: str, first: int, num: int) -> tuple[Trajectory, ...]:
    """Return the episodes of `num` steps of a run from step `first` on that did not fail."""
    try:
        found = [t for step in range(first, first + num) for t in Run(run).trajectories(step)]
    except Exception as e:  # border: any fault of the folder
        raise EnvError(f"{run} has no step {first} to {first + num - 1}: {e}") from e
    return tuple(t for t in found if t.status != "failed")
