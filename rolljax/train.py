"""Train: `python -m rolljax.train --gin FILE [--set 'name = value'] [--run_dir DIR] [--fresh] [--dry_run]`.

The same command continues a run that was stopped. Exit codes: 0 done, 2 config, 3 data or environment, 4 sampler,
5 trainer (not finite), 6 checkpoint, 7 a wait past its deadline, 75 stopped and saved: run it again to go on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import EXIT_PREEMPTED, CheckpointError

if TYPE_CHECKING:
    from rolljax.checkpoint import Progress
    from rolljax.config import Loaded
    from rolljax.model.decoder import Model
    from rolljax.recipe import Recipe
    from rolljax.rooms import Plan
    from rolljax.runfolder import RunFolder


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rolljax.train", description="Train by a recipe.")
    cli.add_config_arguments(parser, required=True)
    parser.add_argument("--run_dir", help="run folder (default: runs/ and the name of the last gin file)")
    parser.add_argument("--fresh", action="store_true", help="delete the run in that folder first")
    parser.add_argument("--dry_run", action="store_true", help="check everything, show what would run, and stop")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cli.quiet()
    config: list[Loaded[Recipe]] = []

    def run() -> int:
        from rolljax import distributed, frozen
        from rolljax.rooms import plan as make_plan

        distributed.require_one(distributed.start())
        config.append(cli.load_recipe(args.gin, args.set))
        plan = make_plan(config[0].value)
        frozen.check(plan)
        if args.dry_run:
            print(describe(plan))
            return 0
        folder = args.run_dir or Path("runs") / Path(args.gin[-1]).stem
        return train(plan, config[0], folder, fresh=args.fresh)

    return cli.run_verb(run, lambda: config[0] if config else None)


def train(plan: Plan, config: Loaded[Recipe], path: str | Path, *, fresh: bool) -> int:
    """Run, continue or decline to repeat the run in folder `path`; returns the exit code."""
    from rolljax.runfolder import RunFolder

    folder = RunFolder(path)
    with folder.lock():
        folder.prepare(config, fresh=fresh)
        return _train(plan, folder)


def _train(plan: Plan, folder: RunFolder) -> int:
    from rolljax import loop
    from rolljax.buffer import Stopped
    from rolljax.model import hf
    from rolljax.progress import Console
    from rolljax.rooms import frozen_base, plain_params
    from rolljax.trainer.state import fingerprint

    console, start = Console(), time.perf_counter()
    checkpoints = folder.checkpoints()
    progress = checkpoints.progress()
    checkpoints.close()
    if progress and progress.finished:
        console.say(f"{folder.path} is complete already ({progress.total_steps} steps); --fresh starts over")
        return 0
    if progress:
        console.say(f"continuing {folder.path} after step {progress.total_steps}")
    with stop_on_signal() as should_stop:
        try:
            state, progress = loop.train(plan, folder, console, should_stop)
        except Stopped:
            checkpoints = folder.checkpoints()
            progress = checkpoints.progress()
            checkpoints.close()
            assert progress is not None
            finish(folder, progress, "stopped by signal")
            console.say("stopped and saved; the same command goes on from here")
            return EXIT_PREEMPTED
        except Exception as e:
            checkpoints = folder.checkpoints()
            folder.write_summary(checkpoints.progress() or loop.Progress(), f"{type(e).__name__}: {e}")
            raise
    if not progress.finished:
        raise CheckpointError(f"the run ended after {progress.total_steps} steps without a reason: this is a bug")
    whole = plan.model.whole(state.params, frozen_base(plan))
    source = plan.recipe.model if isinstance(plan.recipe.model, str) else None
    hf.save(folder.path / "hf", plan.model.plain, plain_params(plan, whole), plan.chat.tokenizer, source=source)
    finish(folder, progress, "all phases done", fingerprint(state))
    console.say(
        f"done in {time.perf_counter() - start:.0f} s: {folder.path}/  curves.png  summary.json  metrics.jsonl  "
        "rollouts/  hf/ (Hugging Face)  ckpt/ (Orbax)"
    )
    return 0


def finish(folder: RunFolder, progress: Progress, reason: str, state_sha256: str = "") -> None:
    """Write the summary and draw the curves."""
    from rolljax.curves import draw

    folder.write_summary(progress, reason, state_sha256)
    draw(folder.rows(), progress.heldout_reward, folder.path / "curves.png")


class stop_on_signal:
    """While inside, SIGTERM and a first Ctrl-C ask the run to stop; a second Ctrl-C interrupts at once."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Callable[[], bool]:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._handle)
        return self._event.is_set

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: Any) -> None:
        if self._event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._event.set()


def describe_adapters(model: Model) -> str:
    """One line: which maps have adapters, and how much that is."""
    import jax

    lora = model.lora
    assert lora is not None
    trained = sum(x.size for x in jax.tree.leaves(model.abstract()))
    maps = ", ".join(lora.maps(model.plain.axes()))
    base = "int8" if lora.int8_base else model.dtype
    return f"adapters  {trained:,} parameters: rank {lora.rank} beside {maps}; base weights in {base}"


def describe(plan: Plan) -> str:
    """What would run: mesh, model, batch geometry, and the first task as the model will see it."""
    from rolljax.trainer.mesh import MESH_AXES

    r, m = plan.recipe, plan.model
    axes = ", ".join(f"{a}={plan.mesh.shape[a]}" for a in MESH_AXES)
    lines = [
        f"mesh      {axes} ({plan.mesh.devices.flat[0].device_kind})",
        f"model     {m.num_params():,} parameters, {m.cfg.num_layers} layers, {m.dtype}"
        + (f", from {r.model}" if isinstance(r.model, str) else ", random weights"),
        *([describe_adapters(m)] if m.lora else []),
        f"sampler   {r.sampler.slots} slots, context {r.sampler.max_context}, "
        f"{r.sampler.num_pages} pages of {r.sampler.page_size} tokens",
        f"tasks     {r.env.name}, up to {r.env.max_turns} turn(s), prompts up to {plan.longest_prompt_tok} tokens, "
        f"{len(plan.heldout)} held out",
    ]
    for p in r.phases:
        shape = p.pack_shape(r.sampler.max_context, r.max_answer_tok, r.env.max_turns)
        lines.append(
            f"phase     {p.name}: {type(p.algorithm).__name__}, {p.steps} steps of {p.prompts_per_step} x "
            f"{p.group_size} trajectories, {p.updates_per_step * p.epochs} update(s) of up to {shape.num_micro} x "
            f"{shape.micro_rows} rows of {shape.row_len} tokens"
        )
    lines += [f"warning   {text}" for text in r.warnings()]
    text = plan.chat.tokenizer.decode(plan.chat.prompt_ids(plan.first_prompt))
    return "\n".join([*lines, "first task as the model sees it:", *(f"  | {line}" for line in text.split("\n"))])


if __name__ == "__main__":
    sys.exit(main())
