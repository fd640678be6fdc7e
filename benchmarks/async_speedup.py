"""Measures the savings of asynchrony and tail batching: seconds per step of real runs, each mechanism added in turn.

    python benchmarks/async_speedup.py --figure docs/async_speedup.png            # all workloads
    python benchmarks/async_speedup.py --workloads agents          # forty minutes, in which it mostly sleeps

A tiny model, the real engine, the real loop; every run is a process of its own, one after the other. The lengths of
answers (single-turn workloads) and the seconds of an environment (`latency.py`) are drawn at random. The seconds are
the mean of the steps in the steady state: without the first two, which compile, and without the last ones, for which no
group is started ahead. Ratios are to the synchronous loop of the same call.

Further columns have the seconds that `rolljax.simulate` predicts for each recipe with the timings of other runs: of the
synchronous one, and of the first that starts steps ahead. A synchronous run does not show what trainer and sampler take
when both use the same cores at once. In brackets: the prediction with the run's own timings.
"""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
SKIPPED = 2
SEEDS = 9
"""Simulations of a recipe."""
COMMON = """
from __gin__ import dynamic_registration
import latency
from rolljax import recipe
from rolljax.envs import pool
from rolljax.model.families import qwen3
from rolljax.rollout import group_buffer
from rolljax.sampler import settings
from rolljax.trainer import mesh
from rolljax.trainer import optimizer
from rolljax.trainer.algorithms import grpo

recipe.Recipe.env = @latency.Latency()
recipe.Recipe.model = @qwen3.Qwen3Config()
qwen3.Qwen3Config.num_layers = 1
qwen3.Qwen3Config.hidden_size = 32
qwen3.Qwen3Config.ffn_size = 64
qwen3.Qwen3Config.num_heads = 2
qwen3.Qwen3Config.num_kv_heads = 1
recipe.Recipe.sampler = @settings.SamplerConfig()
recipe.Recipe.phases = [@recipe.Phase()]
recipe.Recipe.save_every = 100000
recipe.Evaluation.tasks = 2
recipe.Recipe.evaluation = @recipe.Evaluation()
recipe.Phase.name = 'rl'
recipe.Phase.updates_per_step = 2
recipe.Phase.algorithm = @grpo.Grpo()
recipe.Phase.optimizer = @optimizer.AdamW()
optimizer.AdamW.lr = 1e-5
"""
ONE_TURN = """
latency.Latency.turns = 1
latency.Latency.mean_s = 0.0
latency.Latency.std_s = 0.0
latency.Latency.hang_frac = 0.0
recipe.Phase.group_size = 2
"""
FEW_ANSWERS = f"""{ONE_TURN}
settings.SamplerConfig.slots = 16
settings.SamplerConfig.max_context = 1088
recipe.Recipe.max_answer_tok = 1024
recipe.Phase.prompts_per_step = 4
"""
MANY_ANSWERS = f"""{ONE_TURN}
settings.SamplerConfig.slots = 128
settings.SamplerConfig.max_context = 576
recipe.Recipe.max_answer_tok = 512
recipe.Phase.prompts_per_step = 32
"""
AGENTS = """
settings.SamplerConfig.slots = 128
settings.SamplerConfig.max_context = 256
recipe.Recipe.max_answer_tok = 8
recipe.Phase.prompts_per_step = 8
recipe.Phase.group_size = 4
"""
KEEP = {"settings.SamplerConfig.on_publish": "'keep'"}
SPLIT = {"recipe.Recipe.placement": "@mesh.Split()", "mesh.Split.sampler": 1}
TAIL = {"recipe.Phase.tail_batching": "@group_buffer.TailBatching()"}


@dataclasses.dataclass(frozen=True)
class Workload:
    """A model, drawn lengths of answers, drawn times of environments, and the settings that are compared.

    name: for people. gin: settings. lengths: median, and sigmas of the prompts' and the samples' log-normal lengths, in
      tokens. steps: of each run. devices: that JAX sees, which share the cores.
    decode_s: shortest time of a decode step, however few sequences it has. An accelerator reads all of its weights for
      any number of them; these cores take a tenth of the time for one than for thirty-two.
    """

    name: str
    gin: str
    lengths: tuple[float, float, float]
    variants: dict[str, dict[str, object]]
    steps: int = 16
    decode_s: float = 0.0
    devices: int = 1


def ratio(value: float, **more: object) -> dict[str, object]:
    return {"recipe.Phase.async_ratio": value, **{f"recipe.Phase.{name}": x for name, x in more.items()}}


WORKLOADS = {
    "agents": Workload(
        "agents: 5 calls of N(1 s, 1 s), 1 % of episodes hang for 30 s",
        AGENTS,
        (4, 0.0, 0.0),
        {
            "synchronous": {},
            "spare groups and siblings": ratio(0, spare_prompts=1, spare_siblings=1, late="'drop'"),
            "async_ratio 1": ratio(1),
            "async_ratio 2": ratio(2),
            "async_ratio 2, spares": ratio(2, spare_prompts=1, spare_siblings=1, late="'drop'"),
        },
        steps=60,
    ),
    "answers": Workload(
        "answers of log-normal lengths (sigma 1), decode steps of 5 ms",
        MANY_ANSWERS,
        (24, 0.0, 1.0),
        {
            "synchronous": {},
            "async_ratio 0.5": ratio(0.5) | KEEP,
            "async_ratio 1": ratio(1) | KEEP,
            "async_ratio 2": ratio(2) | KEEP,
            "async_ratio 2, recompute": ratio(2),
        },
        steps=40,
        decode_s=0.005,
    ),
    "tail": Workload(
        "prompts' lengths of sigma 1, samples' 0.2, decode steps of 5 ms",
        MANY_ANSWERS,
        (24, 1.0, 0.2),
        {"synchronous": {}, "tail batching": TAIL},
        steps=40,
        decode_s=0.005,
    ),
    "cores": Workload(
        "answers of log-normal lengths (sigma 1), decoded as fast as two cores can",
        FEW_ANSWERS,
        (100, 0.0, 1.0),
        {"synchronous": {}, "async_ratio 1": ratio(1) | KEEP, "async_ratio 1, recompute": ratio(1)},
        steps=60,
    ),
    "split": Workload(
        "the same on two devices of a core each",
        FEW_ANSWERS,
        (100, 0.0, 1.0),
        {
            "synchronous": {},
            "async_ratio 1": ratio(1) | KEEP,
            "async_ratio 1, a device for each": ratio(1) | KEEP | SPLIT,
        },
        steps=60,
        devices=2,
    ),
}


def child(workload: Workload, arguments: list[str]) -> None:
    """Run training with answer lengths that depend only on their addresses."""
    import numpy as np

    from rolljax.commands.train import main as train
    from rolljax.rollout.episodes import SamplerPolicy

    median, of_prompt, of_sample = workload.lengths
    act = SamplerPolicy.act

    async def as_long_as_drawn(self, prompt_ids, episode, key, turn):
        prompt = np.random.default_rng([key.stream, key.prompt_index]).normal(0, of_prompt)
        sample = np.random.default_rng([key.stream, key.prompt_index, key.sibling]).normal(0, of_sample)
        length = int(np.clip(median * math.exp(prompt + sample), 1, self.params.max_tokens))
        params = dataclasses.replace(self.params, max_tokens=length, stop_ids=())
        answer = await act(dataclasses.replace(self, params=params), prompt_ids, episode, key, turn)
        return dataclasses.replace(answer, finish_reason="stop")

    SamplerPolicy.act = as_long_as_drawn
    if workload.decode_s:
        hold_pace(workload.decode_s)
    raise SystemExit(train(arguments))


def hold_pace(decode_s: float) -> None:
    """Let no decode step be shorter; the thread of the sampler sleeps meanwhile."""
    from rolljax.sampler.scheduler import Scheduler

    dispatch = Scheduler._dispatch

    def not_sooner(self):
        before_s = self.stats.generate_s
        out = dispatch(self)
        left_s = max(0.0, decode_s * self.cfg.steps_per_dispatch - (self.stats.generate_s - before_s))
        time.sleep(left_s)
        self.stats.generate_s += left_s
        return out

    Scheduler._dispatch = not_sooner


def write_recipe(name: str, variant: str, folder: Path, steps: int | None) -> Path:
    workload = WORKLOADS[name]
    folder.mkdir(parents=True)
    recipe = folder / "recipe.gin"
    settings = {"recipe.Phase.steps": steps or workload.steps, **workload.variants[variant]}
    recipe.write_text(COMMON + workload.gin + "".join(f"{k} = {v}\n" for k, v in settings.items()))
    return recipe


def run(name: str, recipe: Path) -> list[dict]:
    """Run a recipe in the recipe's folder; return the rows of its steps."""
    arguments = ["--gin", str(recipe), "--run_dir", str(recipe.parent / "run")]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    flags = f"--xla_force_host_platform_device_count={WORKLOADS[name].devices}"
    env = os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, __file__, "--child", name, "--", *arguments]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{recipe}:\n{done.stdout[-3000:]}")
    return [json.loads(line) for line in (recipe.parent / "run" / "metrics.jsonl").read_text().splitlines()]


def simulated(recipe: Path, timings_of: Path) -> float:
    """Simulate a recipe with the timings of the run in another folder; return the mean seconds of a step over seeds.

    It simulates as many steps as the run had, as the first steps differ from later ones.
    """
    from rolljax import cli
    from rolljax.simulate import simulate
    from rolljax.simulation import fitting, report

    loaded = cli.load_recipe([str(recipe)], []).value
    timings = fitting.fitted(timings_of, loaded)
    seeds = [dataclasses.replace(loaded, seed=seed) for seed in range(SEEDS)]
    return sum(report.summarize(*simulate(own, timings)).numbers["step_s"] for own in seeds) / SEEDS


def measured(rows: list[dict]) -> dict[str, float]:
    """Return means over the steps in the steady state."""
    ahead = math.ceil(max(r["stale/start_max_ver"] for r in rows))
    steady = rows[SKIPPED : len(rows) - ahead]

    def mean(key: str) -> float:
        return sum(r[key] for r in steady) / len(steady)

    return {
        "step_s": mean("time/step_s"),
        "wait_s": mean("time/rollout_s"),
        "update_s": mean("time/update_s"),
        "held_frac": 1 - mean("sampler/idle_frac"),
        "trainer_frac": mean("time/update_s") / mean("time/step_s"),
        "age_ver": mean("stale/start_mean_ver"),
        "len_tok": mean("rollout/len_tok"),
    }


def draw(found: dict[str, dict[str, dict[str, float]]], figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(2, len(found))
    rows = math.ceil(len(found) / columns)
    fig, axes = plt.subplots(rows, columns, figsize=(6 * columns, 2.4 * rows), constrained_layout=True, squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_visible(False)
    for axis, (name, variants) in zip(axes.flat, found.items(), strict=False):
        labels = list(variants)[::-1]
        seconds = [variants[v]["step_s"] for v in labels]
        bars = axis.barh(labels, seconds, color="#3b7dd8")
        axis.bar_label(bars, [f"{variants[labels[-1]]['step_s'] / s:.2f}x" for s in seconds], padding=3)
        axis.set(
            title=textwrap.fill(WORKLOADS[name].name, 48), xlabel="seconds per step", xlim=(0, 1.15 * max(seconds))
        )
        axis.title.set_fontsize(9)
    fig.savefig(figure, dpi=120)


def measured_all(name: str, out: Path, steps: int | None) -> dict[str, dict[str, float]]:
    """Measure every variant of a workload, one after the other, and simulate each."""
    recipes, found = {}, {}
    for i, variant in enumerate(WORKLOADS[name].variants):
        recipes[variant] = write_recipe(name, variant, out / f"{name}{i}", steps)
        found[variant] = measured(run(name, recipes[variant]))
        print(name, variant, {k: round(v, 3) for k, v in found[variant].items()}, flush=True)
    sources = {"simulated_s": "synchronous", "simulated_ahead_s": next((v for v in found if "async_ratio" in v), "")}
    for variant, recipe in recipes.items():
        for column, source in sources.items():
            if source:
                found[variant][column] = simulated(recipe, recipes[source].parent / "run")
                found[variant][f"{column}_own"] = float(variant == source)
    return found


def table(name: str, variants: dict[str, dict[str, float]]) -> str:
    base = variants["synchronous"]["step_s"]
    lines = [
        f"\n{WORKLOADS[name].name}\n",
        "| | s per step | ratio | waiting | trainer busy | slots busy | age | simulated s | simulated s, ahead |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, x in variants.items():
        cells = [f"{x['step_s']:.2f}", f"{base / x['step_s']:.2f}"]
        cells += [f"{x[k]:.2f}" for k in ("wait_s", "trainer_frac", "held_frac", "age_ver")]
        for column in ("simulated_s", "simulated_ahead_s"):
            text = f"{x[column]:.2f}" if column in x else ""
            cells.append(f"({text})" if x.get(f"{column}_own") else text)
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default=",".join(WORKLOADS))
    parser.add_argument("--steps", type=int, help="of each run (default: as the workload has it)")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT / "benchmarks"))  # for `latency`
    if args.child:
        child(WORKLOADS[args.child], args.arguments)
    found: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as out:
        for name in args.workloads.split(","):
            found[name] = measured_all(name, Path(out), args.steps)
            print(table(name, found[name]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.figure:
        draw(found, args.figure)


if __name__ == "__main__":
    main()
