"""Export: `python -m rolljax.export --run RUN [--step N] | --model HF_DIR  --to DIR` writes a Hugging Face folder.

`transformers` loads it and computes the same logits. Adapters that a run trained are added to its weights; `--adapter`
writes them alone, as a folder for PEFT. `--step N` takes a checkpoint that was kept, `--step best` the one of the
highest held-out reward, `--average 100,150,200` the mean of several. A run's folder gets a model card. `--model` reads
a folder and writes it again. Folders of a model with images are read for their text part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError
from rolljax.storage import durable

if TYPE_CHECKING:
    from rolljax.model.decoder import Dtype, Params
    from rolljax.recipe import Recipe
    from rolljax.run.checkpoint import Saved, Step
    from rolljax.run.preflight import ResolvedRecipe

DTYPES = ("float32", "bfloat16")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the arguments of the command line; `--help` explains each. None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.export", description="Write a Hugging Face folder.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its newest checkpoint")
    what.add_argument("--model", help="local Hugging Face folder")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", help="of a kept checkpoint, or 'best': of the highest held-out reward")
    which.add_argument("--average", metavar="N,N,...", help="mean of the weights of these kept steps")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write; must be new or empty")
    parser.add_argument("--adapter", action="store_true", help="of a run with adapters: these alone, for PEFT")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: float32)")
    parser.add_argument("--max_shard_gb", type=float, help="10^9 bytes of a file of weights, at most (default: 5)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        print(
            export(
                args.to,
                run=args.run,
                model=args.model,
                step=cli.read_step(args.step),
                average=read_steps(args.average),
                adapter=args.adapter,
                dtype=args.dtype,
                max_shard_gb=args.max_shard_gb,
            )
        )
        return 0

    return cli.run_verb(run)


def read_steps(text: str | None) -> tuple[int, ...]:
    """Parse `--average` into steps.

    Raises:
      ConfigError: the text is not whole numbers with commas.
    """
    try:
        return tuple(int(step) for step in text.split(",")) if text is not None else ()
    except ValueError:
        raise ConfigError(
            "is not whole numbers with commas", setting="--average", value=text, remedy="--average 100,150,200"
        ) from None


def export(
    to: str | Path,
    *,
    run: str | Path | None = None,
    model: str | Path | None = None,
    step: Step | None = None,
    average: Sequence[int] = (),
    adapter: bool = False,
    dtype: Dtype | None = None,
    max_shard_gb: float | None = None,
    recipe: Recipe | None = None,
) -> Path:
    """Write a new or empty folder in Hugging Face's layout, all of it or nothing.

    Args:
      run, model: the run folder or the Hugging Face folder to read; give exactly one.
      step: of a kept checkpoint, or `best`; None: the newest. average: steps whose weights are averaged instead: the
        mean is taken in float64 and rounded to float32 once.
      adapter: write a run's adapters alone, for PEFT. dtype: of the weights that are written (None: float32).
      max_shard_gb: largest size of a file of weights, in units of 10^9 bytes. recipe: of the run; None: the settings of
        the policy that the run folder records, which need neither environment nor reward.

    Raises:
      ConfigError: the arguments contradict each other, or the step is not kept. CheckpointError: the source cannot be
        read. StorageError: the folder cannot be written.
    """
    place = Path(to)
    if (run is None) == (model is None):
        raise ConfigError("is needed, not both or none", setting="--run or --model", remedy="name one of them")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError("is not a new or empty folder", setting="--to", value=str(to), remedy="name another folder")
    how = read_format(dtype, max_shard_gb)
    if adapter and how:
        raise ConfigError(
            "is written in float32, as one file", setting="--adapter", remedy="leave out --dtype and --max_shard_gb"
        )
    with durable.folder(place) as folder:
        if model is not None:
            for name, given in (("--adapter", adapter), ("--step", step is not None), ("--average", bool(average))):
                if given:
                    raise ConfigError("is for runs", setting=name, remedy="leave it out, or name the --run")
            rewrite(folder, Path(model), how)
        elif run is not None:
            export_run(folder, run, step, average, adapter, how, recipe)
    return place


def read_format(dtype: Dtype | None, max_shard_gb: float | None) -> dict[str, Any]:
    """Return the format of weights, as arguments of `hf.save`."""
    how: dict[str, Any] = {}
    if max_shard_gb is not None:
        if max_shard_gb <= 0:
            raise ConfigError("must be above 0", setting="--max_shard_gb", value=max_shard_gb)
        how["max_shard_bytes"] = int(max_shard_gb * 10**9)
    if dtype is not None:
        if dtype not in DTYPES:
            raise ConfigError(f"is not one of {', '.join(DTYPES)}", setting="--dtype", value=dtype)
        how["dtype"] = dtype
    return how


def rewrite(to: Path, folder: Path, how: dict[str, Any]) -> None:
    """Read a Hugging Face folder and write it again."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from rolljax.model import hf
    from rolljax.model.decoder import Model
    from rolljax.model.tokenizer import load_tokenizer
    from rolljax.trainer.mesh import available_devices

    model, tokenizer = Model(hf.read_config(folder)), load_tokenizer(folder)
    here = SingleDeviceSharding(available_devices()[0])
    params = hf.load(folder, model, jax.tree.map(lambda _: here, model.abstract()))
    hf.save(to, model, params, tokenizer, source=folder, **how)


def export_run(
    to: Path,
    run: str | Path,
    step: Step | None,
    average: Sequence[int],
    adapter: bool,
    how: dict[str, Any],
    recipe: Recipe | None,
) -> None:
    """Write the policy of a run, with its card."""
    from rolljax.model import hf
    from rolljax.run.initial_weights import plain_params
    from rolljax.run.policy import policy_recipe
    from rolljax.run.preflight import load_chat, resolve
    from rolljax.run.trained_weights import averaged_params, trained_checkpoint

    resolved = resolve(recipe or policy_recipe(run))
    base = resolved.recipe.model
    if adapter:
        write_adapter(to, run, resolved, step, average)
        return
    params: Params
    if average:
        params, saved = averaged_params(resolved, run, average)
        of = f"The mean of the weights after steps {', '.join(map(str, average))}."
    else:
        trained, saved = trained_checkpoint(resolved, run, step)
        params, of = plain_params(resolved, trained), f"The weights after step {saved.progress.total_steps}."
    source = base if isinstance(base, str) else None
    hf.save(to, resolved.model.plain, params, load_chat(resolved, run).tokenizer, source=source, **how)
    write_card(to, run, saved, of)


def write_card(to: Path, run: str | Path, saved: Saved, of: str) -> None:
    """Write the model card of a checkpoint. of: which weights they are, a sentence."""
    from rolljax.run.folder import RunFolder
    from rolljax.storage import model_card

    folder, progress = RunFolder(run), saved.progress
    rows = [row for row in folder.rows() if row["step"] <= progress.total_steps]
    model_card.write(to, folder.path, progress.heldout_reward, rows, of)


def write_adapter(
    to: Path, run: str | Path, resolved: ResolvedRecipe, step: Step | None, average: Sequence[int]
) -> None:
    """Write a run's adapters alone."""
    from rolljax.model import hf, lora
    from rolljax.run.preflight import load_chat
    from rolljax.run.trained_weights import trained_params

    model, base = resolved.model, resolved.recipe.model
    if average:
        raise ConfigError(
            "cannot be given for adapters: the mean of products is not the product of means",
            setting="--average",
            remedy="leave out --adapter: the folder then holds the mean of all weights",
        )
    if model.lora is None or not isinstance(base, str):
        raise ConfigError(
            "needs a run that trains adapters on the weights of a folder; this run has "
            + ("no adapters" if model.lora is None else "random base weights, which exist nowhere else"),
            setting="--adapter",
            remedy="leave it out: the folder then holds all weights",
        )
    adapters, inside = trained_params(resolved, run, step)[0].adapters, hf.decoder_module(base)
    lora.save_adapter(to, model.lora, model.cfg, adapters, base, load_chat(resolved, run).tokenizer, inside)


if __name__ == "__main__":
    sys.exit(main())
