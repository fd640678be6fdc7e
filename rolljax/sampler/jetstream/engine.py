"""The engine as JetStream's: a `jetstream.engine.engine_api.Engine` where JetStream is installed, the same without it.

    prefill    a prompt -> a prefix of its own: its pages of keys and values, and the logits after its last token
    insert     a prefix -> the pages of a slot
    generate   one decode step of all slots

The programs are made of those of `rolljax.sampler.engine.Engine` (see `sampler.jetstream.programs`). JetStream names
neither a temperature nor a seed per request, so the sampling distribution is the engine's, and the noise is addressed
by the number of the request. Its two interfaces differ in who shows the first token: in 0.2.2 the first `generate`
after the insert, at the head of its repository `prefill` (`JetStreamEngine.first_from_prefill`).
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from rolljax.errors import ConfigError, SamplerError
from rolljax.model.decoder import Params
from rolljax.sampler.arrays import ADDRESS_LEN, MAX_STOP_IDS
from rolljax.sampler.engine import Engine
from rolljax.sampler.jetstream import compat
from rolljax.sampler.jetstream.programs import Prefix, Programs, ServedState
from rolljax.sampler.settings import MIN_CHUNK

BUCKETS = tuple(16 * 2**i for i in range(12))
"""Lengths that JetStream pads prompts to."""
NO_BOS = -1
"""JetStream puts a BOS before every prompt. Tokenizers that have none give it this, and `prefill` takes it away."""

try:
    API: Any = compat.load().engine_api
    TokenizerBase: Any = compat.load().tokenizer_api.Tokenizer
except ConfigError:
    API, TokenizerBase = compat, object
if TYPE_CHECKING:
    from rolljax.sampler.jetstream.compat import JetStreamEngineApi as EngineBase
else:
    EngineBase = API.Engine


class LoadedWeights:
    """The value that `load_params` returns. JetStream's threads keep it for good, so new weights are put into it.

    Every prefill and every decode step reads it once: a swap lands between two of them.
    """

    def __init__(self, params: Params, version: int = 0) -> None:
        self._now = (params, version)

    def swap(self, params: Params, version: int) -> None:
        """Use other weights from the next program on; running requests keep their keys and values."""
        self._now = (params, version)

    @property
    def params(self) -> Params:
        """The parameters, as the engine's programs take them."""
        return self._now[0]

    @property
    def version(self) -> int:
        """The version under which the parameters were loaded."""
        return self._now[1]


class JetStreamEngine(EngineBase):
    """An engine that JetStream can drive.

    Args:
      engine: with `steps_per_dispatch=1`, since JetStream alone knows when a request has its tokens, and with pages for
        every slot at full length (the default).
      params: as the engine wants them; or the `LoadedWeights` of another engine on the same mesh.
      tokenizer: of `transformers`. stop_ids: tokens that end an answer (default: the tokenizer's eos).
      temperature, top_k, top_p, min_p: the sampling distribution of all requests (see `rolljax.types.SamplingParams`);
        temperature 0 is greedy.
      seed: of the noise. max_prefill_length: one of `BUCKETS` (default: the largest that leaves room for a token);
        JetStream cuts longer prompts from the left.
      use_chunked_prefill: let JetStream hand in long prompts in chunks. `prefill` cuts them itself, in any case.
    """

    first_from_prefill: ClassVar[bool] = "bulk_insert" in EngineBase.__abstractmethods__

    def __init__(
        self,
        engine: Engine,
        params: Params | LoadedWeights,
        tokenizer: Any,
        *,
        stop_ids: Sequence[int] | None = None,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        max_prefill_length: int | None = None,
        use_chunked_prefill: bool = False,
    ) -> None:
        cfg = engine.cfg
        _check(engine, max_prefill_length)
        self.engine, self.seed = engine, seed
        self.weights = params if isinstance(params, LoadedWeights) else LoadedWeights(params)
        ids = [tokenizer.eos_token_id] if stop_ids is None else stop_ids
        self.tokenizer = Tokenizer(tokenizer, [i for i in ids if i is not None])
        if len(self.tokenizer.stop_tokens) > MAX_STOP_IDS:
            raise ConfigError(
                f"at most {MAX_STOP_IDS}", setting="JetStreamEngine.stop_ids", value=sorted(self.tokenizer.stop_tokens)
            )
        if not (temperature >= 0 and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1 and 0 <= seed < 2**31):
            raise ConfigError(
                "takes temperature and top_k from 0, top_p in (0, 1], min_p in [0, 1], and a seed below 2**31",
                setting="JetStreamEngine",
                value=(temperature, top_k, top_p, min_p, seed),
            )
        self._max_prefill_length = max_prefill_length or max(b for b in BUCKETS if b < cfg.max_context)
        self._use_chunked_prefill = use_chunked_prefill
        self._numbers = itertools.count()
        self._slots = _Slots(cfg.slots)
        distribution = (temperature, top_k, top_p, min_p)
        self.programs = Programs(engine, distribution, sorted(self.tokenizer.stop_tokens), self.first_from_prefill)

    # ---- what both interfaces have

    def load_params(self, *args: Any, **kwargs: Any) -> LoadedWeights:
        return self.weights

    def init_decode_state(self, *args: Any, **kwargs: Any) -> ServedState:
        """Return an empty state: no slot is active."""
        self._slots = _Slots(self.engine.cfg.slots)
        return self.programs.empty()

    def prefill(
        self,
        *,
        params: LoadedWeights | Params,
        existing_prefix: Any = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        sampler: Any = None,
        request_id: Any = None,
    ) -> Any:
        """Return a prompt's prefix; under the newer interface also the first token.

        Ids outside the vocabulary become its last id: an error here would end the process.

        Args:
          padded_tokens: `[T]`. true_length: number of valid tokens; more than T if JetStream cut the prompt.
          existing_prefix: a prefix (or an `ExistingPrefix` around its "cache") of the tokens before these.
        """
        prefix = self._prefix(params, existing_prefix, padded_tokens, true_length, 1, sampler=sampler)
        return (prefix, self._first(prefix)) if self.first_from_prefill else prefix

    def insert(self, prefix: Prefix, decode_state: ServedState, slot: int, request_id: Any = None) -> ServedState:
        return self.bulk_insert(prefix, decode_state, [slot])

    def generate(
        self, params: LoadedWeights | Params, decode_state: ServedState, sampler: Any = None
    ) -> tuple[ServedState, Any]:
        """Run one decode step. A slot's tokens are valid up to its stop token, or until its context is full."""
        _refuse(sampler=sampler)
        active = self._slots.step()
        width = self.engine.width(max(int(self._slots.reach.max()), 1))
        weights = params.params if isinstance(params, LoadedWeights) else params
        state, data, logp = self.programs.step(weights, decode_state, active, width=width)
        return state, self._result(data, logp, 1)

    def get_prefix_destination_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def get_tokenizer(self) -> Any:
        path = str(self.tokenizer.inner.name_or_path)
        if API is compat:
            return types.SimpleNamespace(path=path, extra_ids=0)
        return compat.load().tokenizer_pb2.TokenizerParameters(path=path)

    def build_tokenizer(self, metadata: Any = None) -> Tokenizer:
        return self.tokenizer

    @property
    def max_concurrent_decodes(self) -> int:
        return self.engine.cfg.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self._max_prefill_length

    @property
    def mesh(self) -> jax.sharding.Mesh:
        return self.engine.mesh

    @property
    def colocated_cpus(self) -> None:
        return None

    # ---- what only the newer one has

    def prefill_multisampling(
        self,
        *,
        params: LoadedWeights | Params,
        existing_prefix: Any = None,
        padded_tokens: jax.Array | np.ndarray,
        true_length: int,
        sampler: Any = None,
        rng: Any = None,
        num_samples: int = 1,
    ) -> tuple[Prefix, Any]:
        """Return one prefix for several samples (for `bulk_insert`), and the first token of each."""
        prefix = self._prefix(
            params, existing_prefix, padded_tokens, true_length, num_samples, sampler=sampler, rng=rng
        )
        return prefix, self._first(prefix)

    def bulk_insert(self, prefix: Prefix, decode_state: ServedState, slots: Sequence[int]) -> ServedState:
        """Sample i of the prefix goes into `slots[i]`."""
        for sample, slot in enumerate(slots):
            decode_state = self.programs.insert(prefix, decode_state, np.int32(slot), np.int32(sample))
            self._slots.reach[slot] = prefix["cache"].shape[1] * self.engine.cfg.page_size
            self._slots.inserted[slot] += 1
        return decode_state

    def free_resource(self, slot: int) -> None:
        """Stop computing the slot. Calls are counted: JetStream may have filled it again before it calls this."""
        self._slots.freed[slot] += 1

    @property
    def use_chunked_prefill(self) -> bool:
        """Return whether JetStream may hand in long prompts in chunks."""
        return self._use_chunked_prefill

    @property
    def prefill_chunk_size(self) -> int:
        """Prompt tokens that are computed at once."""
        return self.engine.cfg.prefill_chunk

    # ---- on the host

    def _prefix(
        self, params: Any, existing: Any, padded: Any, true_length: int, samples: int, **unsupported: Any
    ) -> Prefix:
        """Prefill in chunks of at most `prefill_chunk`. The arrays are the caller's own: JetStream deletes them."""
        _refuse(**unsupported)
        cfg, weights = self.engine.cfg, params.params if isinstance(params, LoadedWeights) else params
        cache, start = _existing(existing)
        ids = self._ids(padded, true_length)
        total = start + len(ids)
        if total >= cfg.max_context:
            raise SamplerError(f"a prompt of {total} tokens does not fit a context of {cfg.max_context}")
        size = MIN_CHUNK
        while size < total:
            size *= 2
        pages = min(-(-size // cfg.page_size), cfg.pages_per_sequence)
        for begin in range(0, len(ids), cfg.prefill_chunk):
            chunk = ids[begin : begin + cfg.prefill_chunk]
            tokens = np.zeros(cfg.chunk_size(len(chunk)), np.int32)
            tokens[: len(chunk)] = chunk
            counts = np.int32(start + begin), np.int32(len(chunk))
            cache, logits = self.programs.prefill(weights, cache, tokens, *counts, pages=pages)
        address = np.zeros((samples, ADDRESS_LEN), np.int32)
        address[:, 0], address[:, 1], address[:, 2] = self.seed, next(self._numbers) % 2**31, np.arange(samples)
        return {"cache": cache, "logits": logits, "length": np.int32(total), "address": address}

    def _ids(self, padded: Any, true_length: int) -> np.ndarray:
        """Return the prompt without padding; an empty one becomes a pad token."""
        padded = np.asarray(padded).astype(np.int32)
        ids = padded[: min(int(true_length), len(padded))]
        ids = ids[1:] if len(ids) and ids[0] == NO_BOS else ids
        ids = ids if len(ids) else np.array([self.tokenizer.pad_id])
        return np.clip(ids, 0, self.engine.model.cfg.vocab_size - 1)

    def _first(self, prefix: Prefix) -> Any:
        data, logp = self.programs.first(prefix["logits"], prefix["length"], prefix["address"])
        return self._result(data, logp, len(prefix["address"]))

    def _result(self, data: jax.Array, logp: jax.Array, samples: int) -> Any:
        more = {"log_prob": logp} if "log_prob" in API.ResultTokens.__dataclass_fields__ else {}
        return API.ResultTokens(data, (0, 1), (1, 2), (2, 3), samples, **more)


class _Slots:
    """The host's record of the slots, `[S]`: insertions, releases, and most tokens that can be in their pages."""

    def __init__(self, slots: int) -> None:
        self.inserted, self.freed, self.reach = (np.zeros(slots, np.int64) for _ in range(3))

    def step(self) -> np.ndarray:
        """Make room for one more token each; returns which slots are in use."""
        active = self.inserted > self.freed
        self.reach = np.where(active, self.reach + 1, 0)
        return active


class Tokenizer(TokenizerBase):
    """A tokenizer of `transformers` as JetStream's.

    JetStream decodes token by token and joins the bytes of a character where they come as "<0xE2>".
    """

    def __init__(self, inner: Any, stop_ids: Sequence[int]) -> None:
        from rolljax.model.vocabulary import Vocabulary

        self.inner = inner
        self._stop_ids, self._vocabulary = frozenset(stop_ids), Vocabulary(inner)

    def encode(self, s: str, **options: Any) -> Any:
        """Return the ids of a text without a chat template; with options, padded as by `token_utils.pad_tokens`."""
        ids = self.inner(s, add_special_tokens=False, verbose=False)["input_ids"]
        if not options:
            return ids
        return compat.load().token_utils.pad_tokens(np.array(ids, np.int32), self.bos_id, self.pad_id, **options)

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        if len(token_ids) != 1:
            return self.inner.decode(list(token_ids), skip_special_tokens=True)
        raw = self._vocabulary.shown(int(token_ids[0]))
        if len(raw) == 1 and raw[0] >= 0x80:
            return f"<0x{raw[0]:02X}>"
        return raw.decode("utf-8", "replace")

    @property
    def pad_id(self) -> int:
        return self.inner.pad_token_id or 0

    @property
    def bos_id(self) -> int:
        return NO_BOS if self.inner.bos_token_id is None else self.inner.bos_token_id

    @property
    def eos_id(self) -> int:
        return self.inner.eos_token_id

    @property
    def stop_tokens(self) -> set[int]:
        return set(self._stop_ids)


def _check(engine: Engine, max_prefill_length: int | None) -> None:
    cfg = engine.cfg
    if cfg.steps_per_dispatch != 1:
        raise ConfigError(
            "must be 1 under JetStream, which alone knows when a request has its tokens",
            setting="SamplerConfig.steps_per_dispatch",
            value=cfg.steps_per_dispatch,
        )
    if cfg.speculate:
        raise ConfigError(
            "has no effect under JetStream, which decodes token by token",
            setting="SamplerConfig.speculate",
            value=cfg.speculate,
            remedy="leave it out",
        )
    needed = cfg.slots * cfg.pages_per_sequence
    if engine.pages_per_shard * engine.num_shards < needed:
        raise ConfigError(
            "leave no full-length sequence to every slot, as JetStream needs it",
            setting="SamplerConfig.pages",
            value=cfg.pages,
            remedy=f"leave it out, or at least {needed}",
        )
    if cfg.max_context <= BUCKETS[0]:
        raise ConfigError(
            f"must be more than {BUCKETS[0]} under JetStream",
            setting="SamplerConfig.max_context",
            value=cfg.max_context,
        )
    if max_prefill_length is not None and (max_prefill_length not in BUCKETS or max_prefill_length >= cfg.max_context):
        raise ConfigError(
            "is no length that JetStream pads to, or leaves no room in the context",
            setting="JetStreamEngine.max_prefill_length",
            value=max_prefill_length,
            remedy=f"one of {[b for b in BUCKETS if b < cfg.max_context]}",
        )


def _existing(existing: Any) -> tuple[jax.Array | None, int]:
    """Cache and length of a prefix, ours or an `ExistingPrefix`."""
    if existing is None:
        return None, 0
    if isinstance(existing, Mapping):
        return existing["cache"], int(existing["length"])
    tokens = np.asarray(existing.common_prefix_tokens)
    return existing.cache, len(tokens) - int(len(tokens) > 0 and tokens[0] == NO_BOS)


def _refuse(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise SamplerError(
                f"{name} is not taken per call: the sampling distribution and the seed are set on JetStreamEngine"
            )
