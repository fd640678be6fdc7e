"""Train: `python -m rolljax.train --gin FILE [--set 'name = value'] [--run_dir DIR] [--fresh] [--dry_run]`.

The same command continues a run that was stopped; on several hosts it is started on each of them (docs/sharding.md).
Exit codes: 0 done, 2 config, 3 data, environment or a lost process, 4 sampler, 5 trainer (not finite), 6 checkpoint,
7 a wait past its deadline, 74 the run folder cannot be written, 75 stopped and saved: run it again to go on,
130 interrupted by a second Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, CheckpointError, StorageError

if TYPE_CHECKING:
    from rolljax.cluster.lockstep import Alone, Follower, Leader
    from rolljax.config.loader import Loaded
    from rolljax.model.decoder import Model
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Progress
    from rolljax.run.folder import RunFolder
    from rolljax.run.preflight import Preflight


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rolljax.train", description="Train by a recipe.")
    cli.add_config_arguments(parser, required=True)
    parser.add_argument("--run_dir", help="run folder (default: runs/ and the name of the last gin file)")
    parser.add_argument("--fresh", action="store_true", help="delete the run in that folder first")
    parser.add_argument("--dry_run", action="store_true", help="check everything, show what would run, and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args, began = parse(argv), time.perf_counter()
    cli.quiet()
    config: list[Loaded[Recipe]] = []
    joined: list[Alone | Leader | Follower] = []

    def run() -> int:
        from rolljax.cluster import distributed, lockstep

        processes = distributed.start()
        if args.dry_run:
            distributed.require_one(processes)
        joined.append(lockstep.join(processes))
        with joined[0].guard():
            config.append(cli.load_recipe(args.gin, args.set))
            return one_process(args, config[0], joined[0], began)

    code = 1
    try:
        code = cli.run_verb(run, lambda: config[0] if config else None)
    finally:
        for team in joined:
            team.end(code)
    return code


def one_process(args: argparse.Namespace, config: Loaded[Recipe], team: Alone | Leader | Follower, began: float) -> int:
    """What this process, which set out at `began`, does of a run, or all there is to do; returns the exit code."""
    from rolljax.cluster.lockstep import Follower
    from rolljax.run import preflight, reference_policies, rehearsal

    folder = args.run_dir or Path("runs") / Path(args.gin[-1]).stem
    if isinstance(team, Follower):
        from rolljax.run.follow import follow

        resolved = preflight.resolve(config.value)
        reference_policies.check(resolved)
        with stop_on_signal(team.ask_to_stop):
            return follow(resolved, config, folder, team)
    plan = preflight.check(config.value)
    checked = rehearsal.check(plan)
    if args.dry_run:
        print(describe(plan, checked))
        return 0
    return train(plan, config, folder, fresh=args.fresh, team=team, began=began)


def train(
    plan: Preflight,
    config: Loaded[Recipe],
    path: str | Path,
    *,
    fresh: bool,
    team: Alone | Leader,
    began: float | None = None,
) -> int:
    """Run, continue or decline to repeat the run in folder `path`; returns the exit code. `began`: see `loop.train`."""
    from rolljax.run.folder import RunFolder

    folder = RunFolder(path)
    with folder.lock():
        notes = folder.prepare(config, fresh=fresh)
        mark = secrets.token_hex()
        folder.mark(mark)
        team.greet(mark)
        return _train(plan, folder, team, notes, began or time.perf_counter())


def _train(plan: Preflight, folder: RunFolder, team: Alone | Leader, notes: list[str], began: float) -> int:
    from rolljax import loop
    from rolljax.run.console import Console
    from rolljax.run.folder import DONE
    from rolljax.threads.event_loop import Stopped

    console = Console()
    for text in notes:
        console.say(text)
    saved = folder.latest(console.say)
    if saved:
        has_more = not saved.progress.finished or loop.has_more(saved.progress, plan.recipe.phases)
        if not has_more and folder.is_complete(saved.progress):
            console.say(complete_line(folder, saved.progress, plan.recipe))
            return 0
        console.say(continuing_line(folder, saved.progress, has_more))
    with stop_on_signal() as is_told:
        try:
            with team.guard():
                should_stop = lambda: is_told() or team.asked_to_stop()  # noqa: E731
                state, progress = loop.train(plan, folder, console, should_stop, team, began)
        except Stopped:
            saved = folder.latest(console.say)
            assert saved is not None
            folder.finish(saved.progress, "stopped by signal")
            console.say("stopped and saved; the same command goes on from here")
            return EXIT_PREEMPTED
        except Exception as e:
            with contextlib.suppress(StorageError, CheckpointError):  # which the error may come from
                saved = folder.latest(console.say)
                folder.write_summary(saved.progress if saved else loop.Progress(), f"{type(e).__name__}: {e}")
            raise
    if not progress.finished:
        raise CheckpointError(f"the run ended after {progress.total_steps} steps without a reason: this is a bug")
    with loop.timed(progress.other_wall_s, "result"), team.turn("result"):
        state_sha256 = loop.result(plan, folder, state, plan.chat.tokenizer)
    folder.finish(progress, DONE, state_sha256, plan.recipe.keep_rollouts)
    console.say(
        f"done in {time.perf_counter() - began:.0f} s: {folder.path}/  curves.png  summary.json  metrics.jsonl  "
        "rollouts/  hf/ (Hugging Face)  ckpt/ (Orbax)"
    )
    return 0


def complete_line(folder: RunFolder, progress: Progress, recipe: Recipe) -> str:
    """One line for a run with nothing left to do."""
    phase = recipe.phases[progress.phase]
    line = f"{folder.path} is complete already ({progress.total_steps} steps); "
    if progress.step < phase.steps:
        line += f"{phase.name} ended early ({progress.phase_end[phase.name]}), so more steps have no effect; "
    return line + "more steps or another phase go on, --fresh starts over"


def continuing_line(folder: RunFolder, progress: Progress, has_more: bool) -> str:
    """One line for a run that goes on."""
    line = f"continuing {folder.path} after step {progress.total_steps}"
    if not has_more:
        return f"{line}: training is done, its results are not all there"
    again = sum(row["step"] > progress.total_steps for row in folder.rows())
    return f"{line}; {again} step(s) that were done after it are made again" if again else line


class stop_on_signal:
    """While inside, SIGTERM and a first Ctrl-C ask the run to stop; a second Ctrl-C ends the process at once: whatever
    it is doing, what was committed stays (`durable`).

    Args:
      tell: is called when they do.
    """

    def __init__(self, tell: Callable[[], None] = lambda: None) -> None:
        self._event, self._tell = threading.Event(), tell
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Callable[[], bool]:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self._event.is_set

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # one that Python did not set: `jax.distributed` has its own
                signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a live line hides
            print(f"{show_cursor}interrupted; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_INTERRUPTED)
        self._event.set()
        self._tell()


def describe_adapters(model: Model) -> str:
    """One line: which maps have adapters, and how much that is."""
    import jax

    lora = model.lora
    assert lora is not None
    trained = sum(x.size for x in jax.tree.leaves(model.abstract()))
    maps = ", ".join(lora.maps(model.plain.axes()))
    base = "int8" if lora.int8_base else model.dtype
    return f"adapters  {trained:,} parameters: rank {lora.rank} beside {maps}; base weights in {base}"


def describe(plan: Preflight, checked: Sequence[str] = ()) -> str:
    """What would run: mesh, model, batch geometry, what was `checked`, and the first task as the model will see it."""
    from rolljax.trainer.mesh import MESH_AXES

    r, m = plan.recipe, plan.model
    split = lambda mesh: ", ".join(f"{a}={mesh.shape[a]}" for a in MESH_AXES)  # noqa: E731
    lines = [
        f"mesh      {split(plan.mesh)} ({plan.mesh.devices.flat[0].device_kind})",
        *([f"sampler's {split(plan.sampler_mesh)}"] if plan.sampler_mesh is not plan.mesh else []),
        f"model     {m.num_params():,} parameters, {m.cfg.num_layers} layers, {m.dtype}"
        + (f", from {r.model}" if isinstance(r.model, str) else ", random weights"),
        *([describe_adapters(m)] if m.lora else []),
        f"sampler   {r.sampler.slots} slots, context {r.sampler.max_context}, "
        f"{r.sampler.num_pages} pages of {r.sampler.page_size} tokens",
        f"tasks     {r.env.name}, up to {r.env.max_turns} turn(s), prompts up to {plan.longest_prompt_tok} tokens, "
        f"{len(plan.heldout)} held out",
    ]
    for p in r.phases:
        shape = r.pack_shape(p)
        lines.append(
            f"phase     {p.name}: {type(p.algorithm).__name__}, {p.steps} steps of {p.prompts_per_step} x "
            f"{p.group_size} trajectories, {p.updates_per_step * p.epochs} update(s) of up to {shape.num_micro} x "
            f"{shape.micro_rows} rows of {shape.row_len} tokens"
        )
    lines += [f"checked   {text}" for text in checked]
    lines += [f"warning   {text}" for text in r.warnings()]
    text = plan.chat.tokenizer.decode(plan.chat.prompt_ids(plan.first_prompt))
    return "\n".join([*lines, "first task as the model sees it:", *(f"  | {line}" for line in text.split("\n"))])


if __name__ == "__main__":
    sys.exit(main())
