"""The program of a run whose samplers connect through proxies, of which signals cut one off, one way or both."""

import signal
import sys

import pytest

from rolljax.commands.train import main
from tests.proxies import DOWN, UP, through_proxies

CUTS = {
    signal.SIGRTMIN + 3 * index + i: (f"sampler-{index}", ways)
    for index in range(2)
    for i, ways in enumerate([(UP,), (DOWN,), (UP, DOWN)])
}
"""Signals, and what each cuts off."""

if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        proxies = through_proxies(patch)
        for number, (name, ways) in CUTS.items():
            signal.signal(number, lambda *_, name=name, ways=ways: proxies[name].swallow(*ways))
        sys.exit(main())
