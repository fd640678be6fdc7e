"""False positives among terminal tasks before and after they are played: tasks of which a planted part is broken.

    python benchmarks/task_cleaning.py --num 50      # three minutes of one core

Of the tasks of `number_files.py` two in five get a fault of one of five kinds. A task is a false positive if a wrong
number passes its tests; it is lost if it is right and dropped. The last kind, tests that accept many numbers, cannot be
found by playing: it is what judges are for.
"""

import argparse
import collections
import json
import random
import tempfile
from pathlib import Path

from rolljax.data import pipeline
from rolljax.recipes.terminal_bench.number_files import write_tasks
from rolljax.recipes.terminal_bench.terminal import HarborTasks
from rolljax.recipes.terminal_bench.verify_tasks import VerifyTasks, play

TEST = "import os, random\n\ndef test_number():\n    {}\n"
FAULTS = {
    "always passes": TEST.format("assert os.path.isdir('/work')"),
    "only looks for the file": TEST.format("assert os.path.exists('/work/out')"),
    "wrong reference": TEST.format("assert open('/work/out').read().strip() == 'none'"),
    "passes by chance": TEST.format("assert os.path.exists('/work/out') and random.random() < 0.5"),
    "accepts any two digits": TEST.format("assert len(open('/work/out').read().strip()) == 2"),
}


def plant(folder: Path, num: int, share: float, seed: int) -> dict[str, str]:
    """Write tasks; return their fault by name, empty where there is none."""
    write_tasks(folder, num)
    rng, found = random.Random(seed), {}
    for path in sorted(folder.iterdir()):
        fault = rng.choice(list(FAULTS)) if rng.random() < share else ""
        if fault:
            (path / "tests/test_outputs.py").write_text(FAULTS[fault])
        found[path.name] = fault
    return found


def false_positive(folder: Path) -> bool:
    """Return whether a wrong number passes, in any of three tries."""
    spec = HarborTasks(path=str(folder))
    number = int((folder / "environment/Dockerfile").read_text().split("echo ")[1].split()[0])
    wrong = f"echo {10 + (number + 17) % 90} > out"
    return any(play(spec, wrong) for _ in range(3))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=50)
    parser.add_argument("--share", type=float, default=0.4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        faults = plant(root / "tasks", args.num, args.share, args.seed)
        rows = root / "rows.jsonl"
        rows.write_text("".join(json.dumps({"folder": str(root / "tasks" / task)}) + "\n" for task in faults))
        made = pipeline.run(pipeline.Pipeline((VerifyTasks(),)), str(rows), root / "clean")
        kept = {json.loads(line)["name"] for f in made.files for line in (made.folder / f).read_text().splitlines()}
        wrong = {task for task in faults if false_positive(root / "tasks" / task)}
        [ledger] = made.stages.values()
    print("| fault | tasks | kept |\n|---|---|---|")
    for fault, num in sorted(collections.Counter(faults.values()).items()):
        print(f"| {fault or 'none'} | {num} | {sum(faults[task] == fault for task in kept)} |")
    print(f"\ndropped: {ledger['dropped']}")
    print(f"false positives: {len(wrong)} of {len(faults)} before, {len(wrong & kept)} of {len(kept)} after")


if __name__ == "__main__":
    main()
