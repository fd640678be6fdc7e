"""Memory of the kernel that code in a sandbox can hold: tries each way, and reads the whole machine's memory meanwhile.

    python benchmarks/sandbox_memory.py [--profile terminal] [--wanted_mib 512]

Columns: what the probe held by its own count when it stopped (0: it was stopped), its own resident size, by how much
the kernel's memory (SUnreclaim, PageTables, KernelStack) rose and the machine's MemAvailable fell at most, and how it
ended. Runs one at a time; other work on the machine moves the figures, above all the last.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rolljax.sandbox import PROFILES, SandboxHost
from rolljax.sandbox.profile import MIB
from tests.e2e.sandbox_memory_probes import PRELUDE, PROBES, RUNNER


def machine() -> tuple[int, int]:
    """Return the bytes that the kernel holds for itself, and minus the bytes that are available."""
    found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    kernel, gone = (
        sum(int(found[name].split()[0]) << 10 for name in names)
        for names in (("SUnreclaim", "PageTables", "KernelStack"), ("MemAvailable",))
    )
    return kernel, -gone


class Rise:
    """By how much both figures of the machine rise while this is open."""

    def __enter__(self) -> Rise:
        self.before = self.most = machine()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            now = machine()
            self.most = max(self.most[0], now[0]), max(self.most[1], now[1])

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", choices=PROFILES, default="terminal")
    parser.add_argument("--wanted_mib", type=int, default=512)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    profile = dataclasses.replace(PROFILES[args.profile], wall_s=20.0, memory_bytes=256 * MIB)
    print(f"{'MiB':<42}{'held':>8}{'resident':>10}{'kernel':>8}{'machine':>9}  ended by")
    with SandboxHost() as host:
        host.run(["true"])
        for name, code in PROBES.items():
            if args.only not in name:
                continue
            program = "\n".join([PRELUDE, f"CODE = {code!r}", RUNNER]).encode()
            sizes = [str(args.wanted_mib * MIB), str(profile.memory_bytes)]
            argv = ["/usr/bin/python3", "-E", "-s", "-S", "-B", "/tmp/probe.py", *sizes]
            with Rise() as rise:
                result = host.run(argv, files={"/tmp/probe.py": program}, profile=profile)
            said = (result.text.strip().splitlines() or ["0 0 said nothing"])[-1].split(" ", 2)
            held, resident, why = int(said[0]) // MIB, int(said[1]) // MIB, (said + [""])[2]
            kernel, gone = ((most - before) // MIB for most, before in zip(rise.most, rise.before, strict=True))
            ended = result.killed_by or why or (result.stderr.decode()[-80:] if result.returncode else "itself")
            print(f"{name:<42}{held:>8}{resident:>10}{kernel:>8}{gone:>9}  {ended}", flush=True)


if __name__ == "__main__":
    main()
