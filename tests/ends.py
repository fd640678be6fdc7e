"""How tests end a run at any point of what it writes (`durable.reach`), and look at how it ends."""

import contextlib
import hashlib
import json
import math
import re
from pathlib import Path

from rolljax.run.checkpoint import Checkpoints, damage
from rolljax.storage import durable


class Killed(BaseException):
    """Stands for SIGKILL: after it nothing more is written."""


@contextlib.contextmanager
def at_points(kill=math.inf, do=None):
    """Yield a list that receives every passed point as `(point, path)`.

    Args:
      kill: the number of the point at which the process ends. do: called at every point, as `reach` is.
    """
    passed, before = [], durable.reach

    def reach(point, path):
        if len(passed) > kill:
            raise Killed
        passed.append((point, path))
        if do:
            do(point, path)
        if len(passed) > kill:
            raise Killed

    durable.reach = reach
    try:
        yield passed
    finally:
        durable.reach = before


OF_THE_CLOCK = ("time/", "tput/", "groups/wait_s", "sampler/idle_frac")
"""Beginnings of the names of metrics that are measured: equal runs differ in them."""


def end(run_dir):
    """Return everything that a run leaves behind, except measurements: equal for bitwise equal runs."""
    run_dir = Path(run_dir)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    said = json.loads((run_dir / "summary.json").read_text())
    files = {str(p.relative_to(run_dir)): hashlib.sha256(_uncalled(p)).hexdigest() for p in run_dir.glob("hf/*")}
    assert "hf/model.safetensors" in files
    played = {
        p.name: [_unmeasured(json.loads(t)) for t in p.read_text().splitlines()] for p in run_dir.glob("rollouts/*")
    }
    left = [p for p in run_dir.rglob("*") if durable.is_temporary(p)]
    assert not left, left
    checkpoints = Checkpoints(run_dir / "ckpt")
    assert len(checkpoints.names()) >= 2 and not any(damage(run_dir / "ckpt" / name) for name in checkpoints.names())
    return {
        "rows": [{k: v for k, v in row.items() if not k.startswith(OF_THE_CLOCK)} for row in rows],
        "summary": {k: v for k, v in said.items() if not k.endswith("wall_s")},
        "rollouts": played,
        "files": files | {p.name: "" for p in run_dir.iterdir()},
        "settings": json.loads((run_dir / "config.resolved.json").read_text()),
    }


def _uncalled(path):
    """Return a file's bytes; for a model card without the command that made the model."""
    return re.sub(rb"(?m)^python .*$", b"python", path.read_bytes()) if path.suffix == ".md" else path.read_bytes()


def _unmeasured(value):
    """Return a trajectory without its seconds."""
    if isinstance(value, dict):
        return {k: _unmeasured(v) for k, v in value.items() if k not in ("env_s", "sample_s")}
    return [_unmeasured(v) for v in value] if isinstance(value, list) else value
