"""What DLCoT's pruning saves, and what a student makes of it: chains of thought about sums (`dlcot_toy.py`), raw and
pruned, each learned by a small model from its beginning, three seeds; a table and rolljax/recipes/dlcot/dlcot.png.

    # half an hour on two cores
    python benchmarks/dlcot.py --figure rolljax/recipes/dlcot/dlcot.png

The pipeline is `data.gin`, its model a rule behind a real server (`rule_server.py`), the student's recipe
`dlcot.gin`. Tokens are bytes.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import dlcot_toy
from quickstart import run
from rule_server import RuleServer

from rolljax.data.__main__ import main as pipeline

NUM = 1500


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def prune(records: list[dict], folder: Path) -> list[dict]:
    """Run records through the pipeline."""
    source = folder / "traces.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    with RuleServer(dlcot_toy.rule) as server:
        code = pipeline(
            ["dlcot/data", "--in", str(source), "--out", str(folder / "pruned")]
            + ["--set", f"EndpointConfig.url = '{server.url}'"]
        )
    assert code == 0
    return rows(folder / "pruned" / "data.jsonl")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    pruned = prune(dlcot_toy.records(NUM, 0), out)
    known = {r["prompt"] for r in pruned}
    raw = [r for r in rows(out / "traces.jsonl") if r["prompt"] in known]  # the same questions for both
    tokens: dict[str, list[int]] = {}
    accuracy: dict[str, list[float]] = {"raw": [], "pruned": []}
    for name, data in (("raw", raw), ("pruned", pruned)):
        lines = (json.dumps({k: r[k] for k in ("prompt", "answer", "trace")}) + "\n" for r in data)
        (out / f"{name}.jsonl").write_text("".join(lines))
        tokens[name] = [len(r["trace"].encode()) for r in data]
    for seed in range(args.seeds):
        for name in accuracy:
            settings = [f"Questions.path = {out / f'{name}.jsonl'}", f"Recipe.seed = {seed}"]
            found = run("dlcot", out / f"{name}_{seed}", [*settings, f"sft/Phase.steps = {args.steps}"])
            accuracy[name].append(found["heldout_reward"][-1]["mean"])
            print(f"{name} seed {seed}: held-out accuracy {accuracy[name][-1]:.3f}", flush=True)
    means = {name: statistics.mean(t) for name, t in tokens.items()}
    saved = 1 - means["pruned"] / means["raw"]
    print(f"\n{len(raw)} traces; tokens {means['raw']:.0f} -> {means['pruned']:.0f} (-{saved:.1%})")
    for name, found in accuracy.items() if args.seeds else ():
        print(f"{name:7} accuracy {statistics.mean(found):.3f}  ({', '.join(f'{a:.3f}' for a in found)})")
    (out / "result.json").write_text(json.dumps({"tokens": tokens, "accuracy": accuracy}))
    if args.figure:
        draw(tokens, accuracy, args.figure)


def draw(tokens: dict, accuracy: dict, figure: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    bins = range(0, max(tokens["raw"]) + 10, 10)
    for i, name in enumerate(tokens):
        left.hist(tokens[name], bins=bins, alpha=0.6, label=f"{name}: mean {statistics.mean(tokens[name]):.0f}")
        right.bar(i, statistics.mean(accuracy[name]), width=0.6, alpha=0.6)
        right.plot([i] * len(accuracy[name]), accuracy[name], "ko", markersize=4)
    left.set(xlabel="tokens of a trace", ylabel="traces", title="before and after pruning")
    left.legend(frameon=False)
    right.set(xticks=range(len(tokens)), xticklabels=list(tokens), ylim=(0, 1), title="student, held out (dots: seeds)")
    fig.savefig(figure, dpi=120)


if __name__ == "__main__":
    main()
