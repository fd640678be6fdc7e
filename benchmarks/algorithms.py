"""Every algorithm on problems of seconds, and on one small language model.

    python benchmarks/algorithms.py --figure docs/algorithms_bench.png      # minutes on two cores; tables and curves
    python benchmarks/algorithms.py --only grpo.Grpo topr.Topr --seeds 3    # some of them; --figure saves them too
    python benchmarks/algorithms.py --lm grpo.Grpo cispo.Cispo              # the quickstart's model; all without names

Numbers go to docs/curves/algorithms.json (numbers of other parts stay). `--redraw` runs nothing: it prints the tables
of the stored numbers, and draws them with `--figure`. The problems are in `toys.py`: policy and critics are tables,
everything else is the trainer's own code. A new file in rolljax/trainer/algorithms is found by itself.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import toys
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from rolljax.trainer import algorithms as package
from rolljax.trainer.algorithms.asyppo import AsyPpo
from rolljax.trainer.algorithms.base import Algorithm
from rolljax.trainer.algorithms.cispo import Cispo
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.algorithms.lite_ppo import LitePpo
from rolljax.trainer.algorithms.opd import Teacher
from rolljax.trainer.algorithms.ppo import Ppo
from rolljax.trainer.algorithms.rebn import ReBn
from rolljax.trainer.algorithms.reinforce import Reinforce
from rolljax.trainer.algorithms.spiral import Spiral
from rolljax.trainer.algorithms.tis import Tis
from rolljax.trainer.algorithms.topr import SequenceTopr, Topr
from rolljax.trainer.algorithms.turn_reinforce import TurnReinforce
from rolljax.trainer.credit.mismatch import Correction
from rolljax.trainer.credit.shaping import GroupFilter
from rolljax.trainer.critic import Critic
from rolljax.trainer.optimizer import AdamW

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "curves" / "algorithms.json"
LAGS = (0, 8, 32)
EVERY = 5
"""Steps between the points of a curve that are kept."""

_CRITIC_LR = AdamW(lr=0.05)
SETTINGS: dict[str, dict[str, Any]] = {
    "asyppo.AsyPpo": {"critic": Critic(num=2, epochs=4, warmup_steps=10, optimizer=_CRITIC_LR)},
    "dapo.Dapo": {"shaping": None},
    "opd.Opd": {"teachers": (Teacher("teacher"),)},
    "ppo.Ppo": {"critic": Critic(optimizer=_CRITIC_LR)},
    "segment_reward.SegmentReward": {"scorer": "teacher", "base": "run_start", "min_segment": 1},
}
"""Settings that an algorithm needs on the bandit; all others run with their defaults."""

SURROGATES: dict[str, type[Any]] = {
    "REINFORCE": Reinforce,
    "PPO clip": Grpo,
    "TIS": Tis,
    "TOPR": Topr,
    "TOPR, sequence": SequenceTopr,
    "CISPO": Cispo,
    "decoupled PPO": DecoupledPpo,
}
"""Ways to treat stale samples, compared with equal advantages."""

Numbers = dict[str, Any]
Advance = Callable[[], None]


def found() -> dict[str, type[Algorithm]]:
    """Return every algorithm of the package by `file.Class`."""
    classes = {}
    for module in pkgutil.iter_modules(package.__path__):
        here = importlib.import_module(f"{package.__name__}.{module.name}")
        for cls in vars(here).values():
            ours = inspect.isclass(cls) and issubclass(cls, Algorithm) and cls.__module__ == here.__name__
            if ours and not inspect.isabstract(cls):
                classes[f"{module.name}.{cls.__name__}"] = cls
    return classes


def make(name: str, cls: type[Algorithm]) -> Algorithm:
    return cls(**SETTINGS.get(name, {}))


def why_not(algorithm: Algorithm) -> str:
    """Return why an algorithm cannot run on the bandit; empty if it can."""
    if algorithm.source != "sampler":
        return "learns from given answers, does not sample"
    if not algorithm.trains_policy:
        return "does not train the policy"
    needs = algorithm.needs()
    if isinstance(algorithm, Spiral):
        return "plays both roles of a game: see nim"
    if needs.context:
        return "scores answers after another prompt, a table has none"
    if needs.attention:
        return "needs attention maps, a table has none"
    if needs.divergence:
        return "compares whole distributions inside the model"
    return ""


# ---- the runs -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """One algorithm on one problem: where its numbers go, how many steps it takes, and how it runs."""

    part: str
    name: str
    lag: int
    steps: int
    go: Callable[[Advance], Numbers]


def curve(values: np.ndarray) -> list[float]:
    """Average over seeds `[S, steps + 1]`, and thin out the steps."""
    return [round(float(v), 4) for v in values.mean(0)[::EVERY]]


def success(history: toys.History) -> Numbers:
    reached = history.steps_to(0.9)
    return {
        "success": curve(history.measured["success"]),
        "steps_to_90": None if np.isinf(np.median(reached)) else float(np.median(reached)),
        "seeds_at_90": int(np.isfinite(reached).sum()),
        "final": round(float(history.measured["success"][:, -1].mean()), 4),
    }


def bandit_runs(seeds: int, steps: int) -> Iterable[Run]:
    for name, cls in found().items():
        algorithm = make(name, cls)
        if why_not(algorithm):
            continue
        for lag in LAGS:

            def go(advance: Advance, algorithm: Algorithm = algorithm, lag: int = lag) -> Numbers:
                return success(
                    toys.train(toys.Bandit, algorithm, seeds=seeds, steps=steps, lr=12, lag=lag, advance=advance)
                )

            yield Run("bandit", name, lag, steps, go)


def surrogate_runs(seeds: int, steps: int) -> Iterable[Run]:
    for name, cls in SURROGATES.items():
        for lag in LAGS:

            def go(advance: Advance, cls: type[Any] = cls, lag: int = lag) -> Numbers:
                algorithm = cls(mean="batch", std="none", aggregation="token-mean")
                problem = lambda s: toys.Bandit(s, group_size=64)  # noqa: E731
                return success(
                    toys.train(problem, algorithm, seeds=seeds, steps=steps, lr=12, lag=lag, advance=advance)
                )

            yield Run("surrogates", name, lag, steps, go)


def stale_runs(seeds: int, steps: int) -> Iterable[Run]:
    """Yield runs that measure the largest logit if failures count -1 and no baseline is subtracted."""
    problems = {
        "easy": (lambda s: toys.Bandit(s, symbols=5, target=2, length=2, group_size=64, wrong=-1), 2),
        "rare": (lambda s: toys.Bandit(s, symbols=8, target=3, length=3, group_size=64, wrong=-1), 12),
    }
    for name, cls in SURROGATES.items():
        for kind, lag in (("easy", 0), ("easy", 32), ("rare", 32)):

            def go(advance: Advance, cls: type[Any] = cls, kind: str = kind, lag: int = lag) -> Numbers:
                problem, lr = problems[kind]
                algorithm = cls(mean="none", std="none", aggregation="token-mean")
                h = toys.train(problem, algorithm, seeds=seeds, steps=steps, lr=lr, lag=lag, advance=advance)
                return {
                    "largest_logit": curve(h.measured["largest_logit"]),
                    "final_logit": round(float(h.measured["largest_logit"][:, -1].mean()), 2),
                    "final": round(float(h.measured["success"][:, -1].mean()), 4),
                }

            yield Run(f"stale {kind}", name, lag, steps, go)


def chain_runs(seeds: int, steps: int) -> Iterable[Run]:
    cases: dict[str, tuple[str, Algorithm]] = {
        "REINFORCE over turns, from the beginning": ("beginning", TurnReinforce()),
        "IPA, from the beginning": ("beginning", Ipa()),
        "IPA, rollback, no imitation": ("rollback", Ipa(failure=0.0, imitation=0.0)),
        "IPA, rollback": ("rollback", Ipa()),
        "IPA, everywhere, no imitation": ("everywhere", Ipa(failure=0.0, imitation=0.0)),
        "IPA, everywhere": ("everywhere", Ipa()),
    }
    for name, (start, algorithm) in cases.items():

        def go(advance: Advance, start: Any = start, algorithm: Algorithm = algorithm) -> Numbers:
            problem = lambda s: toys.Chain(s, start=start)  # noqa: E731
            h = toys.train(problem, algorithm, seeds=seeds, steps=steps, lr=32, advance=advance)
            at = {f"at_{n}": round(float(h.measured["success"][:, n].mean()), 5) for n in (100, 200, 300) if n <= steps}
            return {"success": curve(h.measured["success"]), **at}

        yield Run("chain", name, 0, steps, go)


def guess_runs(seeds: int, steps: int) -> Iterable[Run]:
    for gamma in (0.9, 1.0):

        def go(advance: Advance, gamma: float = gamma) -> Numbers:
            h = toys.train(toys.GuessTheNumber, ReBn(gamma=gamma), seeds=seeds, steps=steps, lr=100, advance=advance)
            return {
                "turns": curve(h.measured["turns"]),
                "final_turns": round(float(h.measured["turns"][:, -1].mean()), 3),
                "final": round(float(h.measured["success"][:, -1].mean()), 4),
            }

        yield Run("guess", f"ReBN, gamma {gamma}", 0, steps, go)


def nim_runs(seeds: int, steps: int) -> Iterable[Run]:
    for name, by_role in (("a baseline for each role", True), ("one for both", False)):

        def go(advance: Advance, by_role: bool = by_role) -> Numbers:
            h = toys.train(toys.Nim, Spiral(by_role=by_role), seeds=seeds, steps=steps, lr=20, advance=advance)
            last = h.measured["right"][:, -1]
            numbers = {"final": round(float(last.mean()), 4), "worst_seed": round(float(last.min()), 4)}
            return {"right": curve(h.measured["right"]), **numbers}

        yield Run("nim", name, 0, steps, go)


def critic_runs(seeds: int, steps: int) -> Iterable[Run]:
    near_sgd = AdamW(lr=2.0, eps=1.0)
    cases = {"by response": (AsyPpo, "response"), "by prompt": (AsyPpo, "prompt"), "the same data": (Ppo, "all")}
    for name, (cls, shard) in cases.items():

        def go(advance: Advance, cls: type[Any] = cls, shard: Any = shard) -> Numbers:
            algorithm = cls(critic=Critic(num=2, epochs=4, shard=shard, optimizer=near_sgd), lam=1.0)
            problem = lambda s: toys.Walk(s, noise=0.5)  # noqa: E731
            h = toys.train(problem, algorithm, seeds=seeds, steps=steps, lr=0, value_std=1, advance=advance)
            assert h.values is not None
            return critic_numbers(h.values)

        yield Run("critics", name, 0, steps, go)


def critic_numbers(values: np.ndarray) -> Numbers:
    """Compare two critics `[S, 2, R]` with each other and with the true values, on the states of new walks."""
    walk = toys.Walk(10_000, samples=2000)
    at = walk.play(np.zeros((walk.rows, 2)), 0).value_rows
    apart, error = values.std(1)[:, at], np.abs(values.mean(1) - walk.true_values)[:, at]
    related = [np.corrcoef(a.ravel(), e.ravel())[0, 1] for a, e in zip(apart, error, strict=True)]
    one, mean = values[:, 0].var(0)[at].mean(), values.mean(1).var(0)[at].mean()
    return {
        "deviation": round(float(apart.mean()), 4),
        "error": round(float(error.mean()), 4),
        "correlation": round(float(np.mean(related)), 3),
        "std_of_one_over_mean": round(float(np.sqrt(one / mean)), 3),
    }


def mixture_runs(seeds: int, steps: int) -> Iterable[Run]:
    cases = {"GRPO": Grpo(), "GRPO, flat groups left out": Grpo(filter=GroupFilter()), "Lite PPO": LitePpo()}
    for name, algorithm in cases.items():

        def go(advance: Advance, algorithm: Algorithm = algorithm) -> Numbers:
            h = toys.train(toys.Prompts, algorithm, seeds=seeds, steps=steps, lr=3, advance=advance)
            norms = h.grad_norms
            return {
                "grad_norm_mean": round(float(norms.mean()), 5),
                "grad_norm_var": float(f"{norms.var(1).mean():.3g}"),
                "grad_norm_cv": round(float((norms.std(1) / norms.mean(1)).mean()), 3),
                "hard": round(float(h.measured["hard"][:, -1].mean()), 4),
                "easy": round(float(h.measured["easy"][:, -1].mean()), 4),
            }

        yield Run("mixture", name, 0, steps, go)


def noise_runs(seeds: int, steps: int) -> Iterable[Run]:
    corrections = {"none": None, "cap 1.2": Correction(), "cap 5": Correction(weight_cap=5.0)}
    for label, correction in corrections.items():
        for sigma in (0.0, 0.5, 1.0, 2.0):

            def go(advance: Advance, correction: Correction | None = correction, sigma: float = sigma) -> Numbers:
                algorithm = Reinforce(mean="batch", correction=correction)
                problem = lambda s: toys.Bandit(s, group_size=64, noise=sigma)  # noqa: E731
                return success(toys.train(problem, algorithm, seeds=seeds, steps=steps, lr=12, advance=advance))

            yield Run("noise", f"{label}|{sigma}", 0, steps, go)


def run_all(runs: Sequence[Run]) -> dict[str, dict[str, Numbers]]:
    """Run everything; return figures by part and by `name|lag`."""
    results: dict[str, dict[str, Numbers]] = {}
    columns = (
        TextColumn("{task.description}", table_column=None),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=sum(r.steps for r in runs))
        for r in runs:
            progress.update(task, description=f"{r.part}: {r.name}, lag {r.lag}")
            results.setdefault(r.part, {})[f"{r.name}|{r.lag}"] = r.go(lambda: progress.advance(task))
    return results


# ---- a language model -----------------------------------------------------------------------------------------------

_CRITICS = ["critic.Critic.optimizer = @value/optimizer.AdamW()", "value/optimizer.AdamW.lr = 1e-3"]
LM_SETTINGS: dict[str, list[str]] = {
    "ppo.Ppo": ["Ppo.critic = @critic.Critic()", *_CRITICS],
    "asyppo.AsyPpo": ["AsyPpo.critic = @critic.Critic()", "critic.Critic.num = 2", *_CRITICS],
    "dapo.Dapo": ["RewardShaping.overlong_cache = 1"],
    "dpo.Dpo": ["rl/Phase.updates_per_step = 1"],
}
"""Settings that the language model's run of an algorithm needs in addition to the quickstart's."""


def lm(names: Sequence[str], out: Path, steps: int, async_ratio: float) -> dict[str, Numbers]:
    """Run the quickstart's model and task with `rolljax.train`: one warm start, then every algorithm from there."""
    warm = out / "warm_start"
    common = ["Recipe.rollouts_every = 1000", "Recipe.save_every = 1000"]
    if not (warm / "summary.json").exists():
        failed = _train(warm, [*common, "Recipe.phases = [@warm_start/recipe.Phase()]"])
        if failed:
            raise SystemExit(f"the warm start failed:\n{failed}")
    results = {}
    for name in names:
        cls = found()[name]
        settings = [
            *common,
            f"Recipe.model = '{warm / 'hf'}'",
            "Recipe.phases = [@rl/recipe.Phase()]",
            f"rl/Phase.algorithm = @{cls.__module__}.{cls.__name__}()",
            f"rl/Phase.steps = {steps}",
            f"rl/Phase.async_ratio = {async_ratio:g}",
            *LM_SETTINGS.get(name, []),
        ]
        folder = out / f"{name}-async{async_ratio:g}"
        print(f"{name}: {folder}", flush=True)
        failed = _train(folder, settings)
        results[f"{name}|{async_ratio:g}"] = {"failed": failed} if failed else _lm_numbers(folder)
    return results


def _train(folder: Path, settings: Sequence[str]) -> str:
    """Run the quickstart with `settings`; the line with the error if it failed, else nothing."""
    command = [sys.executable, "-m", "rolljax.train", "--gin", "quickstart", "--run_dir", str(folder), "--fresh"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command + [a for s in settings for a in ("--set", s)],
        env=env,
        stdout=sys.stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    said = done.stderr.strip().splitlines()
    return next((line for line in said if "error" in line.lower()), "failed") if done.returncode else ""


def _lm_numbers(folder: Path) -> Numbers:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    heldout = [(r["phase_step"], r["heldout/reward_mean"]) for r in rows if "heldout/reward_mean" in r]
    return {
        "reward": [
            round(float(np.mean([r["reward/mean"] for r in rows[i : i + EVERY]])), 4)
            for i in range(0, len(rows), EVERY)
        ],
        "heldout": [
            [0, summary["heldout_reward"][0]["mean"]],
            *heldout,
            [len(rows), summary["heldout_reward"][-1]["mean"]],
        ],
        "final": summary["heldout_reward"][-1]["mean"],
        "wall_s": round(summary["wall_s"], 1),
    }


# ---- tables and figures ---------------------------------------------------------------------------------------------


def load() -> dict[str, Any]:
    return json.loads(DATA.read_text()) if DATA.exists() else {}


def save(results: Mapping[str, Any]) -> None:
    DATA.parent.mkdir(parents=True, exist_ok=True)
    kept = load()
    for part, numbers in results.items():
        kept[part] = {**kept.get(part, {}), **numbers} if isinstance(numbers, dict) else numbers
    lines = [
        f"  {json.dumps(part)}: "
        + ("{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in n.items()) + "\n  }")
        for part, n in kept.items()
    ]
    DATA.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def _names(part: Mapping[str, Numbers]) -> list[str]:
    return list(dict.fromkeys(key.rsplit("|", 1)[0] for key in part))


def _reached(numbers: Numbers) -> str:
    steps = numbers["steps_to_90"]
    return "-" if steps is None else f"{steps:.0f}"


def success_table(part: Mapping[str, Numbers]) -> str:
    """Return a table of the steps to .9 and the final success of every algorithm at every lag."""
    head = ["", *(f"lag {lag}: steps to .9" for lag in LAGS), *(f"lag {lag}: final" for lag in LAGS)]
    rows = []
    for name in _names(part):
        at = [part[f"{name}|{lag}"] for lag in LAGS if f"{name}|{lag}" in part]
        rows.append([f"`{name}`" if "." in name else name, *map(_reached, at), *(f"{n['final']:.3f}" for n in at)])
    return table(head, rows)


def tables(data: Mapping[str, Any]) -> dict[str, str]:
    """Return every table by its name."""
    stale = [[name, *(f"{data[p][f'{name}|{lag}']['final_logit']:.1f}" for p, lag in _STALE)] for name in SURROGATES]
    chain = [
        [n, *(f"{x.get(f'at_{k}', float('nan')):.3f}" for k in (100, 200, 300))] for n, x in _by_name(data["chain"])
    ]
    guess = [[n, *(f"{x[k]:.2f}" for k in ("final_turns", "final"))] for n, x in _by_name(data["guess"])]
    of_critics = ("deviation", "error", "correlation", "std_of_one_over_mean")
    nim = [[n, *(f"{x[k]:.3f}" for k in ("final", "worst_seed"))] for n, x in _by_name(data["nim"])]
    critics = [[n, *(x[k] for k in of_critics)] for n, x in _by_name(data["critics"])]
    of_mixture = ("grad_norm_mean", "grad_norm_var", "grad_norm_cv", "hard", "easy")
    mixture = [[n, *(x[k] for k in of_mixture)] for n, x in _by_name(data["mixture"])]
    left_out = [[f"`{name}`", why] for name, cls in found().items() if (why := why_not(make(name, cls)))]
    return {
        "bandit": success_table(data["bandit"]),
        "left_out": table(["not here", "why"], left_out),
        "surrogates": success_table(data["surrogates"]),
        "stale": table(["", "easy, lag 0", "easy, lag 32", "rare, lag 32"], stale),
        "chain": table(["success after steps", "100", "200", "300"], chain),
        "guess": table(["", "turns", "solved"], guess),
        "nim": table(["winning moves", "mean", "worst seed"], nim),
        "critics": table(["each critic learns", "deviation", "error", "correlation", "ratio"], critics),
        "mixture": table(["", "gradient norm", "its variance", "deviation / mean", "hard", "easy"], mixture),
        "noise": _noise_table(dict(_by_name(data["noise"]))),
        "lm": _lm_table(data.get("lm", {})),
    }


def _noise_table(noise: Mapping[str, Numbers]) -> str:
    labels, sigmas = (list(dict.fromkeys(n.split("|")[i] for n in noise)) for i in (0, 1))
    cell = lambda x: f"{_reached(x)} / {x['final']:.3f}"  # noqa: E731
    rows = [[label, *(cell(noise[f"{label}|{s}"]) for s in sigmas)] for label in labels]
    return table(["weights", *(f"sigma {s}" for s in sigmas)], rows)


def _lm_table(runs: Mapping[str, Numbers]) -> str:
    rows = []
    for key, x in runs.items():
        name, async_ratio = key.rsplit("|", 1)
        if "failed" in x:
            rows.append([f"`{name}`", async_ratio, x["failed"], "", "", ""])
        else:
            first, last = x["heldout"][0][1], x["heldout"][-1]
            rows.append([f"`{name}`", async_ratio, last[0], f"{first:.3f}", f"{last[1]:.3f}", f"{x['wall_s']:.0f}"])
    return table(["", "async ratio", "steps", "held-out reward before", "after", "seconds"], rows)


def print_tables(data: Mapping[str, Any]) -> None:
    """Print every table under its name."""
    for name, text in tables(data).items():
        print(f"{name}\n{text}\n")


_STALE = (("stale easy", 0), ("stale easy", 32), ("stale rare", 32))


def _by_name(part: Mapping[str, Numbers]) -> list[tuple[str, Numbers]]:
    return [(key.rsplit("|", 1)[0], numbers) for key, numbers in part.items()]


COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
SHADES = dict(zip(LAGS, ("#08306b", "#4292c6", "#fd8d3c"), strict=True))


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    return plt


def _steps(values: Sequence[float]) -> list[int]:
    return [EVERY * i for i in range(len(values))]


def curve_figure(names: Sequence[str], path: str | Path) -> None:
    """Plot success on the bandit over steps from docs/curves/algorithms.json: a panel for each lag and a line for each
    of `names` (`grpo.Grpo`).

    Raises:
      KeyError: an algorithm was not measured.
    """
    plt, part = _pyplot(), load()["bandit"]
    fig, axes = plt.subplots(1, len(LAGS), figsize=(8, 2.3), sharey=True, constrained_layout=True)
    for axis, lag in zip(axes, LAGS, strict=True):
        for name, colour in zip(names, COLOURS, strict=False):
            values = part[f"{name}|{lag}"]["success"]
            axis.plot(_steps(values), values, color=colour, linewidth=1.5, label=name.rsplit(".", 1)[-1])
        axis.set(title=f"lag {lag}", xlabel="step", ylim=(-0.02, 1.02))
    axes[0].set_ylabel("success")
    axes[-1].legend(loc="lower right")
    fig.savefig(path, dpi=110)
    plt.close(fig)


def figure(data: Mapping[str, Any], path: Path) -> None:
    """Plot all curves: surrogates by lag, every algorithm by itself, and the other problems."""
    plt = _pyplot()
    names = _names(data["bandit"])
    rows = -(-len(names) // 6)
    fig = plt.figure(figsize=(11, 2.7 + 1.35 * rows + 2.6), layout="constrained")
    top, middle, bottom = fig.subfigures(3, 1, height_ratios=(2.7, 1.35 * rows + 0.4, 2.6))
    _draw_surrogates(top, data["surrogates"])
    _draw_each(middle, data["bandit"], names, rows)
    _draw_others(bottom, data)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def _draw_surrogates(fig: Any, part: Mapping[str, Numbers]) -> None:
    fig.suptitle("treatments of stale samples, equal advantages: success on the bandit", fontsize=9, weight="bold")
    for axis, lag in zip(fig.subplots(1, len(LAGS), sharey=True), LAGS, strict=True):
        for name, colour in zip(_names(part), COLOURS, strict=False):
            values = part[f"{name}|{lag}"]["success"]
            axis.plot(_steps(values), values, color=colour, linewidth=1.4, label=name)
        axis.set(title=f"lag {lag}", xlabel="step", ylim=(-0.02, 1.02))
    fig.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize=7)


def _draw_each(fig: Any, part: Mapping[str, Numbers], names: Sequence[str], rows: int) -> None:
    fig.suptitle("every algorithm with its defaults: success on the bandit by lag", fontsize=9, weight="bold")
    axes = list(fig.subplots(rows, 6, sharex=True, sharey=True).flat)
    for axis, name in zip(axes, names, strict=False):
        for lag in LAGS:
            values = part[f"{name}|{lag}"]["success"]
            axis.plot(_steps(values), values, color=SHADES[lag], linewidth=1.3, label=f"lag {lag}")
        axis.set_title(name.rsplit(".", 1)[-1], fontsize=8, pad=2)
        axis.set(ylim=(-0.05, 1.05), yticks=(0, 1))
    handles, labels = axis.get_legend_handles_labels()
    for spare in axes[len(names) :]:
        spare.axis("off")
    fig.legend(handles, labels, loc="outside lower center", ncols=3)


def _draw_others(fig: Any, data: Mapping[str, Any]) -> None:
    logits, chain, guess = fig.subplots(1, 3)
    for name, colour in zip(SURROGATES, COLOURS, strict=False):
        values = data["stale rare"][f"{name}|32"]["largest_logit"]
        logits.plot(_steps(values), values, color=colour, linewidth=1.4, label=name)
    logits.set(title="rare target, +1 / -1, lag 32: largest logit", xlabel="step", yscale="log", xlim=(0, 480))
    logits.legend(fontsize=6, loc="center right")
    for axis, part, key, title in (
        (chain, "chain", "success", "chain of 8 chunks: success"),
        (guess, "guess", "turns", "guess the number: turns"),
    ):
        for (name, numbers), colour in zip(_by_name(data[part]), COLOURS, strict=False):
            axis.plot(_steps(numbers[key]), numbers[key], color=colour, linewidth=1.4, label=name)
        axis.set(title=title, xlabel="step")
        axis.legend(fontsize=6)


# ---- the command ----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="algorithms on the bandit, and other parts by name")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--figure", type=Path, help="draw everything there, and save the numbers")
    parser.add_argument("--redraw", action="store_true", help="run nothing, print and draw the saved numbers")
    parser.add_argument("--lm", nargs="*", help="train the quickstart's model with these algorithms (none: all)")
    parser.add_argument("--lm_out", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--lm_steps", type=int, default=150)
    parser.add_argument("--async_ratio", type=float, default=0.0)
    args = parser.parse_args()
    if args.lm is not None:
        names = args.lm or [n for n, cls in found().items() if not why_not(make(n, cls))]
        save({"lm": lm(names, args.lm_out.resolve(), args.lm_steps, args.async_ratio)})
        print_tables(load())
        return
    if not args.redraw:
        seeds, steps = args.seeds, args.steps
        few = min(seeds, 3)
        runs = [*bandit_runs(seeds, steps), *surrogate_runs(seeds, steps), *stale_runs(few, steps)]
        runs += [*chain_runs(few, steps), *guess_runs(few, steps), *nim_runs(seeds, 200)]
        runs += [*critic_runs(min(seeds, 8), 80), *mixture_runs(few, steps // 2), *noise_runs(few, 200)]
        results = run_all([r for r in runs if not args.only or r.part in args.only or r.name in args.only])
        print(*(success_table(results[p]) for p in ("bandit", "surrogates") if p in results), sep="\n\n")
        if args.figure:
            save({**results, "settings": {"seeds": seeds, "steps": steps}})
    if args.redraw or args.figure:
        print_tables(load())
    if args.figure:
        figure(load(), args.figure)


if __name__ == "__main__":
    main()
