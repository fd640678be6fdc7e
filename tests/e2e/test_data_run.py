"""Files in the shapes of others train: a shipped configuration and at most three settings on top of it."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from rolljax.commands.train import main as train

from .conftest import rows, summary

NUM = 240


def ask(i):
    return f"Box {i}: what is ${i}+{i % 7}$? The last line should be Answer: $Answer."


DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": ask(i)}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i + i % 7), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"{i:x}"},
    }
    for i in range(NUM)
]
DEEPMATH = [
    {
        "question": f"What is $\\frac{{{i}}}{{4}}$?",
        "final_answer": f"\\dfrac{{{i}}}{{4}}",
        "difficulty": 1.5,
        "topic": "Algebra",
    }
    for i in range(NUM)
]


@pytest.fixture
def files(tmp_path):
    (tmp_path / "dapo").mkdir()
    for n, part in enumerate((DAPO[:100], DAPO[100:])):
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(part), tmp_path / "dapo" / f"train-0000{n}-of-00002.parquet"
        )
    (tmp_path / "deepmath.json").write_text(json.dumps(DEEPMATH))
    return tmp_path


def settings(*texts):
    return [a for text in texts for a in ("--set", text)]


@pytest.mark.parametrize("name, first", [("dapo", ask(0)), ("deepmath.json", "What is $\\frac{0}{4}$?")])
def test_one_setting_is_enough(files, capsys, name, first):
    assert train(["--gin", "questions", "--dry_run", *settings(f"Questions.path = {files / name}")]) == 0
    out = capsys.readouterr().out
    assert "questions, up to 1 turn(s)" in out and f"<|user|>{first}" in out


def test_the_verifier_is_refused_in_threads(files, capsys):
    threads = settings(f"Questions.path = {files / 'dapo'}", "PoolConfig.where = thread")
    assert train(["--gin", "questions", "--dry_run", *threads]) == 2
    assert "PoolConfig.where" in capsys.readouterr().err


REWARD = '''
def near(prompt, answer, record):
    """Half for any digit, the rest for the right answer; the columns are all there."""
    assert prompt == record["prompt"][0]["content"]
    return {"digits": 0.5 * any(c.isdigit() for c in answer), "right": 0.5 * (record["reward_model"]["ground_truth"] in answer)}
'''


@pytest.mark.slow
def test_a_run_on_parquet_of_others_with_a_reward_of_ones_own(files, monkeypatch):
    """Three settings, and numbers that make it small."""
    (files / "my_rewards_of_a_test.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(files))
    mine = settings(
        f"Questions.path = {files / 'dapo'}", "Questions.reward = @my_rewards_of_a_test.near", "rl/Phase.steps = 2"
    )
    small = """warm_start/Phase.steps = 2; warm_start/Phase.prompts_per_step = 16; warm_start/Phase.eval_every = 0
        warm_start/Phase.stop_at_reward = None; rl/Phase.prompts_per_step = 4; rl/Phase.group_size = 4
        rl/Phase.eval_every = 0; SamplerConfig.slots = 16; SamplerConfig.max_context = 160
        PoolConfig.workers = 1; MeshSpec.data = 1; Evaluation.tasks = 4; Recipe.max_answer_tok = 8"""
    run = files / "run"
    argv = ["--gin", "questions", "--run_dir", str(run), *mine, *settings(*small.replace("\n", ";").split(";"))]
    assert train(argv) == 0
    done = rows(run)
    assert len(done) == 4 and summary(run)["stop_reason"] == "all phases done"
    lines = (run / "rollouts" / "step_4.jsonl").read_text().splitlines()
    assert len(lines) == 16 and all(set(json.loads(line)["reward_parts"]) == {"digits", "right"} for line in lines)
    assert "my_rewards_of_a_test.near" in (run / "config.resolved.json").read_text()
    # continuing reads the function again from the run's own configuration
    assert train(argv) == 0
