"""Measures how many minutes each recipe of the page of papers takes on this machine, from a few steps of each phase.

    python benchmarks/recipes.py [NAME ...] [--out DIR] [--steps 6] [--bound] [--again]

Each recipe is the command that a user types, with fewer steps. Compilation happens in the first step of a phase, so the
later ones count: time without evaluations, and time of an evaluation. Both are extrapolated to all steps. A phase that
ends at a reward runs to its end; `--bound` cuts it too, and counts all of its steps. Other programs lengthen wall time,
but not CPU time; on an idle machine of two cores the wall time is between half of the CPU time and all of it. The
result is the smaller one of both: an upper bound, if later steps take as long. Results are added to
docs/recipes.jsonl; a second call continues with the others.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import make_papers_page as page  # noqa: E402

from rolljax import cli  # noqa: E402
from rolljax.errors import ConfigError  # noqa: E402

MODEL = "runs/palette_base/hf"
LATENTS = f"rolljax.recipes.palette.latents --model {MODEL} --env styled_words --to runs/palette.safetensors"
FIRST = {
    "ddk": ("ddk_teacher",),
    "palette": ("palette_base", LATENTS, "palette_warm_up"),
    "complementary/actor": ("complementary/start",),
    "dlcot": ("dlcot --seeds 0 --out runs/dlcot_study",),
    "stagent": ("stagent --seeds 0 --out runs/stagent_study",),
}
"""Recipes and commands whose results a recipe takes; their time is not part of its own."""
SETTINGS = {
    "algorithms/asyppo": ("Critic.warmup_steps = 0",),  # else a few steps train critics alone
    "ddk": ("Distill.teacher = 'runs/ddk_teacher/hf'",),
    "complementary/actor": ("Recipe.model = 'runs/start/hf'",),
    "dlcot": ("Questions.path = 'runs/dlcot_study/both/pruned.jsonl'",),
    "stagent": (
        "Recipe.model = 'runs/stagent_study/seed/hf'",
        "Questions.path = 'runs/stagent_study/routed/data.jsonl'",
    ),
}
NEEDS = {
    "bsa/judged": "a dataset, and servers of two models",
    "usb/judged": "a dataset, and servers of two models",
    "terminal_bench/cli_agent": "mini-swe-agent in /opt/mini",
    "presets/async_ratio_2": "a recipe that it is added to",
}
"""Recipes that are not measured, and what they need."""


def cpu_s(root: int) -> float:
    """Return the CPU seconds of a process and its descendants, and of the children that they waited for."""
    parents, ticks, found = {}, {}, {root}
    for number in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(") ")[2].split()
        except OSError:  # it has ended
            continue
        parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))
    while more := {n for n, parent in parents.items() if parent in found} - found:
        found |= more
    return sum(ticks.get(n, 0) for n in found) / os.sysconf("SC_CLK_TCK")


def run(arguments: list[str], out: Path, rows: Path | None = None) -> tuple[float, list[float]]:
    """Run a module; return its wall seconds, and the CPU seconds at each row of `rows` and at the end."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")]), "JAX_PLATFORMS": "cpu"}
    began, marks = time.perf_counter(), []
    with (out / "log.txt").open("w") as log:
        command = [sys.executable, "-m", *arguments]
        process = subprocess.Popen(command, cwd=out, env=env, stdout=log, stderr=log)
        now_s = 0.0
        try:
            while process.poll() is None:
                now_s = max(now_s, cpu_s(process.pid))
                done = rows.read_text().count("\n") if rows and rows.is_file() else 0
                marks += [now_s] * (done - len(marks))
                time.sleep(0.1)
        finally:
            process.kill()
    if process.returncode:
        raise RuntimeError((out / "log.txt").read_text()[-1500:])
    return time.perf_counter() - began, [*marks, now_s]


def measure(name: str, out: Path, num_steps: int, bound: bool) -> dict:
    """Run a few steps of each phase of a recipe; return its row of the results."""
    loaded = cli.load_recipe([name], list(SETTINGS.get(name, ())))
    phases = next(line for line in loaded.operative.splitlines() if "Recipe.phases = " in line)
    given, folder = list(SETTINGS.get(name, ())), Path("runs", Path(name).stem)
    for scope, phase in zip(re.findall(r"@(\w+)/", phases), loaded.value.phases, strict=True):
        if (bound or phase.stop_at_reward is None) and phase.steps > num_steps:
            given.append(f"{scope}/Phase.steps = {num_steps}")
            given += [f"{scope}/Phase.eval_every = {num_steps // 2}"] if phase.eval_every else []
    command = ["rolljax.train", "--gin", name, "--run_dir", str(folder), "--fresh"]
    metrics = out / folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    wall_s, marks = run([*command, *(word for s in given for word in ("--set", s))], out, metrics)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    found, total_s, total_cpu_s = {}, wall_s, marks[-1]
    for phase in loaded.value.phases:
        own = [i for i, row in enumerate(rows) if row["phase"] == phase.name]
        steps_s = [rows[i]["time/step_s"] for i in own[1:]]
        evals_s = [s for i in own[1:] if (s := rows[i].get("time/eval_s"))]
        step_s = (sum(steps_s) - sum(evals_s)) / len(steps_s)
        busy = (marks[own[-1]] - marks[own[0]]) / sum(steps_s)
        found[phase.name] = {"steps": phase.steps, "step_s": round(step_s, 3), "cpu_s": round(step_s * busy, 3)}
        if len(own) == num_steps < phase.steps and (bound or phase.stop_at_reward is None):
            more_s = step_s * (phase.steps - num_steps)
            if evals_s:
                more_s += sum(evals_s) / len(evals_s) * (phase.steps // phase.eval_every - 2)
            total_s, total_cpu_s = total_s + more_s, total_cpu_s + more_s * busy
        elif len(own) < phase.steps:
            found[phase.name]["steps"] = len(own)
    row = {"config": name, "settings": page.fingerprint(name), "minutes": round(min(total_s, total_cpu_s) / 60, 1)}
    row |= {"wall_minutes": round(total_s / 60, 1), "cpu_minutes": round(total_cpu_s / 60, 1)}
    return row | {"run_s": round(wall_s, 1), "run_cpu_s": round(marks[-1], 1), "phases": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="recipes (default: all of the page)")
    parser.add_argument("--out", type=Path, default=Path("recipe_times"), help="folder of the runs")
    parser.add_argument("--steps", type=int, default=6, help="steps of a phase, even (default: %(default)s)")
    parser.add_argument("--bound", action="store_true", help="count all steps of phases that end at a reward")
    parser.add_argument("--again", action="store_true", help="measure recipes again that have a result")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(out)  # files that recipes name are there
    todo = args.names or page.configs()
    for name in list(dict.fromkeys(each for n in todo for each in (*FIRST.get(n, ()), n))):
        if name in NEEDS:
            print(f"{name:28} not measured, needs {NEEDS[name]}", flush=True)
            continue
        try:
            if " " in name:
                seconds, _ = run(name.split(), out)
                print(f"{name.split()[0]:28} {seconds:.0f} s", flush=True)
                continue
            if not args.again and page.minutes_of(name) is not None:
                continue
            row = measure(name, out, args.steps, args.bound)
        except (RuntimeError, ConfigError) as e:
            print(f"{name:28} FAILED\n{e}", flush=True)
            continue
        rows = [r for r in page.results() if r["config"] != name]
        page.RESULTS.write_text("".join(json.dumps(r) + "\n" for r in sorted([*rows, row], key=lambda r: r["config"])))
        print(f"{name:28} {row['minutes']:6.1f} minutes  {json.dumps(row)}", flush=True)


if __name__ == "__main__":
    main()
