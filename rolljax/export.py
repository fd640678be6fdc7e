"""Export: `python -m rolljax.export --run RUN | --model HF_DIR  --to DIR` writes a Hugging Face folder.

`transformers` loads it and computes the same logits. `--model` reads a folder and writes it again (float32, one file).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rolljax import cli
from rolljax.errors import ConfigError


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rolljax.export", description="Write a Hugging Face folder.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", help="run folder: its latest checkpoint")
    what.add_argument("--model", help="local Hugging Face folder")
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write; must be new or empty")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        to = Path(args.to)
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise ConfigError(
                "is not a new or empty folder", setting="--to", value=args.to, remedy="name another folder"
            )
        export(args.run, args.model, to)
        print(to)
        return 0

    return cli.run_verb(run)


def export(run: str | None, folder: str | None, to: Path) -> None:
    """Write the folder."""
    import jax

    from rolljax.eval import read_params
    from rolljax.model import hf
    from rolljax.model.decoder import Model
    from rolljax.model.tokenizer import load_tokenizer
    from rolljax.rooms import plan as make_plan
    from rolljax.runfolder import stored_config

    if run is not None:
        plan = make_plan(cli.load_recipe([stored_config(run)], []).value)
        hf.save(to, plan.model, read_params(plan, run)[0], plan.chat.tokenizer)
        return
    assert folder is not None
    model, tokenizer = Model(hf.read_config(folder)), load_tokenizer(folder)
    device = jax.tree.map(lambda _: jax.devices()[0], model.abstract())
    hf.save(to, model, hf.load(folder, model, device), tokenizer)


if __name__ == "__main__":
    sys.exit(main())
