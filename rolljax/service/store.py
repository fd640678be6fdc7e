"""The service's folder: what survives a restart.

    service.json                       the base model
    sessions/ID.json, samplers/ID.json
    models/ID/model.json               a policy: its adapter's shape, seed and owner
    models/ID/requests/SEQ.KIND        accepted calls in their order, from the newest state on
    models/ID/results/SEQ.json|pb      their results
    models/ID/state/                   all that is trained, after the call that state.json names
    models/ID/weights|sampler_weights|external_weights/NAME/      checkpoints

A call is written before it is acknowledged, and so is its place in the order. After a restart the calls behind the
newest state are computed again: they give the same weights, because nothing in them is drawn at random.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import safetensors
import safetensors.numpy

from rolljax import reading
from rolljax.errors import CheckpointError
from rolljax.model.decoder import Params
from rolljax.model.shards import save_file
from rolljax.service.wire import RequestError
from rolljax.storage import durable
from rolljax.trainer.slots import TREES, PolicyState

ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9:._-]{0,199}")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
SCHEME = "tinker://"
STATE, INFO, TENSORS = "state.json", "checkpoint.json", "policy.safetensors"
EPHEMERAL = "ephemeral-"
"""Prefix of checkpoints that were made for one sampling client."""

Room = Literal["weights", "sampler_weights", "external_weights"]
KINDS: dict[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Names of checkpoints in listings, by their room in the folder."""
R = TypeVar("R", "SessionRecord", "SamplerRecord", "PolicyRecord")


@dataclasses.dataclass
class SessionRecord:
    """A client's session."""

    id: str
    owner: str
    created_s: float
    tags: list[str] = dataclasses.field(default_factory=list)
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None
    is_over: bool = False


@dataclasses.dataclass
class SamplerRecord:
    """A sampling session."""

    id: str
    session: str
    owner: str
    path: str
    """Of its weights; empty: the base model."""


@dataclasses.dataclass
class PolicyRecord:
    """A policy: a training run of the API."""

    id: str
    session: str
    owner: str
    created_s: float
    rank: int
    seed: int
    train_attn: bool
    train_mlp: bool
    user_metadata: dict[str, Any] | None = None
    is_over: bool = False


@dataclasses.dataclass
class CheckpointInfo:
    """What is known of a checkpoint without its tensors."""

    model_id: str
    room: Room
    name: str
    rank: int
    train_attn: bool
    train_mlp: bool
    num_steps: int
    seq: int
    """Number of the call that made it."""
    created_s: float
    size_bytes: int = 0
    expires_s: float | None = None
    is_public: bool = False
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """The checkpoint's address in the API."""
        return f"{SCHEME}{self.model_id}/{self.room}/{self.name}"

    @property
    def is_expired(self) -> bool:
        return self.expires_s is not None and time.time() > self.expires_s


def split_path(path: str) -> tuple[str, Room, str]:
    """Return policy, room and name of an address.

    Raises:
      RequestError: it is none.
    """
    parts = path.removeprefix(SCHEME).split("/")
    is_one = path.startswith(SCHEME) and len(parts) == 3 and parts[1] in KINDS
    if not is_one or not ID.fullmatch(parts[0]) or not NAME.fullmatch(parts[2]):
        raise RequestError(f"path: {path!r} is not {SCHEME}MODEL_ID/{'|'.join(KINDS)}/NAME")
    return parts[0], parts[1], parts[2]  # type: ignore[return-value]


class ServiceStore:
    """Reads and writes the folder. Of one process; every file has one writer at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("sessions", "samplers", "models"):
            with durable.storing(folder / name):
                (folder / name).mkdir(parents=True, exist_ok=True)

    # ---- records ----------------------------------------------------------------------------------------------------

    def write(self, record: SessionRecord | SamplerRecord | PolicyRecord) -> None:
        """Write a record, in place of an older one."""
        path = self._record(type(record), record.id)
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, json.dumps(dataclasses.asdict(record)))

    def records(self, kind: type[R]) -> dict[str, R]:
        """Return all records of a kind by id, oldest first."""
        paths = self.folder.glob("models/*/model.json" if kind is PolicyRecord else f"{_FOLDERS[kind]}/*.json")
        found = [kind(**reading.load_object(path)) for path in paths if not path.name.startswith(".")]
        return {record.id: record for record in sorted(found, key=lambda r: (getattr(r, "created_s", 0.0), r.id))}

    def sampler(self, name: str) -> SamplerRecord | None:
        """Return the record of a sampling session; None: there is none."""
        path = self._record(SamplerRecord, name)
        return SamplerRecord(**reading.load_object(path)) if ID.fullmatch(name) and path.is_file() else None

    def _record(self, kind: type, name: str) -> Path:
        if kind is PolicyRecord:
            return self.folder / "models" / name / "model.json"
        return self.folder / _FOLDERS[kind] / f"{name}.json"

    # ---- calls ------------------------------------------------------------------------------------------------------

    def write_request(self, model_id: str, seq: int, kind: str, body: bytes) -> None:
        """Write a call, so that it survives a restart."""
        path = self._model(model_id) / "requests" / f"{seq:09d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, body)

    def requests(self, model_id: str) -> Iterator[tuple[int, str, Path]]:
        """Yield the calls behind the newest state in their order: number, kind, and the file with the body."""
        first = self.state_seq(model_id)
        for path in sorted((self._model(model_id) / "requests").glob("[0-9]*.*")):
            seq, _, kind = path.name.partition(".")
            if int(seq) > first:
                yield int(seq), kind, path

    def write_result(self, model_id: str, seq: int, kind: Literal["json", "pb"], data: bytes) -> None:
        """Write the result of a call."""
        path = self._model(model_id) / "results" / f"{seq:09d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write(path, data)

    def result(self, model_id: str, seq: int) -> tuple[str, bytes] | None:
        """Return the kind and the bytes of a result; None: there is none (any more)."""
        for kind in ("json", "pb"):
            path = self._model(model_id) / "results" / f"{seq:09d}.{kind}"
            try:
                return kind, reading.read_bytes(path)
            except FileNotFoundError:
                continue
        return None

    # ---- states and checkpoints -------------------------------------------------------------------------------------

    def state_seq(self, model_id: str) -> int:
        """Return the number of the last call that the newest state contains; -1: there is no state."""
        path = self._model(model_id) / "state" / STATE
        return int(reading.load_object(path)["seq"]) if path.is_file() else -1

    def write_state(self, model_id: str, seq: int, state: PolicyState) -> None:
        """Write all that is trained of a policy after call `seq`, and drop the calls that it contains; their results
        stay until the next state."""
        folder, before = self._model(model_id), self.state_seq(model_id)
        with durable.folder(folder / "state") as new:
            save_file(new / TENSORS, _tensors(state))
            (new / STATE).write_text(json.dumps({"seq": seq}))
        for name, last in (("requests", seq), ("results", before)):
            for path in (folder / name).glob("[0-9]*.*"):
                if int(path.name.partition(".")[0]) <= last:
                    durable.remove(path)

    def read_state(self, model_id: str) -> PolicyState:
        """Return the newest state of a policy."""
        return _read_tensors(self._model(model_id) / "state" / TENSORS)

    def write_checkpoint(self, info: CheckpointInfo, state: PolicyState) -> None:
        """Write a checkpoint, in place of one of that name."""
        with durable.folder(self.checkpoint(info)) as new:
            save_file(new / TENSORS, _tensors(state))
            self.describe(new, info)

    def describe(self, folder: Path, info: CheckpointInfo) -> None:
        """Add the description, with the size of its files, to a folder that is to be a checkpoint."""
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        (folder / INFO).write_text(json.dumps(dataclasses.asdict(dataclasses.replace(info, size_bytes=size))))

    def change(self, info: CheckpointInfo) -> None:
        """Write another description of a checkpoint."""
        durable.write(self.checkpoint(info) / INFO, json.dumps(dataclasses.asdict(info)))

    def read_checkpoint(self, info: CheckpointInfo) -> PolicyState:
        """Return what a checkpoint of a policy contains; parts that it lacks are empty."""
        return _read_tensors(self.checkpoint(info) / TENSORS)

    def checkpoint(self, info: CheckpointInfo) -> Path:
        """Return the folder of a checkpoint."""
        return self._model(info.model_id) / info.room / info.name

    def find(self, path: str) -> CheckpointInfo | None:
        """Return the description of a checkpoint by its address; None: it is not there, or has expired."""
        model_id, room, name = split_path(path)
        file = self._model(model_id) / room / name / INFO
        if not file.is_file():
            return None
        info = CheckpointInfo(**reading.load_object(file))
        return None if info.is_expired else info

    def checkpoints(self, model_id: str = "*") -> list[CheckpointInfo]:
        """Return the checkpoints of a policy, or of all, oldest first; expired ones are removed."""
        found = []
        for room in KINDS:
            for path in self.folder.glob(f"models/{model_id}/{room}/*/{INFO}"):
                if path.parent.name.startswith("."):
                    continue
                info = CheckpointInfo(**reading.load_object(path))
                if info.is_expired:
                    self.delete(info)
                else:
                    found.append(info)
        return sorted(found, key=lambda info: info.created_s)

    def delete(self, info: CheckpointInfo) -> None:
        """Remove a checkpoint."""
        durable.remove(self.checkpoint(info))

    def _model(self, model_id: str) -> Path:
        return self.folder / "models" / model_id


_FOLDERS = {SessionRecord: "sessions", SamplerRecord: "samplers"}


def _tensors(state: PolicyState) -> dict[str, np.ndarray]:
    trees = {name: getattr(state, name) for name in TREES}
    matrices = ((f"{name}/{key}", x) for name, tree in trees.items() if tree for key, x in tree["layers"].items())
    numbers = {"num_steps": np.asarray(state.num_steps, np.int32), "scale": np.asarray(state.scale, np.float32)}
    return {name: np.asarray(x) for name, x in matrices} | numbers


def _read_tensors(path: Path) -> PolicyState:
    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as e:
        raise CheckpointError(f"{path}: cannot be read: {e}") from e
    trees: dict[str, Params] = {name: {} for name in TREES}
    for name, tensor in tensors.items():
        tree, _, key = name.partition("/")
        if key:
            trees[tree].setdefault("layers", {})[key] = tensor
    return PolicyState(**trees, num_steps=tensors["num_steps"], scale=tensors["scale"])
