"""Learning from samples of int8 weights and float8 keys and values, against samples of full precision.

    python benchmarks/low_bits.py FOLDER [--seeds 3] [--only CONFIG] [--arms ARM ...] [--figure docs/low_bits.png]

Runs `quickstart` and the agent `agents/calculator` with every seed, once as they are and once with low bits, that is
with `SamplerConfig.quantization = 'int8'` and `kv_dtype = 'fp8'`. Nothing else differs. `--arms int8 fp8` runs each of
the two settings alone. The arms `low bits, corrected` and `float32, corrected` have `Grpo.correction`.

Printed for each run: held-out reward after the last phase (sampled with the same bits), the reward of the last 20
steps of RL, and the gap between the log-probs of sampler and trainer (`mismatch/k3_nat`), mean and largest of all
steps. The figure has both by step.
A run that was stopped continues, and one that has ended is not run again.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np

from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.storage.run_reader import RunReader
from rolljax.trainer.credit.mismatch import Correction

CONFIGS = ("quickstart", "agents/calculator")
INT8: dict[str, object] = {"SamplerConfig.quantization": "int8"}
FP8: dict[str, object] = {"SamplerConfig.kv_dtype": "fp8"}
CORRECTED: dict[str, object] = {"Grpo.anchor": "proximal", "Grpo.correction": Correction()}
ARMS: dict[str, dict[str, object]] = {
    "float32": {},
    "low bits": INT8 | FP8,
    "low bits, corrected": INT8 | FP8 | CORRECTED,
    "float32, corrected": CORRECTED,
    "int8": INT8,
    "fp8": FP8,
}
DRAWN = ("float32", "low bits")


def curves(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Return the sampled reward and the gap of every step of RL, `[steps]`."""
    rows = [row for row in RunReader(run.path).rows() if "mismatch/k3_nat" in row]
    return tuple(np.array([row[name] for row in rows]) for name in ("reward/mean", "mismatch/k3_nat"))


def draw(path: Path, found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]]) -> None:
    """Draw rewards above, smoothed over 5 steps, and gaps below; a line for each seed."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, len(CONFIGS), figsize=(9, 5), squeeze=False, sharex="col")
    colors = dict(zip(ARMS, ("tab:gray", "tab:red", "tab:purple", "tab:olive", "tab:blue", "tab:green"), strict=True))
    for (config, arm), seeds in found.items():
        column = CONFIGS.index(config)
        for i, (rewards, gaps) in enumerate(seeds):
            smooth = np.convolve(rewards, np.ones(5) / 5, mode="valid")
            axes[0, column].plot(np.arange(len(smooth)) + 5, smooth, color=colors[arm], alpha=0.8)
            axes[1, column].semilogy(gaps, color=colors[arm], alpha=0.8, label=arm if i == 0 else None)
        axes[0, column].set(title=config, ylabel="reward")
        axes[1, column].set(xlabel="step of RL", ylabel="mismatch/k3_nat")
        axes[1, column].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run every arm, and print and draw what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=CONFIGS)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=DRAWN)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    found: dict[tuple[str, str], list[tuple[np.ndarray, np.ndarray]]] = {}
    for config in [args.only] if args.only else CONFIGS:
        for arm in args.arms:
            for seed in range(args.seeds):
                name = f"{config}_{arm}_{seed}".replace("/", "_").replace(", ", "_").replace(" ", "_")
                run = train(config, set=ARMS[arm] | {"Recipe.seed": seed}, run_dir=args.folder / name, progress=False)
                rewards, gaps = curves(run)
                found.setdefault((config, arm), []).append((rewards, gaps))
                end = run.heldout_reward[-1]["mean"]
                gap = f"{gaps.mean():.1e} (largest {gaps.max():.1e})"
                reward = f"held out {end:.2f}, last 20 of {len(rewards)} steps {rewards[-20:].mean():.2f}"
                print(f"{config:18} {arm:19} seed {seed}: {reward}, k3 {gap}", flush=True)
    if args.figure:
        draw(args.figure, found)


if __name__ == "__main__":
    main()
