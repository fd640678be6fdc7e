"""Measure how often a policy solves a task: sample or read its attempts, and compute the task's difficulty from them.

Attempts come from a model (`SampleAttempts`), or from the rollouts that a run wrote (`FromRollouts`). They are in the
record's column `attempts`, a list of `{"text": ..., "reward": ..., "num_tok": ...}`; `Difficulty` sums them up.
"""

from __future__ import annotations

import array
import asyncio
import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

from rolljax.chat_models.base import Asking, ChatTooLong
from rolljax.data.base import AskingStage, Place, Record, RecordSource, Stage, fingerprint, seed_of, text_of, value_of
from rolljax.data.files import line_of
from rolljax.envs.data import answers, messages
from rolljax.envs.questions import BOXED, is_right
from rolljax.errors import ConfigError, DataError, Range, check_fields
from rolljax.storage.run_reader import read_trajectories
from rolljax.types import Message

ATTEMPTS = "attempts"
Score = Callable[[Record, str], float]
"""`score(record, answer)`: returns the reward of an answer, from 0 to 1."""


@dataclasses.dataclass(frozen=True)
class SampleAttempts(AskingStage):
    r"""Ask a model to answer each record `k` times, and compare each answer with the recorded one, as `Questions`
    does."""

    k: Annotated[int, Range(low=1)] = 8
    """Number of attempts per record."""
    temperature: float = 1.0
    max_tok: int = 1024
    key: str = ""
    """The column of the question, a text or messages; empty: `Pipeline.key`."""
    prompt: str = BOXED
    """Template for a question that is a text; `{question}` is replaced."""
    answer_key: str = "answer"
    """The column of the recorded answer."""
    answer_in: str = "any"
    """Place in the model's text from which the answer is read, with the values of `Questions.answer_in`."""
    score: Score | None = None
    """Custom scoring function (record, answer) that returns 0 to 1 and replaces the comparison with the recorded
    answer."""
    until_success: bool = False
    """Whether to stop after the first attempt with reward 1, as adaptive synthesis does; `k` is then the maximum number
    of attempts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self)
        if "{question}" not in self.prompt:
            raise ConfigError(
                "does not contain {question}",
                setting="SampleAttempts.prompt",
                value=self.prompt,
                remedy="add {question}",
            )
        if self.k > 1 and not self.temperature:
            raise ConfigError(
                "makes all attempts at a record the same",
                setting="SampleAttempts.temperature",
                value=0,
                remedy="1, or k = 1",
            )

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        async def play(record: Record) -> list[dict[str, Any]] | None:
            try:
                return await self._play(record, place)
            except ChatTooLong:
                return None

        for record, played in place.asker.each(source, play):
            if played is None:
                place.drop(record, "longer_than_the_model")
                continue
            place.observe("mean_reward", sum(a["reward"] for a in played) / len(played))
            yield {**record, ATTEMPTS: played}

    async def _play(self, record: Record, place: Place) -> list[dict[str, Any]]:
        said, address = self._messages(record), fingerprint(record)

        async def attempt(i: int) -> dict[str, Any]:
            how = Asking(self.temperature, self.max_tok, seed_of(place.seed, address, i))
            answer = await place.asker.ask(said, how)
            reward = await asyncio.to_thread(self.reward, record, answer.text)
            how_long = {"num_tok": answer.num_tok, "finish_reason": answer.finish_reason}
            return {"text": answer.text, "reward": reward, **how_long}

        if not self.until_success:
            return list(await asyncio.gather(*map(attempt, range(self.k))))
        played: list[dict[str, Any]] = []
        while len(played) < self.k and not (played and played[-1]["reward"] >= 1):
            played.append(await attempt(len(played)))
        return played

    def reward(self, record: Record, answer: str) -> float:
        """Return the reward of an answer."""
        if self.score is None:
            reference = answers.split_recorded(text_of(record, self.answer_key))[1]
            return float(is_right(answer, reference, self.answer_in))
        value = float(self.score(record, answer))
        if not 0 <= value <= 1:
            raise DataError(f"SampleAttempts.score gave {value!r}, which is not from 0 to 1, for {str(record)[:200]}")
        return value

    def _messages(self, record: Record) -> Sequence[Message]:
        found = value_of(record, self.key)
        if messages.is_list(found):
            return messages.messages(found, self.key)
        return (Message("user", self.prompt.replace("{question}", text_of(record, self.key))),)


@dataclasses.dataclass(frozen=True)
class FromRollouts(Stage):
    """Take the attempts from the rollouts of runs (`rollouts/step_N.jsonl`) or the answers of an evaluation: the
    attempts at tasks whose content is the record's question. Records without an attempt are left out. Attempts are kept
    in a temporary file, with 8 bytes of memory for each."""

    paths: tuple[str, ...] = ()
    """Files, or folders of them."""
    key: str = ""
    """The column of the question, from which `Questions` makes the content of a task; empty: `Pipeline.key`."""
    solved: bool = True
    """Whether an attempt is scored 1 if it solved the task and 0 otherwise; if False, its score is its reward."""

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("names no file", setting="FromRollouts.paths", remedy="runs/NAME/rollouts, for instance")

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        places: dict[str, array.array[int]] = {}
        with open(place.scratch / "attempts.jsonl", "w+b") as file:
            for t in (t for path in self.files() for t in read_trajectories(path) if not t.lost):
                places.setdefault(fingerprint(t.task.content), array.array("q")).append(file.tell())
                reward = float(t.success) if self.solved else t.reward
                text, tokens = (t.turns[-1].text, t.turns[-1].tokens) if t.turns else ("", ())
                file.write(line_of({"text": text, "reward": reward, "num_tok": len(tokens)}))
            for record in source:
                found = places.get(fingerprint(self._content(record)))
                if found is None:
                    place.drop(record, "not_played")
                else:
                    yield {**record, ATTEMPTS: [_line_at(file, at) for at in found]}

    def files(self) -> list[Path]:
        """Return the files, in the order of their steps.

        Raises:
          ConfigError: there is none.
        """
        found: list[Path] = []
        for path in map(Path, self.paths):
            found += sorted(path.glob("*.jsonl"), key=lambda p: (len(p.name), p.name)) if path.is_dir() else [path]
        if not found or not all(p.is_file() for p in found):
            raise ConfigError("are no files of rollouts", setting="FromRollouts.paths", value=self.paths)
        return found

    def _content(self, record: Record) -> str:
        found = value_of(record, self.key)
        if not messages.is_list(found):
            return text_of(record, self.key)
        said = messages.messages(found, self.key)
        said = said[:-1] if said[-1].role == "assistant" else said
        return json.dumps([[m.role, m.content] for m in said], ensure_ascii=False)


def _line_at(file: BinaryIO, place: int) -> Any:
    file.seek(place)
    return json.loads(file.readline())


@dataclasses.dataclass(frozen=True)
class Rates:
    """Statistics of a task's rewards."""

    k: int
    mu: float
    """Mean of the task's rewards."""
    sigma: float
    """Standard deviation of the task's rewards."""
    score: float
    """Mu times the variance, which is highest at a pass rate of 2/3."""


def rates(rewards: Sequence[float]) -> Rates:
    """Return mean, deviation (of the rewards themselves, not an estimate from a sample) and `mean * variance`."""
    k = len(rewards)
    mu = math.fsum(rewards) / k
    variance = math.fsum((r - mu) ** 2 for r in rewards) / k
    return Rates(k, mu, math.sqrt(variance), mu * variance)


@dataclasses.dataclass(frozen=True)
class Difficulty(Stage):
    """Sum up the attempts at each record: a column `rollouts` with `k`, `mu`, `sigma`, `score` (`rates`)."""

    keep_attempts: bool = False
    """Whether to keep the column `attempts` in the record."""

    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        for record in source:
            found = rates(rewards_of(record))
            place.observe("mu", found.mu)
            kept = {name: value for name, value in record.items() if self.keep_attempts or name != ATTEMPTS}
            yield {**kept, "rollouts": dataclasses.asdict(found)}


def attempts_of(record: Record) -> list[dict[str, Any]]:
    """Return the attempts at a record.

    Raises:
      DataError: it has none.
    """
    found = record.get(ATTEMPTS)
    if not isinstance(found, list) or not found or not all(isinstance(a, dict) and "reward" in a for a in found):
        raise DataError(
            f"a record has no attempts: put SampleAttempts or FromRollouts before this stage: {str(record)[:200]}"
        )
    return found


def rewards_of(record: Record) -> list[float]:
    """Return the rewards of the attempts at a record."""
    return [float(a["reward"]) for a in attempts_of(record)]
