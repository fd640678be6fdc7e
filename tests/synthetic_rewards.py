"""Trajectories of given texts and rewards, for tests of what scores them, and functions that score."""

import asyncio
import dataclasses
import os
import signal
import time

import numpy as np

from rolljax.envs.questions import Questions
from rolljax.rewards.base import RewardContext
from rolljax.rewards.scoring import Scoring
from rolljax.types import Key, Task, Trajectory, Turn


def episode(*rewards, env="frozen_lake", status="ok", success=False, texts=None):
    """Return a trajectory whose turns have these rewards."""
    ids = np.arange(3, dtype=np.int32)
    texts = texts or ["left"] * len(rewards)
    turns = tuple(
        Turn(ids, ids, ids.astype(np.float32), ids * 0, "stop", r, t) for r, t in zip(rewards, texts, strict=True)
    )
    total = 0.0
    for r in rewards:
        total += r
    return Trajectory(Key(0, 0, 0), Task(env, 0, "x"), turns, total, {"own": total}, success, status)


ROWS = [
    {"question": "6*7?", "answer": "42", "ref": 200, "also": "#### 43"},
    {"question": "root 8?", "answer": "2\\sqrt{2}", "ref": 100, "also": "x"},
    {"question": "capital?", "answer": "Paris", "ref": "no", "also": "y"},
]
SPEC = Questions(records=ROWS)
AROUND = RewardContext(SPEC)


def said(text, index=0, *, tokens=3, cut=False):
    """Return an episode of one answer."""
    found = episode(0.0, texts=[text], env=SPEC.name)
    ids = np.zeros(tokens, np.int32)
    turn = dataclasses.replace(
        found.turns[0], tokens=ids, sampler_logp=ids.astype(np.float32), versions=ids,
        finish_reason="length" if cut else "stop",
    )  # fmt: skip
    return dataclasses.replace(found, task=SPEC.task(index), turns=(turn,))


def scored(cfg, *trajectories, around=AROUND):
    """Score the trajectories concurrently; return them with their rewards."""

    async def run():
        scoring = Scoring(cfg.open(around))
        try:
            return await asyncio.gather(*map(scoring.score, trajectories))
        finally:
            await scoring.close()

    return asyncio.run(run())


# ---- functions


def half(task, said):
    return {"half": 0.5, "long": float(len(said.text) > 3)}


def ends(task, said):
    if said.text == "end":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def hangs(task, said):
    while said.text == "hang":
        time.sleep(0.01)
    return 1.0


def letters(task, said):
    return len(set(said.text)) / (1 + len(said.text))
