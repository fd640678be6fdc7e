"""Plan: `python -m rolljax.plan --gin FILE --topology v5p:4x4x4 [--json OUT]` compiles a run's real programs for a TPU
that is not there, and tells whether they fit and how long they take at best. docs/scaling.md explains the figures.

Exit codes: 0 everything fits, 1 something does not, 2 a wrong setting or no TPU compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from rolljax.aot.chips import Chip
    from rolljax.aot.programs import Program
    from rolljax.aot.report import ProgramReport
    from rolljax.aot.transfer import Push, Transfer
    from rolljax.config.loader import Loaded
    from rolljax.recipe import Recipe
    from rolljax.run.preflight import ResolvedRecipe

EXIT_TOO_LARGE = 1
CHANGED_FRAC = 0.03
"""Fraction of all weights that a step changes in bfloat16; assumed for pushes of changes."""
WIDTH = 200
"""Width of the tables if stdout is not a terminal."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m rolljax.plan", description="Compile a recipe's programs for a TPU."
    )
    cli.add_config_arguments(parser, required=True)
    parser.add_argument("--topology", required=True, help="chip and shape of the slice: v5e:2x4, v5p:4x4x4, v6e:16x16")
    parser.add_argument(
        "--sampler_topology",
        help="a slice of the sampler's own: of the same chip with Recipe.placement = @mesh.Split(), of any chip with "
        "@placement.Remote()",
    )
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    parser.add_argument("--hlo", type=Path, help="write the compiled text of each program into this folder")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PROGRAM", help="update, decode, prefill, ...; repeatable"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        from rolljax.aot import chips

        config.append(cli.load_recipe(args.gin, args.set))
        chip = chips.chip(args.topology)
        from rolljax.run import reference_policies
        from rolljax.run.memory import programs, sampler_programs
        from rolljax.run.preflight import resolve

        resolved = resolve(config[0].value, devices(config[0].value, args.topology, args.sampler_topology))
        reference_policies.check(resolved)
        every = [(program, chip) for program in programs(resolved)]
        sampler = remote_sampler(config[0].value, args.sampler_topology)
        if sampler:
            every += [(program, chips.chip(args.sampler_topology)) for program in sampler_programs(sampler)]
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
        reports = list(compile_all(every, args.only, args.hlo))
        found = Plan(resolved, chip, args.topology, args.sampler_topology, reports, sampler)
        show(found)
        if args.json:
            args.json.write_text(json.dumps(to_json(found), indent=1) + "\n")
        return 0 if all(r.fits for r in reports) else EXIT_TOO_LARGE

    return cli.run_verb(run, lambda: config[0] if config else None)


def devices(recipe: Recipe, topology: str, sampler_topology: str | None) -> list[jax.Device]:
    """Return the trainer's devices: those of a slice, followed by the sampler's own slice if they are of one process.

    Raises:
      ConfigError: the slices are not the shares of `Recipe.placement`.
    """
    from rolljax.aot import chips
    from rolljax.cluster.placement import Remote
    from rolljax.errors import ConfigError
    from rolljax.trainer.mesh import Split

    found = chips.devices(topology)
    if isinstance(recipe.placement, Remote):
        if sampler_topology is None:
            raise ConfigError(
                "is needed: samplers have devices of their own",
                setting="--sampler_topology",
                remedy="the slice of each sampler",
            )
        return found
    if sampler_topology is None:
        return found
    both = found + chips.devices(sampler_topology)
    split = recipe.placement
    if chips.chip(sampler_topology) != chips.chip(topology):
        problem = f"is of another chip than {topology}"
    elif not isinstance(split, Split):
        problem = "can have no effect: trainer and sampler share their devices"
    elif [len(share) for share in split.shares(both)] != [len(found), len(both) - len(found)]:
        problem = f"and {topology} have {len(both) - len(found)} and {len(found)} chips, the shares are {split}"
    else:
        return both
    raise ConfigError(
        problem,
        setting="--sampler_topology",
        value=sampler_topology,
        remedy=f"Recipe.placement = @mesh.Split() with Split.sampler = {len(both) - len(found)}, or leave it out",
    )


def remote_sampler(recipe: Recipe, topology: str) -> ResolvedRecipe | None:
    """Return the settings of a sampler in another process as it resolves them on a slice; None: the recipe has none."""
    from rolljax.aot import chips
    from rolljax.cluster.placement import Remote
    from rolljax.run.policy import sampler_recipe, sampler_settings
    from rolljax.run.preflight import resolve

    if not isinstance(recipe.placement, Remote):
        return None
    return resolve(sampler_recipe(sampler_settings(recipe)), chips.devices(topology))


def compile_all(every: list[tuple[Program, Chip]], only: list[str], hlo: Path | None) -> Iterator[ProgramReport]:
    """Compile one program after the other, each for its chip, and print its name on stderr."""
    from rich.console import Console

    from rolljax.errors import ConfigError

    console = Console(stderr=True, highlight=False)
    chosen = [(p, chip) for p, chip in every if not only or p.name.rpartition("/")[2] in only]
    if not chosen:
        names = sorted({p.name.rpartition("/")[2] for p, _ in every})
        raise ConfigError("names no program of this run", setting="--only", value=only, remedy=f"of {', '.join(names)}")
    for i, (program, chip) in enumerate(chosen):
        with console.status(f"compiling {program.name} ({i + 1} of {len(chosen)})"):
            report = program.compile(chip, hlo)
        verdict = "fits" if report.fits else "does not fit"
        console.print(f"{program.name}: compiled in {report.compile_s:.0f} s, {verdict}")
        yield report


# ---- printed output -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """The findings about a run, and the slices they hold for."""

    resolved: ResolvedRecipe
    chip: Chip
    topology: str
    sampler_topology: str | None
    reports: list[ProgramReport]
    sampler: ResolvedRecipe | None = None
    """Settings of each sampler, if these are processes of their own."""

    @property
    def sampler_mesh(self) -> Mesh | None:
        """The mesh of the sampler, or of each."""
        return (self.sampler or self.resolved).sampler_mesh

    @functools.cached_property
    def transfer(self) -> Transfer | None:
        """The way of weights from the trainer's devices to the sampler's."""
        from rolljax.aot.transfer import Transfer
        from rolljax.run.memory import reshard

        way = reshard(self.resolved)
        return Transfer.of(way, self.chip, one_slice=self.sampler_topology is None) if way else None

    @functools.cached_property
    def push(self) -> Push | None:
        """The way of weights to samplers in other processes; of a model with adapters that of each push but the first,
        which takes the base, too."""
        import jax

        from rolljax.aot import chips
        from rolljax.aot.transfer import Push
        from rolljax.cluster.deltas import expected_bytes
        from rolljax.trainer.publish import stacked_weights

        if self.sampler is None or self.sampler_topology is None or self.sampler_mesh is None:
            return None
        model = self.resolved.model
        sent = model.abstract() if model.lora else stacked_weights(model, self.resolved.mesh, fsdp=True)[0]
        arrays = jax.tree.leaves(sent)
        full = sum(x.size * x.dtype.itemsize for x in arrays)
        delta = sum(expected_bytes(x.size, x.dtype.itemsize, CHANGED_FRAC) for x in arrays)
        sent_s = self.resolved.mesh.size * self.chip.dcn_bytes_s
        read_s = self.sampler_mesh.size * chips.chip(self.sampler_topology).dcn_bytes_s
        return Push.of(full, delta, CHANGED_FRAC, sent_s, read_s)

    @property
    def moves_s(self) -> float | None:
        """Seconds that weights travel between devices of trainer and sampler; None: they share their devices."""
        way = self.transfer or self.push
        return way.seconds if way else None

    def side(self, program: str) -> ResolvedRecipe:
        """Return the settings that a program was resolved with."""
        is_trainers = "/" in program or program == "cast"
        return self.resolved if is_trainers or self.sampler is None else self.sampler

    def step_s(self, phase: str, times: Mapping[str, float]) -> float:
        """Return the seconds of a step: on separate devices both sides of an asynchronous phase work at once."""
        ratio = next(p.async_ratio for p in self.resolved.recipe.phases if p.name == phase)
        if self.moves_s is None or not ratio:
            return sum(times.values())
        return max(times["rollout_s"], times["train_s"] + times["publish_s"])


def to_json(found: Plan) -> dict[str, Any]:
    """Return all results and their assumptions as a JSON value."""
    import jax

    resolved, chip, reports = found.resolved, found.chip, found.reports
    sampler_mesh = found.sampler_mesh
    steps = step_times(resolved, reports, found.moves_s)
    return {
        "topology": found.topology,
        "sampler_topology": found.sampler_topology,
        "mesh": {k: v for k, v in resolved.mesh.shape.items() if v > 1},
        "sampler_mesh": {k: v for k, v in sampler_mesh.shape.items() if v > 1} if sampler_mesh else None,
        "parameters": resolved.model.num_params(),
        "jax": jax.__version__,
        "chip": dataclasses.asdict(chip),
        "fits": all(r.fits for r in reports),
        "programs": [r.to_json() for r in reports],
        "transfer": dataclasses.asdict(found.transfer) if found.transfer else None,
        "push": dataclasses.asdict(found.push) if found.push else None,
        "steps": steps,
        "step_s": {phase: found.step_s(phase, times) for phase, times in steps.items()},
        "next": {r.program: next_settings(found.side(r.program), r) for r in reports if not r.fits},
        "timings": timings(found, steps),
    }


def timings(found: Plan, steps: Mapping[str, Mapping[str, float]]) -> dict[str, Any] | None:
    """Return the input of `simulate --timings` for the last phase that samples; None if one of its programs was not
    compiled.

    steps: of `step_times`.
    """
    from rolljax.simulation.planned import planned
    from rolljax.simulation.timings import to_json as timings_json

    if not steps:
        return None
    by_name = {r.program: r for r in found.reports if r.time}
    seconds = {name: r.time.step_s for name, r in by_name.items() if r.time}
    prefill = by_name.get("prefill")
    return timings_json(
        planned(
            found.resolved.recipe,
            list(steps.values())[-1],
            seconds["decode"],
            prefill_tok_s=seconds["prefill"] / prefill.tokens if prefill and prefill.tokens else 0.0,
            swap_s=None if found.moves_s is None else seconds.get("publish", 0.0),
        )
    )


def step_times(
    resolved: ResolvedRecipe, reports: list[ProgramReport], moves_s: float | None = None
) -> dict[str, dict[str, float]]:
    """Estimate the best seconds of the parts of a step, by phase: rollout, training, publish.

    moves_s: seconds that weights travel between the two programs of a publish, on separate devices; `async_ratio` then
    fills the slots with answers of later steps. Every answer counts at full length; prefill is not counted, as nothing
    is known of prompts. Phases that do not sample, and phases without a report for one of their programs, are left out.
    """
    from rolljax.cluster.placement import Remote

    seconds = {r.program: r.time.step_s for r in reports if r.time}
    recipe, found = resolved.recipe, {}
    placement = recipe.placement
    slots = recipe.sampler.slots * (placement.samplers if isinstance(placement, Remote) else 1)
    for phase in recipe.phases:
        critics = phase.algorithm.needs().critics
        times = {"update": phase.updates_per_step * phase.epochs} if phase.algorithm.trains_policy else {}
        if phase.algorithm.needs().trainer_logp:
            times["logprobs"] = phase.updates_per_step
        if critics:
            times["critics"] = phase.updates_per_step * critics.epochs
        publish = ["publish"] if moves_s is None else ["cast", "publish"]
        if isinstance(placement, Remote) and "publish" not in seconds:  # weights are used as they were fetched
            publish = ["cast"]
        wanted = {"decode", *publish, *(f"{phase.name}/{name}" for name in times)}
        if phase.algorithm.source != "sampler" or not wanted <= seconds.keys():
            continue
        ahead = 1 if moves_s is None else 1 + phase.async_ratio  # steps whose answers are under way at once
        waves = math.ceil(ahead * phase.prompts_per_step * phase.group_size / slots) / ahead
        answer = min(recipe.max_answer_tok * recipe.env.max_turns, recipe.sampler.max_context)
        found[phase.name] = {
            "rollout_s": waves * math.ceil(answer / recipe.sampler.steps_per_dispatch) * seconds["decode"],
            "train_s": sum(n * seconds[f"{phase.name}/{name}"] for name, n in times.items()),
            "publish_s": sum(seconds[name] for name in publish) + (moves_s or 0.0),
        }
    return found


def show(found: Plan) -> None:
    """Print the report on stdout."""
    from rich.console import Console

    resolved, chip, reports = found.resolved, found.chip, found.reports

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console = Console(highlight=False, soft_wrap=True, width=WIDTH)
    console.print(
        f"{describe_devices(found)}; {resolved.model.num_params() / 1e9:.2f} B parameters, {resolved.model.dtype}, "
        f"remat {resolved.model.remat}"
    )
    console.print(
        f"assumed of a device: {chip.bf16_flops / 1e12:.0f} TFLOP/s bf16, {chip.hbm_bytes_s / 1e9:.0f} GB/s HBM, "
        f"{chip.usable_hbm_gib} GiB usable, {chip.link_bytes_s / 1e9:.0f} GB/s per link and way ({chip.source})"
    )
    console.print(_overview(reports))
    if found.transfer:
        way = found.transfer
        console.print(
            f"a publish moves {way.gib:.2f} GiB in {way.parts} parts: {way.seconds:.2f} s at best ({way.link}); "
            "decoding continues meanwhile\n"
        )
    if found.push:
        console.print(describe_push(found.push) + "\n")
    for phase, t in step_times(resolved, reports, found.moves_s).items():
        console.print(
            f"a step of {phase} at best, every answer of full length: {found.step_s(phase, t):.1f} s (rollout "
            f"{t['rollout_s']:.1f}, training {t['train_s']:.1f}, publish {t['publish_s']:.1f})\n"
        )
    console.print(_memory(reports))
    for report in reports:
        if report.collectives and report.mfu is not None and report.program.endswith("update"):
            console.print(_collectives(report))
    for report in reports:
        if not report.fits:
            over = report.memory.total - report.memory.usable
            why = report.refused or f"{over:.2f} GiB more than a device has"
            console.print(f"[bold red]{report.program} does not fit[/]: {why}", markup=True)
            for setting in next_settings(found.side(report.program), report):
                console.print(f"  try {setting}", markup=False)


def describe_push(push: Push) -> str:
    """Return a line for the bytes and seconds of a push."""
    return (
        f"a push writes {push.gib:.2f} GiB: {push.write_s:.2f} s, then {push.read_s:.2f} s to be read by a sampler; "
        f"with {push.changed_frac:.0%} changed {push.delta_gib:.2f} GiB: {push.delta_write_s:.2f} s and "
        f"{push.delta_read_s:.2f} s (the hosts' network at its peak); training and decoding continue meanwhile"
    )


def describe_devices(found: Plan) -> str:
    """Return one line about the devices: their number, and the axes that they are split over."""
    from rolljax.cluster.placement import Remote

    mesh, sampler, placement = found.resolved.mesh, found.sampler_mesh, found.resolved.recipe.placement
    split = lambda m: ", ".join(f"{a} {n}" for a, n in m.shape.items() if n > 1) or "one device"  # noqa: E731
    if found.moves_s is not None and sampler:
        each = f" in each of {placement.samplers} samplers" if isinstance(placement, Remote) else ""
        own = f" of {found.sampler_topology}" if found.sampler_topology else ""
        train, sample = (
            f"{mesh.size} devices train ({split(mesh)})",
            f"{sampler.size}{own} sample ({split(sampler)}){each}",
        )
        return f"{found.topology}: {train}, {sample}"
    axes = split(mesh) + (f"; sampler {split(sampler)}" if sampler not in (None, mesh) else "")
    return f"{found.topology}: {mesh.size} devices ({axes})"


def _table(title: str, first: str, *columns: str) -> Any:
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.add_column(first)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _overview(reports: list[ProgramReport]) -> Any:
    table = _table(
        "time of one execution, at best",
        "program",
        *("compile s", "TFLOP", "HBM GiB", "sent GiB", "compute ms", "HBM ms", "chip ms", "ICI hidden", "exposed"),
        *("step ms", "tokens/s", "MFU"),
    )
    for r in reports:
        if r.time is None:
            table.add_row(r.program, f"{r.compile_s:.0f}", "refused")
            continue
        t, sent = r.time, sum(c.sent_gib for c in r.collectives)
        each = (t.compute_s, t.hbm_s, t.chip_s, t.hidden_ici_s, t.exposed_ici_s, t.step_s)
        table.add_row(
            r.program,
            f"{r.compile_s:.0f}",
            f"{r.flops / 1e12:.2f}",
            f"{r.hbm_gib:.1f}",
            f"{sent:.2f}",
            *(f"{1e3 * s:.1f}" for s in each),
            f"{r.tokens / t.step_s:,.0f}" if r.tokens else "",
            "" if r.mfu is None else f"{r.mfu:.1%}",
        )
    return table


def _memory(reports: list[ProgramReport]) -> Any:
    parts = list(dict.fromkeys(k for r in reports for k in (*r.memory.own, *r.memory.beside)))
    table = _table("GiB of one device (in brackets: other live arrays)", "program", *parts, "temporaries")
    for name in ("host", "in all", "usable", "fits"):
        table.add_column(name, justify="right")
    for r in reports:
        m = r.memory
        cells = [f"{m.own[p]:.2f}" if p in m.own else f"({m.beside[p]:.2f})" if p in m.beside else "" for p in parts]
        host = f"{m.host:.2f}" if m.host else ""
        verdict = "yes" if r.fits else "NO"
        table.add_row(
            r.program, *cells, f"{m.temporaries:.2f}", host, f"{m.total:.2f} = {m.total / m.usable:.0%}",
            f"{m.usable:.2f}", verdict
        )  # fmt: skip
    return table


def _collectives(report: ProgramReport, most: int = 12) -> Any:
    table = _table(
        f"collectives of {report.program}, of one device",
        "kind",
        "axes",
        "type",
        "times",
        "payload GiB",
        "sent GiB",
        "ms",
    )
    for c in report.collectives[:most]:
        kind = c.kind + (" (hidden)" if c.hidden else "")
        table.add_row(
            kind, " x ".join(c.axes), c.dtype, f"{c.times:,.0f}", f"{c.payload_gib:.3f}", f"{c.sent_gib:.3f}",
            f"{1e3 * c.seconds:.2f}"
        )  # fmt: skip
    return table


def next_settings(resolved: ResolvedRecipe, report: ProgramReport) -> list[str]:
    """Return the settings to change so that a program fits, the likeliest first."""
    from rolljax.run import memory

    found = report.memory
    sizes = {**found.beside, **found.own, "temporaries": found.temporaries}
    return memory.next_settings(resolved, report.program, sizes, found.usable, found.total - found.usable)


if __name__ == "__main__":
    sys.exit(main())
