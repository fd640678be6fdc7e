"""One of two processes of a trainer to whose weights something happens: `python -m tests.trainer_process EVENT ARGUMENTS`, those
of `rolljax.train`."""

import os
import signal
import sys
from pathlib import Path

from rolljax.cluster.group import SamplerGroup
from rolljax.cluster.snapshots import SnapshotWriter
from rolljax.commands.train import main

VERSION = 2
PROCESS = int(os.environ["JAX_PROCESS_ID"])


def damage():
    """Damage the second process's part of a snapshot once, before the sampler learns of it."""
    tell, done = SamplerGroup.prepare, []

    def prepare(group, snapshot):
        if snapshot.version == VERSION and not done:
            done.append(snapshot)
            folder = Path(os.environ["WEIGHTS"]) / "process_1" / f"{snapshot.epoch:06d}" / f"{VERSION:08d}"
            path = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
            path.write_bytes(path.read_bytes()[:-3])
        tell(group, snapshot)

    SamplerGroup.prepare = prepare


def kill():
    """Kill the second process when it has written its part of a snapshot, and before it says so."""
    commit = SnapshotWriter._commit

    def killed(writer, manifest, end):
        if PROCESS == 1 and manifest.version == VERSION:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(writer, manifest, end)

    SnapshotWriter._commit = killed


if __name__ == "__main__":
    {"damage": damage, "kill": kill}[sys.argv[1]]()
    sys.exit(main(sys.argv[2:]))
