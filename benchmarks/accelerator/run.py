"""Measure everything that an accelerator can tell us, in pieces of at most eight minutes.

    python benchmarks/accelerator/run.py                       # all pieces on the device that JAX finds
    python benchmarks/accelerator/run.py --only decode update  # some of them
    python benchmarks/accelerator/run.py --limit 120           # at most two minutes a piece: the first rows of each
    python benchmarks/accelerator/run.py --tiny                # a dry run on this CPU, with tiny sizes

Every piece runs in its own process and writes one JSON file. A piece that is done is skipped, and one that fails does
not stop the others. `summary.py` makes tables and docs/accelerators.md from the files.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from common import HERE, LIMIT_S, OUT, is_done

PIECES = {
    "first": "imports, devices and their measured peaks; a model decodes and trains one step",
    "numerics": "every kernel against XLA in float32: forward and backward",
    "parity": "log-probs of the sampler against the trainer's; greedy tokens against the plain decoder",
    "decode": "decode and prefill: tokens per second and share of the roofline",
    "kernels": "the speed of every kernel: attention of one layer, and of a decode step over pages",
    "update": "an update: model FLOPs utilization by shape, length, remat and micro-batch",
    "publish": "from the trainer's weights to the sampler's: GB/s",
    "learning": "a real GRPO run of a byte model, with its curve",
    "torch_side": "decode and a training step of the same shape in torch",
}
"""In the order in which we want to know them."""


def run(name: str, args: argparse.Namespace) -> str:
    """Run one piece in its own process; return how it ended."""
    command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(args.out)]
    command += ["--limit", str(args.limit)] + ["--tiny"] * args.tiny + ["--again"] * args.again
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(args.limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {args.limit:.0f} s"
    finally:  # also what the piece has started
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return "done" if code == 0 else f"failed with exit status {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure everything that an accelerator can tell us.")
    parser.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES), help="pieces (default: all)")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the JSON files")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds that a piece may take")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a dry run on a CPU")
    parser.add_argument("--again", action="store_true", help="measure again what is done")
    args = parser.parse_args()
    ends = {}
    for number, name in enumerate(args.only, 1):
        print(f"\n[{number}/{len(args.only)}] {name}: {PIECES[name]}", flush=True)
        start = time.monotonic()
        ends[name] = f"{run(name, args)}, {time.monotonic() - start:.0f} s"
    subprocess.run([sys.executable, str(HERE / "summary.py"), "--results", str(args.out)], check=True)
    print("\n" + "\n".join(f"{name:12} {end}" for name, end in ends.items()))
    return 0 if all(is_done(args.out / f"{name}.json", tiny=args.tiny) for name in args.only) else 1


if __name__ == "__main__":
    sys.exit(main())
