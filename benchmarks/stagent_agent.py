"""Does STAgent's cascade train an agent at the travel desk better than RL alone? A table and a figure.

    python benchmarks/stagent_agent.py --out runs/stagent_agent --figure rolljax/recipes/stagent/stagent_agent.png

A funnel over generated requests; a seed policy that imitates the reference player for a short while; eight attempts of
it at each request, by which `Learnability` routes them; SFT2 on its own solved episodes of the nearly certain ones; RL
on the uncertain ones, rewarded by the rubric with its veto. The controls begin with the same seed policy and
take as many steps: RL on all requests of the funnel, and RL on the learnable ones (both routes) without SFT2. Held-out
requests are played before and after. The routes are compared with 64 attempts at each of some requests.
`--out` keeps all parts; the same command continues there.
"""

import argparse
import json
import random
import statistics
import tempfile
from pathlib import Path

from quickstart import run
from stagent import verb, write

from rolljax.envs.catalog import ref_of
from rolljax.recipes.stagent.episodes import HELD_OUT_FRAC, records_of
from rolljax.recipes.stagent.travel import TINY, Travel
from rolljax.storage.run_reader import read_trajectories

ARMS = {"uniform": "0.5", "learnable": "tab:orange", "cascade": "tab:blue"}
LIMITS = ["--max_answer_tok", "104", "--max_context", "640"]
BAND = (0.05, 0.9)
"""A request is learnable if its true success is between these bounds of `Learnability`."""


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def pipeline(name: str, source: Path, out: Path, *settings: str) -> None:
    if not (out / "report.json").is_file():
        verb("rolljax.data", name, "--in", str(source), "--out", str(out), *(a for s in settings for a in ("--set", s)))


def train(name: str, folder: Path, *settings: str) -> Path:
    """Train unless the run is there; return the folder of its policy."""
    if not (folder / "hf").is_dir():
        run(name, folder, list(settings))
    return folder / "hf"


def play(policy: Path, env: Travel, tasks: int, attempts: int, out: Path, *more: str) -> list:
    """Return the episodes of a policy; they are played unless they are there."""
    if not (out / "table.md").is_file():
        words = ["--model", str(policy), "--env", ref_of(env), "--tasks", str(tasks), "--attempts", str(attempts)]
        verb("rolljax.eval", *words, "--to", str(out), *LIMITS, *more)
    return read_trajectories(out / "answers.jsonl")


def by_level(episodes: list) -> dict[str, float]:
    """Return success by level, over all, and the shares of vetoed and of unreadable answers."""
    level = {t.task.content: str(json.loads(t.task.content)["level"]) for t in episodes}
    found: dict[str, list[float]] = {}
    for t in episodes:
        for name in (level[t.task.content], "all"):
            found.setdefault(name, []).append(t.success)
    vetoed, unread = (sum(t.metrics.get(m, 0) for t in episodes) for m in ("made_up_n", "unread_n"))
    shares = {name: statistics.mean(values) for name, values in sorted(found.items())}
    return shares | {"veto": vetoed / len(episodes), "unread": unread / len(episodes)}


def overlap(chosen: set[str], true: dict[str, float]) -> tuple[float, float, int]:
    """Return precision and recall of the learnable requests among those whose true success is known, and how many of
    them are truly learnable."""
    band = {task for task, mu in true.items() if BAND[0] < mu < BAND[1]}
    both = len(chosen & band)
    return both / max(1, len(chosen & true.keys())), both / max(1, len(band)), len(band)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=280, help="requests before the funnel")
    parser.add_argument("--steps", type=int, default=25, help="of each arm, SFT2 included")
    parser.add_argument("--sft2", type=int, default=5, help="steps of SFT2")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--held_out", type=int, default=100, help="requests, played twice")
    parser.add_argument("--true", type=int, default=40, help="requests that are played 64 times")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    desk = Travel(**TINY)
    fresh = ("--held_out_frac", str(HELD_OUT_FRAC))

    requests = write(out / "requests.jsonl", records_of(desk, args.num))
    pipeline("stagent_agent_funnel", requests, out / "funnel")
    everything = out / "funnel" / "data.jsonl"
    seed = train("stagent_agent_seed", out / "seed")
    start = by_level(play(seed, desk, args.held_out, 2, out / "held_out_seed", *fresh))

    routes, num = out / "routed", len(read(everything))
    asked = Travel(**TINY | {"path": str(everything)})
    play(seed, asked, num, 8, out / "attempts")
    paths = f"FromRollouts.paths = ['{out / 'attempts' / 'answers.jsonl'}']"
    keys = ("FromRollouts.key = 'task'", "Pipeline.split_by = 'route'")
    pipeline("learnability", everything, routes, paths, *keys)
    certain, uncertain = (read(routes / f"{name}.jsonl") for name in ("sft", "rl"))
    both = write(out / "learnable.jsonl", certain + uncertain)
    own = paths.replace("FromRollouts", "SolvedEpisodes")
    pipeline("stagent_agent_episodes", routes / "sft.jsonl", out / "sft2_data", own)
    print(f"{args.num} requests, {num} after the funnel: {len(certain)} nearly certain, {len(uncertain)} uncertain")
    print(f"{len(read(out / 'sft2_data' / 'data.jsonl'))} own episodes for SFT2", flush=True)

    rows: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    for s in range(args.seeds):
        for arm in ARMS:
            policy, path, steps = seed, {"uniform": everything, "learnable": both}.get(arm), args.steps
            if arm == "cascade":
                data = f"Records.path = {out / 'sft2_data' / 'data.jsonl'}"
                how = (f"Recipe.model = {seed}", data, f"Recipe.seed = {s}", f"sft2/Phase.steps = {args.sft2}")
                policy = train("stagent_agent_sft", out / f"sft2_{s}", *how)
                path, steps = routes / "rl.jsonl", args.steps - args.sft2
            how = (f"Recipe.model = {policy}", f"Travel.path = {path}", f"Recipe.seed = {s}")
            policy = train("stagent_agent", out / f"{arm}_{s}", *how, f"rl/Phase.steps = {steps}")
            rows[arm].append(by_level(play(policy, desk, args.held_out, 2, out / f"held_out_{arm}_{s}", *fresh)))
            print(f"{arm} seed {s}: {rows[arm][-1]}", flush=True)

    levels = [name for name in start if name.isdigit()]
    names = ["all", *(f"level {n}" for n in levels), "veto", "unread"]
    print("| held out | " + " | ".join(names) + " |\n" + "|---" * (len(names) + 1) + "|")
    for name, of in {"seed policy": [start], **rows}.items():
        cells = [" ".join(f"{100 * r[k.removeprefix('level ')]:.0f}" for r in of) for k in names]
        print(f"| {name} | " + " | ".join(cells) + " |")
    (out / "result.json").write_text(json.dumps({"seed policy": start} | rows))
    if args.figure:
        draw(out, start, rows, levels, args)

    some = random.Random(0).sample(read(everything), args.true)
    path = write(out / "some.jsonl", some)
    played = play(seed, Travel(**TINY | {"path": str(path)}), args.true, 64, out / "true", "--seed", "1")
    hits: dict[str, list[float]] = {}
    for t in played:
        hits.setdefault(t.task.content, []).append(t.success)
    true = {task: statistics.mean(values) for task, values in hits.items()}
    precision, recall, band = overlap({r["task"] for r in certain + uncertain}, true)
    print(f"{band} of {len(true)} requests learnable by 64 attempts; precision {precision:.2f}, recall {recall:.2f}")


def draw(out: Path, start: dict, rows: dict, levels: list[str], args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for arm, color in ARMS.items():
        for s in range(args.seeds):
            values = [r["reward/mean"] for r in read(out / f"{arm}_{s}" / "metrics.jsonl")]
            first = args.sft2 if arm == "cascade" else 0
            smooth = [statistics.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
            left.plot(range(first + 1, first + len(values) + 1), smooth, color=color, label=None if s else arm)
    left.set(xlabel="step", ylabel="reward of the samples", ylim=(0, 1), title="each on its own requests")
    left.legend(frameon=False)
    for i, (name, of) in enumerate({"seed policy": [start], **rows}.items()):
        heights = [statistics.mean(r[n] for r in of) for n in (*levels, "veto")]
        at = [x + 0.2 * (i - 1.5) for x in range(len(heights))]
        right.bar(at, heights, 0.18, color={"seed policy": "k", **ARMS}[name], label=name)
        for r in of:
            right.plot(at, [r[n] for n in (*levels, "veto")], ".", color="k", markersize=3)
    right.set_xticks(range(len(levels) + 1), [*(f"level {n}" for n in levels), "vetoed"])
    right.set(ylim=(0, 1), title="held-out success by level; share of vetoed answers")
    right.legend(frameon=False)
    fig.savefig(args.figure, dpi=120)


if __name__ == "__main__":
    main()
