"""What a judge of two seconds adds to a step that has other work, at async_ratio 1.

One run, whose judge answers at once and after two seconds in turn, a few steps each, so that other load of the machine
affects both. A step's answers are judged while the trainer works on the step before.

    python benchmarks/slow_judge.py [--latency 2.0] [--blocks 16] [--steps 4]
"""

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolljax.commands.train import main as train
from tests.judge_server import JudgeServer

CONFIG = """
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.chat_models import client
from rolljax.judging import calls
from rolljax.rewards import judge
from rolljax.trainer.algorithms import grpo
include 'quickstart.gin'
recipe.Recipe.reward = @judge.Judge()
judge.Judge.model = @client.EndpointConfig()
client.EndpointConfig.url = '{url}'
client.EndpointConfig.model = 'judge'
client.EndpointConfig.concurrency = 512
judge.Judge.rubric = 'Mark this: {{answer}}'
judge.Judge.limits = @calls.CallLimits()
calls.CallLimits.concurrency = 512
warm_start/recipe.Phase.steps = 20
warm_start/recipe.Phase.eval_every = 0
warm_start/recipe.Phase.stop_at_reward = None
grpo.Grpo.filter = None
rl/recipe.Phase.steps = {steps}
rl/recipe.Phase.prompts_per_step = 16
rl/recipe.Phase.epochs = {epochs}
rl/recipe.Phase.async_ratio = 1.0
rl/recipe.Phase.eval_every = 0
recipe.Evaluation.tasks = 4
recipe.Recipe.save_every = 1000
"""


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--latency", type=float, default=2.0, help="seconds of a slow verdict")
    parser.add_argument("--blocks", type=int, default=16, help="of steps, at once and slow by turns")
    parser.add_argument("--steps", type=int, default=4, help="of a block; the first two are not counted")
    parser.add_argument("--epochs", type=int, default=40, help="of every step's update: its other work")
    args = parser.parse_args()
    delay, over = [0.0], threading.Event()
    seen = 0

    def verdict(text):
        nonlocal seen
        seen += 1
        time.sleep(delay[0])
        return json.dumps({"score": seen % 11})  # the answers differ, and so do their marks

    with tempfile.TemporaryDirectory() as folder:
        server, run = JudgeServer(verdict), Path(folder) / "run"
        steps = args.blocks * args.steps
        config = Path(folder) / "slow_judge.gin"
        config.write_text(CONFIG.format(url=server.url, steps=steps, epochs=args.epochs))

        def watch():
            while not over.wait(0.02):
                done = sum(row["phase"] == "rl" for row in rows(run))
                delay[0] = args.latency * (done // args.steps % 2)

        threading.Thread(target=watch, daemon=True).start()
        code = train(["--gin", str(config), "--run_dir", str(run), "--quiet"])
        over.set()
        server.close()
        if code:
            return code
        rl = [row for row in rows(run) if row["phase"] == "rl"]
    blocks = [rl[i * args.steps + 2 : (i + 1) * args.steps] for i in range(args.blocks)]
    fast, slow = ([r for b in blocks[k::2] for r in b] for k in (0, 1))
    names = ("time/step_s", "time/rollout_s", "time/update_s", "rewards/wait_s", "rewards/calls_n", "rewards/lost_n")
    print("| median of a step | at once | slow |\n|---|---|---|")
    for name in names:
        print(f"| `{name}` | {median(fast, name):.3f} | {median(slow, name):.3f} |")
    ratio = median(slow, "time/step_s") / median(fast, "time/step_s")
    pairs = [median(blocks[i + 1], "time/step_s") / median(blocks[i], "time/step_s") for i in range(0, args.blocks, 2)]
    print(f"\nstep time, slow over at once: {ratio:.3f} (by pairs of blocks: {', '.join(f'{p:.3f}' for p in pairs)})")
    return 0


def rows(run):
    """Return the rows of a run so far."""
    file = run / "metrics.jsonl"
    if not file.is_file():
        return []
    found = []
    for line in file.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # being written
            break
    return found


def median(rows, name):
    return statistics.median(row[name] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
