"""Compare decoding with guesses of next tokens (`SamplerConfig.speculate`) to decoding without them, in one run.

    python benchmarks/speculation.py MODEL QUESTIONS.jsonl [--speculate 7] [--slots 64] [--temperature 1.0]

MODEL is a Hugging Face folder; QUESTIONS.jsonl has a question per row, as `Questions` reads it. Two samplers, with
guesses and without, take turns at the same requests: siblings of the first questions, for some epochs. Every epoch has
noise of its own, so that answers repeat only as far as the policy repeats itself. `--layers` and `--ffn` pad the model
with zeros: it samples the same tokens at the cost of a larger one.

Printed by epoch: decode steps, seconds of decoding, guesses that were right, and tokens that differ.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os
import sys
from pathlib import Path


def main() -> None:
    """Sample everything twice, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--speculate", type=int, default=7)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--requests", type=int, nargs="+", help="numbers of requests (default: slots / 8, and twice slots)"
    )
    parser.add_argument("--layers", type=int, default=0, help="layers to add that change nothing, for the cost")
    parser.add_argument("--ffn", type=int, default=0, help="size of the feed-forward part, for the cost")
    parser.add_argument("--group", type=int, default=4, help="siblings of a question")
    parser.add_argument("--max_tokens", type=int, default=200)
    parser.add_argument("--max_context", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    print("| requests | epoch | steps | with guesses | | decode s | with guesses | | right | tokens | differ |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size in args.requests or (args.slots // 8, 2 * args.slots):
        compare(args, size)


def compare(args: argparse.Namespace, size: int) -> None:
    """Print the rows of one number of requests."""
    import jax
    import jax.numpy as jnp

    from rolljax.envs.questions import Questions
    from rolljax.model import hf
    from rolljax.model.decoder import Model
    from rolljax.model.tokenizer import Chat, load_tokenizer
    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import BATCH_AXES, MeshSpec, param_shardings
    from rolljax.trainer.publish import make_publish
    from rolljax.types import Completion, Message, SamplingParams

    chat, model = Chat.of(load_tokenizer(args.model)), Model(hf.read_config(args.model))
    mesh = MeshSpec().build(jax.devices()[:1])
    weights = hf.load(args.model, model, param_shardings(mesh, model.axes(), model.abstract()))
    larger = dataclasses.replace(
        model.cfg, num_layers=model.cfg.num_layers + args.layers, ffn_size=args.ffn or model.cfg.ffn_size
    )
    model = Model(larger)
    weights = jax.tree.map(
        lambda x, wanted: jnp.pad(x, [(0, b - a) for a, b in zip(x.shape, wanted.shape, strict=True)]),
        weights,
        model.abstract(),
    )
    print(f"{sum(x.size for x in jax.tree.leaves(weights)):,} parameters", file=sys.stderr)
    questions = Questions(str(args.questions), prompt="{question}")
    prompts = [chat.prompt_ids((Message("user", questions.task(i).content),)) for i in range(-(-size // args.group))]
    params = SamplingParams(args.temperature, args.max_tokens, chat.stop_ids)

    def opened(speculate: int) -> Sampler:
        cfg = SamplerConfig(slots=args.slots, max_context=args.max_context, speculate=speculate)
        engine = Engine(model, cfg, mesh, BATCH_AXES)
        return Sampler(engine, make_publish(mesh, model)(weights), 0, longest_prompt=0)

    async def epoch(sampler: Sampler, number: int) -> list[Completion]:
        every = [
            sampler.generate(prompts[i // args.group], params, (number, i // args.group, i % args.group))
            for i in range(size)
        ]
        return await asyncio.gather(*every)

    plain, guessing = opened(0), opened(args.speculate)
    for sampler in (plain, guessing):
        asyncio.run(sampler.warm_up(lambda done, total: None))
    for number in range(1, args.epochs + 1):
        did, found = {}, {}
        for sampler in (plain, guessing) if number % 2 else (guessing, plain):
            before = dataclasses.asdict(sampler.stats)
            found[sampler] = asyncio.run(epoch(sampler, number))
            did[sampler] = {name: now - before[name] for name, now in dataclasses.asdict(sampler.stats).items()}
        differ = sum(
            int((a.tokens != b.tokens).sum()) if len(a.tokens) == len(b.tokens) else max(len(a.tokens), len(b.tokens))
            for a, b in zip(found[plain], found[guessing], strict=True)
        )
        a, b = did[plain], did[guessing]
        print(
            f"| {size} | {number} | {a['steps']} | {b['steps']} | {b['steps'] / a['steps']:.2f} "
            f"| {a['generate_s']:.2f} | {b['generate_s']:.2f} | {b['generate_s'] / a['generate_s']:.2f} "
            f"| {b['accepted_tok'] / max(b['drafted_tok'], 1):.2f} | {sum(len(c.tokens) for c in found[plain])} "
            f"| {differ} |",
            flush=True,
        )
    plain.close()
    guessing.close()


if __name__ == "__main__":
    main()
