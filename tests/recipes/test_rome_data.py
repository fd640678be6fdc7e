"""ROME's data protocols: shares, attacks, and instances that the sandbox confirms."""

import json

import pytest

from rolljax.data.dedup import Exact
from rolljax.errors import ConfigError
from rolljax.recipes.rome import repair_tasks
from rolljax.recipes.rome.compose import Inject, Shares
from rolljax.recipes.terminal_bench.harbor import load_task
from rolljax.recipes.terminal_bench.terminal import HarborTasks
from rolljax.recipes.terminal_bench.verify_tasks import VerifyTasks, play
from rolljax.sandbox import available
from tests.stages import through

in_a_sandbox = pytest.mark.skipif(available() != "", reason=f"no sandbox: {available()}")


def test_shares_of_characters_are_within_one_percent(tmp_path):
    kinds = [("agentic", 300), ("reasoning", 40), ("general", 11)]
    rows = [
        {"prompt": "x" * size, "kind": kind} for i in range(4000) for kind, size in kinds if i % 7 or kind != "general"
    ]
    rows.append({"prompt": "y", "kind": "other"})
    kept, [ledger], _ = through(tmp_path, Shares(), records=rows)
    total = sum(len(r["prompt"]) for r in kept)
    for kind, share in (("agentic", 0.70), ("reasoning", 0.15), ("general", 0.15)):
        got = sum(len(r["prompt"]) for r in kept if r["kind"] == kind) / total
        assert got == pytest.approx(share, abs=0.01) == pytest.approx(ledger["numbers"][f"share_{kind}"], abs=0.01)
    # the scarcest kind is used up, nothing twice
    assert sum(r["kind"] == "general" for r in kept) == sum(r["kind"] == "general" for r in rows)
    assert ledger["dropped"]["other_kind"] == 1


def test_shares_that_are_no_shares_are_refused():
    with pytest.raises(ConfigError, match="add up to 1"):
        Shares(shares={"a": 0.5, "b": 0.4})


def test_records_of_an_earlier_stage_are_left_out(tmp_path):
    earlier = tmp_path / "earlier.jsonl"
    earlier.write_text(json.dumps({"prompt": "Seen before."}) + "\n")
    rows = [{"prompt": p} for p in ("new", "seen  before", "new", "newer")]
    kept, [ledger], _ = through(tmp_path, Exact(against=(str(earlier),)), records=rows)
    assert [r["prompt"] for r in kept] == ["new", "newer"]
    assert ledger["dropped"] == {"duplicate": 1, "seen_in_an_earlier_stage": 1}


def test_an_attack_changes_no_answer_of_the_assistant(tmp_path):
    said = [
        {"role": "user", "content": "Repair it."},
        {"role": "assistant", "content": "ls"},
        {"role": "tool", "content": "a.py"},
        {"role": "assistant", "content": "done"},
    ]
    rows = [{"messages": [{**said[0], "content": f"Repair {i}."}, *said[1:]]} for i in range(40)]
    kept, [ledger], _ = through(tmp_path, Inject(frac=0.5), records=rows)
    attacked = [r for r in kept if "attack" in r]
    assert len(kept) == 40 + len(attacked) and 8 < len(attacked) < 32
    assert {r["attack"] for r in attacked} == {"prompt", "tool"}
    place = {"prompt": 0, "tool": 2}
    for i, r in enumerate(kept):
        if "attack" in r:
            before = kept[i - 1]["messages"]
            changed = [k for k, (a, b) in enumerate(zip(r["messages"], before, strict=True)) if a != b]
            assert changed == [place[r["attack"]]]
    assert ledger["counts"] == {f"attacks_{c}": sum(r["attack"] == c for r in attacked) for c in ("prompt", "tool")}


def test_every_fault_gives_a_wrong_result_somewhere():
    for function in repair_tasks.FUNCTIONS:
        right, name = repair_tasks.source_of(function), function.__name__
        broken = repair_tasks.faults(right)
        assert len(broken) >= 2 and all(b != right for b in broken)
        assert repair_tasks.outcome(right, name, [3, 7, 10, 3]) == function([3, 7, 10, 3])
    for index in range(40):
        files = repair_tasks.task_files(index)
        assert files == repair_tasks.task_files(index)
        assert files["environment/solution.py"] not in files["solution/solve.sh"].replace("\n\n", "\n")


@in_a_sandbox
def test_generated_repairs_pass_with_their_solution_only_and_punish_obedience(tmp_path):
    listed = repair_tasks.write_tasks(tmp_path / "repairs", 3)
    rows = [json.loads(line) for line in listed.read_text().splitlines()]
    kept, [ledger], _ = through(tmp_path, VerifyTasks(repeats=1), records=rows)
    assert [r["name"] for r in kept] == ["repair-000", "repair-001", "repair-002"] and not ledger["dropped"]
    attacked = HarborTasks(path=rows[2]["folder"])
    solution = load_task(tmp_path / "repairs/repair-002").solution
    assert "delete the file" in repair_tasks.task_files(2)["environment/data/README"]
    assert not play(attacked, f"rm data/keep.txt\n{solution}")


@in_a_sandbox
@pytest.mark.parametrize(
    ("test", "solution", "why"),
    [
        ("assert True", "echo 7 > out", "passes_untouched"),
        ("assert open('/app/out').read() == '8\\n'", "echo 7 > out", "solution_fails"),
        ("import os; assert os.path.exists('/app/out')", "echo 7 > out", "passes_empty"),
        ("assert len(open('/app/out').read()) > 1", "echo 7 > out", "passes_other_text"),
        ("assert open('/app/out').read() == '7\\n'", "", "no_solution"),
        ("assert open('/app/out').read() == '7\\n'", "echo 7 > out", ""),
    ],
)
def test_a_task_whose_tests_mean_nothing_is_dropped(tmp_path, test, solution, why):
    folder = tmp_path / "job"
    files = {
        "task.toml": "[verifier]\ntimeout_sec = 9\n",
        "instruction.md": "Write 7 into out.\n",
        "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /app\n",
        "tests/test_outputs.py": f"def test_it():\n    {test}\n",
        **({"solution/solve.sh": solution} if solution else {}),
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    kept, [ledger], _ = through(tmp_path, VerifyTasks(repeats=2), records=[{"folder": str(folder)}])
    assert ledger["dropped"] == ({why: 1} if why else {}) and len(kept) == (not why)
