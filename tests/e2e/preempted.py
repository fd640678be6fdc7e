"""Short steps of a sampler: `python -m tests.e2e.preempted STEPS LOOPS LINGER_S`.

A step is two requests for one token from each of LOOPS event loops, which have a thread each. A line on stdout marks
each finished step of the first loop. `test_preemption.py` starts it, interrupts it at random, and checks that it goes
through all steps.
LINGER_S: how long the idle sampler waits for more; the shorter, the more often it is caught in the wrong place.
"""

import asyncio
import sys
import threading

import jax
import numpy as np

from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.sampler import client
from rolljax.sampler.client import Sampler
from rolljax.sampler.engine import Engine
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.mesh import BATCH_AXES, MeshSpec
from rolljax.types import SamplingParams

TINY = Model(
    Qwen3Config(vocab_size=40, num_layers=1, hidden_size=16, num_heads=2, head_dim=8, ffn_size=16, init_std=0.3)
)
PROMPT = np.arange(5, dtype=np.int32)


def say(what):
    sys.stdout.write(f"{what}\n")
    sys.stdout.flush()


async def steps(sampler, count, loop):
    for step in range(count):
        await asyncio.gather(*(sampler.generate(PROMPT, SamplingParams(1.0, 1), (loop, step, i)) for i in range(2)))
        if loop == 0:
            say(step)


def main():
    count, loops, client.LINGER_S = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    engine = Engine(TINY, SamplerConfig(slots=8, max_context=32), MeshSpec().build(jax.devices()[:1]), BATCH_AXES)
    sampler = Sampler(engine, TINY.init(0), 0, longest_prompt=8)
    threads = [threading.Thread(target=lambda n=n: asyncio.run(steps(sampler, count, n))) for n in range(loops)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sampler.close()
    say("done")


if __name__ == "__main__":
    main()
