"""Timings of TPU slices that need not be present, from a model's shape and assumptions about chips and links."""

from __future__ import annotations

import dataclasses

from rolljax.aot.chips import chip
from rolljax.errors import Range
from rolljax.model.decoder import DecoderConfig, Model
from rolljax.simulation.timings import EngineTimings, Slices, Timings, TrainerTimings

BYTES = 2
"""Bytes of a weight, and of a number in keys and values: bfloat16."""


@dataclasses.dataclass(frozen=True)
class ModelWork:
    """The work and the memory that a model needs."""

    flops: float
    """FLOPs of a token in the forward pass, without attention."""
    attention_flops: float
    """FLOPs of a token's attention to each token before it, in the forward pass."""
    weight_bytes: float
    """Bytes of all weights."""
    kv_bytes: float
    """Keys and values of a token."""

    @staticmethod
    def of(cfg: DecoderConfig) -> ModelWork:
        size = Model(cfg).num_params()
        idle = 0
        if cfg.routing:
            idle = cfg.num_layers * 3 * cfg.hidden_size * (_all_experts(cfg) - cfg.active_ffn_size)
        heads = cfg.num_layers * cfg.head_dim
        return ModelWork(
            2.0 * (size - idle - cfg.vocab_size * cfg.hidden_size),
            4.0 * heads * cfg.num_heads,
            float(BYTES * size),
            2.0 * BYTES * heads * cfg.num_kv_heads,
        )


def _all_experts(cfg: DecoderConfig) -> int:
    assert cfg.routing
    return cfg.active_ffn_size // cfg.routing.per_token * cfg.routing.num_experts


def engine(work: ModelWork, slices: Slices, timings: EngineTimings) -> EngineTimings:
    """Return the timings of a replica of `chips_per_replica` chips, its layers split over all of them."""
    assumed, size = chip(slices.sample_chip), slices.chips_per_replica * chip(slices.sample_chip).cores
    bytes_s = size * assumed.hbm_bytes_s * slices.hbm_frac
    flops_s = size * assumed.bf16_flops
    free = size * assumed.usable_hbm_bytes * slices.memory_frac - work.weight_bytes
    return dataclasses.replace(
        timings,
        replicas=slices.sample_chips // slices.chips_per_replica,
        step_s=work.weight_bytes / bytes_s + slices.collective_s,
        sequence_s=work.flops / (flops_s * slices.decode_mfu),
        context_s=work.kv_bytes / bytes_s,
        prefill_s=work.flops / (flops_s * slices.prefill_mfu),
        kv_tok=int(free / work.kv_bytes),
    )


def trainer(work: ModelWork, slices: Slices, timings: TrainerTimings, mean_tok: float) -> TrainerTimings:
    """Return the timings of a mesh of `train_chips`. mean_tok: mean length of a sequence; a token sees half of it on
    average."""
    assumed, size = chip(slices.train_chip), slices.train_chips * chip(slices.train_chip).cores
    flops = 3 * (work.flops + work.attention_flops * mean_tok / 2)
    return dataclasses.replace(
        timings,
        token_s=flops / (size * assumed.bf16_flops * slices.train_mfu),
        publish_s=work.weight_bytes / slices.publish_bytes_s,
    )


def applied(timings: Timings, cfg: DecoderConfig) -> Timings:
    """Return the timings with the engine's and the trainer's computed from `slices`, if there are any."""
    if timings.slices is None:
        return timings
    Range(low=timings.slices.chips_per_replica).check(timings.slices, "sample_chips")
    work = ModelWork.of(cfg)
    turns = max(1.0, timings.turns.mean)
    mean_tok = timings.prompt_tok.mean + turns * (timings.answer_tok.mean + timings.observation_tok.mean)
    return dataclasses.replace(
        timings,
        engine=engine(work, timings.slices, timings.engine),
        trainer=trainer(work, timings.slices, timings.trainer, mean_tok),
    )
