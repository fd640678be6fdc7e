"""One of two processes of a trainer that write snapshots of the same weights: `python -m tests.snapshot_writers FOLDER`.

They write three versions into a store of both, FOLDER/shared, and three into a folder of each that it serves; then they wait
for the end of their stdin."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.experimental.multihost_utils import sync_global_devices
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rolljax.cluster.file_server import FileServer
from rolljax.cluster.snapshots import SnapshotWriter
from rolljax.concurrency import distributed
from rolljax.trainer.publish import checksums

SPECS = {"rows": P("hosts"), "columns": P(None, ("hosts", "local")), "both": P("local", "hosts"), "all": P()}


def weights(version):
    """Return the weights of a version, NumPy. They are near each other, but most of what the second process has is another
    from version 2 on."""
    rng = np.random.default_rng(7)
    found = {name: rng.normal(size=(16, 24, 8)).astype(np.float32) for name in SPECS}
    for name in SPECS:
        found[name][version, 3] = version
    if version >= 2:
        found["rows"][8:] += 1
        found["columns"][:, 12:] += 1
    return found


def main(folder, rank):
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("hosts", "local"))

    def barrier():
        sync_global_devices("snapshot")

    def write(url, **settings):
        """Return what each version builds on."""
        writer, bases = SnapshotWriter(url, 1, barrier=barrier, chunk_bytes=2000, **settings), []
        for version in range(4):
            shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
            host = weights(version)
            params = {
                n: jax.make_array_from_callback(host[n].shape, s, host[n].__getitem__) for n, s in shardings.items()
            }
            bases.append(writer.write(params, version, checksums(params)).base)
        return bases

    found = {"shared": write(str(folder / "shared"))}
    (folder / f"apart{rank}").mkdir()
    with FileServer(folder / f"apart{rank}") as server:
        (folder / f"url{rank}").write_text(server.url)
        barrier()
        urls = [(folder / f"url{i}").read_text() for i in range(2)]
        found["apart"] = write(str(folder / f"apart{rank}"), stores=urls)
        sys.stdout.write(json.dumps({"urls": urls, "bases": found}) + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    distributed.start()
    main(Path(sys.argv[1]), jax.process_index())
