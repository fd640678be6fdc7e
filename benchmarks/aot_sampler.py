"""What the TPU compiler says of the sampler's programs for a slice: memory, aliasing, kernels, seconds to compile.

python benchmarks/aot_sampler.py                                   Qwen3-8B on three slices of 8 chips (docs/tpu.md)
python benchmarks/aot_sampler.py --topology v5e:2x4 --data 2 --pages 9216
python benchmarks/aot_sampler.py --small --json out.json           2 layers of it: what CI compiles
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax

from rolljax.errors import ConfigError
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler import aot
from rolljax.sampler.engine import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec, param_shardings
from rolljax.trainer.publish import make_publish

LAYOUTS = {"v5e:2x4": (1, 11008), "v5p:2x2x2": (1, 75776), "v6e:2x4": (1, 23552)}
"""Per slice of 8: batch shards (the other devices are the tensor axis), and KV pages of 64 tokens that fill the chips
to a little under 90 % beside Qwen3-8B."""
QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    num_layers=36,
    hidden_size=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    ffn_size=12288,
    rope_theta=1e6,
    tie_embeddings=False,
    max_position=40960,
)
SMALL = dataclasses.replace(QWEN3_8B, vocab_size=8192, num_layers=2, hidden_size=512, ffn_size=1024)


def compile_all(topology: str, model: Model, cfg: SamplerConfig, sampler: MeshSpec, trainer: MeshSpec):
    """The programs of `aot.compile_sampler`, for a trainer on the same devices in a mesh of its own."""
    devices = aot.devices(topology)
    mesh, trainer_mesh = sampler.build(devices), trainer.build(devices)
    publish = make_publish(mesh, model)
    place = lambda shapes, shardings: jax.tree.map(  # noqa: E731
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    axes, shapes = model.axes(), model.abstract()
    trained = place(shapes, param_shardings(trainer_mesh, axes, shapes))
    params = place(jax.eval_shape(publish, shapes), param_shardings(mesh, axes, shapes, fsdp=False))
    return aot.compile_sampler(topology, model, cfg, mesh, BATCH_AXES, params, publish, trained)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", action="append", choices=list(LAYOUTS), help="default: all of them")
    parser.add_argument("--small", action="store_true", help="a model of 2 layers with the real heads")
    parser.add_argument("--data", type=int, help="batch shards of the sampler; the other devices are its tensor axis")
    parser.add_argument("--pages", type=int, help="KV pages of all shards (default: what fills the chips)")
    parser.add_argument("--slots", type=int, help="default: 256, or 32 of the small model")
    parser.add_argument("--prefill_chunk", type=int, help="default: 2048, or 256 of the small model")
    parser.add_argument(
        "--fsdp", type=int, default=4, help="mesh of the trainer: the other devices are its tensor axis"
    )
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    args = parser.parse_args()
    model = Model(SMALL if args.small else QWEN3_8B, "bfloat16")
    programs, refused = [], 0
    print("topology    program  compile s  peak GiB  of usable  pool GiB  temporaries  aliased  kernels", flush=True)
    for topology in args.topology or LAYOUTS:
        data, pages = LAYOUTS[topology]
        cfg = SamplerConfig(
            slots=args.slots or (32 if args.small else 256),
            max_context=4096,
            page_size=64,
            pages=args.pages or pages,
            prefill_chunk=args.prefill_chunk or (256 if args.small else 2048),
        )
        sampler, trainer = MeshSpec(data=args.data or data, tensor=-1), MeshSpec(data=1, fsdp=args.fsdp, tensor=-1)
        try:
            for p in compile_all(topology, model, cfg, sampler, trainer):
                programs.append(p)
                pool = f"{p.pool_gib:8.2f}  {p.temp_share:10.3%}  {p.pool_aliased!s:>8}" if p.pool_gib else " " * 30
                print(
                    f"{topology:10}  {p.program:8} {p.compile_s:8.1f}  {p.peak_gib:8.2f}  {p.peak_share:8.1%}  {pool} "
                    f"{p.kernels:8}",
                    flush=True,
                )
        except ConfigError as error:
            refused += 1
            print(f"{topology:10}  {error}", file=sys.stderr, flush=True)
    if args.json:
        args.json.write_text(json.dumps([dataclasses.asdict(p) for p in programs], indent=1) + "\n")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main())
