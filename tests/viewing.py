"""A run folder as a run writes it, with texts that mean harm, and a viewer that shows it."""

import dataclasses
import json
import threading
import time

import numpy as np

from rolljax.run.folder import RunFolder
from rolljax.serve import listen, url
from rolljax.storage.layout import METRICS, RESOLVED, SUMMARY
from rolljax.types import Alternatives, Fault, Key, Task, Trajectory, Turn
from rolljax.viewer.app import make_server
from rolljax.viewer.runs import Runs

SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
BIDI = "user‮ txt.exe‬ ⁦isolated⁩"
CONTROLS = "bell\x07 escape\x1b[31m null\x00 return\r zero\u200bwidth \ufeff tag\U000e0041 lone"
TRICKS = '"tokens":[1,2,3] \\"tokens\\":[ </script><!-- ${1+1} {{7*7}} javascript:alert(1)'
HARMFUL = (SCRIPT, BIDI, CONTROLS, TRICKS)
USER, ASSISTANT, END = 258, 259, 257


def encode(text):
    """Return the ids of a text in the byte tokenizer, from a separate table: 33 to 126 first, as bytes sort by GPT-2's
    letters."""
    from rolljax.model.tokenizer import byte_core

    return byte_core().encode(text, add_special_tokens=False).ids


def turn(prompt, answer, version=1, reward=0.0, finish="stop"):
    ids = [*encode(answer), END]
    logp = -np.abs(np.random.default_rng(len(ids)).normal(0, 1.2, len(ids))).astype(np.float32)
    told = np.array([USER, *encode(prompt), ASSISTANT], np.int32)
    ids, versions = np.array(ids, np.int32), np.full(len(ids), version, np.int32)
    other = np.full_like(ids, encode("\u202e")[0])
    likely = Alternatives(np.stack([ids, other], 1), np.stack([logp, logp - 1], 1))
    return Turn(told, ids, logp, versions, finish, reward, answer, alternatives=likely)


def trajectory(
    draw, sibling, reward, turns, *, task="a task", env="lake", status="ok", fault=None, trained=None, parts=None
):
    return Trajectory(
        Key(0, draw, sibling),
        Task(env, 100 + draw, task),
        tuple(turns),
        reward,
        {"score": reward} if parts is None else parts,
        reward >= 1,
        status,
        fault,
        trained={"advantages": reward - 0.5} if trained is None else trained,
    )


def step_of(number, groups=4, siblings=4, text=""):
    """Return the trajectories of a step: the spread of rewards grows with the prompt index."""
    found = []
    for g in range(groups):
        draw = number * groups + g
        for s in range(siblings):
            reward = 1.0 if s < g else 0.0
            turns = [
                turn(f"Where is the door of room {draw}?", f"Let me look. north {s} {text}"),
                turn("You see a wall.", f"go {'north' if reward else 'south'}", reward=reward),
            ]
            found.append(trajectory(draw, s, reward, turns, task=f"Leave room {draw} by the door {text}"))
    gone = Fault("infra", "reset", "the server is gone", True)
    found.append(trajectory(number * groups + groups, 0, 0.0, (), status="failed", fault=gone, trained={}))
    cut = Fault("limit", "answer", "an answer was cut: length")
    found.append(
        trajectory(
            number * groups + groups,
            1,
            0.25,
            [turn("Count.", "1, 2, 3, héllo 🙂", finish="length")],
            status="truncated",
            fault=cut,
            env="count",
        )
    )
    return found


def row(step, phase="rl", **more):
    known = {"reward/mean": step / 10, "reward/std": 0.4, "reward/success_frac": min(1, step / 12), "rollout/len_tok": 20.0 + step, "policy/entropy_nat": 1 / step,
             "time/step_s": 0.5, "faults/env_n": 0.0, "tput/sample_tok_s": 100.0, "mismatch/k3_nat": 1e-6 * step}  # fmt: skip
    return {"step": step, "phase_step": step, "version": step, "phase": phase, **known, **more}


def write_run(path, steps=3, text="", seed=0, finished=True):
    """Write a run of that many steps, as `RunFolder` does."""
    folder = RunFolder(path)
    (path / "rollouts").mkdir(parents=True)
    phases = ("warm_start", "rl")
    config = {"seed": seed, "model.__class__": "Qwen3Config", "max_answer_tok": 8}
    for i, name in enumerate(phases):
        config |= {
            f"phases[{i}].name": name,
            f"phases[{i}].steps": steps,
            f"phases[{i}].optimizer.lr": 0.01 * (1 + seed),
        }
    (path / RESOLVED).write_text(json.dumps(config))
    (path / "env.json").write_text(
        json.dumps(
            {
                "python": "3.12",
                "packages": {"jax": "0.10"},
                "platform": "cpu",
                "devices": 1,
                "command": ["train.py", "--gin", "quickstart"],
            }
        )
    )
    for step in range(1, steps + 1):
        add_step(path, step, text, "warm_start" if step == 1 else "rl")
    for name, reward in (("start", 0.0), ("warm_start", 0.5), ("rl", 1.0)):
        folder.write_heldout(
            name,
            [
                trajectory(
                    i, 0, reward * (i % 2), [turn("Hidden?", f"{name} {text}", reward=reward)], task=f"held out {i}"
                )
                for i in range(4)
            ],
        )
    if finished:
        heldout = [
            {"phase": "start", "step": 0, "mean": 0.0, "n": 4},
            {"phase": "rl", "step": steps, "mean": 0.5, "n": 4},
        ]
        (path / SUMMARY).write_text(
            json.dumps({"stop_reason": "all phases done", "steps": steps, "wall_s": 12.5, "heldout_reward": heldout})
        )
    return path


def add_step(path, step, text="", phase="rl"):
    """Add one more step."""
    folder = RunFolder(path)
    folder.write_rollouts(step, step_of(step, text=text))
    folder.write_row(row(step, phase))


def rewrite(path, steps):
    """Rewrite the metrics, shorter, as a run that resumes from an earlier step does."""
    beside = path / "new"
    beside.write_text("".join(json.dumps(row(step) | {"reward/mean": -1.0}) + "\n" for step in range(1, steps + 1)))
    beside.replace(path / METRICS)


def long_trajectory(tokens=100_000):
    """Return a trajectory of that many tokens."""
    words = ("north ", "south ", "look\n", "é", "wall ")
    text = "".join(words[i % len(words)] for i in range(tokens // 5))
    one = turn("Walk on.", text)
    size = tokens // len(one.tokens) + 1
    repeated = {name: np.tile(getattr(one, name), size)[:tokens] for name in ("tokens", "sampler_logp", "versions")}
    likely = Alternatives(*(np.tile(a, (size, 1))[:tokens] for a in (one.alternatives.ids, one.alternatives.logp)))
    long = dataclasses.replace(one, text=(text * size)[:tokens], alternatives=likely, **repeated)
    return trajectory(0, 0, 1.0, [long], task="a long walk")


class Viewing:
    """A viewer in a thread of this process."""

    def __init__(self, *paths, token=None, head_s=30.0):
        listener = listen("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.url = url(listener)
        self.server = make_server(Runs(paths), token, head_s)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self.server.started:
            assert self._thread.is_alive(), "the viewer did not start"
            time.sleep(0.005)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.should_exit = True
        self._thread.join()
