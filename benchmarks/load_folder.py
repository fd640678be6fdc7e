"""Host memory while a Hugging Face folder is read onto eight devices, compared with the devices' own memory.

Writes a folder of random bfloat16 weights (Llama 3) in several files, then reads it in a process of its own with eight
CPU devices, `fsdp = 8`, float32 parameters. CPU devices lie in the same memory: the peak of the process's resident
memory, less what it was before, less the parameters, is what reading needed. Limit: 1.3 times the largest file.

python benchmarks/load_folder.py                        4 GiB in files of 512 MiB; needs 14 GiB of memory
python benchmarks/load_folder.py --mib 96 --shard_mib 48
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

DEVICES = 8
LIMIT = 1.3
MIB = 2**20


def resident() -> int:
    """Return the resident bytes of this process, including mapped files."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Peak:
    """The most resident memory while inside, sampled every millisecond."""

    def __enter__(self) -> Peak:
        self.before = self.most = resident()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(1e-3):
            self.most = max(self.most, resident())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()


def config(mib: int):
    """Return a Llama 3 of `mib` MiB in bfloat16; its embedding is about an eighth of that, as is its head."""
    from rolljax.model.families.llama3 import Llama3Config

    hidden = 2048 if mib >= 1024 else 512
    params = mib * MIB // 2
    ffn = 4 * hidden
    a_layer = 3 * hidden * ffn + hidden * hidden * 5 // 2
    layers = max(3 * params // 4 // a_layer, 1)
    vocab = (params - layers * a_layer) // 2 // hidden // 64 * 64
    return Llama3Config(
        vocab_size=vocab, num_layers=layers, hidden_size=hidden, num_heads=16, num_kv_heads=4, head_dim=hidden // 16,
        ffn_size=ffn, tie_embeddings=False,
    )  # fmt: skip


def make(folder: Path, mib: int, shard_mib: int) -> None:
    """Write the folder, one tensor at a time."""
    import ml_dtypes
    import numpy as np

    from rolljax.model import hf, shards
    from rolljax.model.decoder import Model
    from rolljax.model.tokenizer import byte_tokenizer

    cfg, rng = config(mib), np.random.default_rng(0)
    like = Model(cfg).abstract()
    planned = []
    for entry in hf.entries(cfg):
        leaf = like[entry.path[0]] if len(entry.path) == 1 else like[entry.path[0]][entry.path[1]]
        shape = leaf.shape[len(entry.index) :]

        def draw(shape=shape, entry=entry):
            value = rng.integers(0x3000, 0x3F00, shape, np.uint16).view(ml_dtypes.bfloat16)
            return np.ascontiguousarray(entry.to_theirs(value))

        planned.append(shards.Planned(entry.name, 2 * int(np.prod(shape)), draw))
    (folder / "config.json").write_text(json.dumps(hf.write_config(cfg, byte_tokenizer(), "bfloat16")))
    for _ in shards.write(folder, planned, shard_mib * MIB):
        pass


def measure(folder: Path) -> dict[str, float]:
    """Read the folder here, on eight devices."""
    import jax

    from rolljax.model import hf
    from rolljax.model.decoder import Model
    from rolljax.trainer.mesh import MeshSpec, param_shardings

    model = Model(hf.read_config(folder))
    shardings = param_shardings(MeshSpec(data=1, fsdp=DEVICES).build(), model.axes(), model.abstract())
    jax.block_until_ready(jax.jit(lambda x: x + 1)(1.0))  # the runtime is there, whatever is read
    start = time.perf_counter()
    with Peak() as peak:
        params = hf.load(folder, model, shardings)
    seconds = time.perf_counter() - start
    held = sum(s.data.nbytes for leaf in jax.tree.leaves(params) for s in leaf.addressable_shards)
    files = [f.stat().st_size for f in folder.glob("*.safetensors")]
    over = peak.most - peak.before - held
    return {
        "devices": jax.device_count(),
        "files": len(files),
        "folder_mib": sum(files) / MIB,
        "largest_file_mib": max(files) / MIB,
        "device_mib": held / MIB,
        "before_mib": peak.before / MIB,
        "peak_mib": peak.most / MIB,
        "over_mib": over / MIB,
        "of_largest_file": over / max(files),
        "seconds": seconds,
    }


def in_a_process(folder: Path) -> dict[str, float]:
    flags = f"--xla_force_host_platform_device_count={DEVICES}"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    done = subprocess.run([sys.executable, __file__, "--measure", str(folder)], env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="of the folder")
    parser.add_argument("--shard_mib", type=int, default=512, help="of a file, at most")
    parser.add_argument("--folder", help="where the folder is made; default: a temporary one")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure)))
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        make(Path(folder), args.mib, args.shard_mib)
        figures = in_a_process(Path(folder))
    for name, value in figures.items():
        print(f"{name:18} {value:10.2f}".removesuffix(".00"))
    verdict = "within" if figures["of_largest_file"] < LIMIT else "above"
    print(f"{verdict} {LIMIT} times the largest file, over the device buffers")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
