"""Checkpoints: everything that a run needs to continue, saved together, and read only if every byte is as written.

A checkpoint is the train state and one record (`RunProgress`): phase and step, the position of the task stream, the
policy version, held-out rewards and wall seconds so far, and the groups that are complete and wait to be trained.
Randomness is addressed, not stored, and rollouts in flight are made again from their addresses: this is all there is.

It is a folder: the arrays as Orbax writes them, `progress.json`, `waiting.jsonl`, and a manifest with the SHA-256 of
every file (`sha256sum -c manifest.sha256` checks it by hand). It is filled beside its place and takes its name, which
no other checkpoint had or will have, when all of it is on the disk. Reading takes the newest that agrees with its
manifest.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from rolljax import reading
from rolljax.errors import CheckpointError, ConfigError, boundary
from rolljax.model.decoder import Params
from rolljax.run.progress import RunProgress
from rolljax.storage import durable
from rolljax.trainer.state import TrainState

MANIFEST, ARRAYS, PROGRESS, WAITING = "manifest.sha256", "arrays", "progress.json", "waiting.jsonl"
_NAME = re.compile(r"(\d{6,})_step_\d+")
_LINE = re.compile(r"([0-9a-f]{64})  (.+)\n")
_READERS = 8

Step = int | Literal["best"]
"""A checkpoint of a run: the newest one after N steps over all phases, or `best`: the highest held-out reward."""


class Saved(NamedTuple):
    """A committed checkpoint."""

    name: str
    progress: RunProgress


class Checkpoints:
    """The checkpoints of one run folder. Where a run is several processes, all of them save and read arrays together,
    and the first one does everything else."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).absolute()
        self._good: set[str] = set()
        """Names of checkpoints that this process has checked or written."""
        self._bad: dict[str, str] = {}
        """The damage of each damaged checkpoint, by name."""
        self._rewards: dict[str, float | None] = {}

    def names(self) -> list[str]:
        """Return the names of all checkpoints, the newest last."""
        if not self.folder.is_dir():
            return []
        found = [entry.name for entry in self.folder.iterdir() if _NAME.fullmatch(entry.name)]
        return sorted(found, key=_serial)

    def next_name(self, progress: RunProgress) -> str:
        """Return the name of the next checkpoint to save."""
        names = self.names()
        return f"{_serial(names[-1]) + 1 if names else 1:06}_step_{progress.total_steps}"

    def save(self, name: str, state: TrainState, progress: RunProgress) -> None:
        """Commit a checkpoint as `name`, which is a new one.

        Raises:
          StorageError: the disk does not take it. CheckpointError: Orbax does not write it.
        """
        record = dataclasses.asdict(progress)
        texts = {WAITING: record.pop("waiting"), PROGRESS: json.dumps(record, indent=1) + "\n"}
        write(self.folder / name, state, texts)
        self._good.add(name)

    def latest(self, warn: Callable[[str], None]) -> Saved | None:
        """Return the newest complete checkpoint; None if there are no checkpoints.

        Args:
          warn: receives a sentence about each newer one that is damaged.

        Raises:
          CheckpointError: there are checkpoints, and none is whole.
        """
        for name in reversed(self.names()):
            if name not in self._good | self._bad.keys():
                if problem := damage(self.folder / name):
                    self._bad[name] = f"{self.folder / name}: {problem}"
                    warn(f"warning: a checkpoint is damaged and left out: {self._bad[name]}")
                else:
                    self._good.add(name)
            if name in self._good:
                return Saved(name, self._progress(name))
        if self._bad:
            raise CheckpointError("no checkpoint is whole; --fresh starts over\n  " + "\n  ".join(self._bad.values()))
        return None

    def _progress(self, name: str) -> RunProgress:
        path = self.folder / name / PROGRESS
        with boundary(CheckpointError, f"reading {path}, which another version of rolljax may have written"):
            return RunProgress(**json.loads(path.read_text()), waiting=path.with_name(WAITING).read_text())

    def state(self, name: str, abstract: TrainState, shardings: TrainState) -> TrainState:
        """Return the train state with the given shardings, on any mesh."""
        return read(self.folder / name, abstract, shardings)

    def params(self, name: str, abstract: Params, shardings: Params) -> Params:
        """Return only the policy's parameters, with the given shardings; the rest of the state is not read."""
        return read_part(self.folder / name, ("policy", "params"), abstract, shardings)

    def find(self, step: Step) -> Saved:
        """Return the newest valid checkpoint of a step, or the one with the highest held-out reward.

        Raises:
          ConfigError: no checkpoint of that step is kept, or none was evaluated; the message lists the kept steps.
          CheckpointError: the checkpoints of that step are damaged.
        """
        names = self.best(1) if step == "best" else [n for n in reversed(self.names()) if step_of(n) == step]
        kept = ", ".join(str(s) for s in dict.fromkeys(map(step_of, self.names()))) or "none"
        if not names:
            raise ConfigError(
                "names a checkpoint that is not there: " + ("none was evaluated" if step == "best" else f"kept {kept}"),
                setting="--step",
                value=step,
                remedy="name one of these; Recipe.keep_checkpoints and Recipe.keep_best say which are kept",
            )
        for name in names:
            problem = "" if name in self._good else damage(self.folder / name)
            if not problem:
                return Saved(name, self._progress(name))
        raise CheckpointError(f"{self.folder / names[0]} is damaged: {problem}; steps that are kept: {kept}")

    def heldout_reward(self, name: str) -> float | None:
        """Return the held-out reward of a checkpoint's weights; None: not evaluated, or the record is damaged."""
        if name not in self._rewards:
            try:
                found = reading.read_object(self.folder / name / PROGRESS, "").get("weights_reward")
            except CheckpointError:
                found = None
            self._rewards[name] = found if isinstance(found, float) else None
        return self._rewards[name]

    def best(self, number: int) -> list[str]:
        """Return up to `number` checkpoints with the highest held-out rewards, the best first; of equal ones the
        earlier."""
        rewards = {n: self.heldout_reward(n) for n in self.names() if n not in self._bad}
        found = [(reward, -_serial(name), name) for name, reward in rewards.items() if reward is not None]
        return [name for _, _, name in sorted(found, reverse=True)[:number]]

    def retain(self, keep: int, keep_best: int = 0) -> int:
        """Delete all but the newest `keep` and the `keep_best` with the highest held-out rewards, and damaged ones.

        Returns:
          `total_steps` of the oldest one of the newest, 0 where there is none.
        """
        sound = [name for name in self.names() if name not in self._bad]
        stay = {*sound[-keep:], *self.best(keep_best)}
        for name in {*sound, *self._bad} - stay:
            if (self.folder / name).exists():
                durable.remove(self.folder / name)
        self._bad.clear()
        return step_of(sound[-keep:][0]) if sound else 0


def step_of(name: str) -> int:
    """Return `total_steps` of a checkpoint, by its name."""
    return int(name.rpartition("_")[2])


def _serial(name: str) -> int:
    return int(name.partition("_")[0])


# ---- a folder of arrays ---------------------------------------------------------------------------------------------


def write(path: Path, tree: Any, texts: dict[str, str]) -> None:
    """Commit arrays and small files as folder `path`, with a manifest; the processes that hold the arrays all call it.

    Each process writes its parts. After Orbax reports that all parts are written, the first process writes the
    manifest, syncs everything to disk, and renames the folder to `path`.

    Raises:
      StorageError, CheckpointError: it cannot be written; earlier checkpoints are unchanged.
    """
    import orbax.checkpoint as ocp

    leads = jax.process_index() == 0
    place = durable.folder(path) if leads else contextlib.nullcontext(durable.beside(path))
    with boundary(CheckpointError, f"saving {path}"), durable.storing(path), place as temporary:
        with contextlib.closing(ocp.Checkpointer(ocp.StandardCheckpointHandler())) as checkpointer:
            checkpointer.save(temporary / ARRAYS, args=ocp.args.StandardSave(tree))
        _give_back_memory()
        if leads:
            for name, text in texts.items():
                (temporary / name).write_text(text)
            (temporary / MANIFEST).write_text(_manifest(digests(temporary, _files(temporary))))


def _give_back_memory() -> None:
    """Return the memory that Orbax has freed to the system. The C library keeps it for the threads that wrote: 0.8 GiB
    for each GiB of arrays, which the next update would not find."""
    with contextlib.suppress(OSError, AttributeError):  # a C library that is not glibc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def read(path: Path, abstract: Any, shardings: Any) -> Any:
    """Read the arrays of a folder that `write` made, with the given shardings; all processes that hold the arrays must
    call this."""
    import orbax.checkpoint as ocp

    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    with (
        boundary(CheckpointError, f"reading {path}"),
        contextlib.closing(ocp.Checkpointer(ocp.StandardCheckpointHandler())) as checkpointer,
    ):
        return checkpointer.restore(path / ARRAYS, args=ocp.args.StandardRestore(like))


def read_part(path: Path, keys: Sequence[str], abstract: Any, shardings: Any) -> Any:
    """Read the arrays below `keys` in a folder that `write` made, with the given shardings."""
    import orbax.checkpoint as ocp

    like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)
    for key in reversed(keys):
        like = {key: like}
    how = ocp.args.PyTreeRestore(
        item=like, restore_args=ocp.checkpoint_utils.construct_restore_args(like), partial_restore=True
    )
    with (
        boundary(CheckpointError, f"reading {path}"),
        contextlib.closing(ocp.Checkpointer(ocp.PyTreeCheckpointHandler())) as checkpointer,
    ):
        found = checkpointer.restore(path / ARRAYS, args=how)
        for key in keys:
            found = found[key]
        if missing := [x for x in jax.tree.leaves(found) if not isinstance(x, jax.Array)]:
            raise CheckpointError(f"{path} has no array of shape {missing[0].shape}: it is of another model")
    return found


def damage(path: Path) -> str:
    """Describe the damage of a folder that `write` made, naming one file; empty if it is undamaged."""
    try:
        text = reading.read_bytes(path / MANIFEST).decode()
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError) as e:
        return f"{MANIFEST} cannot be read: {reading.reason(e)}"
    written = {name: digest for digest, name in _LINE.findall(text)}
    if _manifest(written) != text:
        return f"{MANIFEST} is not as it was written"
    there = set(_files(path)) - {MANIFEST}
    for name in sorted(there ^ set(written)):
        return f"{name} is missing" if name in written else f"{name} is not in {MANIFEST}"
    try:
        found = digests(path, list(written))
    except OSError as e:
        return f"{e.filename} cannot be read: {reading.reason(e)}"
    wrong = [name for name in written if found[name] != written[name]]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return f"{wrong[0]} is not as it was written{more}" if wrong else ""


def digests(path: Path, names: list[str]) -> dict[str, str]:
    """Return the SHA-256 of files of a folder, in hexadecimal digits."""

    with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
        return dict(zip(names, pool.map(reading.digest, [path / name for name in names]), strict=True))


def _manifest(written: dict[str, str]) -> str:
    """Return the output that `sha256sum` would print."""
    return "".join(f"{digest}  {name}\n" for name, digest in written.items())


def _files(path: Path) -> list[str]:
    return sorted(entry.relative_to(path).as_posix() for entry in path.rglob("*") if not entry.is_dir())
