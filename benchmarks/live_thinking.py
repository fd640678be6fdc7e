"""LiveThinking on sums, every part of it: what rejection tuning and RL with a length band each do for a small student.

    # twenty minutes of one core
    python benchmarks/live_thinking.py --figure rolljax/recipes/live_thinking/live_thinking.png [--seeds 3]

For each seed a teacher (`live_thinking_teacher.gin`) answers every task eight times. One student imitates its first
answer to each task (base), another the shortest that is right and helpful (RFT, `data.gin`); both are mixtures of
experts and take equal steps. GRPO (the phase `rl` of `live_thinking.gin`) goes on from each, on the same tasks. Four
answers to each of 96 tasks that none of them has seen (`held_out_sums.jsonl`) are measured, at temperature 1. FLOPs of
an answer are estimated: twice the parameters that a token passes through, times its tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import tempfile
from pathlib import Path

from trained import ROOT, train

from rolljax.chat_models.local import LocalModel
from rolljax.data import pipeline
from rolljax.data.__main__ import main as run_data
from rolljax.data.attempts import SampleAttempts
from rolljax.data.base import Record
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3_moe import Qwen3MoeConfig
from rolljax.recipes.live_thinking.thinking_sums import helpful, right
from rolljax.sampler.settings import SamplerConfig

RECIPE = ROOT / "rolljax" / "recipes" / "live_thinking"
ARMS = ("teacher", "base", "RFT", "RL only", "RFT + RL")
SAMPLER = SamplerConfig(slots=128, max_context=160)


@dataclasses.dataclass(frozen=True)
class Measured:
    """Means over the answers to held-out tasks."""

    right: float
    helpful: float
    tokens: float
    mflops: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where the picture goes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, help="a folder that keeps the runs, and whose runs are taken")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.runs or Path(scratch)).resolve()
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder / "compiled"))  # seeds share their programs
        found = [arms(folder / str(seed), seed) for seed in range(args.seeds)]
        curves = {name: [curve(folder / str(seed) / name) for seed in range(args.seeds)] for name in ARMS[3:]}
    print("\n| | right | helpful | tokens | MFLOPs of an answer |\n|---|---|---|---|---|")
    for name in ARMS:
        columns = [[getattr(of[name], f.name) for of in found] for f in dataclasses.fields(Measured)]
        cells = [told(values, digits) for values, digits in zip(columns, (2, 2, 0, 1), strict=True)]
        print(f"| {name} | {' | '.join(cells)} |")
    if args.figure:
        draw(args.figure, found, curves)


def told(values: list[float], digits: int) -> str:
    """Return the mean, and every seed's value."""
    each = ", ".join(f"{v:.{digits}f}" for v in values)
    return f"**{statistics.mean(values):.{digits}f}** ({each})"


def arms(folder: Path, seed: int) -> dict[str, Measured]:
    """Train everything from one seed; return what was measured."""
    folder.mkdir(parents=True, exist_ok=True)
    own = f"Recipe.seed = {seed}"
    found = {"teacher": measured(train("live_thinking_teacher", folder / "teacher", own))}
    tasks, attempts = RECIPE / "thinking_sums.jsonl", folder / "attempts"
    model = f"LocalModel.path = '{folder / 'teacher'}'"
    stages = "Pipeline.stages = [@dedup.Exact(), @attempts.SampleAttempts()]"
    made = data(tasks, attempts, stages, model, f"Pipeline.seed = {seed}")
    only = "Pipeline.stages = [@rejection.RejectionSampling()]"
    any_of_them = ("RejectionSampling.min_reward = 0.0", "RejectionSampling.prefer = 'first'")
    rows = {"base": data(made, folder / "first", only, *any_of_them), "RFT": data(made, folder / "kept", only)}
    print(f"seed {seed}: {len(read(made))} tasks, {len(read(rows['RFT']))} with an answer that is kept", flush=True)
    # base imitates wrong answers on purpose, which a run refuses unless they count as solved
    unfiltered = ("Questions.solved_at = 0.0", "Questions.bad_rows = 'skip'")
    for name, path in rows.items():
        settings = (own, "Recipe.phases = [@rft/Phase()]", f"Questions.path = '{path}'")
        found[name] = measured(train("live_thinking", folder / name, *settings, *(unfiltered * (name == "base"))))
    for name, start in (("RL only", "base"), ("RFT + RL", "RFT")):
        settings = (f"Recipe.model = '{folder / start / 'hf'}'", f"Questions.path = '{rows['RFT']}'")
        found[name] = measured(train("live_thinking", folder / name, own, "Recipe.phases = [@rl/Phase()]", *settings))
    for name in ARMS:
        print(f"seed {seed}: {name:8} {found[name]}", flush=True)
    return found


def data(source: Path, out: Path, *settings: str) -> Path:
    """Run the pipeline `data.gin` with some settings; return its records."""
    words = [word for s in settings for word in ("--set", s)]
    assert run_data(["live_thinking/data", "--in", str(source), "--out", str(out), *words]) == 0
    return out / "data.jsonl"


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def measured(run: Path) -> Measured:
    """Answer the held-out tasks four times with the result of a run."""
    stage = SampleAttempts(k=4, max_tok=128, key="question", prompt="{question}", answer_key="sum")
    asked = pipeline.Pipeline((stage,), LocalModel(str(run), SAMPLER), concurrency=128)
    pipeline.run(asked, str(RECIPE / "held_out_sums.jsonl"), run / "held_out")
    tried = [(r, a) for r in read(run / "held_out" / "data.jsonl") for a in r["attempts"]]
    tokens = statistics.mean(a["num_tok"] for _, a in tried)
    return Measured(
        statistics.mean(right("", a["text"], r) for r, a in tried),
        statistics.mean(helpful(r, a["text"]) for r, a in tried),
        tokens,
        2 * active_params(run / "hf") * tokens / 1e6,
    )


def active_params(folder: Path) -> int:
    """Return the number of parameters that a token passes through."""
    cfg = hf.read_config(folder)
    num = Model(cfg, "float32").num_params()
    if isinstance(cfg, Qwen3MoeConfig):
        idle = cfg.num_experts - cfg.experts_per_token
        num -= cfg.num_layers * idle * 3 * cfg.hidden_size * cfg.expert_ffn_size
    return num


def curve(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(path: Path, found: list[dict[str, Measured]], curves: dict[str, list[list[dict[str, float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for i, name in enumerate(ARMS):
        x, y = ([getattr(of[name], what) for of in found] for what in ("tokens", "right"))
        axes[0].scatter(x, y, color=f"C{i}", label=name)
        axes[0].scatter(x, [of[name].helpful for of in found], color=f"C{i}", marker="x")
    axes[0].set(
        xlabel="tokens of an answer", xlim=(0, None), ylim=(0, 1.05), title="held out: right (dots), helpful (x)"
    )
    axes[0].legend(fontsize=8)
    for axis, what in zip(axes[1:], ("rollout/len_tok", "rewards/part/helpful"), strict=True):
        for name, runs in curves.items():
            for seed, rows in enumerate(runs):
                label = None if seed else name
                axis.plot([row[what] for row in rows], color=f"C{ARMS.index(name)}", alpha=0.8, label=label)
        axis.set(xlabel="step of GRPO", ylim=(0, None))
    axes[1].set(title="tokens of an answer")
    axes[2].set(title="helpful answers")
    axes[2].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
