"""Time the router's decisions: `python benchmarks/router.py [--samplers 2000]`.

Requests of groups of eight come to a cluster whose slots are nearly all busy, or all, while its samplers take new
weights one after the other. Prints the microseconds of one core for a decision (`place`, `take`) and for the end of a
request (`done`).
"""

import argparse
import random
import time

from rolljax.cluster.router import RoutedRequest, Router

SLOTS = 16


def play(samplers: int, load: float, events: int) -> tuple[float, float]:
    """Return the seconds of a decision and of an end, at a load that is a multiple of all slots."""
    router, rng, number, running = Router(), random.Random(0), 0, []
    for i in range(samplers):
        router.join(f"sampler-{i}", SLOTS)
    router.push(0)
    for name in router.members:
        router.ready(name, 0)
    swaps, decided_s, ended_s, ended = 0, 0.0, 0.0, 0
    while ended < events:
        if swaps % samplers == 0:
            router.push(router.version + 1)
        requests = []
        while len(running) + router.waiting + len(requests) < load * samplers * SLOTS:
            version = max(0, router.version - rng.randint(0, 1))
            group = (0, number // 8)
            requests.append(RoutedRequest(number, group, (*group, number % 8), version))
            number += 1
        ends = [running.pop(rng.randrange(len(running))) for _ in range(20)] if running else []
        times_s = [time.process_time()]
        router.swapped(f"sampler-{swaps % samplers}", router.version)
        running += [r.number for r in requests if router.place(r)]
        times_s.append(time.process_time())
        for end in ends:
            router.done(end)
        times_s.append(time.process_time())
        running += [r.number for _, r in router.take()]
        times_s.append(time.process_time())
        swaps += 1
        if swaps > 1:  # the cluster is full from here on
            decided_s += times_s[1] - times_s[0] + times_s[3] - times_s[2]
            ended_s, ended = ended_s + times_s[2] - times_s[1], ended + len(ends)
    return decided_s / ended, ended_s / ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samplers", type=int, default=2000)
    parser.add_argument("--requests", type=int, default=100_000)
    args = parser.parse_args()
    for load in (0.9, 1.2):
        decided_s, ended_s = play(args.samplers, load, args.requests)
        what = f"{args.samplers} samplers, {load:.0%} load"
        print(f"{what}: {decided_s * 1e6:.1f} us a decision, {ended_s * 1e6:.1f} us an end")


if __name__ == "__main__":
    main()
