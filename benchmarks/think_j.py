"""Think-J in miniature (arXiv 2505.14268): a judge of digit sums, online and offline, and what it says in both orders.

    # five minutes a seed
    python benchmarks/think_j.py --seeds 3 --to runs/think_j --figure rolljax/recipes/think_j/think_j.png

Every stage is a process of its own, at low priority, and is skipped if its result exists, so the same command continues
where it was interrupted. Stages of a seed: `online`: think_j.gin; `init`: think_j_init.gin, exported; `pairs`: 3000
questions to its judge and critic; `offline`: think_j_offline.gin on them. Then kept checkpoints are asked about 256
held-out pairs in both orders, at temperature 0. `always_a` is a server that answers `a2` to everything.
"""

from __future__ import annotations

import argparse
import http.server
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

NUM_PAIRS, NUM_EVALUATED = 3000, 256
METRICS = ("accuracy", "pair accuracy", "agreement")
ENV = "digit_sums"
Curve = dict[str, dict[str, list[float]]]
"""Step -> metric -> mean, low, high."""


def stages(folder: Path, seed: int, every: int) -> Iterator[tuple[str, Path, list[str]]]:
    """Name, what shows that it is done, and command of every stage of a seed."""
    train = [sys.executable, "-m", "rolljax.train", "--quiet", "--gin"]
    keep = [f"Recipe.seed = {seed}", "Recipe.keep_checkpoints = 99", "Recipe.rollouts_every = 1000"]
    kept = [word for setting in [*keep, "Recipe.save_every = 20"] for word in ("--set", setting)]
    kept_more = [*kept, "--set", "Recipe.save_every = 10"]
    runs = {name: folder / f"{name}_{seed}" for name in ("online", "init", "pairs", "offline")}
    done = "summary.json"
    yield "online", runs["online"] / done, [*train, "think_j", "--run_dir", str(runs["online"]), *kept]
    yield "init", runs["init"] / done, [*train, "think_j_init", "--run_dir", str(runs["init"]), *kept_more]
    hf = folder / f"init_hf_{seed}"
    yield "export", hf / "config.json", [
        *(sys.executable, "-m", "rolljax.export", "--run"), str(runs["init"]), "--to", str(hf),
    ]  # fmt: skip
    mine = [sys.executable, __file__, "--to", str(folder), "--seed", str(seed), "--every", str(every), "--stage"]
    yield "pairs", runs["pairs"] / "pairs.jsonl", [*mine, "pairs"]
    given = [f"Recipe.model = {str(hf)!r}", f"Records.path = {str(runs['pairs'] / 'pairs.jsonl')!r}"]
    settings = [word for setting in given for word in ("--set", setting)]
    yield "offline", runs["offline"] / done, [
        *train, "think_j_offline", "--run_dir", str(runs["offline"]), *kept, *settings,
    ]  # fmt: skip
    for name in ("init", "online", "offline"):
        yield f"eval {name}", folder / f"{name}_{seed}.json", [*mine, name]


def make_pairs(folder: Path, seed: int) -> None:
    import rolljax
    from rolljax.chat_models.base import Asking
    from rolljax.recipes.think_j import judge_pairs
    from rolljax.recipes.think_j.digit_sums import DigitSums

    with rolljax.load(folder / f"init_{seed}") as model:
        made = judge_pairs.make(
            DigitSums(),
            model,
            to=folder / f"pairs_{seed}",
            num=NUM_PAIRS,
            how=Asking(temperature=1.0, max_tok=12, seed=seed),
            concurrency=512,
        )
    print(f"seed {seed}: {made.num} pairs of {NUM_PAIRS} questions, {dict(made.counts)}")


def evaluate_steps(folder: Path, name: str, seed: int, every: int) -> None:
    """Evaluate the kept checkpoints of a run: the ends of its phases, the last one, and one every `every` steps."""
    from rolljax.eval import evaluate
    from rolljax.evaluation.settings import Attempts

    run, curve = folder / f"{name}_{seed}", {}
    steps = sorted({int(p.name.rpartition("_")[2]) for p in (run / "ckpt").glob("*_step_*")})
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ends = [a["step"] for a, b in itertools.pairwise(rows) if a["phase"] != b["phase"]]
    first = ends[0] if ends else steps[-1] if name == "init" else 0
    for step in (s for s in steps if s in (*ends, steps[-1]) or (every and s > first and s % every == 0)):
        curve[str(step)] = asked(evaluate(run=run, step=step, **_how(Attempts(temperature=0.0))))
    (folder / f"{name}_{seed}.json").write_text(json.dumps(curve, indent=1) + "\n")


def _how(attempts: Any) -> dict[str, Any]:
    return {
        "envs": [ENV],
        "tasks": NUM_EVALUATED,
        "held_out_frac": 0.1,
        "attempts": attempts,
        "max_answer_tok": 12,
        "quiet": True,
    }


def asked(report: Any) -> dict[str, list[float]]:
    """Return the judge's figures: mean, low, high."""
    found = report.pairs[0]["all pairs"].estimates
    return {metric: [found[metric].mean, found[metric].low, found[metric].high] for metric in METRICS}


def always_a() -> dict[str, list[float]]:
    """Return the figures of a server that answers `a2` to everything."""
    from rolljax.eval import evaluate
    from rolljax.evaluation.settings import Attempts

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            body = json.dumps({"choices": [{"message": {"content": "9 1\na2"}, "finish_reason": "stop"}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 256  # the client opens a connection for each request; five may wait by default

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from rolljax.chat_models.client import EndpointConfig

    endpoint = EndpointConfig(f"http://127.0.0.1:{server.server_port}/v1", "a", concurrency=16)
    found = asked(evaluate(endpoint=endpoint, **_how(Attempts(concurrency=16))))
    server.shutdown()
    return found


def draw(path: Path, curves: dict[str, list[Curve]], constant: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(1, 2, figsize=(11, 3.8), layout="constrained", sharey=True)
    for axis, name in zip(axes, ("online", "offline"), strict=True):
        for colour, metric in enumerate(METRICS):
            for i, curve in enumerate(curves[name]):
                steps = sorted(curve, key=int)
                low, high = ([curve[s][metric][k] for s in steps] for k in (1, 2))
                x = [int(s) for s in steps]
                label = metric if not i else None
                axis.plot(x, [curve[s][metric][0] for s in steps], color=f"C{colour}", label=label)
                axis.fill_between(x, low, high, color=f"C{colour}", alpha=0.12, linewidth=0)
        axis.axhline(constant["pair accuracy"][0], color="grey", linestyle=":", label='pair accuracy of always "a"')
        axis.axhline(constant["accuracy"][0], color="grey", linestyle="--", label='accuracy of always "a"')
        axis.set(title=name, xlabel="step (of supervised init, then of optimization)", ylim=(-0.02, 1.02))
    axes[0].legend(fontsize=8, loc="lower right")
    fig.savefig(path, dpi=110)


def with_init(init: Curve, after: Curve) -> Curve:
    """Return the curve of a run that continued from another one's end."""
    last = max(map(int, init))
    return init | {str(last + int(step)): value for step, value in after.items()}


def tell(curves: dict[str, list[Curve]], constant: dict[str, list[float]]) -> None:
    print("| | steps | accuracy | pair accuracy | agreement |\n|:--|--:|--:|--:|--:|")
    for name, every in curves.items():
        for seed, curve in enumerate(every):
            for step in (min(curve, key=int), max(curve, key=int)):
                cells = ["{:.3f} [{:.3f}, {:.3f}]".format(*curve[step][m]) for m in METRICS]
                print(f"| {name}, seed {seed} | {step} | {' | '.join(cells)} |")
    print("| always a | | " + " | ".join("{:.3f} [{:.3f}, {:.3f}]".format(*constant[m]) for m in METRICS) + " |")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path("runs/think_j"), help="folder of all runs and results")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--figure", type=Path, help="where to draw")
    parser.add_argument("--every", type=int, default=60, help="steps between evaluated checkpoints; 0: first and last")
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.stage:
        if args.stage == "pairs":
            return make_pairs(args.to, args.seed)
        return evaluate_steps(args.to, args.stage, args.seed, args.every)
    args.to.mkdir(parents=True, exist_ok=True)
    for seed in range(args.seeds):
        for name, result, command in stages(args.to, seed, args.every):
            if not result.is_file():
                print(f"seed {seed}: {name}", flush=True)
                subprocess.run(["nice", "-n", "5", *command], check=True)
    read = lambda name: [json.loads((args.to / f"{name}_{s}.json").read_text()) for s in range(args.seeds)]  # noqa: E731
    curves = {"online": read("online"), "offline": [*map(with_init, read("init"), read("offline"))]}
    constant = always_a()
    tell(curves, constant)
    if args.figure:
        draw(args.figure, curves, constant)


if __name__ == "__main__":
    main()
