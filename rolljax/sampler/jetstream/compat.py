"""JetStream's modules, adapted to import and run with today's JAX; and stand-ins for its interface if it is missing.

JetStream has two public interfaces: the released package 0.2.2 and the head of its repository. Import its modules
through `load`, which repairs the obstacles to running 0.2.2:

    jax.tree_map                      gone from JAX; 0.2.2 calls it
    seqio                             its only import of TensorFlow; replaced by an empty module during the import
    the root logger                   0.2.2 sets it to DEBUG and adds a handler; both are taken back
    token prompts without BOS         end 0.2.2's process; `JetStream.Driver` takes them

`JetStreamEngineApi`, `JetStreamResultTokens` and `ExistingPrefix` below stand in for `Engine`, `ResultTokens` and
`ExistingPrefix` of the head of the repository.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from rolljax.errors import ConfigError

INSTALL = "pip install 'rolljax[jetstream]' && pip install --no-deps google-jetstream==0.2.2"

_MODULES = (
    "core.config_lib",
    "core.orchestrator",
    "core.server_lib",
    "core.proto.jetstream_pb2",
    "core.proto.jetstream_pb2_grpc",
    "engine.engine_api",
    "engine.token_utils",
    "engine.tokenizer_api",
    "engine.tokenizer_pb2",
)


@dataclasses.dataclass(frozen=True)
class JetStream:
    """JetStream's modules, under their own names, and its `Driver` with our fix."""

    config_lib: Any
    orchestrator: Any
    server_lib: Any
    jetstream_pb2: Any
    jetstream_pb2_grpc: Any
    engine_api: Any
    token_utils: Any
    tokenizer_api: Any
    tokenizer_pb2: Any
    Driver: Any


@functools.cache
def load() -> JetStream:
    """Import JetStream.

    Raises:
      ConfigError: it is not installed, or something it needs is not.
    """
    if not hasattr(jax, "tree_map"):
        jax.tree_map = jax.tree.map  # type: ignore[attr-defined]
    try:
        with _root_logger_as_it_is(), _seqio_stands_in():
            modules = {name.rpartition(".")[2]: importlib.import_module(f"jetstream.{name}") for name in _MODULES}
    except ImportError as e:
        raise ConfigError(f"cannot be imported: {e}", setting="JetStream", remedy=INSTALL) from e

    base: Any = modules["orchestrator"].Driver

    class Driver(base):
        """0.2.2 asks the list of a prompt without BOS for its shape."""

        def _process_prefill_content(self, request: Any, *args: Any) -> Any:
            if isinstance(request.prefill_content, list):
                request.prefill_content = np.array(request.prefill_content, np.int32)
            return super()._process_prefill_content(request, *args)

    return JetStream(**modules, Driver=Driver)


@contextlib.contextmanager
def _root_logger_as_it_is() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    try:
        yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


@contextlib.contextmanager
def _seqio_stands_in() -> Iterator[None]:
    """Provide modules with the two names that JetStream imports from seqio, if seqio is not installed."""
    if importlib.util.find_spec("seqio") is not None:
        yield
        return
    package, vocabularies = types.ModuleType("seqio"), types.ModuleType("seqio.vocabularies")
    package.vocabularies = vocabularies  # type: ignore[attr-defined]
    vocabularies.Vocabulary = abc.ABC  # type: ignore[attr-defined]
    vocabularies.SentencePieceVocabulary = _NoSentencePiece  # type: ignore[attr-defined]
    stand_ins = {"seqio": package, "seqio.vocabularies": vocabularies}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


class _NoSentencePiece:
    def __init__(self, *args: Any, **options: Any) -> None:
        raise ConfigError("needs seqio", setting="JetStream's SentencePieceVocabulary", remedy="pip install seqio")


def run_server(
    engine: JetStreamEngineApi, port: int, *, prefill_engine: JetStreamEngineApi | None = None, host: str = "127.0.0.1"
) -> Any:
    """Start and return JetStream's gRPC server; call its `stop()`. JetStream's own function would listen on all
    interfaces.

    Args:
      prefill_engine: prefills for `engine`, on its own devices; without one, `engine` alternates between both.
    """
    js = load()
    engines = [engine] if prefill_engine is None else [prefill_engine, engine]
    devices = [list(e.mesh.devices.flat) for e in engines]
    slices = [f"{d[0].platform}={len(d)}" for d in devices]
    make = [lambda _, e=e: e for e in engines]
    if prefill_engine is None:
        config = js.config_lib.ServerConfig(interleaved_slices=slices, interleaved_engine_create_fns=make)
    else:
        config = js.config_lib.ServerConfig(
            prefill_slices=slices[:1],
            generate_slices=slices[1:],
            prefill_engine_create_fns=make[:1],
            generate_engine_create_fns=make[1:],
        )
    with _replaced(js.server_lib, "_HOST", host), _replaced(js.orchestrator, "Driver", js.Driver):
        return js.server_lib.run(port=port, config=config, devices=sum(devices, []), jax_padding=False)


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


# ---- the interface, where JetStream is missing


@dataclasses.dataclass
class SlotData:
    """A slot as JetStream reads it: tokens, which of them are valid, how many there are, log-probs."""

    tokens: Any
    valid: Any
    lengths: Any
    log_prob: Any = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class JetStreamResultTokens:
    """Tokens of one step, a row per slot: `data` has columns of tokens, of whether they hold, and of lengths so far."""

    data: Any
    tokens_idx: tuple[int, int] = dataclasses.field(metadata={"static": True})
    valid_idx: tuple[int, int] = dataclasses.field(metadata={"static": True})
    length_idx: tuple[int, int] = dataclasses.field(metadata={"static": True})
    samples_per_slot: int = dataclasses.field(metadata={"static": True})
    log_prob: Any = None

    def copy_to_host_async(self) -> None:
        if isinstance(self.data, jax.Array):
            self.data.copy_to_host_async()

    def convert_to_numpy(self) -> JetStreamResultTokens:
        return dataclasses.replace(self, data=np.array(self.data))

    def get_result_at_slot(self, slot: int) -> SlotData:
        return self.get_result_at_slots(range(slot * self.samples_per_slot, (slot + 1) * self.samples_per_slot))

    def get_result_at_slots(self, slots: Sequence[int]) -> SlotData:
        rows = np.array(slots)
        tokens, valid, lengths = (self.data[rows, a:b] for a, b in (self.tokens_idx, self.valid_idx, self.length_idx))
        return SlotData(tokens, valid, lengths[:, 0], None if self.log_prob is None else self.log_prob[rows])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class ExistingPrefix:
    """A prefix that was computed before: its `prefix["cache"]` and the tokens that are in it."""

    cache: Any
    common_prefix_tokens: Any


class JetStreamEngineApi(abc.ABC):
    """Methods that an engine must define, and the optional `free_resource`."""

    @abc.abstractmethod
    def prefill(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Any = None,
        request_id: Any = None,
    ) -> Any: ...
    @abc.abstractmethod
    def prefill_multisampling(
        self,
        *,
        params: Any,
        existing_prefix: Any = None,
        padded_tokens: Any,
        true_length: int,
        sampler: Any = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> Any: ...
    @abc.abstractmethod
    def insert(self, prefix: Any, decode_state: Any, slot: int, request_id: Any = None) -> Any: ...
    @abc.abstractmethod
    def bulk_insert(self, prefix: Any, decode_state: Any, slots: Sequence[int]) -> Any: ...
    @abc.abstractmethod
    def generate(self, params: Any, decode_state: Any, sampler: Any = None) -> Any: ...
    @abc.abstractmethod
    def load_params(self, *args: Any, **kwargs: Any) -> Any: ...
    @abc.abstractmethod
    def init_decode_state(self, *args: Any, **kwargs: Any) -> Any: ...
    @abc.abstractmethod
    def get_prefix_destination_sharding(self) -> Any: ...
    @abc.abstractmethod
    def get_tokenizer(self) -> Any: ...
    @property
    @abc.abstractmethod
    def max_concurrent_decodes(self) -> int: ...
    @property
    @abc.abstractmethod
    def samples_per_slot(self) -> int: ...
    @property
    @abc.abstractmethod
    def max_prefill_length(self) -> int: ...
    @property
    @abc.abstractmethod
    def mesh(self) -> Any: ...
    @property
    @abc.abstractmethod
    def colocated_cpus(self) -> Any: ...
    @property
    @abc.abstractmethod
    def use_chunked_prefill(self) -> bool: ...
    @property
    @abc.abstractmethod
    def prefill_chunk_size(self) -> int: ...

    def free_resource(self, slot: int) -> Any:
        return None


Engine, ResultTokens = JetStreamEngineApi, JetStreamResultTokens
"""Aliases with JetStream's own names, under which `engine.py` finds either its classes or these."""
