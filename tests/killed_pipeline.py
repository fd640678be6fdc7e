"""`python -m tests.killed_pipeline N ARGUMENTS...`: the verb `rolljax.data`, ended by SIGKILL when it passes point N of what
it writes (`durable.reach`). N = -1: it is not ended, and says how many points there are."""

import os
import signal
import sys

from rolljax.data.__main__ import main
from rolljax.storage import durable


def go(kill, arguments):
    passed = 0

    def reach(point, path):
        nonlocal passed
        if passed == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    durable.reach = reach
    code = main(arguments)
    sys.stderr.write(f"\npoints={passed}\n")
    return code


if __name__ == "__main__":
    sys.exit(go(int(sys.argv[1]), sys.argv[2:]))
