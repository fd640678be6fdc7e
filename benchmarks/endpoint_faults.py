"""Judges in front of a server that misbehaves: wrong rewards, and the longest time that the event loop stood still.

Every form of judge is asked once for each behaviour of `tests/misbehaving.py`, all of them at the same time.

    python benchmarks/endpoint_faults.py
"""

import resource
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.misbehaving import misbehaving
from tests.misbehaving_judges import DEADLINE_S, FATAL, JUDGES, Stalls, expected, names_of, rewards


def main():
    print("form        behaviours   right    none   wrong   stall, clock   stall, CPU")
    with misbehaving() as address:
        for form in JUDGES:
            stalls, found = Stalls(), {}
            for slow, heavy, timeout_s in ((False, False, 300.0), (False, True, 300.0), (True, False, DEADLINE_S)):
                found |= rewards(form, address, names_of(form, slow=slow, heavy=heavy), timeout_s, stalls)[0]
            for name in FATAL:
                found |= rewards(form, address, [name], stalls=stalls)[0]
            wanted = expected(form, found)
            right = sum(found[name] is not None and found[name] == wanted[name] for name in found)
            none = sum(value is None for value in found.values())
            wrong = len(found) - right - none
            print(
                f"{form:<12}{len(found):10d}{right:8d}{none:8d}{wrong:8d}{stalls.clock_s:13.3f} s"
                f"{stalls.cpu_s:11.3f} s",
                flush=True,
            )
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
