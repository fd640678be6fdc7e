"""Train: `python -m rolljax.train --gin FILE [--set 'name = value'] [--run_dir DIR] [--replay RUN] [--fresh]
[--restarts N] [--dry_run]`.

The same command continues a run that was stopped; on several hosts it is started on each of them (docs/scaling.md).
With `--restarts N` it also restarts a run that has crashed (docs/runs.md).
Exit codes: 0 done, 2 config, 3 data, environment or a lost process, 4 sampler, 5 trainer (not finite), 6 checkpoint,
7 a wait past its deadline, 8 out of memory, 74 the run folder cannot be written, 75 stopped and saved: run it again to
continue, 130 interrupted by a second Ctrl-C. With `--restarts` also 128 + N: killed by signal N, and not restarted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rolljax import cli
from rolljax.commands import restarts
from rolljax.concurrency import signals
from rolljax.errors import EXIT_INTERRUPTED, EXIT_PREEMPTED, CheckpointError, StorageError

if TYPE_CHECKING:
    from rolljax.concurrency.lockstep import Follower, Leader, SingleProcess
    from rolljax.config.loader import Loaded
    from rolljax.console.progress import Console
    from rolljax.model.decoder import Model
    from rolljax.recipe import Recipe
    from rolljax.run.folder import RunFolder
    from rolljax.run.memory import Account
    from rolljax.run.preflight import Preflight
    from rolljax.run.progress import RunProgress
    from rolljax.run.trainer import Trainer


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments of the command line; `--help` explains each. None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.train", description="Train by a recipe.")
    cli.add_config_arguments(parser, required=True)
    parser.add_argument("--run_dir", help="run folder (default: runs/ and the name of the last gin file)")
    parser.add_argument(
        "--replay", metavar="RUN", help="train the steps of the run in that folder, from its rollouts, then continue"
    )
    parser.add_argument("--fresh", action="store_true", help="delete the run in that folder first")
    parser.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="restart the run up to N times after a crash, a hang or a loss",
    )
    parser.add_argument("--dry_run", action="store_true", help="check everything, show what would run, and stop")
    parser.add_argument("--quiet", action="store_true", help="say nothing but notices and errors")
    parser.add_argument("--no_color", action="store_true", help="no colours (also: the variable NO_COLOR)")
    args = parser.parse_args(argv)
    if args.restarts < 0:
        parser.error("argument --restarts: must not be negative")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args, began = parse(argv), time.perf_counter()
    run_dir = Path(args.run_dir or Path("runs") / Path(args.gin[-1]).stem)
    if args.restarts > 0:
        given = sys.argv[1:] if argv is None else argv
        return cli.run_verb(lambda: restarts.supervise(given, run_dir, args.restarts))
    after = os.environ.pop(restarts.AFTER, "")
    cli.quiet()
    config: list[Loaded[Recipe]] = []
    joined: list[SingleProcess | Leader | Follower] = []

    def run() -> int:
        from rolljax.concurrency import distributed, lockstep
        from rolljax.console.progress import Console

        processes = distributed.start()
        if args.dry_run:
            distributed.require_one(processes)
        joined.append(lockstep.join(processes))
        with joined[0].guard():
            config.append(cli.load_recipe(args.gin, args.set))
            return train(
                config[0],
                run_dir,
                Console(quiet=args.quiet, color=not args.no_color),
                began,
                joined[0],
                replay_of=args.replay,
                fresh=args.fresh,
                dry_run=args.dry_run,
                after=after,
            )

    code = 1
    try:
        told = "stopped by SIGTERM; the same command continues from the last checkpoint, or starts the run"
        code = cli.run_verb(run, lambda: config[0] if config else None, at_sigterm=(EXIT_PREEMPTED, told))
    finally:
        for team in joined:
            team.end(code)
    return code


def train(
    config: Loaded[Recipe],
    run_dir: str | Path,
    console: Console,
    began: float,
    team: SingleProcess | Leader | Follower,
    *,
    replay_of: str | Path | None = None,
    fresh: bool = False,
    dry_run: bool = False,
    told_to_stop: Callable[[], bool] | None = None,
    after: str = "",
) -> int:
    """Start or continue a run, or do nothing if the run is complete; return the exit code.

    Args:
      console: shows progress. began: see `loop.train`. team: the processes of the run.
      replay_of: run folder whose rollouts are trained first. fresh: delete an earlier run in `run_dir` first.
      dry_run: check everything, print what would run, and return.
      told_to_stop: polled during the run; True saves and ends the run. None: SIGTERM and Ctrl-C end it.
      after: how the process before ended, if this one replaces it.
    """
    from rolljax import loop
    from rolljax.concurrency.event_loop import Stopped
    from rolljax.concurrency.lockstep import Follower
    from rolljax.run import memory, preflight, replay, shape_checks
    from rolljax.run.folder import RunFolder

    folder = RunFolder(run_dir)
    if isinstance(team, Follower):
        return follow(config, folder, team)
    checked = preflight.check(config.value)
    lines = shape_checks.check(checked)
    log = replay.read_log(replay_of, config, folder) if replay_of else None
    account = memory.account(checked)
    if dry_run:
        account = account.by_compiler()
        print(describe(checked, account, [*lines, *([log.describe()] if log else [])]))
    account.check()
    if dry_run:
        return 0
    with folder.lock():
        for text in folder.prepare(config, fresh=fresh):
            console.say(text)
        folder.keep_template(checked.chat.tokenizer.chat_template if checked.chat.replaced else None)
        team.handshake(folder.mark())
        if is_complete(folder, checked.recipe, console):
            return 0
        if log:
            console.say(log.check_continues(folder))
        folder.begin(fresh=fresh, after=after)
        account = account.by_compiler()
        account.check()
        stopping = contextlib.nullcontext(told_to_stop) if told_to_stop else signals.stop_requests(end_at_once)
        with stopping as is_told:
            try:
                with team.guard(), memory.explained(account):
                    should_stop = team.should_stop(is_told)
                    trainer, progress = loop.train(checked, folder, console, should_stop, team, began, log)
            except Stopped:
                return stopped(folder, console)
            except Exception as e:  # border: the summary records any error that ended the run
                failed(folder, console, e)
                raise
        return finish(folder, console, checked.recipe, trainer, progress, began)


def follow(config: Loaded[Recipe], folder: RunFolder, team: Follower) -> int:
    """Follow the leader of a run: repeat its calls on the devices of this process; return the exit code.

    Raises:
      ConfigError: settings or run folder differ from the leader's. InfraError: the leader is lost.
    """
    from rolljax.run import preflight, reference_policies
    from rolljax.run.runtime import follow_sampler
    from rolljax.run.trainer import LOCKSTEP_CALLS, Trainer

    resolved = preflight.resolve(config.value)
    reference_policies.check(resolved)
    trainer = team.share("trainer", Trainer(resolved, folder), LOCKSTEP_CALLS)
    follow_sampler(resolved, trainer.weights, folder.path, team)
    with signals.stop_requests(end_at_once, tell=team.ask_to_stop):
        team.serve(lambda mark: folder.check_shared(config, mark))
    return team.code


def is_complete(folder: RunFolder, recipe: Recipe, console: Console) -> bool:
    """Return whether a run folder is complete; print that, or the step from which the run continues."""
    saved = folder.latest(console.say)
    if saved is None:
        return False
    has_more = not saved.progress.finished or saved.progress.has_more(recipe.phases)
    if not has_more and folder.is_complete(saved.progress):
        console.say(complete_line(folder, saved.progress, recipe))
        return True
    console.say(continuing_line(folder, saved.progress, has_more))
    return False


def stopped(folder: RunFolder, console: Console) -> int:
    """Finish a run that has saved and stops on request; return the exit code."""
    from rolljax.run.progress import RunProgress

    if saved := folder.latest(console.say):
        folder.finish(saved.progress, "stopped by signal")
        console.say("stopped and saved; the same command continues from here")
    else:
        folder.write_summary(RunProgress(), "stopped by signal")
        console.say("stopped before its first step; the same command begins it again")
    return EXIT_PREEMPTED


def failed(folder: RunFolder, console: Console, error: Exception) -> None:
    """Write the error that ended a run into its summary, unless the run folder itself cannot be read or written."""
    from rolljax.run.progress import RunProgress

    with contextlib.suppress(StorageError, CheckpointError):
        saved = folder.latest(console.say)
        folder.write_summary(saved.progress if saved else RunProgress(), f"{type(error).__name__}: {error}")


def finish(
    folder: RunFolder, console: Console, recipe: Recipe, trainer: Trainer, progress: RunProgress, began: float
) -> int:
    """Write the results at the end of a run and show its summary; return the exit code."""
    from rolljax.run.folder import DONE
    from rolljax.run.step_metrics import timed
    from rolljax.run.summary import summary_lines

    if not progress.finished:
        raise CheckpointError(f"the run ended after {progress.total_steps} steps without a reason: this is a bug")
    with timed(progress.other_wall_s, "result"):
        state_sha256 = trainer.result()
    folder.finish(progress, DONE, state_sha256, recipe.keep_rollouts)
    for line in summary_lines(folder):
        console.say(line)
    console.say(
        f"done in {time.perf_counter() - began:.0f} s: {folder.path}/  curves.png  summary.json  metrics.jsonl  "
        "rollouts/  hf/ (Hugging Face)  ckpt/ (Orbax)"
    )
    return 0


def complete_line(folder: RunFolder, progress: RunProgress, recipe: Recipe) -> str:
    """Return one line for a run with nothing left to do."""
    phase = recipe.phases[progress.phase]
    line = f"{folder.path} is complete already ({progress.total_steps} steps); "
    if progress.step < phase.steps:
        line += f"{phase.name} ended early ({progress.phase_end[phase.name]}), so more steps have no effect; "
    return line + "more steps or another phase continue it, --fresh starts over"


def continuing_line(folder: RunFolder, progress: RunProgress, has_more: bool) -> str:
    """Return one line for a run that continues."""
    line = f"continuing {folder.path} after step {progress.total_steps}"
    if not has_more:
        return f"{line}: training is done, its results are not all there"
    again = sum(row["step"] > progress.total_steps for row in folder.rows())
    return f"{line}; {again} step(s) that were done after it are made again" if again else line


def end_at_once() -> NoReturn:
    """End the process immediately. Committed files remain intact (`durable`)."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # which a live line hides
    print(f"{show_cursor}interrupted; the same command continues from the last checkpoint", file=sys.stderr)
    sys.stderr.flush()
    os._exit(EXIT_INTERRUPTED)


def describe_adapters(model: Model) -> str:
    """Return one line with the adapted maps and the number of their parameters."""
    import jax

    lora = model.lora
    assert lora is not None
    trained = sum(x.size for x in jax.tree.leaves(model.abstract()))
    maps = ", ".join(lora.maps(model.plain.axes()))
    base = "int8" if lora.int8_base else model.dtype
    return f"adapters  {trained:,} parameters: rank {lora.rank} on {maps}; base weights in {base}"


def describe_split(checked: Preflight) -> list[str]:
    """Return one line, if trainer and sampler share no devices, with the devices of each and the transfer between
    them."""
    import jax

    from rolljax.cluster import placement, ray_launcher
    from rolljax.trainer.publish import Reshard, share_devices

    mesh, sampler = checked.mesh, checked.sampler_mesh
    if sampler is None:
        remote = checked.recipe.placement
        assert isinstance(remote, placement.Remote)
        lines = ray_launcher.describe(remote)
        return [f"samplers  processes of their own: {remote}", *(f"ray       {line}" for line in lines)]
    if share_devices(mesh, sampler):
        return []
    train, sample = (f"{m.devices.flat[0].id} to {m.devices.flat[-1].id}" for m in (mesh, sampler))
    way, idle = Reshard(mesh, checked.model, sampler), jax.device_count() - mesh.size - sampler.size
    line = f"split     devices {train} train, {sample} sample; a publish moves {way.moved_bytes / 2**20:,.1f} MiB"
    return [line + f"; {idle} devices are not used" * bool(idle)]


def described_template(recipe: Recipe) -> str:
    """Return the source of the chat template that replaces the one of the model's folder."""
    if recipe.chat_template:
        return recipe.chat_template
    return "the training template of the folder's own, which keeps earlier turns (docs/my_model.md, Chat templates)"


def describe(checked: Preflight, account: Account, lines_of_checks: Sequence[str] = ()) -> str:
    """Return a description of the run: mesh, model, batch geometry, memory, checks, warnings, and the first task as the
    model sees it."""
    from rolljax.trainer.mesh import MESH_AXES

    r, m, sampler_mesh = checked.recipe, checked.model, checked.sampler_mesh
    split = lambda mesh: ", ".join(f"{a}={mesh.shape[a]}" for a in MESH_AXES)  # noqa: E731
    lines = [
        f"mesh      {split(checked.mesh)} ({checked.mesh.devices.flat[0].device_kind})",
        *(
            [f"sampler's {split(sampler_mesh)}"]
            if sampler_mesh is not None and sampler_mesh is not checked.mesh
            else []
        ),
        *describe_split(checked),
        f"model     {m.num_params():,} parameters, {m.cfg.num_layers} layers, {m.dtype}"
        + (f", from {r.model}" if isinstance(r.model, str) else ", random weights"),
        *([describe_adapters(m)] if m.lora else []),
        *([f"template  {described_template(r)}"] if checked.chat.replaced else []),
        f"sampler   {r.sampler.slots} slots, context {r.sampler.max_context}, "
        f"{r.sampler.num_pages} pages of {r.sampler.page_size} tokens",
        f"tasks     {r.env.name}, up to {r.env.max_turns} turn(s), prompts up to {checked.longest_prompt_tok} tokens, "
        f"{len(checked.heldout)} held out",
        *([f"columns   {taken}"] if (taken := r.env.columns_taken()) else []),
    ]
    for p in r.phases:
        shape = r.pack_shape(p)
        lines.append(
            f"phase     {p.name}: {type(p.algorithm).__name__}, {p.steps} steps of {p.prompts_per_step} x "
            f"{p.group_size} trajectories, {p.updates_per_step * p.epochs} update(s) of up to {shape.num_micro} x "
            f"{shape.micro_rows} rows of {shape.row_len} tokens"
        )
    lines += [f"memory    {text}" for text in account.lines()]
    lines += [f"checked   {text}" for text in lines_of_checks]
    lines += [f"warning   {text}" for text in (*r.warnings(), *checked.warnings)]
    text = checked.chat.tokenizer.decode(checked.chat.prompt_ids(checked.first_prompt))
    return "\n".join([*lines, "first task as the model sees it:", *(f"  | {line}" for line in text.split("\n"))])


if __name__ == "__main__":
    sys.exit(main())
