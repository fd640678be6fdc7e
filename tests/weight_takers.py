"""One of two processes of a sampler that take weights: `python -m tests.weight_takers`.

The first one reads snapshots from its stdin, JSON, one a line. It answers each with an error, and with the checksums of the
weights that the devices of all processes have then."""

import hashlib
import json
import sys

import jax
import numpy as np

from rolljax.concurrency import distributed, lockstep
from rolljax.errors import SamplerError
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.run.weight_channel import PART_CALLS, StorePart, StoreSink
from rolljax.sampler.engine import EngineWorker
from rolljax.sampler.weights import Snapshot
from rolljax.trainer.mesh import MeshSpec

MODEL = Model(Qwen3Config(num_layers=1))


def digest(params, device):
    """Return a checksum of the weights on a device."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(next(s.data for s in leaf.addressable_shards if s.device == device)).tobytes())
    return found.hexdigest()


class Digests:
    """Tells the first process which weights the devices of this one have."""

    def __init__(self, worker, team):
        self._worker, self._team = worker, team

    def tell(self):
        return self._team.collect("digests", " ".join(digest(self._worker.params, d) for d in jax.local_devices()))


def main():
    team, worker = lockstep.join(distributed.start(), at_once=True), EngineWorker(None)
    part = team.share("weights", StorePart(MODEL, MeshSpec().build(), worker, team), PART_CALLS)
    digests = team.share("digests", Digests(worker, team), ("tell",))
    if isinstance(team, lockstep.Follower):
        team.serve(lambda text: None)
        team.end(team.code)
        return
    sink = StoreSink(part)
    for line in sys.stdin:
        snapshot, error = Snapshot(**json.loads(line)), ""
        try:
            sink.prepare(snapshot)
            sink.swap(snapshot.version)
        except SamplerError as e:
            error = str(e)
        sys.stdout.write(json.dumps({"error": error, "digests": " ".join(digests.tell()).split()}) + "\n")
        sys.stdout.flush()
    team.end(0)


if __name__ == "__main__":
    main()
