"""The thread that trains: it computes the calls of all policies, each policy's in their order.

    accepted call -> its policy's queue -> round -> result in the store -> whoever waits for it

A round takes the loss calls at the head of every policy's queue and computes them in shared batches, then one other
call of each policy. So no policy waits for another's queue. Policies that are not in a slot of the trainer are on the
host; the one that has waited longest makes room.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from tinker import types

from rolljax import reading
from rolljax.concurrency.waits import Inbox
from rolljax.errors import CheckpointError, RolljaxError
from rolljax.model.lora import Lora, linear_maps, save_adapter
from rolljax.service.store import EPHEMERAL, NAME, CheckpointInfo, PolicyRecord, Room, SamplerRecord, ServiceStore
from rolljax.service.wire import Limits, LossCall, RequestError, loss_result, read_adam, read_json, read_loss_call
from rolljax.storage import durable
from rolljax.trainer.slots import TREES, PolicyState, SlotTrainer

Kind = Literal[
    "create", "loss", "optim_step", "save_weights", "save_weights_for_sampler", "save_weights_external", "load"
]
ATTENTION, FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")
CALLS_PER_ROUND = 64
"""Most loss calls of one policy that are computed together."""
KEPT_EPHEMERAL = 8
"""Newest checkpoints of a policy's sampling clients that are kept."""


@dataclasses.dataclass(frozen=True)
class BaseModel:
    """The model that all policies adapt."""

    name: str
    folder: str
    tokenizer: Any
    inside: str
    """Name of the decoder inside the model that `transformers` makes of the folder."""
    arch: str
    tokenizer_id: str
    """The tokenizer's name for clients: a name of the hub, or the folder."""


@dataclasses.dataclass(eq=False)
class LoadedPolicy:
    """A policy, and the calls that it has still to compute. Only the training thread changes it."""

    record: PolicyRecord
    lora: Lora
    next_seq: int = 0
    calls: dict[int, tuple[Kind, Any]] = dataclasses.field(default_factory=dict)
    slot: int | None = None
    state: PolicyState | None = None
    """On the host, while it has no slot."""
    used_s: float = 0.0
    steps_unsaved: int = 0
    """Optimizer steps since the newest state in the store."""

    @property
    def is_empty(self) -> bool:
        """Return whether it has no weights yet."""
        return self.slot is None and self.state is None

    @property
    def head(self) -> tuple[Kind, Any] | None:
        """The call that comes next, if it is here."""
        return self.calls.get(self.next_seq)


class TrainingWorker:
    """Trains all policies in a thread of its own.

    Args:
      state_steps: optimizer steps after which a policy's state is written.
      done: called in the thread with a policy and the number of a call whose result is in the store.
    """

    def __init__(
        self,
        trainer: SlotTrainer,
        base: BaseModel,
        store: ServiceStore,
        limits: Limits,
        state_steps: int,
        done: Callable[[str, int], None],
    ) -> None:
        self.base, self.store, self.limits = base, store, limits
        self.inbox: Inbox[Callable[[], None] | None] = Inbox("the training thread")
        self.error: str | None = None
        """Why the thread has stopped, if it has."""
        self._trainer, self._state_steps, self._done = trainer, state_steps, done
        self._states = trainer.empty()
        self._policies: dict[str, LoadedPolicy] = {}
        self._maps = linear_maps(trainer.model.plain.axes())
        self._thread = threading.Thread(target=self._run, name="rolljax-service-trainer", daemon=True)
        self._thread.start()

    # ---- from any thread --------------------------------------------------------------------------------------------

    def lora(self, record: PolicyRecord) -> Lora:
        """Return the shape of a policy's adapter.

        Raises:
          RequestError: its rank does not fit a slot, or it has no map.
        """
        most = self._trainer.slots.rank
        if not 1 <= record.rank <= most:
            raise RequestError(f"lora_config.rank: this server takes 1 to {most} (its --rank), not {record.rank}")
        wanted = (ATTENTION if record.train_attn else ()) + (FEED_FORWARD if record.train_mlp else ())
        targets = tuple(name for name in wanted if name in self._maps)
        if not targets:
            raise RequestError("lora_config: names no map of this model; set train_attn or train_mlp")
        return Lora(record.rank, self._trainer.slots.alpha, targets)

    def submit(self, record: PolicyRecord, seq: int, kind: Kind, call: Any) -> None:
        """Queue a call that is in the store."""
        self.inbox.put(lambda: self._enqueue(record, seq, kind, call))

    def resume(self, record: PolicyRecord) -> None:
        """Take up a policy from the store: its newest state, and the calls behind it."""
        self.inbox.put(lambda: self._resume(record))

    def unload(self, model_id: str) -> concurrent.futures.Future[None]:
        """Write a policy's state, and forget it."""
        gone: concurrent.futures.Future[None] = concurrent.futures.Future()

        def run() -> None:
            policy = self._policies.pop(model_id, None)
            if policy and not policy.is_empty:
                self._write_state(policy)
            gone.set_result(None)

        self.inbox.put(run)
        return gone

    def close(self) -> None:
        """Write the states of all policies and end the thread."""
        self.inbox.put(None)
        self._thread.join()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_in():
                self._round()
            for policy in self._policies.values():
                if policy.next_seq and policy.steps_unsaved:
                    self._write_state(policy)
        except Exception as e:  # border: the thread ends, and everything that waits learns why
            self.error = f"the trainer stopped: {type(e).__name__}: {e}"
            for policy in self._policies.values():
                for seq in policy.calls:
                    self._done(policy.record.id, seq)
            raise

    def _take_in(self) -> bool:
        """Make the calls in the inbox, waiting while there is nothing to do; return False at the end."""
        while self.inbox or not any(policy.head for policy in self._policies.values()):
            item = self.inbox.take()
            if item is None:
                return False
            item()
        return True

    def _enqueue(self, record: PolicyRecord, seq: int, kind: Kind, call: Any) -> None:
        policy = self._policies.get(record.id)
        if policy is None:
            policy = self._policies[record.id] = LoadedPolicy(record, self.lora(record))
        if seq >= policy.next_seq:
            policy.calls[seq] = (kind, call)

    def _resume(self, record: PolicyRecord) -> None:
        policy = self._policies[record.id] = LoadedPolicy(record, self.lora(record))
        policy.next_seq = self.store.state_seq(record.id) + 1
        if policy.next_seq:
            policy.state = self._padded(self.store.read_state(record.id))
        for seq, kind, path in self.store.requests(record.id):
            policy.calls[seq] = (kind, read_call(kind, reading.read_bytes(path), self.limits))  # type: ignore[arg-type,assignment]

    def _round(self) -> None:
        for policy in self._policies.values():
            while policy.head and policy.head[0] not in ("create", "load") and policy.is_empty:
                self._end_call(policy, RequestError("the policy was not made: its first call failed"))
        for backward in (True, False):
            self._compute_losses(backward)
        for policy in [p for p in self._policies.values() if p.head and p.head[0] != "loss"]:
            kind, call = policy.head  # type: ignore[misc]
            try:
                self._end_call(policy, self._made(policy, kind, call))
            except (RequestError, CheckpointError) as e:
                self._end_call(policy, e)

    def _compute_losses(self, backward: bool) -> None:
        """Compute the loss calls at the heads of all queues that are of this kind."""
        chosen: list[tuple[LoadedPolicy, list[LossCall]]] = []
        for policy in sorted(self._policies.values(), key=lambda p: p.used_s):
            calls: list[LossCall] = []
            for seq in range(policy.next_seq, policy.next_seq + CALLS_PER_ROUND):
                _, call = policy.calls.get(seq, ("", None))
                if not isinstance(call, LossCall) or call.backward != backward:
                    break
                calls.append(call)
            if calls and len(chosen) < self._trainer.slots.num:  # the others' turn is the next round
                chosen.append((policy, calls))
        if not chosen:
            return
        self._give_slots([policy for policy, _ in chosen])
        every = [(policy, call) for policy, calls in chosen for call in calls]
        examples = [dataclasses.replace(e, slot=p.slot) for p, call in every for e in call.examples]  # type: ignore[arg-type]
        self._states, outputs = self._trainer.forward_backward(self._states, examples, backward=backward)
        rest = iter(outputs)
        for policy, call in every:
            self._end_call(policy, loss_result(call, [next(rest) for _ in call.examples]))

    def _made(self, policy: LoadedPolicy, kind: Kind, call: Any) -> dict[str, Any]:
        """Make a call that is no loss; return its result."""
        if kind == "create":
            policy.state = jax.device_get(self._trainer.new_policy(policy.lora, policy.record.seed))
            return {"type": "create_model", "model_id": policy.record.id}
        if kind == "load":
            return self._load(policy, call)
        if kind == "optim_step":
            self._give_slots([policy])
            assert policy.slot is not None
            self._states, found = self._trainer.optimizer_step(self._states, policy.slot, read_adam(call.optim_params))
            policy.steps_unsaved += 1
            if not found.pop("finite"):
                raise RequestError("the gradient is not finite: this step changed nothing, and the gradient is dropped")
            return {"metrics": found}
        return self._save(policy, kind, call)

    def _end_call(self, policy: LoadedPolicy, result: bytes | dict[str, Any] | RolljaxError) -> None:
        """Write the result of a policy's next call, and continue with the one after it."""
        model_id, seq = policy.record.id, policy.next_seq
        if isinstance(result, bytes):
            self.store.write_result(model_id, seq, "pb", result)
        else:
            failed = {"error": str(result), "category": "user"}
            fields = failed if isinstance(result, RolljaxError) else result
            self.store.write_result(model_id, seq, "json", json.dumps(fields).encode())
        del policy.calls[seq]
        policy.next_seq += 1
        policy.used_s = time.monotonic()
        if policy.steps_unsaved >= self._state_steps:
            self._write_state(policy)
        self._done(model_id, seq)

    # ---- slots ------------------------------------------------------------------------------------------------------

    def _give_slots(self, wanted: Iterable[LoadedPolicy]) -> None:
        """Bring policies into slots of the trainer, in place of the policies that have not been used for longest."""
        wanted = list(wanted)
        held = {policy.slot: policy for policy in self._policies.values() if policy.slot is not None}
        free = [slot for slot in range(self._trainer.slots.num) if slot not in held]
        idle = sorted((p for p in held.values() if p not in wanted), key=lambda p: -p.used_s)
        for policy in wanted:
            if policy.slot is not None:
                continue
            if not free:
                last = idle.pop()
                free.append(last.slot)  # type: ignore[arg-type]
                last.state, last.slot = self._state(last), None
            assert policy.state is not None
            policy.slot = free.pop(0)
            self._states, policy.state = self._trainer.put(self._states, policy.slot, policy.state), None

    def _state(self, policy: LoadedPolicy) -> PolicyState:
        """Return the state of a policy on the host."""
        if policy.slot is None:
            assert policy.state is not None
            return policy.state
        on_host: PolicyState = jax.device_get(self._trainer.take(self._states, policy.slot))
        return on_host

    def _change(self, policy: LoadedPolicy, state: PolicyState) -> None:
        """Use another state for a policy."""
        if policy.slot is None:
            policy.state = state
        else:
            self._states = self._trainer.put(self._states, policy.slot, state)

    def _cut(self, policy: LoadedPolicy, **left_out: Any) -> PolicyState:
        """Return the state of a policy in its own rank. left_out: trees that are replaced."""
        state, cut = self._state(policy), self._trainer.slots.cut
        trees = {name: cut(getattr(state, name), policy.lora.rank) for name in TREES}
        return dataclasses.replace(state, **{**trees, **left_out})

    def _padded(self, state: PolicyState) -> PolicyState:
        """Return a state from the store in the rank of the slots; what it lacks is zero."""
        pad = self._trainer.slots.padded
        trees = {"adapters": jax.device_get(pad(state.adapters))}
        nothing = jax.tree.map(np.zeros_like, trees["adapters"])
        for name in ("grads", "mu", "nu"):
            tree = getattr(state, name)
            trees[name] = jax.device_get(pad(tree)) if tree else nothing
        return dataclasses.replace(state, **trees)

    def _write_state(self, policy: LoadedPolicy) -> None:
        self.store.write_state(policy.record.id, policy.next_seq - 1, self._cut(policy))
        policy.steps_unsaved = 0

    # ---- checkpoints ------------------------------------------------------------------------------------------------

    def _load(self, policy: LoadedPolicy, call: types.LoadWeightsRequest) -> dict[str, Any]:
        info = self.store.find(call.path)
        if info is None or info.room != "weights":
            raise RequestError(f"path: there is no training checkpoint {call.path}")
        shape = (info.rank, info.train_attn, info.train_mlp)
        own = (policy.record.rank, policy.record.train_attn, policy.record.train_mlp)
        if shape != own:
            raise RequestError(f"path: its adapter has (rank, attention, feed-forward) {shape}, this policy has {own}")
        state = self._padded(self.store.read_checkpoint(info))
        if not call.optimizer:
            zero = jax.tree.map(np.zeros_like, state.mu)
            state = dataclasses.replace(state, mu=zero, nu=zero, num_steps=np.int32(0))
        self._change(policy, state)
        policy.steps_unsaved = self._state_steps  # the checkpoint may be another one when calls are computed again
        return {"type": "load_weights", "path": call.path, "model_id": policy.record.id}

    def _save(self, policy: LoadedPolicy, kind: Kind, call: Any) -> dict[str, Any]:
        room: Room = {
            "save_weights": "weights",
            "save_weights_for_sampler": "sampler_weights",
            "save_weights_external": "external_weights",
        }[kind]  # type: ignore[assignment]
        seq = policy.next_seq
        info = CheckpointInfo(
            policy.record.id,
            room,
            call.path or f"{EPHEMERAL}{seq}",
            policy.record.rank,
            policy.record.train_attn,
            policy.record.train_mlp,
            int(policy.state.num_steps if policy.state else self._states.num_steps[policy.slot]),
            seq,
            time.time(),
            expires_s=time.time() + call.ttl_seconds if call.ttl_seconds else None,
            user_metadata=getattr(call, "user_metadata", None),
        )
        there = self.store.find(info.path)
        if there and there.seq != seq and not getattr(call, "overwrite", False):  # its own: computed after a restart
            raise RequestError(f"path: {info.path} is there already; choose another name, or overwrite")
        if room == "external_weights":
            self._export(policy, info)
            return {"type": kind, "path": info.path}
        left_out: dict[str, Any] = {"grads": {}} if room == "weights" else {"grads": {}, "mu": {}, "nu": {}}
        self.store.write_checkpoint(info, self._cut(policy, **left_out))
        if call.path is not None or room == "weights":
            return {"type": kind, "path": info.path}
        self._drop_ephemeral(policy)
        name = f"{policy.record.session}:sample:{call.sampling_session_seq_id or 0}"
        self.store.write(SamplerRecord(name, policy.record.session, policy.record.owner, info.path))
        return {"type": kind, "sampling_session_id": name}

    def _drop_ephemeral(self, policy: LoadedPolicy) -> None:
        kept = [c for c in self.store.checkpoints(policy.record.id) if c.name.startswith(EPHEMERAL)]
        for info in kept[:-KEPT_EPHEMERAL]:
            self.store.delete(info)

    def _export(self, policy: LoadedPolicy, info: CheckpointInfo) -> None:
        """Write the adapter as the folder that PEFT reads."""
        cfg, base = self._trainer.model.cfg, self.base
        adapters = {"layers": dict(self._cut(policy).adapters["layers"])}
        for name in {key[:-2] for key in adapters["layers"]} - set(policy.lora.targets):
            del adapters["layers"][f"{name}_a"], adapters["layers"][f"{name}_b"]
        with durable.folder(self.store.checkpoint(info)) as new:
            save_adapter(new, policy.lora, cfg, adapters, base.folder, base.tokenizer, base.inside)
            self.store.describe(new, info)


_TYPES: Mapping[str, Any] = {
    "create": types.CreateModelRequest,
    "optim_step": types.OptimStepRequest,
    "save_weights": types.SaveWeightsRequest,
    "save_weights_for_sampler": types.SaveWeightsForSamplerRequest,
    "save_weights_external": types.SaveWeightsExternalRequest,
    "load": types.LoadWeightsRequest,
}


def read_call(kind: Kind, body: bytes, limits: Limits) -> Any:
    """Return the call that a body holds, checked.

    Raises:
      RequestError: it holds none.
    """
    if kind == "loss":
        return read_loss_call(body, limits)
    call = read_json(body, _TYPES[kind])
    if kind == "optim_step":
        read_adam(call.optim_params)
    if kind.startswith("save") and call.path is not None and not is_checkpoint_name(call.path):
        raise RequestError(f"path: {call.path!r} is no name: letters, digits, '.', '_', '-', at most 128")
    return call


def is_checkpoint_name(name: str) -> bool:
    """Return whether a client may give a checkpoint this name."""
    return bool(NAME.fullmatch(name)) and not name.startswith(EPHEMERAL)


def seed_of(model_id: str) -> int:
    """Return the seed of a policy whose client names none."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:4], "little")
