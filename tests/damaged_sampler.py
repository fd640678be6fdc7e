"""The program of a sampler whose weights are damaged in memory, after their checksums were compared."""

import sys

import jax

from rolljax import sampler_host
from rolljax.run.weight_channel import StorePart

swap = StorePart.swap


def damaged(part, version):
    swap(part, version)
    part._worker.set_params(jax.tree.map(lambda x: 1.5 * x, part._worker.params))


if __name__ == "__main__":
    StorePart.swap = damaged
    sys.exit(sampler_host.main())
