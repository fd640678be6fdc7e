"""Trajectories of given texts and rewards, for tests of what scores them."""

import numpy as np

from rolljax.types import Key, Task, Trajectory, Turn


def episode(*rewards, env="frozen_lake", status="ok", success=False, texts=None):
    """A trajectory whose turns have these rewards."""
    ids = np.arange(3, dtype=np.int32)
    texts = texts or ["left"] * len(rewards)
    turns = tuple(
        Turn(ids, ids, ids.astype(np.float32), ids * 0, "stop", r, t) for r, t in zip(rewards, texts, strict=True)
    )
    total = 0.0
    for r in rewards:
        total += r
    return Trajectory(Key(0, 0, 0), Task(env, 0, "x"), turns, total, {"own": total}, success, status)
