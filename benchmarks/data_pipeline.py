"""Measures speed and memory of a data pipeline: records per second, peak memory of a separate process.

    python benchmarks/data_pipeline.py                      # a million records, without MinHash
    python benchmarks/data_pipeline.py --num 200000 --minhash

Records are questions of 20 words; a tenth repeats, a tenth nearly does. The bound is 1.5 GiB for a million.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = "from rolljax.data import dedup\nfrom rolljax.data import filters\nfrom rolljax.data import pipeline\n"
STAGES = "@dedup.Exact(), {minhash}@filters.Length(), @filters.KeepScripts()"


def write(path: Path, num: int) -> None:
    rng = random.Random(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne", "ru", "sa", "to", "vi") for b in "abcdefghijklmnop"]
    last: list[str] = []
    with open(path, "w") as f:
        for i in range(num):
            kind = rng.random()
            if last and kind < 0.1:
                text = last[-1]
            elif last and kind < 0.2:
                text = last[-1] + " please"
            else:
                text = " ".join(rng.choices(words, k=20))
            last = [text]
            f.write(json.dumps({"prompt": text, "answer": str(i)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=1_000_000)
    parser.add_argument("--minhash", action="store_true")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        from rolljax.data.__main__ import main as verb

        recipe, source, out = args.child
        start = time.process_time()
        assert verb([recipe, "--in", source, "--out", out]) == 0
        peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024
        print(f"cpu_s={time.process_time() - start:.1f} peak_mib={peak:.0f}")
        return
    with tempfile.TemporaryDirectory() as folder:
        source, recipe = Path(folder, "in.jsonl"), Path(folder, "recipe.gin")
        write(source, args.num)
        stages = STAGES.format(minhash="@dedup.MinHash(), " if args.minhash else "")
        recipe.write_text(f"from __gin__ import dynamic_registration\n{PARTS}pipeline.Pipeline.stages = [{stages}]\n")
        command = [sys.executable, __file__, "--child", str(recipe), str(source), str(Path(folder, "out"))]
        start = time.perf_counter()
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        wall = time.perf_counter() - start
        print(done.stdout)
        cpu = float(done.stdout.split("cpu_s=")[1].split()[0])
        print(f"{args.num} records: {args.num / wall:.0f} per second of wall time, {args.num / cpu:.0f} per CPU second")


if __name__ == "__main__":
    main()
