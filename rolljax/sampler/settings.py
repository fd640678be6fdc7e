"""Sizes and choices of the sampler; imports no engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from rolljax.errors import ConfigError, Range, check_fields
from rolljax.model.axes import MESH_AXES
from rolljax.model.decoder import DecoderConfig
from rolljax.sampler.sampling import MAX_TOP_LOGPROBS

MIN_CHUNK = 32
"""Fewest tokens a prefill program is made for; chunks are padded to this, or to a doubling of it."""
MIN_WIDTH = 64
"""Fewest tokens of context a program is made for."""
MIN_ROWS = 4
"""Fewest rows a decode program is made for."""


@dataclasses.dataclass(frozen=True)
class SamplerConfig:
    """Sizes of the sampler, and its choices."""

    slots: Annotated[int, Range(low=1)] = 64
    """Sequences that decode at the same time."""
    max_context: Annotated[int, Range(low=1)] = 512
    """Maximum number of tokens of a prompt and its answer together."""
    page_size: Annotated[int, Range(low=1)] = 16
    """Tokens per KV page."""
    pages: int | None = None
    """KV pages (default: for every slot a sequence of full length, and the last page of its prompt, which its siblings
    copy)."""
    prefill_chunk: int = 512
    """Prompt tokens computed at once; a longer prompt is prefilled in chunks, and decoding never waits for more than
    one."""
    steps_per_dispatch: Annotated[int, Range(low=1)] = 8
    """Decode steps between two looks of the host."""
    speculate: Annotated[int, Range(low=0, high=63)] = 0
    """Maximum number of tokens that are guessed ahead and checked in one step; 0: none. A guess is what followed the
    same tokens earlier: in a sibling, in an earlier answer, or in the prompt. Guesses change no token, only the number
    of steps. They pay in the long tail of a step, where few requests run."""
    speculate_tok: Annotated[int, Range(low=1)] = 256
    """Maximum number of tokens of a step that checks guesses, over the rows of a device: about as many as a device
    computes in the time in which it reads its weights. While more requests run, nothing is guessed."""
    cascade_tok: Annotated[int, Range(low=0)] = 128
    """Fewest tokens that running requests must have in common at their beginning, as siblings have a prompt, for decode
    steps to read the keys and values of these tokens once for 8 requests (cascade attention); 0: never. It changes no
    token. 'ragged' has no such reading. With 'dense' the programs are compiled when they are first needed, and a
    server, which compiles all of its programs at its start, has none."""
    prefix_match: Literal["turns", "any", "off"] = "turns"
    """Cached keys and values that a prompt may start from. 'turns': from a complete earlier prompt or answer that it
    extends (and every full `prefill_chunk`), so that the computation never depends on earlier requests; 'any': the
    longest common prefix with anything in the cache (best for serving); 'off': none."""
    on_publish: Literal["recompute", "keep"] = "recompute"
    """Treatment of running requests when the weights change. 'recompute': their keys and values are computed again with
    the new weights; 'keep': they continue with the keys and values of the old weights (PipelineRL,
    arXiv:2509.19128)."""
    reuse_stale: bool = False
    """Let new requests start from keys and values that older weights made."""
    attention: Literal["auto", "dense", "ragged", "triton"] = "auto"
    """Method by which decode steps read KV pages. 'dense' copies the context out of the pages, once per dispatch (XLA,
    any device); 'ragged' (Pallas, TPU; prefill too) and 'triton' (Pallas, GPU; deprecated by JAX) read the pages in
    place. 'auto': 'ragged' on TPU, 'triton' on GPUs where it was measured, with prefill by cuDNN, 'dense' on other
    devices (docs/scaling.md)."""
    quantization: Literal["none", "int8"] = "none"
    """Form of the sampler's weights. 'int8': the linear maps of the layers are int8, with a scale for each output, made
    on the devices at each publish. A decode step, which reads all weights, then reads about half of bfloat16's bytes.
    Experts, the embedding and the output matrix stay as they are. Sampled log-probs differ more from the trainer's:
    watch `mismatch/k3_nat`, and set an algorithm's `correction` if it is large (docs/scaling.md)."""
    kv_dtype: Literal["auto", "fp8"] = "auto"
    """Type of keys and values in pages. 'auto': the model's compute dtype; 'fp8': float8_e4m3fn without scales, half of
    bfloat16's bytes. Sampled log-probs then differ from the trainer's, many times more than with int8 weights
    (docs/scaling.md): set an algorithm's `correction`. 'triton' does not read it."""
    tensor: Annotated[int | None, Range(low=1)] = None
    """Number of devices over which the layers of the sampler's weights are split (default: as in the trainer's mesh);
    the remaining devices share out the slots. Decoding reads all of a device's weights for every token of its slots, so
    it wants them split further than training does."""
    expert: Annotated[int | None, Range(low=1)] = None
    """Number of devices over which the experts of the sampler's weights are split (default: as in the trainer's mesh);
    the remaining devices share out the slots. Decoding reads all of a device's weights for every token of its slots, so
    it wants them split further than training does."""
    programs: Literal["many", "few"] = "many"
    """Number of prompt and context sizes for which separate programs are compiled. A server compiles all of them at its
    start: on CPU 'few' takes a fourth of the time of 'many', and pads more."""
    record_experts: bool = False
    """Whether to return the experts that each decoded token took, for models with experts; the trainer then uses the
    same experts (router replay, arXiv:2510.11370)."""
    record_alternatives: Annotated[int, Range(low=0, high=MAX_TOP_LOGPROBS)] = 0
    """Number of most likely tokens to write into the rollouts for each sampled token; `rolljax.view` shows them. Each
    takes about forty bytes."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.prefill_chunk < MIN_CHUNK or self.prefill_chunk & (self.prefill_chunk - 1):
            raise ConfigError(
                f"must be a power of two, at least {MIN_CHUNK}",
                setting="SamplerConfig.prefill_chunk",
                value=self.prefill_chunk,
            )
        if self.prefill_chunk % self.page_size:
            raise ConfigError(
                f"is not a multiple of page_size={self.page_size}",
                setting="SamplerConfig.prefill_chunk",
                value=self.prefill_chunk,
                remedy="choose a page size that is a power of two",
            )
        if self.speculate_tok <= self.speculate:
            raise ConfigError(
                f"is too few to check {self.speculate} guesses of one request",
                setting="SamplerConfig.speculate_tok",
                value=self.speculate_tok,
                remedy=f"at least {self.speculate + 1}",
            )
        if self.pages is not None and self.pages <= self.pages_per_sequence:
            raise ConfigError(
                "is less than one sequence needs",
                setting="SamplerConfig.pages",
                value=self.pages,
                remedy=f"{self.max_context} tokens need {self.pages_per_sequence + 1} pages of {self.page_size}",
            )

    @property
    def most_per_dispatch(self) -> int:
        """Maximum number of tokens that a sequence gets between two looks of the host."""
        return max(self.steps_per_dispatch, self.speculate + 1)

    @property
    def pages_per_sequence(self) -> int:
        """Pages that a sequence of full length takes."""
        return -(-self.max_context // self.page_size)

    @property
    def num_pages(self) -> int:
        """Number of pages: `pages`, or enough to fill every slot. Sequences take over the pages of their prefilled
        prompt except its last page, which each of them copies; hence one extra page per slot."""
        return self.pages or self.slots * (self.pages_per_sequence + 1)

    def mesh(self, trainer: Mesh, devices: Sequence[jax.Device] | None = None) -> Mesh:
        """Return the sampler's mesh.

        Args:
          trainer: the trainer's mesh. devices: the sampler's own devices (default: the trainer's).

        Raises:
          ConfigError: the number of devices is not divisible by `tensor` x `expert`.
        """
        if devices is None and self.tensor is None and self.expert is None:
            return trainer
        tensor, expert = self.tensor or trainer.shape["tensor"], self.expert or trainer.shape["expert"]
        own = trainer.devices if devices is None else np.array(devices)
        if own.size % (tensor * expert):
            name = "expert" if self.expert and not self.tensor else "tensor"
            raise ConfigError(
                f"{own.size} devices do not divide by tensor x expert = {tensor} x {expert}",
                setting=f"SamplerConfig.{name}",
                value=getattr(self, name),
                remedy=f"choose a divisor of {own.size}",
            )
        sizes = {"data": own.size // (tensor * expert), "expert": expert, "tensor": tensor}
        return Mesh(own.reshape([sizes.get(axis, 1) for axis in MESH_AXES]), MESH_AXES)

    def check_shards(self, num_shards: int) -> None:
        """Raise `ConfigError` unless slots, prefill rows and pages can be split over this many batch shards."""
        if self.slots % num_shards:
            raise ConfigError(
                f"does not divide over {num_shards} batch shards of the mesh",
                setting="SamplerConfig.slots",
                value=self.slots,
                remedy=f"choose a multiple of {num_shards}",
            )
        each = self.num_pages // num_shards
        if each <= self.pages_per_sequence:
            raise ConfigError(
                f"over {num_shards} batch shards leave {each} each, less than one sequence needs",
                setting="SamplerConfig.pages",
                value=self.num_pages,
                remedy=f"at least {(self.pages_per_sequence + 1) * num_shards}",
            )

    def check_model(self, model: DecoderConfig) -> None:
        """Raise `ConfigError` if experts are to be recorded of a model that has none, or more tokens than it knows."""
        if self.record_alternatives > model.vocab_size:
            raise ConfigError(
                f"is more than the {model.vocab_size} tokens of the model",
                setting="SamplerConfig.record_alternatives",
                value=self.record_alternatives,
            )
        if self.record_experts and not model.routing:
            raise ConfigError(
                f"can have no effect: {type(model).__name__} has no experts",
                setting="SamplerConfig.record_experts",
                value=True,
                remedy="leave it out",
            )

    @property
    def chunk_sizes(self) -> tuple[int, ...]:
        """Padded lengths that a prefill program exists for, growing from `MIN_CHUNK` to `prefill_chunk`."""
        sizes, step = [MIN_CHUNK], 2 if self.programs == "many" else 4
        while sizes[-1] < min(self.prefill_chunk, self.max_context):
            sizes.append(min(sizes[-1] * step, self.prefill_chunk))
        return tuple(sizes)

    def chunk_size(self, tokens: int) -> int:
        """Return the padded length for this many new tokens of a prompt."""
        return next((size for size in self.chunk_sizes if size >= tokens), self.chunk_sizes[-1])

    def prefill_rows(self, chunk_size: int, num_shards: int) -> int:
        """Prefill rows per batch shard of the program for that padded length: about `prefill_chunk` tokens in all."""
        return max(1, self.prefill_chunk // (chunk_size * num_shards))

    @property
    def widths(self) -> tuple[int, ...]:
        """Pages of context that a program exists for, growing to the full context from `MIN_WIDTH` tokens."""
        widths, step = [self.pages_per_sequence], 2 if self.programs == "many" else 4
        while widths[0] * self.page_size >= step * MIN_WIDTH:
            widths.insert(0, -(-widths[0] // step))
        return tuple(widths)

    @property
    def draw_variants(self) -> tuple[tuple[bool, bool], ...]:
        """Variants of drawing that programs exist for: whether they truncate, and whether they report likely tokens."""
        few = ((False, False), (True, True))
        return few if self.programs == "few" else (*few, (True, False), (False, True))

    def draw_variant(self, truncate: bool, top: bool) -> tuple[bool, bool]:
        """Return the sampling program to use. With "few" programs it may do more than requested."""
        return (truncate or top, truncate or top) if self.programs == "few" else (truncate, top)
