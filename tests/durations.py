"""Measured costs of tests: CPU seconds of this process and of the children it has waited for, which no other load on the
machine changes. Every run prints its costliest tests and files. `make durations` writes `tests/durations.json`, by which
the files are handed out, longest first, to the processes of pytest-xdist."""

import json
import math
import resource
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest

PATH = Path(__file__).with_name("durations.json")
OTHERS = "others"  # the mean of a file's tests that are not listed one by one
LISTED_FROM_S = 0.5
SHOWN = 20


def cpu_s():
    """Return the CPU seconds of this process with all its threads, and of its ended children."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def load():
    """Return {file: {test: CPU seconds}}, as `Durations.write` stored it."""
    return json.loads(PATH.read_text()) if PATH.exists() else {}


def longest_first(items):
    """Sort `items` so that the files with the longest expected tests come first; a file's tests stay together, in
    order.

    A test that was never measured counts as its file's others do, a file that never was as the longest.
    """
    known, expected = load(), Counter()
    for item in items:
        file, _, test = item.nodeid.partition("::")
        seconds = known.get(file, {OTHERS: math.inf})
        expected[file] += seconds.get(test, seconds[OTHERS])
    return sorted(items, key=lambda item: -expected[item.nodeid.partition("::")[0]])


class Durations:
    """A pytest plugin that measures; under pytest-xdist, in every process, and sums up in the one that hands out."""

    def __init__(self, write):
        """Start measuring. write: whether to store the durations of the tests that ran."""
        self.write, self.last = write, cpu_s()
        self.cpu, self.wall = defaultdict(float), defaultdict(float)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self):
        self.last = cpu_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        now = cpu_s()
        report.cpu_s, self.last = now - self.last, now
        return report

    def pytest_runtest_logreport(self, report):
        self.cpu[report.nodeid] += getattr(report, "cpu_s", 0.0)
        self.wall[report.nodeid] += report.duration

    def pytest_terminal_summary(self, terminalreporter):
        files = Counter()
        for test, seconds in self.cpu.items():
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"CPU seconds: {sum(files.values()):.0f} in all")
        for costs in (files, Counter(self.cpu)):
            for name, seconds in costs.most_common(SHOWN):
                wall = f"  ({self.wall[name]:.1f} s by the clock)" if name in self.wall else ""
                terminalreporter.write_line(f"{seconds:7.1f}  {name}{wall}")
            terminalreporter.write_line("")
        if self.write:
            self.write_file()

    def write_file(self):
        """Put what ran into the file; what did not run stays as it was, but for files that are gone."""
        root = PATH.parents[1]
        files = {file: tests for file, tests in load().items() if (root / file).exists()}
        ran = defaultdict(dict)
        for nodeid, seconds in self.cpu.items():
            file, _, test = nodeid.partition("::")
            ran[file][test] = seconds
        for file, tests in ran.items():
            listed = {test: round(s, 1) for test, s in tests.items() if s >= LISTED_FROM_S}
            others = [s for test, s in tests.items() if test not in listed]
            kept = {test: s for test, s in files.get(file, {}).items() if test not in tests and test != OTHERS}
            mean = round(sum(others) / max(len(others), 1), 3)
            files[file] = {OTHERS: mean} | dict(sorted((kept | listed).items()))
        PATH.write_text(json.dumps(dict(sorted(files.items())), indent=1) + "\n")
