"""Seconds of one whole GRPO step, compared with other frameworks on equal work.

    python benchmarks/grpo_step.py                                   # rolljax alone
    python benchmarks/grpo_step.py --compare --python tunix=/path/to/python trl=/path/to/python

A step is: sample 8 answers to each of 8 prompts, reward them, credit, pack, one update, weights to the sampler. Model,
tokenizer, prompts, reward and lengths come from `peers/grpo_common.py`, which every framework's script imports.
`ragged` draws prompts of 16 to 256 tokens; `fixed` has 64. `0p6b` has the shape of Qwen3-0.6B, and 4 answers of 32
tokens to each of 2 prompts of 128 (up to 17 GB, minutes per framework):

    python benchmarks/grpo_step.py --compare --work 0p6b --core -1 --rounds 1 --steps 3 --python trl=/path/to/python
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "peers"))
WORK = {
    "fixed": "",
    "ragged": "--prompt-len 256 --prompt-len-min 16",
    "0p6b": "--layers 28 --dim 1024 --heads 16 --kv-heads 8 --head-dim 128 --ffn 3072 --vocab 151936 --prompts 2 "
    "--generations 4 --prompt-len 128 --new-tokens 32 --warmup 1",
}
PEERS = {
    "tunix": ("tunix", "tunix_grpo.py", []),
    "trl": ("trl", "trl_grpo.py", []),
    "plain": ("rolljax", "plain_grpo.py", []),
    "plain, micro-batches": ("rolljax", "plain_grpo.py", ["--micro-prompts", "2"]),
}


def ours(args: argparse.Namespace) -> None:
    """Time the step with the modules that `rolljax.loop` uses."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import importlib.metadata as metadata

    import grpo_common as bc
    import jax
    import numpy as np

    from rolljax.model.decoder import Model, Params
    from rolljax.model.families.qwen3 import Qwen3Config
    from rolljax.run.weight_channel import SharedSink
    from rolljax.sampler.client import Sampler
    from rolljax.sampler.engine import Engine, EngineWorker
    from rolljax.sampler.settings import SamplerConfig
    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.batch import PackShape, num_rows_bound
    from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
    from rolljax.trainer.optimizer import AdamW
    from rolljax.trainer.phase_trainer import PhaseTrainer
    from rolljax.trainer.publish import make_publish
    from rolljax.types import Key, SamplingParams, Task, Trajectory, Turn

    def compared(params: Params) -> list[np.ndarray]:
        return [np.array(x.ravel()[: bc.NUM_COMPARED]) for x in jax.tree.leaves(params)]

    a, total = args, args.warmup + args.steps + 1
    shape = Qwen3Config(
        a.vocab, a.layers, a.dim, a.heads, a.kv_heads, a.head_dim, a.ffn, 1_000_000.0, 1e-6, init_std=0.02
    )
    model, mesh = Model(shape), MeshSpec().build(jax.devices()[:1])
    longest = a.prompt_len + a.new_tokens
    row_len = a.row_len or a.prompt_len + 4 * a.new_tokens
    rows = num_rows_bound(a.prompts, a.generations, a.prompt_len, a.new_tokens, row_len)
    trainer = PhaseTrainer(
        mesh,
        model,
        Grpo(aggregation="token-mean", clip_low=None, clip_high=None),
        AdamW(a.lr, b2=0.999),
        PackShape(-(-rows // a.micro_rows), a.micro_rows, row_len),
        steps=total,
        groups_per_step=a.prompts,
        limit_tok=a.new_tokens,
    )
    state = trainer.states.init(jax.jit(lambda: model.init(a.seed))())
    before = compared(state.params)
    publish = make_publish(mesh, model)
    chunk = min(512, 1 << (a.prompts * a.prompt_len - 1).bit_length())  # a smaller step fills no larger prefill
    cfg = SamplerConfig(slots=a.prompts * a.generations, max_context=longest, prefill_chunk=chunk)
    engine = Engine(model, cfg, mesh, BATCH_AXES)
    tok, law = bc.tokenizer(a.vocab), SamplingParams(a.temperature, a.new_tokens)
    rec = bc.Recorder()
    answers: list[Any] = []

    async def sample(sampler: Sampler, prompts: list[np.ndarray], step: int) -> list[Any]:
        ask = [
            sampler.generate(p, law, (a.seed, step, g, s)) for g, p in enumerate(prompts) for s in range(a.generations)
        ]
        return await asyncio.gather(*ask)

    def trajectory(prompt: np.ndarray, answer: Any, step: int, group: int, sibling: int) -> Trajectory:
        text = tok.decode(answer.tokens)
        reward = bc.reward(text)
        turn = Turn(prompt, answer.tokens, answer.sampler_logp, answer.versions, "stop", reward, text)
        return Trajectory(Key(0, group, sibling), Task("vowels", group, ""), (turn,), reward, {}, False, "ok")

    def weights() -> Any:
        return state.params

    sampler = None
    for i, batch in enumerate(bc.prompt_batches(a, total)):
        rec.begin_step()
        if sampler is None:
            worker = EngineWorker(engine)
            sink = SharedSink(publish, weights, worker)
            sink.swap(0)
            sampler = Sampler(engine, None, 0, longest_prompt=0, worker=worker, sink=sink)
        else:
            sampler.swap(i)
        start = bc.now()
        prompts = [np.array(tok(p)["input_ids"], np.int32) for p in batch]
        answers = asyncio.run(sample(sampler, prompts, i))
        rec.add_rollout(start, sum(len(x.tokens) for x in answers))
        start = bc.now()
        groups = [
            [trajectory(p, answers[g * a.generations + s], i, g, s) for s in range(a.generations)]
            for g, p in enumerate(prompts)
        ]
        sampler.sleep()
        state, _ = trainer.step(state, groups, {}, i)
        jax.block_until_ready(state.params)
        rec.add_train(start)
    rec.begin_step()
    assert sampler is not None
    sampler.close()
    versions = {n: metadata.version(n) for n in ("jax", "jaxlib", "optax")}
    rec.report("rolljax GRPO", a, model.num_params(), versions)
    moved = max(float(np.abs(x - y).max()) for x, y in zip(before, compared(state.params), strict=True))
    different = len({x.tokens.tobytes() for x in answers})
    print(
        f"check: optimizer steps {int(state.policy.num_updates)}, largest weight change {moved:.2e}, "
        f"distinct completions in last batch {different}/{len(answers)}"
    )


def compare(args: argparse.Namespace) -> None:
    """Run each framework in turn in its own process, pinned to one core; print a table of ratios."""
    pythons = {"rolljax": sys.executable} | dict(p.split("=") for p in args.python)
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE / "peers")])}
    pin = ["taskset", "-c", str(args.core)] if args.core >= 0 else []
    runs: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for round_ in range(args.rounds):
        for work in args.work:
            commands = {"rolljax": [sys.executable, str(HERE / "grpo_step.py")]}
            for name, (owner, script, flags) in PEERS.items():
                # the plain script knows one prompt length only, and keeps all logits of a batch
                if owner in pythons and not (work != "fixed" and owner == "rolljax"):
                    threads = ["--threads", "1"] if owner == "trl" and args.core >= 0 else []
                    commands[name] = [pythons[owner], str(HERE / "peers" / script), *flags, *threads]
            for name, command in commands.items():
                with tempfile.NamedTemporaryFile(suffix=".json") as file:
                    flags = [*WORK[work].split(), "--steps", str(args.steps), "--json", file.name]
                    peak_gib = run(name, [*pin, *command, *flags], env)
                    out = json.loads(Path(file.name).read_text()) | {"peak_gib": peak_gib}
                runs.setdefault(work, {}).setdefault(name, []).append(out)
                print(
                    f"round {round_} {work:7} {name:21} step {out['s_per_step']:.3f} s  train {out['train_s']:.3f}  "
                    f"rollout {out['rollout_s']:.3f}  first {out['first_step_s']:.1f}  CPU {out['cpu_s_per_step']:.3f}"
                    f"  peak {out['peak_gib']:.1f} GiB",
                    flush=True,
                )
    for work, by_name in runs.items():
        keys = ("s_per_step", "train_s", "rollout_s", "cpu_s_per_step", "first_step_s", "peak_gib")
        best = {n: {k: statistics.median(r[k] for r in rs) for k in keys} for n, rs in by_name.items()}
        mine = best["rolljax"]
        print(f"\n{work}\n| | s/step | CPU s/step | first s | peak GiB | ours faster: step | update | rollout | CPU |")
        print("|---|---|---|---|---|---|---|---|---|")
        for n, b in best.items():
            ratio = [b[k] / mine[k] for k in ("s_per_step", "train_s", "rollout_s", "cpu_s_per_step")]
            print(
                f"| {n} | {b['s_per_step']:.3f} | {b['cpu_s_per_step']:.3f} | {b['first_step_s']:.1f} | "
                f"{b['peak_gib']:.1f} | " + " | ".join(f"{r:.2f}x" for r in ratio) + " |"
            )
    if args.json:
        Path(args.json).write_text(json.dumps(runs, indent=1))


def run(name: str, command: list[str], env: dict[str, str]) -> float:
    """Run a framework's command to its end, quietly; return its peak memory in GiB."""
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, env=env, stdout=said, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            said.seek(0)
            sys.exit(f"{name}: {said.read()[-2000:].decode(errors='replace')}")
    return usage.ru_maxrss / 2**20


def main() -> None:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--compare", action="store_true")
    if first.parse_known_args()[0].compare:
        p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        p.add_argument("--compare", action="store_true")
        p.add_argument("--python", nargs="*", default=[], metavar="PEER=PYTHON")
        p.add_argument("--work", nargs="*", default=["fixed", "ragged"], choices=list(WORK))
        p.add_argument("--rounds", type=int, default=3)
        p.add_argument("--steps", type=int, default=10)
        p.add_argument("--core", type=int, default=0, help="core to pin everyone to; -1: all cores")
        p.add_argument("--json", default="")
        compare(p.parse_args())
        return
    import grpo_common as bc

    p = bc.parser(__doc__)
    p.add_argument("--row-len", type=int, default=0, help="packed row length (0: a prompt and four answers)")
    p.add_argument("--micro-rows", type=int, default=2)
    ours(p.parse_args())


if __name__ == "__main__":
    main()
