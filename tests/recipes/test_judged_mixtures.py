"""Training of a judge, and a mixture in which this judge rewards one domain."""

import asyncio
import json

import pytest

from rolljax import cli
from rolljax.commands.train import main as train
from rolljax.rewards.base import RewardContext
from rolljax.rewards.calibration import agreement, read_labelled

from ..e2e.conftest import ROOT, rows

SMALL = ["Qwen3Config.hidden_size = 64", "Qwen3Config.ffn_size = 192"]


def run(recipe, run_dir, *settings):
    argv = ["--gin", recipe, "--run_dir", str(run_dir), "--set", "MeshSpec.data = 1"]
    return train([*argv, *(word for setting in settings for word in ("--set", setting))])


def test_without_the_judge_a_dry_run_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train(["--gin", "rlvr_mixture", "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert "LocalModel.path is neither a Hugging Face folder nor a run folder" in said and "train it first" in said


def test_a_reward_model_that_no_phase_trains_is_refused_for_a_domain_too(tmp_path, capsys):
    own = "{'spell': @rolljax.rollout.domains.DomainSettings()}"
    settings = ["Recipe.domains = " + own, "DomainSettings.reward = @rolljax.rewards.reward_model.RewardModelScore()"]
    settings += ["RewardModelScore.phase = 'none'"]
    argv = ["--gin", "two_tasks", "--dry_run", *(word for setting in settings for word in ("--set", setting))]
    assert train(argv) == 2
    assert "RewardModelScore.phase" in capsys.readouterr().err


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Train until the judge ends with a verdict, right or wrong."""
    run_dir = tmp_path_factory.mktemp("judge") / "run"
    short = ["warm_start/Phase.steps = 24", "warm_start/Phase.prompts_per_step = 8", "warm_start/Phase.eval_every = 0"]
    assert run("rlvr_judge", run_dir, *SMALL, *short) == 0
    return run_dir


@pytest.mark.sweep
def test_a_judged_domain_gets_the_judges_reward_and_records_the_books(judge, tmp_path, capsys):
    short = [f"LocalModel.path = '{judge}'", "warm_start/Phase.steps = 1", "warm_start/Phase.prompts_per_step = 5"]
    short += [f"rl/Phase.{name}" for name in ("steps = 2", "eval_every = 2", "prompts_per_step = 10", "group_size = 4")]
    assert run("rlvr_mixture", tmp_path / "run", *SMALL, *short, "Evaluation.tasks = 5", "Grpo.filter = None") == 0
    found = {"sums": 0, "formulas": 0, "code": 0, "thanks": 0}
    for step in (2, 3):
        for line in (tmp_path / "run" / "rollouts" / f"step_{step}.jsonl").read_text().splitlines():
            t = json.loads(line)
            found[t["task"]["env"]] += 1
            if t["task"]["env"] == "thanks":
                assert t["status"] in ("ok", "truncated") and t["reward"] == t["reward_parts"]["judge"] in (0.0, 1.0)
                assert t["reward_parts"]["book"] in (0.0, 1.0) and t["reward_parts"]["judge/agreed"] == 1.0
            else:
                assert "judge" not in t["reward_parts"]
    assert found == {"sums": 32, "formulas": 16, "code": 16, "thanks": 16}
    *_, before, last = rows(tmp_path / "run")
    for row in (before, last):
        assert 0 <= row["rewards/part/judge"] <= 1 and row["rewards/lost_n"] == 0
    assert all(f"domain/{name}/heldout_mean" in last for name in found)


@pytest.mark.sweep
def test_the_judge_has_a_verdict_on_every_labelled_answer_and_the_same_again(judge):
    """A training this short need not make the judge right."""
    mixture = cli.load_recipe(["rlvr_mixture"], [f"LocalModel.path = '{judge}'"]).value
    reward, env = mixture.domains["thanks"].reward.terms["judge"], mixture.env.domains["thanks"].env
    labelled = read_labelled(ROOT / "rolljax/recipes/judged_mixtures/thanks_labelled.jsonl")[:24]
    found = [asyncio.run(agreement(reward, RewardContext(env), labelled)) for _ in range(2)]
    assert found[0] == found[1] and found[0].lost == 0 and found[0].num == 24
