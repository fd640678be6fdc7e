"""Export: `python -m rolljax.export --run RUN | --model HF_DIR  --to DIR` writes a Hugging Face folder.

`transformers` loads it and computes the same logits. Adapters that a run trained are added to its weights; `--adapter`
writes them alone, as a folder for PEFT. `--model` reads a folder and writes it again.
Folders of a model with images are read for their text part.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rolljax import cli
from rolljax.errors import ConfigError
from rolljax.run import durable


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The arguments of the command line; `--help` says what each is. None: those of this process."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.export", description="Write a Hugging Face folder.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its latest checkpoint")
    what.add_argument("--model", help="local Hugging Face folder")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write; must be new or empty")
    parser.add_argument("--adapter", action="store_true", help="of a run with adapters: these alone, for PEFT")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of the weights (default: float32)")
    parser.add_argument("--max_shard_gb", type=float, help="10^9 bytes of a file of weights, at most (default: 5)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command, with its arguments; returns its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        to = Path(args.to)
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(
                "is not a new or empty folder", setting="--to", value=args.to, remedy="name another folder"
            )
        how: dict[str, Any] = {}
        if args.max_shard_gb is not None:
            if args.max_shard_gb <= 0:
                raise ConfigError("must be above 0", setting="--max_shard_gb", value=args.max_shard_gb)
            how["max_shard_bytes"] = int(args.max_shard_gb * 10**9)
        if args.dtype is not None:
            how["dtype"] = args.dtype
        if args.adapter and how:
            raise ConfigError(
                "is written in float32, as one file", setting="--adapter", remedy="leave out --dtype and --max_shard_gb"
            )
        with durable.folder(to) as folder:
            export(args.run, args.model, folder, adapter=args.adapter, **how)
        print(to)
        return 0

    return cli.run_verb(run)


def export(run: str | None, folder: str | None, to: Path, *, adapter: bool = False, **how: Any) -> None:
    """Write the folder. how: as `hf.save` takes it."""
    import jax
    from jax.sharding import SingleDeviceSharding

    from rolljax.model import hf, lora
    from rolljax.model.decoder import Model
    from rolljax.model.tokenizer import load_tokenizer
    from rolljax.run.folder import stored_config
    from rolljax.run.initial_weights import plain_params
    from rolljax.run.preflight import load_chat, resolve
    from rolljax.run.trained import trained_params
    from rolljax.trainer.mesh import available_devices

    if run is not None:
        resolved = resolve(cli.load_recipe([stored_config(run)], []).value)
        model, base, tokenizer = resolved.model, resolved.recipe.model, load_chat(resolved).tokenizer
        if not adapter:
            source = base if isinstance(base, str) else None
            params = plain_params(resolved, trained_params(resolved, run)[0])
            hf.save(to, model.plain, params, tokenizer, source=source, **how)
            return
        if model.lora is None or not isinstance(base, str):
            raise ConfigError(
                "asks for adapters beside the weights of a folder; this run has "
                + ("none" if model.lora is None else "random base weights, which nobody else can make"),
                setting="--adapter",
                remedy="leave it out: the folder then holds all weights",
            )
        adapters, inside = trained_params(resolved, run)[0].adapters, hf.decoder_module(base)
        lora.save_adapter(to, model.lora, model.cfg, adapters, base, tokenizer, inside)
        return
    if adapter:
        raise ConfigError("is for runs", setting="--adapter", remedy="leave it out, or name the --run")
    assert folder is not None
    model, tokenizer = Model(hf.read_config(folder)), load_tokenizer(folder)
    here = SingleDeviceSharding(available_devices()[0])
    params = hf.load(folder, model, jax.tree.map(lambda _: here, model.abstract()))
    hf.save(to, model, params, tokenizer, source=folder, **how)


if __name__ == "__main__":
    sys.exit(main())
