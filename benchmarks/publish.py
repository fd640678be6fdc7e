"""Weights from a trainer to a sampler in another process, through a store: speed, bytes and host memory.

A process writes snapshots of random bfloat16 weights, split over four CPU devices. Another one reads them, split along
another axis. Both write or read plain files of the same bytes before each snapshot; figures are medians of the rounds
after the first four. Plain files stay as long as snapshots do: the last two, and a third while it is written. A plain
write that reuses the memory of a file that was removed just before would be several times faster than either where the
machine is a virtual one, because it needs no new pages. CPU devices lie in host memory: the host memory of a side is
the growth of its resident memory up to the peak during its first snapshot, less what its devices have got.

python benchmarks/publish.py                    1 GiB; needs 8 GiB of memory and 5 GiB in the folder
python benchmarks/publish.py --mib 64
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from load_folder import Peak

DEVICES = 4
ARRAYS = 16
CHANGED = 0.04
WARM_UP = 4
"""Number of the first snapshots, which do not count."""
MIB = 2**20
WARM = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Environment in which memory that was freed is used again."""


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def give_back(version: int) -> None:
    """Give freed memory back before the first version, whose host memory counts."""
    if not version:
        ctypes.CDLL(None).malloc_trim(0)


def plain_write(folder: Path, arrays: list[Any], version: int) -> None:
    """Write an array to a new file each, and remove those of the version two before."""
    for i, x in enumerate(arrays):
        with open(folder / f"plain{i}.{version}", "wb", buffering=0) as f:
            data = memoryview(x).cast("B")
            while data:
                data = data[f.write(data) :]
    for i in range(len(arrays)):
        (folder / f"plain{i}.{version - 2}").unlink(missing_ok=True)


def plain_read(folder: Path, arrays: list[Any], version: int) -> None:
    """Read each file into the memory of an array."""
    for i, x in enumerate(arrays):
        with open(folder / f"plain{i}.{version}", "rb", buffering=0) as f:
            data = memoryview(x).cast("B")
            while data:
                data = data[f.readinto(data) :]


class Side:
    """What both processes have: a mesh, and the shapes of the weights."""

    def __init__(self, folder: Path, mib: int, axis: int) -> None:
        import jax
        import numpy as np
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(np.array(jax.devices()), ("parts",))
        self.folder, self.nbytes = folder, mib * MIB
        self.sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, "parts"))
        shape = (mib // ARRAYS // 2, 512, 2048)
        self.shapes = {f"layers.w{i:02}": jax.ShapeDtypeStruct(shape, "bfloat16") for i in range(ARRAYS)}
        self.plain = [np.zeros(shape, np.uint16) for _ in range(ARRAYS)]  # written once: its pages are there

    def figures(self, seconds: float) -> float:
        return self.nbytes / MIB / seconds


class Trainer(Side):
    """The process that writes."""

    def __init__(self, folder: Path, mib: int) -> None:
        import numpy as np

        from rolljax.cluster.snapshots import SnapshotWriter

        super().__init__(folder, mib, 1)
        self.rng = np.random.default_rng(0)
        for x in self.plain:
            x[:] = self.rng.integers(0, 2**16, x.shape, np.uint16)
        self.writer, self.version = SnapshotWriter(str(folder / "store"), 1), -1
        self.put()

    def put(self) -> None:
        """Bring the weights to the devices."""
        import jax

        from rolljax.trainer.publish import checksums

        host = dict(zip(self.shapes, self.plain, strict=True))
        # a copy, or the devices would use the memory itself
        self.params = jax.device_put({name: x.copy().view("bfloat16") for name, x in host.items()}, self.sharding)
        self.sums = jax.device_get(checksums(self.params))

    def changed(self, x: Any) -> Any:
        """Return bit patterns of which 4 % are others."""
        return x ^ (self.rng.random(x.shape, "float32") < CHANGED)

    def write(self, kind: str) -> dict[str, Any]:
        """Write the weights as the next version: `full`, or with some `changed`. Write plain files before."""
        self.version += 1
        if kind == "changed":
            for x in self.plain:
                x[:] = self.changed(x)
            self.put()
        plain_s = timed(lambda: plain_write(self.folder, self.plain, self.version))
        give_back(self.version)
        with Peak() as peak:
            full = kind == "full"
            seconds = timed(lambda: self.writer.write(self.params, self.version, self.sums, full=full))
        files = [p for p in (self.folder / f"store/000001/{self.version:08}").rglob("*") if p.is_file()]
        return {
            "version": self.version,
            "plain": self.figures(plain_s),
            "write": self.figures(seconds),
            "bytes": sum(p.stat().st_size for p in files) / self.nbytes,
            "memory": (peak.most - peak.before) / self.nbytes,
        }

    def codec(self) -> dict[str, float]:
        """Encode and decode the changes of the next version, in one thread, chunk by chunk."""
        from rolljax.cluster import deltas
        from rolljax.cluster.snapshots import CHUNK_BYTES

        size = min(CHUNK_BYTES // 2, self.plain[0].size)
        pairs = [(x.reshape(-1, size).copy(), self.changed(x).reshape(-1, size)) for x in self.plain]
        chunks = [(old, new) for olds, news in pairs for old, new in zip(olds, news, strict=True)]
        found: list[bytes] = []
        encode_s = timed(lambda: found.extend(deltas.encode(old, new) or b"" for old, new in chunks))

        def decode() -> None:
            for (old, _), delta in zip(chunks, found, strict=True):
                deltas.decode_into(old, delta)

        decode_s = timed(decode)
        return {
            "encode": self.figures(encode_s),
            "decode": self.figures(decode_s),
            "equal": all((old == new).all() for old, new in chunks),
        }


class Sampler(Side):
    """The process that reads."""

    def __init__(self, folder: Path, mib: int) -> None:
        import jax

        from rolljax.cluster.snapshots import SnapshotReader
        from rolljax.trainer.publish import checksums, differing

        super().__init__(folder, mib, 2)
        self.checksums, self.differing = checksums, differing
        shardings = jax.tree.map(lambda _: self.sharding, self.shapes)
        self.reader = SnapshotReader(str(folder / "store"), self.shapes, shardings)

    def read(self, version: int, kind: str) -> dict[str, Any]:
        """Read a version, after plain files of the same bytes; of a full one also what is read to the host alone."""
        import jax

        plain_s = timed(lambda: plain_read(self.folder, self.plain, version))
        arrived: list[Any] = []
        give_back(version)
        with Peak() as peak:
            seconds = timed(lambda: arrived.extend(self.reader.read(1, version)))
        params, sums = arrived
        found = {
            "plain": self.figures(plain_s),
            "to_devices": self.figures(seconds),
            "memory": (peak.most - peak.before - self.nbytes) / self.nbytes,
            "equal": kind == "again" or not self.differing(sums, jax.device_get(self.checksums(params))),
        }
        if kind != "changed":
            end = time.monotonic() + 600
            manifest = self.reader._read_manifest(1, version, end)
            found["read"] = self.figures(timed(lambda: self.reader._read_full(manifest, end)))
        return found


def serve(side: str, folder: Path, mib: int) -> None:
    """Execute the commands that come on stdin, each a method and its arguments."""
    one: Any = {"trainer": Trainer, "sampler": Sampler}[side](folder, mib)
    for line in sys.stdin:
        name, *args = json.loads(line)
        print(json.dumps(getattr(one, name)(*args)), flush=True)


def start(side: str, folder: Path, mib: int) -> Callable[..., dict[str, Any]]:
    """Start a process; return what calls a method in it."""
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | WARM | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--side", side, "--folder", str(folder), "--mib", str(mib)]
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def call(*args: Any) -> dict[str, Any]:
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps(args) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"the {side} has ended")
        return json.loads(answer)

    return call


def measure(folder: Path, mib: int, rounds: int) -> list[tuple[str, float, str, bool]]:
    """Return the rows of the table: what, its figure, its unit or limit, whether it is within the limit."""
    trainer, sampler = start("trainer", folder, mib), start("sampler", folder, mib)
    written, read = [], []
    for i in range(WARM_UP + rounds):
        written.append(trainer("write", "full"))
        read.append(sampler("read", written[-1]["version"], "full" if i == WARM_UP + rounds - 1 else "again"))
    delta, deltas_read = [], []
    for _ in range(4):
        delta.append(trainer("write", "changed"))
        deltas_read.append(sampler("read", delta[-1]["version"], "changed"))
    codec = [trainer("codec") for _ in range(2)]

    def middle(found: list[dict[str, Any]], *names: str) -> float:
        """Return the median of a figure, or of the ratio of two."""
        return statistics.median(one[names[0]] / (one[names[1]] if names[1:] else 1) for one in found)

    first, last = (written[0], read[0]), (written[WARM_UP:], read[WARM_UP:])
    write_ratio, read_ratio = middle(last[0], "write", "plain"), middle(last[1], "read", "plain")
    encode, decode = (max(one[name] for one in codec) for name in ("encode", "decode"))
    equal = all(one["equal"] for one in [*read, *deltas_read, *codec])
    return [
        ("plain write, MB/s", middle(last[0], "plain"), "", True),
        ("write, MB/s", middle(last[0], "write"), "", True),
        ("write / plain write", write_ratio, ">= 0.8", write_ratio >= 0.8),
        ("plain read, MB/s", middle(last[1], "plain"), "", True),
        ("read, MB/s", middle(last[1], "read"), "", True),
        ("read / plain read", read_ratio, ">= 0.7", read_ratio >= 0.7),
        ("read, and copied to devices, MB/s", middle(last[1], "to_devices"), "", True),
        ("changes of 4 % / all bytes", middle(delta[1:], "bytes"), "<= 0.08", middle(delta[1:], "bytes") <= 0.08),
        ("write of changes, MB/s of the weights", middle(delta[1:], "write"), "", True),
        ("read of changes, MB/s of the weights", middle(deltas_read[1:], "to_devices"), "", True),
        ("encode, one core, MB/s", encode, ">= 200", encode >= 200),
        ("decode, one core, MB/s", decode, ">= 400", decode >= 400),
        ("host memory of the writer / its weights", first[0]["memory"], "", True),
        ("host memory of the reader / its weights", first[1]["memory"], "< 1.2", first[1]["memory"] < 1.2),
        ("equal to the bit", float(equal), "1", equal),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="of the weights: a multiple of 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the store is made; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--side", choices=["trainer", "sampler"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        serve(args.side, args.folder, args.mib)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        rows = measure(Path(folder), args.mib, args.rounds)
    print(f"| {args.mib} MiB of bfloat16 | | limit | |\n|---|---|---|---|")
    for name, figure, limit, is_within in rows:
        print(f"| {name} | {figure:.3g} | {limit} | {'' if not limit else 'yes' if is_within else 'NO'} |")
    if args.json:
        args.json.write_text(json.dumps({name: figure for name, figure, _, _ in rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
