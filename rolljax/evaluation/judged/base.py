"""The interface of evaluations by judges: items of a file, questions about an answer, tables of the verdicts."""

from __future__ import annotations

import abc
import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np

from rolljax.chat_models.base import ChatModelConfig
from rolljax.errors import Checked, ConfigError, DataError, Range, check_fields
from rolljax.evaluation.judged.items import Item, ItemRecord, read_records
from rolljax.evaluation.report import Estimate, estimate, table
from rolljax.evaluation.settings import Attempts
from rolljax.types import Message


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """A question to judges about one answer."""

    name: str
    """Short name of the question, the same for all answers."""
    messages: tuple[Message, ...]
    field: str
    """Field of the JSON object that the judges are to write (see `judging.verdict.read_label`)."""
    labels: Mapping[str, str]
    """Labels by the value that judges write in the JSON object's field (see `judging.verdict.read_label`)."""
    known: str | None = None
    """The verdict, if it is known without a judge; None: judges are asked."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """One answer and its verdicts, without the texts of item and answer."""

    prompt_index: int
    """Number of the item."""
    sibling: int
    """Number of the sample."""
    item: str
    facts: Mapping[str, Any]
    """The benchmark's own record of the answer."""
    labels: Mapping[str, str | None]
    """Label by question; None if there is no verdict."""
    votes: Mapping[str, Sequence[str | None]]
    """The labels by judge, None for a judge that failed."""
    faults: Mapping[str, int]
    """Number of the judges' faults, by kind."""

    @property
    def complete(self) -> bool:
        """Return whether every question has a verdict."""
        return None not in self.labels.values()


@dataclasses.dataclass(frozen=True)
class JudgedTable:
    """One table of a report."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    """Rows of cells; the first cell is a name."""

    def markdown(self) -> str:
        """Render the table as text."""
        return table(self.head, self.rows)


@dataclasses.dataclass(frozen=True)
class JudgedReport:
    """The results of an evaluation by judges."""

    title: str
    tables: Sequence[JudgedTable]
    values: Mapping[str, float]
    """Every number of the table by name, not rounded."""
    notes: Sequence[str]
    """Sentences below the tables."""
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Counts of requests to the judges and the model, by kind."""

    def markdown(self) -> str:
        """Render the tables as text."""
        tables = "\n\n".join(t.markdown() for t in self.tables)
        return f"**{self.title}**\n\n{tables}\n" + "".join(f"\n{note}\n" for note in self.notes)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a JSON value."""
        return dataclasses.asdict(self)

    def _repr_markdown_(self) -> str:
        return self.markdown()


@dataclasses.dataclass(frozen=True)
class JudgedBenchmark(Checked, abc.ABC):
    """Items, and the questions about answers to them. Subclasses are frozen dataclasses with further settings."""

    needs_judge: ClassVar[bool] = True

    path: str = ""
    """Path of the items: JSON Lines, JSON, Parquet, Arrow or CSV."""
    samples: Annotated[int, Range(low=1)] = 1
    """Number of answers to each item."""
    temperature: Annotated[float, Range(low=0)] = 0.0
    """Sampling temperature of the answers."""
    top_p: Annotated[float, Range(above=0, high=1)] = 1.0
    """Nucleus sampling of the answers: the smallest set of tokens with at least this probability; 1: all tokens."""
    max_answer_tok: Annotated[int, Range(low=1)] = 2048
    """Maximum number of tokens in one answer."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Return a short name for tables."""

    @abc.abstractmethod
    def read_items(self) -> Sequence[Item]:
        """Return the items, in order.

        Raises:
          DataError: a record cannot be used, or the number of records does not fit the formulas.
        """

    def items(self) -> tuple[Item, ...]:
        """Return the items of `read_items`. Raises `DataError` if two items have the same id; passes on the errors of
        `read_items`."""
        items = tuple(self.read_items())
        for name, times in collections.Counter(item.id for item in items).items():
            if times > 1:
                raise DataError(f"item {name!r} is there twice")
        return items

    def records(self, field: str) -> list[ItemRecord]:
        """Return all records of the file that a setting names; see `read_records`."""
        return read_records(getattr(self, field), f"{type(self).__name__}.{field}")

    @abc.abstractmethod
    def asks(self, item: Item, answer: str) -> Sequence[Ask]:
        """Return the questions about an answer: the same names for every answer."""

    @abc.abstractmethod
    def facts(self, item: Item, answer: str) -> Mapping[str, Any]:
        """Return numbers and flags of an answer for the tables; JSON without texts."""

    @abc.abstractmethod
    def tables(self, items: Sequence[Item], judged: Sequence[Judged], how: JudgedEvaluation) -> JudgedReport:
        """Compute the results.

        Args:
          judged: all existing answers, in order of item and sample. how: confidence, resamples and seed of
            intervals.
        """


@dataclasses.dataclass(frozen=True)
class JudgedEvaluation:
    """Settings of an evaluation whose answers judges rate."""

    benchmark: JudgedBenchmark
    """Benchmark that defines the items, the questions and the tables."""
    judges: tuple[ChatModelConfig, ...] = ()
    """The chat models that judge; the majority of several decides."""
    votes: Annotated[int, Range(low=1)] = 1
    """Number of verdicts of each judge; more than one needs a temperature."""
    judge_temperature: Annotated[float, Range(low=0)] = 0.0
    """Sampling temperature of the judges."""
    judge_max_tok: Annotated[int, Range(low=1)] = 512
    """Maximum number of tokens in a judge's answer."""
    seed: int = 0
    """Seed of the answers, verdicts and intervals."""
    confidence: Annotated[float, Range(above=0, below=1)] = 0.95
    """Confidence level of the intervals."""
    resamples: Annotated[int, Range(low=100)] = 10_000
    """Number of bootstrap resamples for the intervals."""
    concurrency: Annotated[int, Range(low=1)] = 64
    """Maximum number of answers in progress at a time."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.votes > 1 and not self.judge_temperature:
            raise ConfigError(
                "gives the same verdict again at temperature 0",
                setting="JudgedEvaluation.votes",
                value=self.votes,
                remedy="set judge_temperature, or name several judges",
            )

    def estimate(self, domains: Sequence[np.ndarray], *, share: bool = True, one_trial: bool = True) -> Estimate:
        """Return the mean of the means of `domains` with its interval, see `evaluation.report.estimate`."""
        how = Attempts(confidence=self.confidence, resamples=self.resamples, seed=self.seed)
        return estimate(domains, how, share=share, one_trial=one_trial)
