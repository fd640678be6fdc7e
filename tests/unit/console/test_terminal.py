"""Text of models in a terminal, curves in one line, and what the console says of a step."""

import io
import json
import re
import subprocess
import sys

import pytest

from rolljax.console import progress as console_module
from rolljax.console.progress import Console, bottleneck, faults, panel_rows, step_line, waits
from rolljax.console.terminal import duration, sparkline, visible
from rolljax.run.folder import RESOLVED, RunFolder
from rolljax.run.summary import summary_lines

ROW = {
    "step": 12, "phase_step": 12, "reward/mean": 0.5, "rollout/len_tok": 7.0, "rollout/fail_frac": 0.0, "time/step_s": 10.0,
    "time/rollout_s": 7.0, "time/decode_s": 6.0, "time/update_s": 2.0, "time/publish_s": 1.0, "tput/sample_tok_s": 1234.0,
    "tput/train_tok_s": 999.0, "policy/entropy_nat": 1.0, "mismatch/k3_nat": 0.0, "mismatch/abs_max_nat": 1e-6,
    "train/tokens_n": 100.0,
}  # fmt: skip


@pytest.mark.parametrize(
    "text", ["\x1b[2J", "\x1b]0;title\x07", "a\rb", "\u202eevil", "\u200b", "\x9b31m", "\ud800", "\u2028", "\x7f"]
)
def test_what_a_terminal_would_obey_or_hide_is_written_out(text):
    shown = visible(text)
    assert all(c.isprintable() for c in shown) and shown != text
    assert shown.encode("ascii", "strict" if shown.isascii() else "ignore")


def test_plain_text_stays():
    assert (
        visible("é 漢字 🙂\n[bold]x[/bold]") == "é 漢字 🙂\n[bold]x[/bold]" and visible("a\nb", lines=False) == "a\\nb"
    )


def test_curves_in_one_line():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█" and sparkline([2, 2]) == "▁▁" and sparkline([]) == ""
    assert sparkline([0, float("nan"), 1]) == "▁ █" and sparkline([float("nan")]) == " "
    assert len(sparkline(range(1000), 40)) == 40 and sparkline([0.0] * 50 + [1.0] * 50, 2) == "▁█"
    assert sparkline([1e308, -1e308]) == "▁▁"  # the span is not finite


def test_durations():
    assert [duration(s) for s in (0.4, 65, 7620, 273600)] == ["0 s", "1 m 05 s", "2 h 07 m", "3 d 04 h"]


def test_the_bottleneck_is_named():
    assert bottleneck(ROW) == "sampler 70%"
    idle = ROW | {"time/decode_s": 1.0}
    supervised = {name: value for name, value in ROW.items() if name not in ("tput/sample_tok_s", "time/decode_s")}
    for row in (idle, supervised):
        assert bottleneck(row | {"time/env_s": 4.0}) == "env 70%"
        assert bottleneck(row | {"time/env_s": 2.0}) == bottleneck(row) == "host 70%"
    assert bottleneck(ROW | {"time/env_s": 6.0}) == "sampler 70%"
    assert bottleneck(ROW | {"time/update_s": 8.0}) == "trainer 80%"
    assert list(waits(ROW)) == ["sampler", "trainer", "weights", "evaluation", "disk"]


def test_one_line_for_a_step():
    line = step_line("rl", ROW, 20, ROW | {"reward/mean": 0.4})
    assert line.startswith("rl 12/20  reward 0.500 (+0.100)  len 7.0") and line.endswith("10.00s waits: sampler 70%")
    failed = ROW | {"rollout/fail_frac": 0.25, "faults/env_n": 2.0, "faults/infra_n": 1.0}
    assert step_line("rl", failed, 20).endswith("failed 25% (infra 1, env 2)") and faults(ROW) == ""
    assert "loss 0.250" in step_line(
        "sft", {k: v for k, v in ROW.items() if "sample" not in k} | {"loss/total": 0.25}, 20
    )


def on(console, *, terminal):
    from rich.console import Console as Rich

    console._rich = Rich(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, _environ={})
    return console


def test_without_a_terminal_there_is_a_line_for_every_step():
    console = on(Console(), terminal=False)
    console.start_phase("rl", 14, 11)
    for step in (12, 13, 14):
        console.step(ROW | {"phase_step": step})
    console.end_phase()
    lines = console._rich.file.getvalue().splitlines()
    assert lines[0] == "rl: 14 steps, continuing after 11 (compiling)" and len(lines) == 4
    assert [line.split()[1] for line in lines[1:]] == ["12/14", "13/14", "14/14"] and "ETA below 20 s" in lines[1]


def test_quiet_says_notices_only():
    console = on(Console(quiet=True), terminal=True)
    console.start_phase("rl", 14, 0)
    console.step(ROW)
    console.say("something")
    console.waiting("nothing has moved")
    console.warn("most answers were cut")
    console.end_phase()
    assert "most answers were cut" in console._rich.file.getvalue() and "something" not in console._rich.file.getvalue()
    assert console._live is None and "12/14" not in console._rich.file.getvalue()


def test_on_a_terminal_there_is_a_panel_that_gives_way_to_a_line():
    console = on(Console(), terminal=True)
    console.start_phase("rl [bold]", 20, 11)
    console.answers(["  good  1.000  what? -> [red]this", "  bad   0.000  what? -> \\x1b[31m"])
    console.step(ROW)
    console._live.refresh()
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", console._rich.file.getvalue())
    for text in ("rl [bold]", "step 12/20", "1,234 sampled", "sampler 70%, trainer 20%", "none", "[red]this", "ETA"):
        assert text in shown, text
    console.wait("evaluating")
    console._live.refresh()
    assert "evaluating" in console._rich.file.getvalue()
    console.end_phase()
    assert console._live is None and console._rich.file.getvalue().count("waits: sampler 70%") == 1


def test_the_panel_of_a_supervised_phase_shows_the_loss():
    row = {k: v for k, v in ROW.items() if k != "tput/sample_tok_s"} | {"loss/total": 0.25}
    told = dict(panel_rows(row, [2, 1, 0.25], []))
    assert told["loss"].endswith("0.250") and "sampled" not in told["tokens/s"]
    assert console_module.HISTORY > 3 and told["faults"] == "none"


def test_a_summary_to_paste(tmp_path):
    (tmp_path / RESOLVED).write_text("{}")
    assert summary_lines(RunFolder(tmp_path)) == [f"run       {tmp_path.name}: no step is done"]
    rows = [ROW | {"step": s, "phase_step": s, "phase": "rl", "reward/mean": s / 4} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    heldout = [{"phase": p, "step": s, "mean": m, "n": 16} for p, s, m in (("start", 0, 0.1), ("rl", 2, 0.4))]
    summary = {
        "stop_reason": "all phases done",
        "steps": 2,
        "wall_s": 75.0,
        "heldout_reward": heldout,
        "state_sha256": "ab" * 32,
    }
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    env = {
        "python": "3.11",
        "packages": {"jax": "1"},
        "platform": "cpu",
        "devices": 2,
        "command": ["train", "\x1b[31m"],
    }
    (tmp_path / "env.json").write_text(json.dumps(env))
    text = "\n".join(summary_lines(RunFolder(tmp_path)))
    for part in ("all phases done, 2 steps in 1 m 15 s", "reward 0.250 -> 0.500", "held-out 0.100 -> 0.400 (16 tasks)",
                 "sampler 70%", "2 x cpu", "\\x1b[31m", "17,276 sampled (1,234/s)"):  # fmt: skip
        assert part in text, part


def test_a_run_outlives_the_reader_of_its_lines():
    code = """
import os, sys
from rolljax.console.progress import Console
read, write = os.pipe()
os.close(read)
os.dup2(write, 2)
console = Console()
console.say("one")
console.warn("two")
console.say("three")
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout == "alive\n"
