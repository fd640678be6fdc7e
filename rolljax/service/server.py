"""Tinker's API over HTTP: sessions, policies, samples, checkpoints. An ASGI application.

    HTTP -> endpoint -> checked call -> store (durable) -> training thread, or sampler
                     <- id of a future                        |
    HTTP -> retrieve_future <- result <-----------------------+

A call is acknowledged with an id that follows from its policy and its number, so a client that sends a call again gets
the same future, before and after a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import functools
import hashlib
import hmac
import json
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp
from tinker import types

from rolljax import reading
from rolljax.errors import RolljaxError, SamplerError
from rolljax.service.sampling import Samples
from rolljax.service.store import (
    KINDS,
    SCHEME,
    CheckpointInfo,
    PolicyRecord,
    SamplerRecord,
    ServiceStore,
    SessionRecord,
)
from rolljax.service.training import BaseModel, Kind, TrainingWorker, read_call, seed_of
from rolljax.service.wire import Limits, RequestError, read_json, unpacked

PROTOBUF = "application/x-protobuf"
POLL_S = 25.0
"""Longest that an answer waits for a result; the client then asks again."""
BODY_BYTES = 64 * 2**20
BODY_S = 60.0
LINK_S = 3600
"""Seconds that links to exported files are valid."""
REAP_S = 5.0
"""Seconds between two looks for sessions whose clients are gone."""
PAGE = 100
CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": True,
    "custom_loss_server_side": False,
    "use_pyqwest_transport": False,
}
NOTE = "adapters train attention and feed-forward maps; the output matrix stays as it is (train_unembed has no effect)"
ABSENT = {
    "audit": "no audit log",
    "billing/usage/events": "no billing",
    "billing/usage/checkpoints/current": "no billing",
    "copy_weights": "no projects to copy weights to; load the checkpoint from where it is",
    "create_custom_loss": "no losses of clients; forward_backward_custom computes them in the client",
    "sessions/search": "no search; list the sessions",
    "sessions/{session_id}/project": "no projects",
    "sessions/{session_id}/trace_export": "no traces",
}
"""Endpoints of the API that this server does not have, and why."""
Endpoint = Callable[["TrainingService", Request, str], Awaitable[Any]]


class TrainingService:
    """The state of the server. `app` is the ASGI application; create it, and use it, in one event loop.

    Args:
      keys: API keys of tenants, who see nothing of each other; none: everyone is one tenant.
      session_s: seconds without a sign of its client after which a session ends, and its policies are unloaded.
      max_policies: most policies of a tenant that are loaded at a time. max_calls: most open calls of a policy.
    """

    def __init__(
        self,
        store: ServiceStore,
        base: BaseModel,
        limits: Limits,
        samples: Samples,
        make_worker: Callable[[Callable[[str, int], None]], TrainingWorker],
        *,
        keys: tuple[str, ...] = (),
        session_s: float = 900.0,
        max_policies: int = 64,
        max_calls: int = 1024,
    ) -> None:
        self.store, self.base, self.limits, self.samples = store, base, limits, samples
        self._keys, self._session_s = keys, session_s
        self._max_policies, self._max_calls = max_policies, max_calls
        self._loop = asyncio.get_running_loop()
        self._secret = secrets.token_bytes(32)
        self._seen_s: dict[str, float] = {}
        """When the client of each session was last heard of."""
        self._accepted: dict[str, dict[int, asyncio.Task[None] | None]] = {}
        """Calls of each policy that are in the store; with a task, on their way there."""
        self._waiting: dict[tuple[str, int], asyncio.Event] = {}
        self._clones: dict[str, int] = {}
        self._done: dict[str, int] = {}
        """Number of each policy's calls that are computed."""
        self.sessions = store.records(SessionRecord)
        self.policies = store.records(PolicyRecord)
        self.worker = make_worker(self._call_is_done)
        for record in self.policies.values():
            if not record.is_over:
                done = self.store.state_seq(record.id) + 1
                seqs = [*range(done), *(seq for seq, _, _ in store.requests(record.id))]
                self._accepted[record.id], self._done[record.id] = dict.fromkeys(seqs), done
                self.worker.resume(record)
        for session in self.sessions.values():
            if not session.is_over:
                self._seen_s[session.id] = time.monotonic()
        self._reaper = asyncio.ensure_future(self._reap())
        self.app: ASGIApp = Starlette(
            routes=[
                *(Route(f"/api/v1/{path}", self._handler(fn), methods=[method]) for method, path, fn in ENDPOINTS),
                *(Route(f"/api/v1/{path}", self._absent, methods=["GET", "POST", "PUT"]) for path in ABSENT),
                Route("/api/v1/files/{model_id}/{name}/{file}", self._file),
            ],
            exception_handlers={ClientDisconnect: lambda *_: Response(status_code=499)},
        )

    async def close(self) -> None:
        """Stop sampling and training; states are written."""
        self._reaper.cancel()
        await self.samples.close()
        await asyncio.to_thread(self.worker.close)

    # ---- requests ---------------------------------------------------------------------------------------------------

    def _handler(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        @functools.wraps(endpoint)
        async def handle(request: Request) -> Response:
            try:
                answer = await endpoint(self, request, self._owner(request))
            except RequestError as e:
                return refusal(e.status, str(e))
            except SamplerError as e:
                return refusal(503, str(e))
            except RolljaxError as e:
                return refusal(500, str(e))
            return answer if isinstance(answer, Response) else json_response(answer)

        return handle

    async def _absent(self, request: Request) -> Response:
        path = request.scope["route"].path.removeprefix("/api/v1/")
        return refusal(404, f"this server has {ABSENT[path]}")  # the package would ask again after a 501

    def _owner(self, request: Request) -> str:
        """Return the tenant of a request's key.

        Raises:
          RequestError: the key is none of the server's.
        """
        if not self._keys:
            return "all"
        key = request.headers.get("x-api-key", "")
        fits = [hmac.compare_digest(key.encode(), known.encode()) for known in self._keys]
        if not any(fits):
            raise RequestError("no valid key: give ServiceClient an api_key that this server was started with", 401)
        return hashlib.sha256(key.encode()).hexdigest()[:16]

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > BODY_BYTES:
                        raise RequestError(f"the body is more than {BODY_BYTES} bytes", 413)
        except TimeoutError:
            raise RequestError(f"the body did not arrive within {BODY_S:g} s", 408) from None
        return unpacked(b"".join(parts), request.headers.get("content-encoding", ""), BODY_BYTES)

    async def _json(self, request: Request, kind: Any) -> Any:
        return read_json(await self._body(request), kind)

    async def _field(self, request: Request, name: str) -> Any:
        """Return one field of a JSON body."""
        try:
            fields = reading.parse(await self._body(request))
        except ValueError as e:
            raise RequestError(f"the body is not JSON: {e}") from None
        if not isinstance(fields, dict) or name not in fields:
            raise RequestError(f"{name}: is missing")
        return fields[name]

    # ---- what belongs to whom ---------------------------------------------------------------------------------------

    def _session(self, name: str, owner: str) -> SessionRecord:
        session = self.sessions.get(name)
        if session is None or session.owner != owner:
            raise RequestError(f"session_id: there is no session {name!r}", 404)
        return session

    def _open_session(self, name: str, owner: str) -> SessionRecord:
        session = self._session(name, owner)
        if session.is_over:
            raise RequestError(f"session_id: session {name} has ended", 410)
        self._seen_s[name] = time.monotonic()
        return session

    def _policy(self, name: str, owner: str) -> PolicyRecord:
        record = self.policies.get(name)
        if record is None or record.owner != owner:
            raise RequestError(f"model_id: there is no model {name!r}", 404)
        return record

    def _loaded(self, name: str, owner: str) -> PolicyRecord:
        record = self._policy(name, owner)
        if record.is_over:
            raise RequestError(f"model_id: model {name} was unloaded; load one of its checkpoints", 404)
        self._seen_s[record.session] = time.monotonic()
        return record

    def _sampler(self, name: str, owner: str) -> SamplerRecord:
        found = self.store.sampler(name)
        if found is None or found.owner != owner:
            raise RequestError(f"sampling_session_id: there is no sampling session {name!r}", 404)
        return found

    def _checkpoint(self, path: str, owner: str, *, change: bool = False) -> CheckpointInfo:
        """Return a checkpoint that the owner may read, or may change."""
        info = self.store.find(path)
        policy = self.policies.get(info.model_id) if info else None
        if info is None or policy is None or not (policy.owner == owner or (info.is_public and not change)):
            raise RequestError(f"path: there is no checkpoint {path}", 404)
        return info

    # ---- sessions ---------------------------------------------------------------------------------------------------

    async def healthz(self, request: Request, owner: str) -> Any:
        if self.worker.error:
            raise RequestError(self.worker.error, 503)
        return {"status": "ok"}

    async def client_config(self, request: Request, owner: str) -> Any:
        return CLIENT_CONFIG

    async def dynamic_config(self, request: Request, owner: str) -> Any:
        return {"refresh_interval_sec": 300, "sample_cancel_enabled": True}

    async def telemetry(self, request: Request, owner: str) -> Any:
        await self._body(request)
        return {"status": "accepted"}

    async def capabilities(self, request: Request, owner: str) -> Any:
        model = {"model_name": self.base.name, "max_context_length": self.limits.max_context}
        return {"supported_models": [{**model, "trainable": True, "sampleable": True}]}

    async def create_session(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.CreateSessionRequest)
        session = SessionRecord(
            str(uuid.uuid4()), owner, time.time(), given.tags, given.user_metadata, given.display_name
        )
        await asyncio.to_thread(self.store.write, session)
        self.sessions[session.id] = session
        self._seen_s[session.id] = time.monotonic()
        return {"type": "create_session", "session_id": session.id, "info_message": NOTE}

    async def heartbeat(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.SessionHeartbeatRequest)
        self._open_session(given.session_id, owner)
        return {"type": "session_heartbeat"}

    async def finish_session(self, request: Request, owner: str) -> Any:
        await self._body(request)
        await self._end_session(self._session(request.path_params["session_id"], owner))
        return Response(status_code=204)

    async def get_session(self, request: Request, owner: str) -> Any:
        session = self._session(request.path_params["session_id"], owner)
        samplers = await asyncio.to_thread(self.store.records, SamplerRecord)
        return {
            "training_run_ids": [p.id for p in self.policies.values() if p.session == session.id],
            "sampler_ids": [s.id for s in samplers.values() if s.session == session.id],
            "user_metadata": texts(session.user_metadata),
            "display_name": session.display_name,
        }

    async def list_sessions(self, request: Request, owner: str) -> Any:
        mine = [s.id for s in reversed(self.sessions.values()) if s.owner == owner]
        return {"sessions": page_of(request, mine)[0]}

    async def _end_session(self, session: SessionRecord) -> None:
        """End a session: its policies are unloaded, their states and checkpoints stay."""
        session.is_over = True
        self._seen_s.pop(session.id, None)
        await asyncio.to_thread(self.store.write, session)
        for record in [p for p in self.policies.values() if p.session == session.id and not p.is_over]:
            await self._unload(record)

    async def _unload(self, record: PolicyRecord) -> None:
        record.is_over = True
        await asyncio.wrap_future(self.worker.unload(record.id))
        await asyncio.to_thread(self.store.write, record)
        self._accepted.pop(record.id, None)

    async def _reap(self) -> None:
        """End the sessions whose clients are gone."""
        while True:
            await asyncio.sleep(min(REAP_S, self._session_s))
            latest = time.monotonic() - self._session_s
            for name in [name for name, seen_s in self._seen_s.items() if seen_s < latest]:
                await self._end_session(self.sessions[name])

    # ---- policies ---------------------------------------------------------------------------------------------------

    async def create_model(self, request: Request, owner: str) -> Any:
        body = await self._body(request)
        given: types.CreateModelRequest = read_call("create", body, self.limits)
        self._check_base(given.base_model)
        if given.lora_config is None:
            raise RequestError("lora_config: is missing; this server trains adapters")
        if given.optimizer_config.type != "adamw":
            raise RequestError(f"optimizer_config: {given.optimizer_config.type!r} is not offered, only adamw")
        shape, name = given.lora_config, f"{given.session_id}:train:{given.model_seq_id}"
        record = PolicyRecord(
            name,
            self._open_session(given.session_id, owner).id,
            owner,
            time.time(),
            shape.rank,
            seed_of(name) if shape.seed is None else shape.seed % 2**31,
            shape.train_attn,
            shape.train_mlp,
            given.user_metadata,
        )
        return await self._first_call(record, "create", given, body)

    async def _first_call(self, record: PolicyRecord, kind: Kind, call: Any, body: bytes) -> Any:
        """Accept the call that makes a policy."""
        if record.id not in self.policies:
            self.worker.lora(record)
            loaded = [p for p in self.policies.values() if p.owner == record.owner and not p.is_over]
            if len(loaded) >= self._max_policies:
                raise RequestError(f"{len(loaded)} models are loaded, the most for one key: end some sessions", 429)
            self.policies[record.id] = record
            await asyncio.to_thread(self.store.write, record)
        return await self._accept(self._loaded(record.id, record.owner), 0, kind, call, body)

    async def load_weights(self, request: Request, owner: str) -> Any:
        body = await self._body(request)
        given: types.LoadWeightsRequest = read_call("load", body, self.limits)
        if given.weights_access_token:
            raise RequestError("weights_access_token: is not offered; publish the checkpoint")
        info = self._checkpoint(given.path, owner)
        if given.session_id is None or given.model_seq_id is None:
            return await self._accept(self._loaded(given.model_id or "", owner), given.seq_id, "load", given, body)
        if given.base_model:
            self._check_base(given.base_model)
        session, name = self._open_session(given.session_id, owner), f"{given.session_id}:train:{given.model_seq_id}"
        shape = (info.rank, seed_of(name), info.train_attn, info.train_mlp)
        record = PolicyRecord(name, session.id, owner, time.time(), *shape, given.user_metadata)
        return await self._first_call(record, "load", given, body)

    def _check_base(self, name: str) -> None:
        if name not in (self.base.name, self.base.folder):
            raise RequestError(f"base_model: {name!r} is not here; this server has {self.base.name!r}")

    async def call(self, request: Request, owner: str) -> Any:
        """Accept a call of a policy."""
        kind: Kind = _CALLS[request.url.path.rpartition("/")[2]]
        body = await self._body(request)
        call = await asyncio.to_thread(read_call, kind, body, self.limits)
        return await self._accept(self._loaded(call.model_id, owner), call.seq_id, kind, call, body)

    async def _accept(self, record: PolicyRecord, seq: int | None, kind: Kind, call: Any, body: bytes) -> Any:
        """ServiceStore a call and queue it, once; return its future."""
        if seq is None or seq < 0:
            raise RequestError("seq_id: is missing")
        accepted = self._accepted.setdefault(record.id, {})
        if seq not in accepted:
            if len(accepted) - self._done.get(record.id, 0) >= self._max_calls:
                raise RequestError(f"{self._max_calls} calls of this model are open: wait for results", 429)

            async def store() -> None:
                await asyncio.to_thread(self.store.write_request, record.id, seq, kind, body)
                self.worker.submit(record, seq, kind, call)

            accepted[seq] = asyncio.ensure_future(store())
        task = accepted[seq]
        if task is not None:
            try:
                await asyncio.shield(task)
            except RolljaxError:
                accepted.pop(seq, None)
                raise
            accepted[seq] = None
        return {"request_id": f"{record.id}:{seq}", "model_id": record.id}

    async def unload_model(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.UnloadModelRequest)
        await self._unload(self._loaded(given.model_id, owner))
        return {"request_id": f"{given.model_id}:unloaded", "model_id": given.model_id}

    async def get_info(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.GetInfoRequest)
        record, base = self._loaded(given.model_id, owner), self.base
        return {
            "type": "get_info",
            "model_id": record.id,
            "model_data": {"arch": base.arch, "model_name": base.name, "tokenizer_id": base.tokenizer_id},
            "is_lora": True,
            "lora_rank": record.rank,
            "model_name": self.base.name,
        }

    # ---- samples ----------------------------------------------------------------------------------------------------

    async def create_sampling_session(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.CreateSamplingSessionRequest)
        session = self._open_session(given.session_id, owner)
        if given.model_path:
            self._checkpoint(given.model_path, owner)
        else:
            self._check_base(given.base_model or "")
        name = f"{session.id}:sample:{given.sampling_session_seq_id}"
        await asyncio.to_thread(self.store.write, SamplerRecord(name, session.id, owner, given.model_path or ""))
        return {"type": "create_sampling_session", "sampling_session_id": name}

    async def join_sampling_session(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.JoinSamplingSessionRequest)
        record = self._sampler(given.sampling_session_id, owner)
        self._clones[record.id] = self._clones.get(record.id, secrets.randbits(20)) + 1
        return {"type": "join_sampling_session", "client_counter": self._clones[record.id]}

    async def get_sampler(self, request: Request, owner: str) -> Any:
        record = self._sampler(request.path_params["sampler_id"], owner)
        return {"sampler_id": record.id, "base_model": self.base.name, "model_path": record.path or None}

    async def sample(self, request: Request, owner: str) -> Any:
        body = await self._body(request)
        given = await asyncio.to_thread(read_json, body, types.SampleRequest)
        if given.sampling_session_id is None:
            raise RequestError("sampling_session_id: is missing")
        record = self._sampler(given.sampling_session_id, owner)
        if record.session in self._seen_s:
            self._seen_s[record.session] = time.monotonic()
        name = self.samples.submit(record, given)
        return {"request_id": name, "sample_sequence_ids": [f"{name}:{i}" for i in range(given.num_samples)]}

    async def cancel(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.FutureRetrieveRequest)
        self._sampler(given.request_id.rpartition(":")[0], owner)
        self.samples.cancel(given.request_id)
        return Response(status_code=204)

    # ---- futures ----------------------------------------------------------------------------------------------------

    async def retrieve(self, request: Request, owner: str) -> Any:
        given = await self._json(request, types.FutureRetrieveRequest)
        of, _, seq = given.request_id.rpartition(":")
        if of in self.policies:
            return await self._trained(self._policy(of, owner), seq)
        self._sampler(of, owner)
        task = self.samples.find(given.request_id)
        if task is None:
            raise RequestError(f"request_id: {given.request_id} is not known any more; send the request again", 410)
        try:
            async with asyncio.timeout(POLL_S):
                return Response(await asyncio.shield(task), media_type=PROTOBUF)
        except TimeoutError:
            return not_yet(given.request_id)
        except RequestError as e:
            return {"error": str(e), "category": "user"}

    async def _trained(self, record: PolicyRecord, seq: str) -> Any:
        if seq == "unloaded":
            return {"type": "unload_model", "model_id": record.id}
        if not seq.isdigit():
            raise RequestError(f"request_id: {record.id}:{seq} is none", 404)
        number, until = int(seq), time.monotonic() + POLL_S
        while True:
            event = self._waiting.setdefault((record.id, number), asyncio.Event())
            event.clear()  # before the look: a result that comes after it sets the event again
            if found := await asyncio.to_thread(self.store.result, record.id, number):
                self._waiting.pop((record.id, number), None)
                kind, data = found
                return Response(data, media_type=PROTOBUF if kind == "pb" else "application/json")
            if self.worker.error:
                return {"error": self.worker.error, "category": "server"}
            if number not in self._accepted.get(record.id, {}):
                self._waiting.pop((record.id, number), None)
                raise RequestError(f"request_id: {record.id}:{seq} is not known (any more)", 404)
            try:
                async with asyncio.timeout_at(self._loop.time() + max(until - time.monotonic(), 0)):
                    await event.wait()
            except TimeoutError:
                return not_yet(f"{record.id}:{seq}")

    def _call_is_done(self, model_id: str, seq: int) -> None:
        """Wake up whoever waits for a call; from the training thread."""

        def wake() -> None:
            self._done[model_id] = self._done.get(model_id, 0) + 1
            if event := self._waiting.get((model_id, seq)):
                event.set()

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(wake)

    # ---- runs and checkpoints ---------------------------------------------------------------------------------------

    async def training_runs(self, request: Request, owner: str) -> Any:
        mine = [p for p in reversed(self.policies.values()) if p.owner == owner]
        page, cursor = page_of(request, mine)
        runs = await asyncio.to_thread(lambda: [self._run(p) for p in page])
        return {"training_runs": runs, "cursor": cursor}

    async def training_run(self, request: Request, owner: str) -> Any:
        return await asyncio.to_thread(self._run, self._policy(request.path_params["model_id"], owner))

    def _run(self, record: PolicyRecord) -> dict[str, Any]:
        newest = {info.room: described(info) for info in self.store.checkpoints(record.id)}
        seen_s = self._seen_s.get(record.session)
        last_s = record.created_s if seen_s is None else time.time() - (time.monotonic() - seen_s)
        return {
            "training_run_id": record.id,
            "base_model": self.base.name,
            "model_owner": record.owner,
            "is_lora": True,
            "lora_rank": record.rank,
            "last_request_time": stamp(last_s),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": texts(record.user_metadata),
        }

    async def checkpoints(self, request: Request, owner: str) -> Any:
        record = self._policy(request.path_params["model_id"], owner)
        found = await asyncio.to_thread(self.store.checkpoints, record.id)
        return {"checkpoints": [described(info) for info in found]}

    async def all_checkpoints(self, request: Request, owner: str) -> Any:
        every = await asyncio.to_thread(self.store.checkpoints)
        mine = [i for i in reversed(every) if i.model_id in self.policies and self.policies[i.model_id].owner == owner]
        page, cursor = page_of(request, mine)
        return {"checkpoints": [described(info) for info in page], "cursor": cursor}

    def _named(self, request: Request, owner: str) -> CheckpointInfo:
        model_id, name = request.path_params["model_id"], request.path_params["checkpoint_id"]
        return self._checkpoint(f"{SCHEME}{model_id}/{name}", owner, change=True)

    async def delete_checkpoint(self, request: Request, owner: str) -> Any:
        await asyncio.to_thread(self.store.delete, self._named(request, owner))
        return Response(status_code=204)

    async def publish(self, request: Request, owner: str) -> Any:
        await self._body(request)
        info = self._named(request, owner)
        info.is_public = request.method == "POST"
        await asyncio.to_thread(self.store.change, info)
        return Response(status_code=204)

    async def set_ttl(self, request: Request, owner: str) -> Any:
        info = self._named(request, owner)
        seconds = await self._field(request, "ttl_seconds")
        if seconds is not None and not (isinstance(seconds, int) and 0 < seconds < 2**40):
            raise RequestError("ttl_seconds: must be a number of seconds, or null")
        info.expires_s = None if seconds is None else time.time() + seconds
        await asyncio.to_thread(self.store.change, info)
        return Response(status_code=204)

    async def weights_info(self, request: Request, owner: str) -> Any:
        info = self._checkpoint(str(await self._field(request, "tinker_path")), owner)
        return {
            "base_model": self.base.name,
            "is_lora": True,
            "lora_rank": info.rank,
            "train_unembed": False,
            "train_mlp": info.train_mlp,
            "train_attn": info.train_attn,
        }

    async def external_urls(self, request: Request, owner: str) -> Any:
        info = self._named(request, owner)
        if info.room != "external_weights":
            raise RequestError("checkpoint_id: only external_weights have files to fetch: save_weights_external")
        until = int(time.time()) + LINK_S
        root = f"{str(request.base_url).rstrip('/')}/api/v1/files/{info.model_id}/{info.name}"
        names = sorted(path.name for path in self.store.checkpoint(info).iterdir() if path.is_file())
        urls = {n: f"{root}/{n}?until={until}&by={self._signed(info.model_id, info.name, n, until)}" for n in names}
        return {"urls": urls, "expires": stamp(until)}

    def _signed(self, *parts: object) -> str:
        return hmac.new(self._secret, "/".join(map(str, parts)).encode(), "sha256").hexdigest()

    async def _file(self, request: Request) -> Response:
        """Send a file of an exported checkpoint to whoever has its link."""
        model_id, name, file = (request.path_params[n] for n in ("model_id", "name", "file"))
        until, by = request.query_params.get("until", ""), request.query_params.get("by", "")
        right = self._signed(model_id, name, file, until)
        is_valid = until.isdigit() and hmac.compare_digest(by.encode(), right.encode())
        info = self.store.find(f"{SCHEME}{model_id}/external_weights/{name}") if is_valid else None
        if info is None or int(until) < time.time():
            return refusal(403, "this link is not valid (any more)")
        return FileResponse(self.store.checkpoint(info) / file)


_CALLS: Mapping[str, Kind] = {
    "forward_backward": "loss",
    "optim_step": "optim_step",
    "save_weights": "save_weights",
    "save_weights_for_sampler": "save_weights_for_sampler",
    "save_weights_external": "save_weights_external",
}
_CHECKPOINT = "training_runs/{model_id}/checkpoints/{checkpoint_id:path}"
ENDPOINTS: tuple[tuple[str, str, Any], ...] = (
    ("GET", "healthz", TrainingService.healthz),
    ("POST", "client/config", TrainingService.client_config),
    ("POST", "client/dynamic_config", TrainingService.dynamic_config),
    ("POST", "telemetry", TrainingService.telemetry),
    ("GET", "get_server_capabilities", TrainingService.capabilities),
    ("POST", "create_session", TrainingService.create_session),
    ("POST", "session_heartbeat", TrainingService.heartbeat),
    ("GET", "sessions", TrainingService.list_sessions),
    ("POST", "sessions/{session_id}/finish", TrainingService.finish_session),
    ("GET", "sessions/{session_id}", TrainingService.get_session),
    ("POST", "create_model", TrainingService.create_model),
    ("POST", "load_weights", TrainingService.load_weights),
    *(("POST", name, TrainingService.call) for name in _CALLS),
    ("POST", "unload_model", TrainingService.unload_model),
    ("POST", "get_info", TrainingService.get_info),
    ("POST", "create_sampling_session", TrainingService.create_sampling_session),
    ("POST", "join_sampling_session", TrainingService.join_sampling_session),
    ("GET", "samplers/{sampler_id}", TrainingService.get_sampler),
    ("POST", "asample", TrainingService.sample),
    ("POST", "cancel_future", TrainingService.cancel),
    ("POST", "retrieve_future", TrainingService.retrieve),
    ("GET", "training_runs", TrainingService.training_runs),
    ("GET", "training_runs/{model_id}", TrainingService.training_run),
    ("GET", "training_runs/{model_id}/checkpoints", TrainingService.checkpoints),
    ("GET", f"{_CHECKPOINT}/external_weights_urls", TrainingService.external_urls),
    ("POST", f"{_CHECKPOINT}/publish", TrainingService.publish),
    ("DELETE", f"{_CHECKPOINT}/publish", TrainingService.publish),
    ("PUT", f"{_CHECKPOINT}/ttl", TrainingService.set_ttl),
    ("DELETE", _CHECKPOINT, TrainingService.delete_checkpoint),
    ("GET", "checkpoints", TrainingService.all_checkpoints),
    ("POST", "weights_info", TrainingService.weights_info),
)
"""Method, path and handler of every endpoint."""


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response."""
    return Response(json.dumps(value), status, media_type="application/json")


def refusal(status: int, message: str) -> Response:
    """Return an error as the SDK shows it."""
    return json_response({"detail": message}, status)


def not_yet(request_id: str) -> Response:
    """Tell a client to ask again: its call waits or is computed."""
    return json_response({"type": "try_again", "request_id": request_id, "queue_state": "active"}, 408)


def page_of(request: Request, entries: list[Any]) -> tuple[list[Any], dict[str, int]]:
    """Return the entries that a request's `limit` and `offset` name, and the cursor."""
    try:
        offset, limit = (int(request.query_params.get(n, d)) for n, d in (("offset", 0), ("limit", PAGE)))
    except ValueError:
        raise RequestError("limit and offset: must be whole numbers") from None
    if offset < 0 or not 0 <= limit <= 10 * PAGE:
        raise RequestError(f"offset: from 0; limit: 0 to {10 * PAGE}")
    return entries[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(entries)}


def described(info: CheckpointInfo) -> dict[str, Any]:
    """Return a checkpoint as listings show it."""
    return {
        "checkpoint_id": f"{info.room}/{info.name}",
        "checkpoint_type": KINDS[info.room],
        "time": stamp(info.created_s),
        "tinker_path": info.path,
        "size_bytes": info.size_bytes,
        "public": info.is_public,
        "user_metadata": info.user_metadata,
        "expires_at": None if info.expires_s is None else stamp(info.expires_s),
    }


def stamp(seconds: float) -> str:
    """Return a time as ISO 8601."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def texts(fields: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return metadata with its values as text."""
    return None if fields is None else {name: str(value) for name, value in fields.items()}
