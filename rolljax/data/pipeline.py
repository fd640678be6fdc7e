"""A pipeline: its settings, and how it runs, stops and resumes.

A folder of a pipeline holds
  pipeline.json    its settings, input, model; another pipeline is not written over it
  data.jsonl       the records (or a file for each value of `Pipeline.split_by`), when all stages are over
  report.json, report.md, report.png   the report of each stage
  work/            records between two stages, and journals of the models' answers

A finished stage is not run again; an interrupted one runs again from the start, with the answers of its journal.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from rolljax.chat_models.base import ChatModelConfig
from rolljax.console.progress import ProgressBar
from rolljax.data import report
from rolljax.data.base import (
    NUM_SAMPLES,
    AskingStage,
    Ledger,
    Place,
    Record,
    RecordSource,
    Stage,
    fingerprint,
    seed_of,
    value_of,
    with_key,
)
from rolljax.data.files import FileSource, Format, Spill, Writer, write_spill
from rolljax.data.model_calls import Asker
from rolljax.errors import ConfigError, DataError, Range, check_fields
from rolljax.storage import durable
from rolljax.storage.layout import LOCK
from rolljax.storage.lock import locked

SETUP, WORK = "pipeline.json", "work"
SCHEMA = 1
FORMATS = ("jsonl", "jsonl.gz", "parquet")


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """A data pipeline: stages, one after the other."""

    stages: tuple[Stage, ...] = ()
    """Stages, in the order in which they run."""
    model: ChatModelConfig | None = None
    """Default model for stages that name none themselves."""
    key: str = "prompt"
    """The column of the questions, for all stages that name none themselves; dots reach into objects."""
    seed: int = 0
    """Seed of everything random in the pipeline."""
    concurrency: Annotated[int, Range(low=1)] = 32
    """Maximum number of concurrent requests to a model."""
    output: Format = "jsonl"
    """Format of the output files."""
    split_by: str = ""
    """A column whose values (texts) name the files that records go to; empty: all go into one, `data`."""
    bad_rows: Literal["error", "skip"] = "error"
    """Handling of input rows that are not records: `error` raises an error that names the first such row, `skip` leaves
    them out and counts them."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.stages:
            raise ConfigError("has no stage", setting="Pipeline.stages", remedy="name one, such as @dedup.Exact()")
        if self.output not in FORMATS:
            raise ConfigError(
                "is no format", setting="Pipeline.output", value=self.output, remedy=f"one of {', '.join(FORMATS)}"
            )
        if self.bad_rows not in ("error", "skip"):
            raise ConfigError(
                "is neither error nor skip",
                setting="Pipeline.bad_rows",
                value=self.bad_rows,
                remedy="'error' or 'skip'",
            )
        for stage in self.stages:
            if stage.asks and self.model_of(stage) is None:
                raise ConfigError(
                    f"is not set, and stage {stage.name} asks a model",
                    setting="Pipeline.model",
                    remedy="Pipeline.model = @client.EndpointConfig(), and client.EndpointConfig.url = 'http://...'",
                )

    def model_of(self, stage: Stage) -> ChatModelConfig | None:
        """Return the model of a stage; None: it asks none."""
        if not isinstance(stage, AskingStage):
            return None
        return (stage.model or self.model) if stage.asks else None

    @property
    def labels(self) -> Sequence[str]:
        """Return the labels of its stages: number and name."""
        return [f"{i + 1:02d}_{stage.name}" for i, stage in enumerate(self.stages)]


@dataclasses.dataclass(frozen=True)
class PipelineResult:
    """The output of a pipeline."""

    folder: Path
    files: Mapping[str, int]
    """Name of a file -> number of its records."""
    stages: Mapping[str, Mapping[str, Any]]
    """Label of a stage -> its ledger, as JSON."""


def run(
    pipeline: Pipeline, source: str, folder: str | Path, *, fresh: bool = False, setup: Any = None
) -> PipelineResult:
    """Run a pipeline, or resume an interrupted one. May be called in any thread, also inside of a running event loop,
    which is blocked meanwhile.

    Args:
      source: the input: a file, a folder, or a pattern, as `envs.data.rows` reads them.
      folder: of the pipeline; it is made. fresh: start from scratch, answers of models included.
      setup: the settings that must be the same to resume, as JSON; None: the settings' `repr`.

    Raises:
      ConfigError: the folder holds something else, or another pipeline. DataError: records that a stage cannot use.
      InfraError: a model gave no answer; earlier answers are kept. StorageError: the disk is full.
    """
    given = FileSource(source, skip_bad=pipeline.bad_rows == "skip")
    made_of = {
        "schema": SCHEMA,
        "settings": _that_matter(repr(pipeline) if setup is None else json.loads(json.dumps(setup))),
        "input": given.state,
        "models": [m.identity if (m := pipeline.model_of(s)) else None for s in pipeline.stages],
    }
    with _opened(Path(folder), made_of, fresh) as work, ProgressBar() as bar:
        return _run(pipeline, given, Path(folder), work, bar)


def _that_matter(setup: Any) -> Any:
    """Return the settings that can change a record: all but how models are reached (`models` identifies them)."""
    if not isinstance(setup, Mapping):
        return setup
    aside = re.compile(r"(^|\.)model(\.|$)|^concurrency$")
    return {name: value for name, value in setup.items() if not aside.search(name)}


def _run(pipeline: Pipeline, given: FileSource, folder: Path, work: Path, bar: ProgressBar) -> PipelineResult:
    if (folder / report.REPORT).is_file():
        bar.say(f"{folder} is complete: nothing to do (--fresh starts from scratch)")
        found = json.loads((folder / report.REPORT).read_text())
        return PipelineResult(folder, found["files"], found["stages"])
    records: RecordSource = given
    ledgers: dict[str, Mapping[str, Any]] = {}
    for i, (label, stage) in enumerate(zip(pipeline.labels, pipeline.stages, strict=True)):
        spill, said = work / f"{label}.jsonl", work / f"{label}.json"
        if not said.is_file():
            ledger = _run_stage(pipeline, stage, label, records, work, bar)
            if i == 0 and given.bad:
                ledger["dropped"] = {**ledger["dropped"], "bad_row": given.bad}
            durable.write(said, json.dumps(ledger, indent=1) + "\n")
        ledgers[label] = json.loads(said.read_text())
        if spill.is_file():
            records = Spill(spill)
            if i:
                durable.remove(work / f"{pipeline.labels[i - 1]}.jsonl")
        bar.say(_outcome(label, ledgers[label]))
    files = _write(pipeline, records, folder)
    samples = [json.dumps(r, ensure_ascii=False)[:400] for r in itertools.islice(records, NUM_SAMPLES)]
    report.write(folder, len(given), files, ledgers, samples)
    durable.remove(work / f"{pipeline.labels[-1]}.jsonl")
    return PipelineResult(folder, files, ledgers)


def _run_stage(
    pipeline: Pipeline, stage: Stage, label: str, records: RecordSource, work: Path, bar: ProgressBar
) -> dict[str, Any]:
    """Run one stage; return its report. Its records are complete by then."""
    scratch = work / f".{label}.tmp"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    model = pipeline.model_of(stage)
    start_s = time.monotonic()
    answers = work / f"{label}.answers.jsonl"
    asker = None if model is None else Asker(model, answers, label, pipeline.concurrency)
    place = Place(label, seed_of(pipeline.seed, label), scratch, asker)
    counted = _Counted(records, place.ledger, bar, label)
    num = write_spill(work / f"{label}.jsonl", with_key(stage, pipeline.key).run(counted, place))
    place.ledger.num_in, place.ledger.num_out = len(records), num
    shutil.rmtree(scratch, ignore_errors=True)
    asked = dict(asker.counts) if asker is not None else {}
    return {"stage": stage.name, **place.ledger.to_json(), "asked": asked, "seconds": time.monotonic() - start_s}


class _Counted:
    """A source that shows how far its readers are."""

    def __init__(self, source: RecordSource, ledger: Ledger, bar: ProgressBar, label: str) -> None:
        self._source, self._ledger, self._bar, self._label = source, ledger, bar, label

    def __len__(self) -> int:
        return len(self._source)

    def __iter__(self) -> Iterator[Record]:
        total = len(self._source)
        for i, record in enumerate(self._source):
            if i % 64 == 0:
                self._show(i)
            yield record
        self._show(total)

    def _show(self, done: int) -> None:
        text, total = f"{self._label}, {sum(self._ledger.dropped.values())} dropped", len(self._source)
        self._bar.show(done, total, text, f"{text}: {done} of {total} records")

    def record(self, i: int) -> Record:
        return self._source.record(i)


def _outcome(label: str, ledger: Mapping[str, Any]) -> str:
    """Return a line about a finished stage."""
    dropped = ", ".join(f"{why} {n}" for why, n in ledger["dropped"].items())
    asked = f"; {n} answers" if (n := ledger["asked"].get("asked")) else ""
    return f"{label}: {ledger['num_in']} -> {ledger['num_out']}{f' ({dropped})' if dropped else ''}{asked}"


def _write(pipeline: Pipeline, records: RecordSource, folder: Path) -> dict[str, int]:
    """Write the results to files, each complete before it gets its name."""
    writers: dict[str, Writer] = {}

    def writer(name: str) -> Writer:
        if name not in writers:
            path = folder / f"{name}.{pipeline.output}"
            writers[name] = Writer(durable.beside(path), pipeline.output)
        return writers[name]

    with durable.storing(folder):
        for record in records:
            writer(_file_of(record, pipeline.split_by)).add(record)
        if not writers:
            writer("data")
        found = {}
        for name in sorted(writers):
            writers[name].close()
            path = folder / f"{name}.{pipeline.output}"
            durable.reach("written", path)
            if writers[name].path.exists():
                writers[name].path.rename(path)
            durable.reach("after", path)
            found[path.name] = writers[name].num
        durable.sync_tree(folder)
    return found


def _file_of(record: Record, split_by: str) -> str:
    if not split_by:
        return "data"
    value = value_of(record, split_by)
    if not isinstance(value, str) or not re.fullmatch(r"[\w.-]{1,64}", value) or value.startswith("."):
        raise DataError(f"Pipeline.split_by = {split_by!r}: {value!r} is no name for a file")
    return value


# ---- the folder -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(folder: Path, made_of: Mapping[str, Any], fresh: bool) -> Iterator[Path]:
    """Open the folder's `work`, locked against other processes."""
    with locked(folder, SETUP, "the folder of a pipeline", "--out"):
        if fresh:
            for entry in sorted(folder.iterdir(), key=lambda e: e.name == SETUP):
                if entry.name != LOCK:
                    durable.remove(entry)
        durable.sweep(folder)
        work = folder / WORK
        if (folder / SETUP).is_file() and _holds_results(folder):
            _check_same(folder, json.loads((folder / SETUP).read_text()), made_of)
        durable.write(folder / SETUP, json.dumps(made_of, indent=1) + "\n")
        work.mkdir(exist_ok=True)
        try:
            yield work
        finally:
            if not _holds_results(folder):  # a start that failed leaves the folder free for other settings
                durable.remove(work)
                durable.remove(folder / SETUP)


def _holds_results(folder: Path) -> bool:
    """Return whether a stage is finished, or a model has answered: another pipeline must not overwrite that."""
    work = folder / WORK
    answered = any(path.stat().st_size for path in work.glob("*.answers.jsonl"))
    return answered or (folder / report.REPORT).is_file() or any(work.glob("*.json"))


def _check_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    if fingerprint(before) == fingerprint(now):
        return
    parts = [name for name in now if before.get(name) != now[name]]
    detail = ", ".join(parts)
    old, new = before.get("settings"), now["settings"]
    if isinstance(old, dict) and isinstance(new, dict):
        changed = [n for n in collections.ChainMap(new, old) if old.get(n) != new.get(n)]
        detail = ", ".join([*(p for p in parts if p != "settings"), *changed[:5]])
    raise ConfigError(
        f"holds another pipeline: {detail} differ",
        setting="--out",
        value=str(folder),
        remedy="go back to the old settings and input, name another --out, or start from scratch with --fresh",
    )
