"""The interface of pipeline stages: settings, and a function from records to records."""

from __future__ import annotations

import abc
import collections
import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from rolljax.chat_models.base import ChatModelConfig
from rolljax.envs.data import columns, messages
from rolljax.envs.data.rows import BadRow
from rolljax.errors import Checked, DataError, Range

if TYPE_CHECKING:
    from rolljax.data.model_calls import Asker

Record = dict[str, Any]
"""Column -> JSON value. Stages make new records and never change one."""
NUM_SAMPLES = 3
"""Maximum number of dropped records per reason that the report shows."""
KEYS = ("key", "question_key")
"""Fields of stages that name the column of the questions."""
NUM_OBSERVED = 2000
"""Maximum number of values per name that are kept for the report's histogram: a random sample, chosen by the seed."""


class RecordSource(Protocol):
    """The input records of a stage. They can be read in order, any number of times, or by their number, and are not
    held in memory."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Record]: ...

    def record(self, i: int) -> Record:
        """Record `i`."""


@dataclasses.dataclass
class Ledger:
    """The report of a stage."""

    num_in: int = 0
    """Number of records that entered the stage."""
    num_out: int = 0
    """Number of records that left the stage."""
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of dropped records, by reason."""
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Counts that the stage itself recorded, by name."""
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that the stage itself measured, by name."""
    samples: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Up to `NUM_SAMPLES` dropped records, by reason."""
    observed: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    """Observed values by name; a random sample of `NUM_OBSERVED` if there are more (`seen` counts all)."""
    seen: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """Number of observed values, by name."""

    def to_json(self) -> dict[str, Any]:
        """Return all fields as a JSON value."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


class Place:
    """The context of a running stage: its resources, and its report.

    label: of the stage in this pipeline, `02_minhash`. seed: of everything random in the stage. scratch: a folder for
    data that does not fit into memory; it is empty at first, and deleted afterwards. asker: asks the stage's model;
    None: the stage has no model.
    """

    def __init__(self, label: str, seed: int, scratch: Path, asker: Asker | None = None) -> None:
        self.label, self.seed, self.scratch, self._asker = label, seed, scratch, asker
        self.ledger = Ledger()
        self._rng = random.Random(f"{seed} {label}")

    @property
    def asker(self) -> Asker:
        """The client of the stage's model."""
        if self._asker is None:
            raise DataError(f"stage {self.label} asks a model, and has none")
        return self._asker

    def drop(self, record: Record, why: str) -> None:
        """Report a dropped record and why: a word or two, the same for all of a kind."""
        self.ledger.dropped[why] += 1
        shown = self.ledger.samples.setdefault(why, [])
        if len(shown) < NUM_SAMPLES:
            shown.append(json.dumps(record, ensure_ascii=False)[:400])

    def count(self, name: str, num: int = 1) -> None:
        """Add to a count of the report."""
        self.ledger.counts[name] += num

    def number(self, name: str, value: float) -> None:
        """Put a number into the report."""
        self.ledger.numbers[name] = float(value)

    def observe(self, name: str, value: float) -> None:
        """Add a value to a histogram of the report."""
        self.ledger.seen[name] += 1
        values = self.ledger.observed.setdefault(name, [])
        if len(values) < NUM_OBSERVED:
            values.append(float(value))
        elif (i := self._rng.randrange(self.ledger.seen[name])) < NUM_OBSERVED:
            values[i] = float(value)


class Stage(abc.ABC):
    """Settings of one stage. Subclasses are frozen dataclasses; those with a field `model` may ask a model. A field
    `key` that is empty is the pipeline's column (`Pipeline.key`)."""

    @property
    def asks(self) -> bool:
        """Return whether the stage needs a model: the one in its field `model`, else `Pipeline.model`."""
        return False

    @property
    def name(self) -> str:
        """Return the stage's name in reports: the name of its class in snake case."""
        return "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__).lstrip("_")

    @abc.abstractmethod
    def run(self, source: RecordSource, place: Place) -> Iterator[Record]:
        """Yield the output records for the records of `source`; report dropped ones to `place`.

        The output depends on records, settings, `place.seed` and the model's answers, and on nothing else: an
        interrupted stage is run again with the answers received so far.

        Raises:
          DataError: a record lacks what the stage needs.
        """


@dataclasses.dataclass(frozen=True)
class AskingStage(Checked, Stage):
    """The settings of every stage that asks a model."""

    _: dataclasses.KW_ONLY
    model: ChatModelConfig | None = None
    """Model that the stage asks; None: `Pipeline.model`."""
    temperature: Annotated[float, Range(low=0)] = 0.7
    """Sampling temperature of an answer."""
    max_tok: Annotated[int, Range(low=1)] = 512
    """Maximum number of tokens in an answer."""

    @property
    def asks(self) -> bool:
        return True


def with_key(settings: Any, key: str) -> Any:
    """Return a stage's settings with the pipeline's column where they name none, those inside of them included."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in KEYS and value == "":
            changes[field.name] = key
        elif (
            dataclasses.is_dataclass(value) and not isinstance(value, type) and (inner := with_key(value, key)) != value
        ):
            changes[field.name] = inner
    return dataclasses.replace(settings, **changes) if changes else settings


def each(source: Iterable[Record], change: Callable[[Record], Record | None]) -> Iterator[Record]:
    """Yield the results of `change`; None drops a record."""
    for record in source:
        if (made := change(record)) is not None:
            yield made


def value_of(record: Mapping[str, Any], key: str) -> Any:
    """Return the value of a column; a name with dots reaches into objects.

    Raises:
      DataError: the column is missing.
    """
    try:
        return columns.value(dict(record), key)
    except BadRow as e:
        raise DataError(
            f"a record {e}\n  fix:   name the column of the questions for all stages (Pipeline.key), or in the "
            "settings of the stage"
        ) from None


def text_of(record: Mapping[str, Any], key: str) -> str:
    """Return the text of a column: a text, a number as text, or the texts of a list of messages, one below the other.

    Raises:
      DataError: the column is missing, or holds another kind of value.
    """
    found = messages.unpacked(value_of(record, key))
    try:
        if isinstance(found, list):
            return "\n".join(m.content for m in messages.messages(found, key))
        return messages.text(messages.written(found, key), key, empty=True)
    except BadRow as e:
        raise DataError(f"a record cannot be used: {e}") from None


def fingerprint(value: Any) -> str:
    """Return 32 hex digits of the SHA-256 of a JSON value; the order of keys does not matter."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:32]


def seed_of(*address: object) -> int:
    """Return a seed for an address: 31 bits of a hash, so that it depends on nothing else."""
    return int(hashlib.sha256("\0".join(map(str, address)).encode()).hexdigest()[:8], 16) & 0x7FFFFFFF
