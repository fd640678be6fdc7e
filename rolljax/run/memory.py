"""The memory account of a run: the bytes that each program needs on a device, the bytes that the device has, and the
settings to change if they do not fit.

Shapes alone give the sizes of arguments, results and other live arrays, within a second. Only XLA knows temporaries: it
compiles the programs if shapes and activations exceed `ASKED_FRAC` of a device. The run then reuses what was compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import jax

from rolljax.aot import programs as aot
from rolljax.errors import ConfigError, OutOfMemory
from rolljax.run.initial_weights import base_shapes
from rolljax.run.preflight import ResolvedRecipe
from rolljax.run.trainer import make_trainer
from rolljax.trainer.mesh import num_batch_shards, num_slot_shards
from rolljax.trainer.publish import Reshard, share_devices

ASKED_FRAC = 0.125
HOST_FRAC = 0.95
"""Fraction of a host's available memory that a run may use. The rest is for its processes and for compilers."""
GIB, MIB = 2**30, 2**20
CGROUPS = Path("/sys/fs/cgroup")


# ---- what a device has ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes that a device has for a run, and in words whose they are."""

    bytes: float
    text: str


def room(resolved: ResolvedRecipe) -> DeviceMemory:
    """Return the memory of each device of a run: of an accelerator its allocator's limit, of a CPU device its share of
    this host's available memory."""
    devices = {d for mesh in (resolved.mesh, resolved.sampler_mesh) if mesh for d in mesh.devices.flat}
    own = sorted((d for d in devices if d.process_index == jax.process_index()), key=lambda d: d.id)
    stats = own[0].memory_stats() if own[0].platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return DeviceMemory(float(stats["bytes_limit"]), f"{own[0].device_kind}, {said(stats['bytes_limit'])}")
    free, total = host_memory()
    shared = f", shared by {len(own)} devices" if len(own) > 1 else ""
    return DeviceMemory(HOST_FRAC * free / len(own), f"this host has {said(free)} to spare of {said(total)}{shared}")


def host_memory() -> tuple[float, float]:
    """Return the bytes that this process could still allocate, and the total: of the host, or of its control group's
    limit."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    free = total
    with contextlib.suppress(OSError, KeyError):
        free = 1024.0 * int(_table(Path("/proc/meminfo"))["MemAvailable:"])
    for limit, used in _limits():
        free, total = min(free, limit - used), min(total, limit)
    return max(free, 0.0), total


def _limits() -> Iterator[tuple[float, float]]:
    """Yield the limits of this process's control group and of its ancestors, and the usage of each that cannot be
    dropped."""
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return
    own = CGROUPS / line.removeprefix("0::").strip("/")
    for folder in (own, *own.parents):
        with contextlib.suppress(OSError, KeyError, ValueError):  # ValueError: "max"
            limit = float((folder / "memory.max").read_text())
            cached = float(_table(folder / "memory.stat")["inactive_file"])
            yield limit, float((folder / "memory.current").read_text()) - cached


def _table(path: Path) -> dict[str, str]:
    return dict(line.split()[:2] for line in path.read_text().splitlines())


# ---- what a run takes -----------------------------------------------------------------------------------------------


def programs(resolved: ResolvedRecipe) -> Iterator[aot.Program]:
    """Yield all programs of a run: of each phase that differs from the earlier ones, of the sampler, and between
    them. Of samplers in other processes there are none here, but the trainer keeps a copy of the weights until it is
    written for them."""
    mesh, model, recipe = resolved.mesh, resolved.model, resolved.recipe
    base, way = base_shapes(resolved), reshard(resolved)
    sampler_mesh = resolved.sampler_mesh
    sampler = aot.SamplerShapes.of(model, recipe.sampler, sampler_mesh) if sampler_mesh else None
    trainers, seen = [], set()
    pushed = {} if sampler else aot.leaving_bytes(mesh, model)
    for index, phase in enumerate(recipe.phases):
        trainer = make_trainer(resolved, index, aot.reference_shapes(mesh, model, phase.algorithm, base), base)
        trainers.append(aot.TrainerShapes.of(trainer))
        is_alone = bool(way) or sampler is None or resolved.sampler_sleeps(phase)
        key = (phase.algorithm, phase.optimizer, trainer.shape, is_alone)
        if key not in seen:
            yield from trainers[-1].programs(phase.name, pushed if is_alone or not sampler else sampler.resident())
        seen.add(key)
    largest = max((t.resident() for t in trainers), key=lambda sizes: sum(sizes.values()))
    trainer = trainers[0].trainer
    trained = model.full_params(trainers[0].state.policy.params, trainer.base)
    if sampler is None:
        yield aot.push_program(mesh, model, trained, largest)
        return
    arriving = {aot.ARRIVING: way.moved_bytes / way.received.size} if way else {}
    yield from sampler.programs(arriving or largest)
    asleep = all(map(resolved.sampler_sleeps, recipe.phases))
    yield from aot.publish_programs(mesh, model, trained, sampler, largest, way, asleep=asleep)


def sampler_programs(sampler: ResolvedRecipe) -> Iterator[aot.Program]:
    """Yield the programs of a sampler in another process, whose settings were resolved over its devices."""
    assert sampler.sampler_mesh is not None
    shapes = aot.SamplerShapes.of(sampler.model, sampler.recipe.sampler, sampler.sampler_mesh)
    yield from shapes.remote_programs(sampler.model)


def reshard(resolved: ResolvedRecipe) -> Reshard | None:
    """Return the transfer of weights between trainer and sampler if they share no devices."""
    if resolved.sampler_mesh is None or share_devices(resolved.mesh, resolved.sampler_mesh):
        return None
    return Reshard(resolved.mesh, resolved.model, resolved.sampler_mesh)


@dataclasses.dataclass(frozen=True)
class Use:
    """Bytes of one device while a program runs."""

    program: aot.Program
    sizes: Mapping[str, float]
    """Bytes by name of arguments, results and all other live arrays; gradients are a part of the temporaries."""
    activations: float
    """Estimated bytes saved for the backward pass, from the widths of the layers."""
    compiled: float | None = None
    """Arguments, results and temporaries by XLA's analysis (None: not compiled)."""

    @property
    def total(self) -> float:
        """All bytes. Without XLA's analysis, temporaries other than gradients are missing."""
        if self.compiled is None:
            return sum(self.sizes.values())
        return self.compiled + sum(self.program.beside.values())

    @property
    def temporaries(self) -> float | None:
        """Bytes that the program needs in addition to its arguments and results, gradients included."""
        if self.compiled is None:
            return None
        return max(0.0, self.compiled - sum(v for k, v in self.program.own.items() if k != "gradients"))


@dataclasses.dataclass(frozen=True)
class Account:
    """The memory that every program of a run needs on a device, and the device's memory."""

    resolved: ResolvedRecipe
    uses: tuple[Use, ...]
    """Memory use of each program."""
    room: DeviceMemory
    """Memory that the device has."""

    @functools.cached_property
    def largest(self) -> Use:
        """The program that takes most."""
        return max(self.uses, key=lambda use: use.total)

    @property
    def fits(self) -> bool:
        return self.largest.total <= self.room.bytes

    def by_compiler(self) -> Account:
        """Return the account with XLA's analysis of every program, if that can matter and the programs belong to this
        process alone. Each is compiled for it, in the order of the run."""
        about = max(use.total + use.activations for use in self.uses)
        if about < ASKED_FRAC * self.room.bytes or not self.fits or jax.process_count() > 1:
            return self
        asked = [dataclasses.replace(use, compiled=use.program.needed_bytes()) for use in self.uses]
        return dataclasses.replace(self, uses=tuple(asked))

    def lines(self) -> list[str]:
        """Return the account as text: live arrays, the need of each program, and the memory of the device."""
        parts: dict[str, float] = {}
        for use in self.uses:
            for name, size in use.sizes.items():
                parts[name] = max(size, parts.get(name, 0.0))
        if activations := max(use.activations for use in self.uses):
            parts["activations"] = activations
        text = ", ".join(f"{name} {said(size)}" for name, size in parts.items())
        found = [f"of one device: {text}"]
        for use in self.uses:
            temporaries = "" if use.temporaries is None else f", of which temporaries {said(use.temporaries)}"
            found.append(f"{use.program.name}: {said(use.total)}{temporaries}")
        if self.uses[0].compiled is None:
            found[1:] = [f"{self.largest.program.name} takes most: {said(self.largest.total)} and its temporaries"]
        return [*found, f"there is {said(self.room.bytes)} ({self.room.text})"]

    def check(self) -> None:
        """Refuse a run that does not fit.

        Raises:
          ConfigError: it does not; it names the settings to change, the likeliest first.
        """
        if self.fits:
            return
        use = self.largest
        sizes = {**use.sizes, "temporaries": (use.temporaries or 0.0) + use.activations * (use.compiled is None)}
        over = use.total - self.room.bytes
        changes = next_settings(self.resolved, use.program.name, sizes, self.room.bytes, over)
        setting, _, value = changes[0].partition(": ")[0].partition(" = ")
        account = "\n".join(f"    {line}" for line in self.lines())
        raise ConfigError(
            f"lets the run take more memory than a device has: {use.program.name} takes {said(use.total)}"
            f"{'' if use.compiled else ' without its temporaries'}, there is {said(self.room.bytes)}\n{account}",
            setting=setting.removeprefix("fewer ").removeprefix("a shorter ").partition(" ")[0],
            remedy="; or ".join(changes),
        )


def account(resolved: ResolvedRecipe) -> Account:
    """Compute the account of a run by shapes alone; nothing is allocated or compiled."""
    recipe, mesh, found = resolved.recipe, resolved.mesh, []
    tokens = {p.name: p.micro_rows * p.row_len for p in recipe.phases}
    parts = num_batch_shards(mesh) * mesh.shape["context"] * mesh.shape["tensor"]
    for program in programs(resolved):
        phase, _, name = program.name.rpartition("/")
        trains = name in ("update", "critics")
        kept = resolved.model.saved_bytes * tokens[phase] / parts if trains else 0.0
        found.append(Use(program, {**program.own, **program.beside}, kept))
    return Account(resolved, tuple(found), room(resolved))


# ---- what to change -------------------------------------------------------------------------------------------------


def next_settings(
    resolved: ResolvedRecipe, program: str, sizes: Mapping[str, float], usable: float, over: float
) -> list[str]:
    """Return the settings to change so that a program fits, the likeliest first.

    Args:
      sizes: memory of a device by purpose, and `temporaries`. usable: the device's memory.
      over: excess of the program; all in one unit.
    """
    recipe, shape = resolved.recipe, resolved.mesh.shape
    tried: dict[str, list[str]] = {}
    phase = next((p for p in recipe.phases if program.startswith(f"{p.name}/")), None)
    shards = num_batch_shards(resolved.mesh)
    on_host = resolved.mesh.devices.flat[0].platform == "cpu"
    if phase is not None:
        work = []
        if recipe.remat != "full":
            work.append("Recipe.remat = 'full': the backward pass computes again instead of keeping")
        if phase.micro_rows > shards:
            work.append(f"Phase.micro_rows = {max(shards, phase.micro_rows // 2)}: fewer rows at once")
        else:
            work.append(f"MeshSpec.context = {2 * shape['context']}: each row over more devices")
        work.append("a shorter Phase.row_len (and SamplerConfig.max_context)")
        tried["temporaries"] = work
        state = []
        if shape["data"] > 1:
            state.append(f"MeshSpec.fsdp = {shape['fsdp'] * shape['data']}, MeshSpec.data = 1: split over all devices")
        if phase.optimizer.mu_dtype == "float32" and hasattr(phase.optimizer, "b1"):
            state.append(f"{type(phase.optimizer).__name__}.mu_dtype = 'bfloat16': half the momentum")
        if not phase.optimizer.offload and not on_host:
            state.append(f"{type(phase.optimizer).__name__}.offload = True: the optimizer's state in host memory")
        tried["optimizer"] = state
        lora = [] if recipe.lora else ["Recipe.lora = @lora.Lora(): train adapters only"]
        tried["parameters"] = tried["gradients"] = [*state[:1], *lora]
    if resolved.sampler_mesh:
        tensor = resolved.sampler_mesh.shape["tensor"]
        tried["sampler weights"] = [f"SamplerConfig.tensor = {2 * tensor}: split them"]
    tried["KV pool"] = [_fewer_pages(resolved, sizes.get("KV pool", 0.0), over), "fewer SamplerConfig.slots"]
    order = sorted(tried, key=lambda part: -sizes.get(part, 0.0))
    found = [text for part in order if sizes.get(part, 0.0) > 0.02 * usable for text in tried[part]]
    return list(dict.fromkeys([*found, "more memory, or more devices"]))


def _fewer_pages(resolved: ResolvedRecipe, pool: float, over: float) -> str:
    """Return the setting of the largest number of pages that fits, or of half the pages if no sequence would fit."""
    cfg = resolved.recipe.sampler
    assert resolved.sampler_mesh is not None
    left = int(0.95 * cfg.num_pages * (pool - over) / pool) if pool > over else 0
    if left > cfg.pages_per_sequence * num_slot_shards(resolved.sampler_mesh):
        return f"SamplerConfig.pages = {left}: as many as fit, and fewer sequences at once while they are long"
    return f"SamplerConfig.pages = {cfg.num_pages // 2}: half the pages"


# ---- when it runs out -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def explained(account: Account) -> Iterator[None]:
    """Turn an out-of-memory error of XLA or the host into an `OutOfMemory` that shows the account.

    Raises:
      OutOfMemory: memory ran out inside.
    """
    try:
        yield
    except Exception as e:  # border: what XLA and NumPy raise
        first = ran_out(e)
        if first is None:
            raise
        lines = "\n".join(f"    {line}" for line in account.lines())
        raise OutOfMemory(
            f"memory ran out: {str(first).splitlines()[0][:300]}\n{lines}\n  fix:   {'; or '.join(changes_of(account))}"
        ) from e


def changes_of(account: Account) -> list[str]:
    """Return the settings to change of a run that ran out of memory although its account fits."""
    use = account.largest
    sizes = {**use.sizes, "temporaries": (use.temporaries or 0.0) + use.activations}
    return next_settings(account.resolved, use.program.name, sizes, account.room.bytes, 0.1 * use.total)


def ran_out(error: BaseException | None) -> BaseException | None:
    """Return the out-of-memory error in a chain of causes, if there is one."""
    while error is not None:
        if isinstance(error, MemoryError):
            return error
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error):
            return error
        error = error.__cause__ or error.__context__
    return None


def said(size: float) -> str:
    """Format bytes for people."""
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / MIB:.1f} MiB"
