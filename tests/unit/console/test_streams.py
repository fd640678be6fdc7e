"""Consoles and results that cannot be written, and SIGTERM at any time: a command ends with its own exit code."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rolljax import cli
from rolljax.console import terminal
from rolljax.console.progress import Console, ProgressBar, TolerantConsole
from rolljax.errors import EnvError

ROOT = Path(__file__).parents[3]
VERB = """
import sys
from rolljax import cli
from rolljax.errors import EnvError
from rolljax.console.progress import Console

def main():
    console = Console()
    for step in range(3000):
        console.say(f"step {step}")
        console.warn("x" * 100)
    print("done", file=open(sys.argv[1], "w"))
    if sys.argv[2:] == ["fail"]:
        raise EnvError("no luck")
    return 5

sys.exit(cli.run_verb(main))
"""


def command(text, *args, redirect="", before=""):
    """Run a program in bash, its streams redirected."""
    return subprocess.run(
        ["bash", "-c", f'{before} "$0" -c "$1" "${{@:2}}" {redirect}', sys.executable, text, *map(str, args)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("redirect", ["2>/dev/full", "2>&-", "2>&- >&-", "2>&1 | true; exit ${PIPESTATUS[0]}"])
def test_a_console_that_cannot_be_written_ends_nothing(tmp_path, redirect):
    """Full, closed, its reader gone: the exit code is that of the work, and no file takes the closed one's place."""
    for outcome, code in (("ok", 5), ("fail", 3)):
        done = command(VERB, tmp_path / outcome, outcome, redirect=redirect)
        assert done.returncode == code and "Traceback" not in done.stderr + done.stdout, done.stderr
        assert (tmp_path / outcome).read_text() == "done\n"


def test_a_console_on_a_file_of_limited_size_ends_nothing(tmp_path):
    done = command(VERB, tmp_path / "out", redirect=f"2>{tmp_path}/log", before="ulimit -f 4;")
    assert done.returncode == 5 and (tmp_path / "log").stat().st_size <= 4096


class Failing(io.StringIO):
    """A terminal that has closed."""

    def write(self, text):
        raise OSError(5, "Input/output error")

    flush = isatty = lambda self: self.write("")


def test_a_terminal_that_closes_ends_no_console(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Failing())
    console = Console()
    console.say("one")
    console.start_phase("rl", 2, 0)
    console.warn("two")
    console.end_phase()
    lines = TolerantConsole(file=Failing(), force_terminal=True)
    lines.print("three")
    assert not lines.file.isatty() and console.is_terminal is False


def test_a_bar_shows_a_name_as_it_is_and_survives_its_terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes any stream for a terminal
    for stream in (io.StringIO(), Failing()):
        monkeypatch.setattr(sys, "stderr", stream)
        for in_bytes in (False, True):
            with ProgressBar("reading [bold]model", 10, in_bytes=in_bytes) as bar:
                bar.advance(4)
                bar.show(5, 10, "reading [bold]model", "half of it is read")
                bar.say("a line")
        if not isinstance(stream, Failing):
            assert "[bold]model" in stream.getvalue() and "a line" in stream.getvalue()


RESULTS = """
import sys
from rolljax import cli
def main():
    for _ in range(int(sys.argv[1])):
        print("x" * 100)
    return 0
sys.exit(cli.run_verb(main))
"""


@pytest.mark.parametrize("lines", [1, 10_000])
def test_results_that_cannot_be_written_are_an_error(lines):
    done = command(RESULTS, lines, redirect=">/dev/full")
    assert done.returncode == 74 and len(done.stderr.splitlines()) == 2
    assert "results cannot be written to standard output: No space left on device" in done.stderr
    gone = command(RESULTS, lines, redirect="| true; exit ${PIPESTATUS[0]}")
    assert gone.returncode in (0, 1) and not gone.stderr  # 0: all was written before the reader had ended


def test_streams_are_as_they_were_behind_a_verb(capsys):
    before = sys.stdout, sys.stderr

    def main():
        assert isinstance(sys.stderr, terminal.Unfailing) and isinstance(sys.stdout, terminal.Results)
        sys.stdout.write("a result\n")
        raise EnvError("no luck")

    assert cli.run_verb(main) == 3 and (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("a result\n", "env error: no luck\n")


def test_sigterm_ends_a_verb_in_order(capsys):
    closed = []

    def main():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            signal.pause()
        finally:
            closed.append(True)
        return 0

    before = signal.getsignal(signal.SIGTERM)
    assert cli.run_verb(main, at_sigterm=(75, "stopped")) == 75 and closed
    assert signal.getsignal(signal.SIGTERM) == before and capsys.readouterr().err == "stopped\n"
