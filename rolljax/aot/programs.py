"""A run's real programs, compiled for devices that are not there.

    update, critics, logprobs  of each phase, as its `PhaseTrainer` makes them
    decode, prefill, insert    of the sampler's `Engine`
    publish                    from the trainer's weights to the sampler's
    cast                       before it, where both have their own chips; for samplers in other processes, `publish` is
                               their own: it writes the pieces that were fetched over the weights in use

Arrays that are in HBM while a program runs, but are not its arguments, are added to the compiler's figure for the
program. Where trainer and sampler share their chips, these are all arrays of the other one, unless the sampler sleeps.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rolljax.aot import hlo
from rolljax.aot.chips import Chip
from rolljax.aot.report import GIB, Memory, ProgramReport, time_of
from rolljax.model.decoder import DecoderConfig, Model, Params
from rolljax.model.hf import read_config
from rolljax.model.lora import Adapted
from rolljax.model.moe import SLACK
from rolljax.sampler.arrays import Inserts, PrefillChunks
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import MIN_CHUNK, SamplerConfig
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.batch import COLUMNS, SCALARS, TokenBatch
from rolljax.trainer.mesh import SLOT_AXES, batch_shardings, param_shardings
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.trainer.publish import (
    Reshard,
    adapted_weights,
    copied,
    in_own_parts,
    make_write,
    stacked_weights,
    takes_parts,
)

Sizes = Mapping[str, float]
"""Bytes of one device by purpose."""
LEAVING, ARRIVING = "leaving weights", "arriving weights"
"""Names of `Sizes` for weights in transfer between meshes, on either side."""


@dataclasses.dataclass(frozen=True)
class Program:
    """One program, ready to be compiled."""

    name: str
    lower: Callable[[], Any]
    mesh: Mesh
    own: Sizes
    """Bytes per device of the program's arguments and results, by name."""
    beside: Sizes
    """Other arrays in HBM."""
    host: float = 0.0
    trips: int = 1
    """Iterations of the program's outermost loop whose length is only known at run time."""
    model_flops: float = 0.0
    """FLOPs that the model requires, over all devices (see `Report`)."""
    tokens: int = 0
    """Tokens that one execution computes (see `Report`)."""

    def compile(self, chip: Chip, folder: Path | None = None) -> ProgramReport:
        """Compile, and report the result. A program that the compiler refuses is a report, not an error.

        folder: where to write the compiled text.
        """
        start = time.perf_counter()
        try:
            compiled = self.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            needed, text = _needed(str(error))
            memory = self._memory(max(needed, sum(self.own.values())), chip)
            return ProgramReport(self.name, time.perf_counter() - start, memory, refused=text)
        seconds = time.perf_counter() - start
        text = compiled.as_text()
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.name.replace('/', '_')}.hlo").write_text(text)
        work = hlo.read(text, dict(self.mesh.shape), self.trips)
        # experts that are split keep room for an uneven choice; an even one is assumed
        used = 1 / SLACK if self.mesh.shape["expert"] > 1 else 1.0
        timing, collectives, (in_kernels, kernel_bytes) = time_of(work, chip, list(self.mesh.devices.flat), used)
        full_speed = chip.bf16_flops * self.mesh.size * timing.step_s
        memory = compiled.memory_analysis()
        return ProgramReport(
            self.name,
            seconds,
            self._memory(memory.peak_memory_in_bytes, chip, memory.alias_size_in_bytes),
            time=timing,
            flops=work.matmul_flops + in_kernels,
            kernel_flops=in_kernels,
            hbm_gib=(work.hbm_bytes + kernel_bytes) / GIB,
            collectives=collectives,
            model_flops=self.model_flops,
            tokens=self.tokens,
            mfu=self.model_flops / full_speed if self.model_flops and full_speed else None,
            kernels=len(work.kernels),
        )

    def needed_bytes(self) -> float:
        """Return the bytes of one device for arguments, results and temporaries, as the compiler of these devices
        counts them."""
        memory = self.lower().compile().memory_analysis()
        given = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return float(given + memory.temp_size_in_bytes)

    def _memory(self, peak: float, chip: Chip, aliased: float = 0.0) -> Memory:
        own = {k: v / GIB for k, v in self.own.items()}
        beside = {k: v / GIB for k, v in self.beside.items()}
        temporaries = peak / GIB - sum(own.values())
        return Memory(own, temporaries, beside, self.host / GIB, peak / GIB, chip.usable_hbm_gib, aliased / GIB)


def _needed(text: str) -> tuple[float, str]:
    """Return the bytes that a refused program would need, and why it was refused."""
    units = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    found = re.search(r"[Uu]sed ([\d.]+)([KMGT]?) of", text)
    first = next((line for line in text.splitlines() if "memory" in line or "hbm" in line), text.splitlines()[0])
    return (float(found[1]) * units[found[2]] if found else 0.0), first.strip()


# ---- shapes ---------------------------------------------------------------------------------------------------------


def placed(shapes: Any, shardings: Any) -> Any:
    """Return the shapes with the shardings of the same tree."""

    def one(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


def device_bytes(tree: Any, *, host: bool = False) -> float:
    """Return the bytes of a tree on one device, in its own memory or (host) in its host's."""
    total = 0
    for x in jax.tree.leaves(tree):
        if (x.sharding.memory_kind == "pinned_host") == host:
            total += math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return float(total)


def computed_params(mesh: Mesh, model: Model, *, fsdp: bool = True) -> Params:
    """Return the shapes of a plain decoder's parameters, matrices in the compute dtype; without `fsdp` (see
    `param_shardings`) as the sampler computes with them."""
    return placed(*stacked_weights(model, mesh, fsdp=fsdp))


def reference_shapes(
    mesh: Mesh, model: Model, algorithm: Algorithm, base: Params | None
) -> dict[str, tuple[Model, Params]]:
    """Return the shapes of an algorithm's reference policies by source (`run.reference_policies`).

    With adapters, all references of this run are the base without adapters; a later phase's start adds adapters, which
    are small.
    """
    found: dict[str, tuple[Model, Params]] = {}
    for source in algorithm.needs().references:
        if source not in ("run_start", "phase_start"):
            other = Model(read_config(source), model.dtype)
            found[source] = (other, computed_params(mesh, other))
        elif base is not None:
            found[source] = (model, Adapted(base, None))
        else:
            found[source] = (model, computed_params(mesh, model))
    return found


# ---- what a model asks for ------------------------------------------------------------------------------------------


def matmul_params(model: Model) -> float:
    """Return the number of parameters that multiply a token: without embedding rows and norms, and of experts only the
    chosen ones."""
    cfg, total = model.cfg, 0.0
    plain = model.plain
    shapes, axes = plain.abstract(), plain.axes()
    for names, x in zip(
        jax.tree.leaves(axes, is_leaf=lambda a: isinstance(a, tuple)), jax.tree.leaves(shapes), strict=True
    ):
        if sum(n != "layers" for n in names) < 2 or "head_dim" in names and "embed" not in names:
            continue
        share = cfg.routing.per_token / cfg.routing.num_experts if cfg.routing and "experts" in names else 1.0
        total += x.size * share
    if not cfg.tie_embeddings:
        total -= cfg.vocab_size * cfg.hidden_size
    return total


def attention_flops(cfg: DecoderConfig, tokens: int, context: float) -> float:
    """Return the FLOPs of attention in a forward pass over tokens that attend to `context` keys each."""
    return 4.0 * cfg.num_layers * cfg.num_heads * cfg.head_dim * tokens * context


# ---- the trainer ----------------------------------------------------------------------------------------------------


def batch_shapes(trainer: PhaseTrainer, *, credit: bool = True) -> TokenBatch:
    """Return the shapes of the batches that a trainer makes for updates (`PhaseTrainer.pack_micro_batches`) or, without
    credit, for forward passes (`pack_samples`)."""
    shape, needs, cfg = trainer.shape, trainer.algorithm.needs(), trainer.model.cfg
    names = {name for name, c in COLUMNS.items() if c.source == "packing"} | {"advantages", "sampler_logp"}
    if credit:
        names |= {"weights"} | {name for name, c in COLUMNS.items() if c.asked_by and getattr(needs, c.asked_by)}
    sizes = {"C": needs.critics.num if needs.critics else 0, "L": cfg.num_layers}
    dtypes = {name: COLUMNS[name].dtype for name in names}
    if cfg.routing and trainer.replay_experts:
        dtypes["expert_ids_Lk"], sizes["k"] = cfg.routing.dtype, cfg.routing.per_token
    if trainer.compare_samplers:
        dtypes["sampler_ids"] = COLUMNS["sampler_ids"].dtype
    arrays: dict[str, Any] = dict.fromkeys(COLUMNS)
    for name, dtype in dtypes.items():
        tail = (sizes[letter] for letter in COLUMNS[name].axes)
        arrays[name] = jax.ShapeDtypeStruct((shape.num_micro, shape.micro_rows, shape.row_len, *tail), dtype)
    scalars = {n: jax.ShapeDtypeStruct((), jnp.int32 if n == "num_micro" else jnp.float32) for n in SCALARS}
    batch = TokenBatch(**arrays, **scalars)  # type: ignore[arg-type]
    return placed(batch, batch_shardings(trainer.mesh, batch))


@dataclasses.dataclass(frozen=True)
class TrainerShapes:
    """Shapes of all that a phase's trainer keeps on its devices."""

    trainer: PhaseTrainer
    state: Any
    batch: Any
    references: Mapping[str, Any]

    @staticmethod
    def of(trainer: PhaseTrainer) -> TrainerShapes:
        state = placed(trainer.states.abstract(), trainer.states.shardings)
        references = {name: params for name, (_, params) in trainer.references.items()}
        return TrainerShapes(trainer, state, batch_shapes(trainer), references)

    def resident(self) -> dict[str, float]:
        """Return the bytes of one device between updates."""
        policy, critics = self.state.policy, self.state.critics
        sizes = {"parameters": device_bytes(policy.params), "optimizer": device_bytes(policy.opt_state)}
        if self.trainer.base is not None:
            sizes["base weights"] = device_bytes(self.trainer.base)
        # adapted ones are the base itself
        references = {n: p for n, p in self.references.items() if not isinstance(p, Adapted)}
        if references:
            sizes["reference policies"] = device_bytes(references)
        if critics is not None:
            sizes["critics"] = device_bytes(critics)
        return sizes

    def programs(self, phase: str, beside: Sizes) -> Iterator[Program]:
        """Return the programs of this phase. beside: HBM that the sampler holds meanwhile; empty if it sleeps."""
        trainer, batch = self.trainer, self.batch
        shape, model, needs = trainer.shape, trainer.model, trainer.algorithm.needs()
        tokens = shape.num_micro * shape.micro_rows * shape.row_len
        forward = 2 * matmul_params(model) * tokens + attention_flops(model.cfg, tokens, shape.row_len / 2)
        rest = self.resident()

        def program(
            name: str, jitted: Any, args: tuple[Any, ...], own: tuple[str, ...], flops: float, grads: Any
        ) -> Program:
            sizes = {k: rest[k] for k in own if k in rest} | {"batch": device_bytes(batch)}
            if grads is not None:
                sizes["gradients"] = device_bytes(grads)
            others = {k: v for k, v in rest.items() if k not in own}
            host = device_bytes(args, host=True)
            return Program(
                f"{phase}/{name}",
                lambda: jitted.lower(*args),
                trainer.mesh,
                sizes,
                {**others, **beside},
                host,
                shape.num_micro,
                flops,
                tokens,
            )

        policy = self.state.policy
        if trainer.algorithm.trains_policy:
            args: tuple[Any, ...] = (policy, batch, dict(self.references), trainer.base)
            own: tuple[str, ...] = ("parameters", "optimizer", "base weights", "reference policies")
            factor = 2 if model.lora else 3  # frozen weights have no gradients
            yield program("update", trainer.policy_update, args, own, factor * forward, policy.params)
        if self.state.critics is not None:
            critics = self.state.critics
            own = ("critics", "base weights")
            yield program("critics", trainer.critic_update, (critics, batch, trainer.base), own, 0.0, critics.params)
        if needs.trainer_logp:
            own = ("parameters", "base weights")
            args = (model.full_params(policy.params, trainer.base), batch_shapes(trainer, credit=False))
            yield program("logprobs", trainer.forward_passes.policy_program, args, own, forward, None)


# ---- the sampler ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class SamplerShapes:
    """Shapes of all that a sampler keeps on its devices."""

    engine: Engine
    params: Any
    state: Any

    @staticmethod
    def of(model: Model, cfg: SamplerConfig, mesh: Mesh) -> SamplerShapes:
        engine = Engine(model.plain, cfg, mesh, SLOT_AXES)
        state = placed(jax.eval_shape(engine.init_decode_state), engine.state_shardings())
        return SamplerShapes(engine, computed_params(mesh, model, fsdp=False), state)

    def resident(self) -> dict[str, float]:
        """Return the bytes of one device."""
        return {"sampler weights": device_bytes(self.params), "KV pool": device_bytes(self.state)}

    def programs(self, beside: Sizes) -> Iterator[Program]:
        """Return the programs of decode, of prefill of the longest pieces, and of insert.

        beside: the trainer's share of HBM."""
        engine, state, params = self.engine, self.state, self.params
        cfg, mesh, model = engine.cfg, engine.mesh, engine.model

        def like(tree: Any) -> Any:
            return placed(tree, jax.tree.map(lambda _: state.token.sharding, tree))

        piece, width = cfg.chunk_sizes[-1], cfg.pages_per_sequence
        pieces = like(PrefillChunks.empty(cfg.prefill_rows(piece, engine.num_shards) * engine.num_shards, piece, width))
        table, slots = like(np.zeros((cfg.slots, width), np.int32)), like(np.zeros(cfg.slots, np.int32))
        vocab = NamedSharding(mesh, PartitionSpec(SLOT_AXES, "tensor"))
        prompts = cfg.prefill_rows(MIN_CHUNK, engine.num_shards) * engine.num_shards
        logits = jax.ShapeDtypeStruct((prompts, model.cfg.vocab_size), jnp.float32, sharding=vocab)
        per_token = 2 * matmul_params(model)
        steps, prompt = cfg.slots * cfg.steps_per_dispatch, pieces.tokens.size
        both, rest = self.resident(), {"sampler weights": self.resident()["sampler weights"]}
        pool = {"KV pool": both["KV pool"]}
        decode = per_token * steps + attention_flops(model.cfg, steps, cfg.max_context / 2)
        prefill = per_token * prompt + attention_flops(model.cfg, prompt, cfg.max_context / 2)

        def program(name: str, lower: Any, own: Sizes, others: Sizes, *rest: Any) -> Program:
            return Program(name, lower, mesh, own, {**others, **beside}, 0.0, *rest)

        yield program(
            "decode",
            lambda: engine._generate.lower(params, state, table, slots, None, False, False),
            both,
            {},
            1,
            decode,
            steps,
        )
        yield program(
            "prefill", lambda: engine._prefill.lower(params, state, pieces, width), both, {}, 1, prefill, prompt
        )
        if cfg.speculate:
            rows, width = engine.verify_rows[-1] * engine.num_shards, cfg.speculate
            tokens = rows * (width + 1)
            some = like((np.zeros((rows, cfg.pages_per_sequence), np.int32), np.zeros(rows, np.int32)))
            drafts = like((np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)))
            flops = per_token * tokens + attention_flops(model.cfg, tokens, cfg.max_context / 2)
            yield program(
                "verify",
                lambda: engine._verify.lower(params, state, *some, *drafts, False, False),
                both,
                {},
                1,
                flops,
                tokens,
            )
        inserts = like(Inserts.empty(cfg.slots))
        yield program("insert", lambda: engine._insert.lower(state, logits, inserts, False, False), pool, rest)

    def fetched(self, model: Model) -> Any:
        """Return the shapes of what a sampler in another process fetches, and keeps (`weight_channel.StoreSink`): the
        weights, or adapters and their base."""
        parts = in_own_parts(self.engine.mesh, model)
        if model.lora:
            return placed(*adapted_weights(model, parts))
        return computed_params(parts, model) if takes_parts(self.engine.mesh, model) else self.params

    def remote_programs(self, model: Model) -> Iterator[Program]:
        """Return all programs of a sampler in another process, which fetches weights while it decodes."""
        fetched, sizes = self.fetched(model), self.resident()
        arriving = {ARRIVING: device_bytes(fetched)}
        yield from self.programs(arriving)
        if fetched is not self.params:
            mesh = self.engine.mesh
            parts = in_own_parts(mesh, model)
            write = make_write(parts, model, mesh)
            own = {"sampler weights": sizes["sampler weights"], **arriving}
            yield Program(
                "publish", lambda: write.lower(fetched, self.params), parts, own, {"KV pool": sizes["KV pool"]}
            )


def leaving_bytes(mesh: Mesh, model: Model) -> Sizes:
    """Return the bytes of one device of the trainer's for the copy of its weights, or of its adapters alone, that it
    writes to a store."""
    if model.lora:
        return {LEAVING: device_bytes(placed(model.abstract(), param_shardings(mesh, model.axes(), model.abstract())))}
    return {LEAVING: device_bytes(computed_params(in_own_parts(mesh, model), model))}


def push_program(mesh: Mesh, model: Model, trained: Any, trainer: Sizes) -> Program:
    """Return the program that copies what the trainer sends to a store. Arguments: see `publish_programs`."""
    own = {"parameters": trainer["parameters"]}
    others = {k: v for k, v in trainer.items() if k not in own}

    def lower() -> Any:
        if model.lora:
            return copied.lower(trained.adapters)
        parts = in_own_parts(mesh, model)
        return make_write(mesh, model, parts, fsdp=True).lower(trained, computed_params(parts, model))

    return Program("cast", lower, mesh, {**own, **leaving_bytes(mesh, model)}, others)


def publish_programs(
    mesh: Mesh,
    model: Model,
    trained: Any,
    sampler: SamplerShapes,
    trainer: Sizes,
    reshard: Reshard | None,
    *,
    asleep: bool = False,
) -> Iterator[Program]:
    """Yield the program that copies the trainer's weights to the sampler's; between two meshes (`reshard`) two, one on
    each.

    Args:
      mesh: the trainer's. trained: the argument of `Model.bind`, with shardings. trainer: bytes of all that it keeps.
      asleep: the sampler always sleeps until then, so that it has no pages yet.
    """
    weights = sampler.resident()["sampler weights"]
    pages = {} if asleep else {"KV pool": sampler.resident()["KV pool"]}
    mine = {k: v for k, v in trainer.items() if k in ("parameters", "base weights")}
    others = {k: v for k, v in trainer.items() if k not in mine}
    old, to = sampler.params, sampler.engine.mesh
    if reshard is None:
        write = make_write(mesh, model, to)
        own, beside = mine | {"sampler weights": weights}, others | pages
        yield Program("publish", lambda: write.lower(trained, old), mesh, own, beside)
        return
    sent, received = (computed_params(m, model) for m in (reshard.sent, reshard.received))
    own = mine | {LEAVING: device_bytes(sent)}
    yield Program("cast", lambda: reshard.cast_program.lower(trained, sent), mesh, own, others)
    own = {"sampler weights": weights, ARRIVING: device_bytes(received)}
    write = make_write(reshard.received, model.plain, to)
    yield Program("publish", lambda: write.lower(received, old), reshard.received, own, pages)
