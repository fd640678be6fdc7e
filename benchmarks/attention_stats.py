"""Measures the cost of attention statistics: seconds and temporary memory next to a plain forward pass of the same
rows.

    JAX_PLATFORMS=cpu python benchmarks/attention_stats.py                 # this machine, JSON
    python benchmarks/attention_stats.py --layers 28 --dim 1024 --heads 16 --kv-heads 8 --head-dim 128 --ffn 3072 \
        --row-len 4096 --rows 4 --dtype bfloat16                           # Qwen3-0.6B layers, for an accelerator

Three programs, none of which computes logits: `plain` (`model.attention.packed`, whole attention matrices), `blocks`
(the same by blocks of query rows), `stats` (blocks, with the statistics). They run in turn; ratios are taken within a
round, and their medians printed. Rows hold one prompt and two siblings; a quarter is prompt, the rest is sampled.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.model.attention import packed
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.trainer.attention_stats import AttentionMaps, TokenRoles, make_attention_stats, packed_in_blocks

SIZES = {"layers": 12, "dim": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "ffn": 768, "vocab": 512}
WORK = {"row_len": 1024, "rows": 2, "block_rows": 128, "rounds": 7}


def packed_rows(row_len: int, num_rows: int, vocab: int) -> list[jax.Array]:
    """Return tokens, positions, segment ids, branch ids and mask of full rows."""
    prompt, answer = row_len // 4, (row_len - row_len // 4) // 2
    lengths = (prompt, answer, row_len - prompt - answer)
    branches = np.repeat([0, 1, 2], lengths)
    positions = np.concatenate([np.arange(n) + (prompt if i else 0) for i, n in enumerate(lengths)])
    tile = lambda x: jnp.asarray(np.tile(x, (num_rows, 1)).astype(np.int32))  # noqa: E731
    tokens = np.random.default_rng(0).integers(0, vocab, (num_rows, row_len)).astype(np.int32)
    return [jnp.asarray(tokens), tile(positions), tile(np.ones(row_len)), tile(branches), tile(branches > 0)]


def programs(model: Model, cfg: AttentionMaps) -> dict[str, Any]:
    """Return jitted programs by name, all of (params, *packed_rows)."""

    def plain(params, tokens, positions, segments, branches, mask):
        del mask
        return model.bind(params)(tokens, positions, packed(segments, branches, positions)).hidden

    def blocks(params, tokens, positions, segments, branches, mask):
        attend = packed_in_blocks(TokenRoles.of(positions, segments, branches, mask), cfg.block_rows)
        return model.bind(params)(tokens, positions, attend).hidden

    return {"plain": jax.jit(plain), "blocks": jax.jit(blocks), "stats": make_attention_stats(model, cfg=cfg)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (SIZES | WORK).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    a = parser.parse_args()
    shape = Qwen3Config(a.vocab, a.layers, a.dim, a.heads, a.kv_heads, a.head_dim, a.ffn)
    model, cfg = Model(shape, a.dtype), AttentionMaps(block_rows=a.block_rows)
    inputs = [jax.jit(lambda: model.init(0))(), *packed_rows(a.row_len, a.rows, a.vocab)]
    compiled, out = {}, {}
    for name, program in programs(model, cfg).items():
        start = time.perf_counter()
        compiled[name] = program.lower(*inputs).compile()
        memory = compiled[name].memory_analysis()
        out[name] = {"compile_s": time.perf_counter() - start, "temp_mib": memory.temp_size_in_bytes / 2**20}
        jax.block_until_ready(compiled[name](*inputs))
    seconds: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(a.rounds):
        for name, program in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(program(*inputs))
            seconds[name].append(time.perf_counter() - start)
    for name, times in seconds.items():
        out[name]["median_s"] = statistics.median(times)
    for base in ("plain", "blocks"):
        rounds = zip(seconds["stats"], seconds[base], strict=True)
        out["stats"][f"over_{base}"] = statistics.median(s / b for s, b in rounds)
    device, layers = jax.devices()[0].device_kind, cfg.layers(a.layers)
    print(json.dumps({"device": device, "settings": vars(a), "measured_layers": layers, **out}, indent=1))


if __name__ == "__main__":
    main()
