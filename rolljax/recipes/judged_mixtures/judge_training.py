"""Judging as an environment: trains a model to judge, by imitation or by RL."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.envs.data.rows import find_files
from rolljax.errors import EnvError
from rolljax.judging.verdict import Unreadable
from rolljax.rewards.base import RewardContext
from rolljax.rewards.calibration import Labelled, read_labelled
from rolljax.rewards.judge import Judge
from rolljax.types import Message, Task


@dataclasses.dataclass(frozen=True)
class JudgeTraining(EnvSpec):
    """The answers of a labelled set, presented to the policy as `judge` presents answers to its model.

    One turn: the policy writes a verdict. Reward: 1 - |score by the verdict - labelled score|; 0 for a verdict that
    cannot be parsed. The reference verdict is the label, or the marks, nearest to the labelled score, without a veto;
    the task is solved if both scores are at least 0.5, or both below it. Tasks about one question have the same
    content, so that a question is held out with all its answers.
    """

    runs = "inline"

    judge: Judge
    """Judge that defines how the policy is prompted and how its verdict is parsed. Its `model` is not called, and its
    `calibration`, made for a trained judge, is not used."""
    env: EnvSpec
    """The environment whose tasks were answered."""
    labelled: str
    """File of a labelled set, or the name of one that comes with rolljax. JSON Lines, `{"index": 3, "answer": "...",
    "label": 1}`: the index of the task, an answer, and its score from 0 to 1."""
    domain: str = "judge"
    """Name of these tasks in metrics."""

    @property
    def name(self) -> str:
        return self.domain

    @property
    def num_tasks(self) -> int | None:
        return len(_read(self.labelled))

    def answer(self, index: int) -> Labelled:
        """Return the labelled answer of task `index`.

        Raises:
          ConfigError: there is no such file. DataError: it is not a labelled set.
        """
        answers = _read(self.labelled)
        return answers[index % len(answers)]

    def task(self, index: int) -> Task:
        return Task(self.name, index, self.env.task(self.answer(index).index).content)

    def warm(self) -> None:
        self.env.warm()
        _read(self.labelled)

    def make(self) -> JudgeTrainingEnv:
        return JudgeTrainingEnv(self)

    def prompt(self, index: int) -> tuple[Message, ...]:
        """Return the prompt of task `index`."""
        labelled = self.answer(index)
        around = RewardContext(self.env, seed=index)
        return self.judge.prompts(around, self.env.task(labelled.index), labelled.answer)[""]

    def reference_answer(self, worth: float) -> str:
        """Return the reference verdict on an answer whose label is `worth`, from 0 to 1."""
        judge = self.judge
        if judge.labels:
            return json.dumps({"verdict": min(judge.labels, key=lambda label: abs(judge.labels[label] - worth))})
        low, high = judge.scale
        mark = round(low + (high - low) * worth, 3)
        marks: dict[str, Any] = dict.fromkeys(judge.dimensions, int(mark) if mark == int(mark) else mark)
        return json.dumps(marks | ({judge.veto: False} if judge.veto else {}))

    def read(self, text: str) -> float | None:
        """Return the score, from 0 to 1, that the verdict in `text` gives the answer; None: the verdict cannot be
        parsed."""
        judge = dataclasses.replace(self.judge, calibration=())
        try:
            return judge.worth([judge.read(text)]).value
        except Unreadable:
            return None

    def final_answer(self, task: Task, text: str) -> str | None:
        worth = self.read(text)
        return None if worth is None else f"{worth:g}"

    def bad_actions(self) -> Sequence[str]:
        return (
            *super().bad_actions(),
            "{" * 50_000,
            '{"verdict": 1e999}',
            '{"score": NaN}',
            "[" * 50_000 + "]" * 50_000,
        )


class JudgeTrainingEnv(PureEnv):
    """One answer, one verdict. Metrics: `no_verdict_n`, answers without one."""

    def __init__(self, spec: JudgeTraining) -> None:
        self._spec = spec
        self._worth: float | None = None

    def reset(self, task: Task) -> tuple[Message, ...]:
        if self._spec.task(task.index).content != task.content:
            raise EnvError(
                f"answer {task.index} of {self._spec.labelled} is not the task that was asked for: was the file "
                "changed?"
            )
        self._worth = self._spec.answer(task.index).label
        return self._spec.prompt(task.index)

    def step(self, action: str) -> StepResult:
        worth, said = self._open(), self._spec.read(action)
        self._worth = None
        reference = self._spec.read(self._spec.reference_answer(worth))
        assert reference is not None
        right = said is not None and (said >= 0.5) == (reference >= 0.5)
        return StepResult(
            (),
            0.0 if said is None else 1.0 - abs(said - worth),
            terminated=True,
            success=right,
            metrics={"no_verdict_n": float(said is None)},
        )

    def reference_answer(self) -> str:
        return self._spec.reference_answer(self._open())

    def _open(self) -> float:
        if self._worth is None:
            raise EnvError("step before reset, or after the episode's end")
        return self._worth


@functools.lru_cache(maxsize=8)
def _read(path: str) -> Sequence[Labelled]:
    return read_labelled(find_files(path, "JudgeTraining.labelled")[0])
