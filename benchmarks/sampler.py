"""The sampler's speed: prefill and decode tokens/s, time to first token, slot use, prefix hits, the device's roofline.

    python benchmarks/sampler.py --workload fixed                      # this machine, one workload, JSON
    python benchmarks/sampler.py --workload fixed --shape layers=28 dim=1024 heads=16 kv_heads=8 head_dim=128 \
        ffn=3072 vocab=151936 --dtype bfloat16 --slots 256             # Qwen3-0.6B shapes, for an accelerator
    python benchmarks/sampler.py --compare --python tunix=DIR/bin/python trl=DIR/bin/python

`--compare` runs ours and the peers (see `peers/README.md`) on equal work, each in a process of its own, in turn for
several rounds, and prints the ratios of the medians. All of the way is timed: prompt ids on the host, weights swapped
(so that nothing is left in the cache), pages, scheduler, log-probs, new ids on the host.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import workloads as wl

HERE = Path(__file__).parent
PEERS = {
    "rolljax, 2 devices": ("rolljax", ["../sampler.py", "--cpu", "--devices", "2"]),
    "plain": ("rolljax", ["plain_jax.py"]),
    "plain gumbel": ("rolljax", ["plain_jax.py", "--sampling", "gumbel"]),
    "Tunix": ("tunix", ["tunix_sampler.py"]),
    "TRL": ("trl", ["trl_generate.py"]),
    "TRL static": ("trl", ["trl_generate.py", "--cache", "static"]),
}
"""Name: whose python it needs, and its script with flags."""


def ours(args: argparse.Namespace) -> dict[str, Any]:
    """Time one workload through `rolljax.sampler.client.Sampler`."""
    if args.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={args.devices}"
    import jax

    from rolljax.model.decoder import Model
    from rolljax.model.families.qwen3 import Qwen3Config
    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
    from rolljax.trainer.publish import make_publish
    from rolljax.types import SamplingParams

    shape, work, weights = wl.setup(args)
    s = shape
    model = Model(
        Qwen3Config(
            s.vocab, s.layers, s.dim, s.heads, s.kv_heads, s.head_dim, s.ffn, s.rope_theta, s.eps, tie_embeddings=False
        ),
        args.dtype,
    )
    longest = work.prompts.shape[1] + work.turns * work.max_new + work.appends.shape[1] * work.appends.shape[2]
    cfg = SamplerConfig(
        slots=args.slots,
        max_context=longest,
        page_size=args.page_size,
        prefill_chunk=args.prefill_chunk,
        steps_per_dispatch=args.steps_per_dispatch,
    )
    mesh = MeshSpec().build(jax.devices()[: args.devices])
    params = make_publish(mesh, model)(weights)
    sampler = Sampler(Engine(model, cfg, mesh, BATCH_AXES), params, 0, longest_prompt=0)
    settings = SamplingParams(1.0, work.max_new, (work.stop,) if work.stops else ())
    waits: list[float] = []
    last: list[Any] = []

    async def sequence(i: int, seed: int) -> list[Any]:
        stream, turns = work.rows[i], []
        for turn in range(work.turns):
            turns.append(await sampler.generate(stream, settings, (seed, i, turn)))
            if turn + 1 < work.turns:
                stream = np.concatenate([stream, turns[-1].tokens, work.appends[i, turn]])
        return turns

    async def everything(seed: int) -> list[list[Any]]:
        return await asyncio.gather(*(sequence(i, seed) for i in range(len(work.lengths))))

    def rollout(seed: int) -> list[list[np.ndarray]]:
        forget_prefixes(sampler, params)
        done = asyncio.run(everything(seed))
        waits[:] = [c.queue_s for turns in done for c in turns]
        last[:] = done
        return [[turns[t].tokens for turns in done] for t in range(work.turns)]

    def logps_off() -> float:
        return wl.check_logps(weights, shape, work.rows[0], last[0][0].tokens, last[0][0].sampler_logp)

    def counted(seed: int) -> list[list[np.ndarray]]:
        before[:] = [sampler.stats]
        return rollout(seed)

    before: list[Any] = []
    out = wl.measure(
        f"rolljax ({args.devices} {jax.devices()[0].platform})", args, shape, work, counted, 0, ["jax", "flax"],
        logps_off if args.dtype == "float32" else None,
    )  # fmt: skip
    done_s = out["seconds"][-1]
    did = {k: v - getattr(before[0], k) for k, v in dataclasses.asdict(sampler.stats).items()}
    prefill_tok, prefill_s = time_prefill(sampler, params, work, settings)
    sampler.close()
    out |= {
        "prefill_tokens": did["prefill_tok"],
        "prefix_hit_frac": did["reused_tok"] / (did["reused_tok"] + did["prefill_tok"]),
        "slot_frac": did["busy_slot_steps"] / did["slot_steps"],
        "prefill_tok_s": prefill_tok / prefill_s,
        "decode_tok_s": did["sampled_tok"] / did["generate_s"],
        "host_frac": did["host_s"] / done_s,
        "first_token_s": {"median": statistics.median(waits), "max": max(waits)},
        "roofline": roofline(model, params, work, args.slots, did),
    }
    print(json.dumps({k: out[k] for k in list(out)[-8:]}))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1))
    return out


def forget_prefixes(sampler: Any, params: Any) -> None:
    """Publish the same weights again, so that nothing is left in the prefix cache."""
    from rolljax.sampler.weights import Snapshot

    sampler.prepare(Snapshot(sampler.version + 1, params))
    sampler.swap(sampler.version + 1)


def time_prefill(sampler: Any, params: Any, work: wl.Workload, settings: Any) -> tuple[int, float]:
    """Return the number of computed prompt tokens, and the seconds until every first token is sampled (best of 3)."""
    one = dataclasses.replace(settings, max_tokens=1)

    async def firsts() -> None:
        await asyncio.gather(*(sampler.generate(row, one, (i,)) for i, row in enumerate(work.rows)))

    best = float("inf")
    for _ in range(3):
        forget_prefixes(sampler, params)
        before, start = sampler.stats.prefill_tok, time.perf_counter()
        asyncio.run(firsts())
        best = min(best, time.perf_counter() - start)
    return sampler.stats.prefill_tok - before, best


def roofline(model: Any, params: Any, work: wl.Workload, slots: int, did: dict[str, float]) -> dict[str, float]:
    """Compare decoding with the memory limit: bytes of weights and live KV per step over the measured bandwidth."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((64 if jax.devices()[0].platform == "cpu" else 1024) * 2**18)
    copy = jax.jit(lambda x: x + 1)
    copy(x).block_until_ready()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        copy(x).block_until_ready()
        times.append(time.perf_counter() - start)
    bandwidth = 2 * x.nbytes / min(times)
    c, bytes_each = model.cfg, jnp.dtype(model.dtype).itemsize
    read = sum(p.nbytes for p in jax.tree.leaves(params)) - params["embed"].nbytes
    grown = work.turns * float(work.lengths.mean()) + work.appends.shape[1] * work.appends.shape[2]
    context = work.prompts.shape[1] + grown / 2
    live = did["busy_slot_steps"] / did["slot_steps"] * slots
    kv = live * context * c.num_layers * 2 * c.num_kv_heads * c.head_dim * bytes_each
    steps = did["slot_steps"] / slots
    return {
        "bandwidth_gib_s": bandwidth / 2**30,
        "step_gib": (read + kv) / 2**30,
        "limit_step_ms": 1e3 * (read + kv) / bandwidth,
        "step_ms": 1e3 * did["generate_s"] / steps,
        "fraction": (read + kv) / bandwidth / (did["generate_s"] / steps),
    }


def compare(args: argparse.Namespace) -> None:
    """Run ours and the peers in turn, each in its own process; print a table of ratios."""
    pythons = {"rolljax": sys.executable} | dict(p.split("=") for p in args.python)
    scripts = {"rolljax": [sys.executable, str(HERE / "sampler.py"), "--cpu"]}
    for name, (python, (script, *flags)) in PEERS.items():
        if python in pythons:
            scripts[name] = [pythons[python], str(HERE / "peers" / script), *flags]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)])}
    results: dict[str, dict[str, list[dict]]] = {}
    for round_ in range(args.rounds):
        for workload in args.workloads:
            for name, command in scripts.items():
                with tempfile.NamedTemporaryFile(suffix=".json") as file:
                    flags = ["--workload", workload, "--repeat", str(args.repeat), "--json", file.name]
                    subprocess.run(
                        [*command, *flags], env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
                    )
                    out = json.loads(Path(file.name).read_text())
                results.setdefault(workload, {}).setdefault(name, []).append(out)
                print(f"round {round_} {workload:14} {name:12} {out['tokens_per_s']:8.0f} tokens/s", flush=True)
    print(f"\n| workload | {' | '.join(scripts)} | {' | '.join(f'ours / {n}' for n in scripts if n != 'rolljax')} |")
    print("|---" * (2 * len(scripts)) + "|")
    table = {}
    for workload, by_name in results.items():
        seconds = {n: statistics.median(s for r in runs for s in r["seconds"]) for n, runs in by_name.items()}
        tokens = by_name["rolljax"][0]["tokens"]
        ratios = {n: seconds[n] / seconds["rolljax"] for n in scripts if n != "rolljax"}
        table[workload] = {"tokens_per_s": {n: tokens / s for n, s in seconds.items()}, "ratio": ratios}
        rates = " | ".join(f"{tokens / seconds[n]:,.0f}" for n in scripts)
        print(f"| {workload} | {rates} | {' | '.join(f'{r:.2f}x' for r in ratios.values())} |")
    if args.json:
        Path(args.json).write_text(json.dumps({"summary": table, "runs": results}, indent=1))


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--compare", action="store_true")
    if first.parse_known_args()[0].compare:
        p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        p.add_argument("--compare", action="store_true")
        p.add_argument("--python", nargs="*", default=[], metavar="PEER=PYTHON")
        p.add_argument("--workloads", nargs="*", default=list(wl.NAMES), choices=wl.NAMES)
        p.add_argument("--rounds", type=int, default=3)
        p.add_argument("--repeat", type=int, default=5)
        p.add_argument("--json", default="")
        compare(p.parse_args())
        return
    p = wl.parser(__doc__)
    p.add_argument("--slots", type=int, default=64)
    p.add_argument("--page_size", type=int, default=16)
    p.add_argument("--prefill_chunk", type=int, default=512)
    p.add_argument("--steps_per_dispatch", type=int, default=16)
    p.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    p.add_argument("--devices", type=int, default=1, help="devices that the slots are split over")
    p.add_argument("--cpu", action="store_true", help="use the CPU even where there is an accelerator")
    ours(p.parse_args())


if __name__ == "__main__":
    main()
