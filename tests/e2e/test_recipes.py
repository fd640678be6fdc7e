"""Recipes whose algorithms need more than rewards: critics, frozen policies, attention statistics, several turns. Real
runs of the shipped files with smaller numbers, and the exact continuation of one that has it all."""

import pytest

from rolljax import loop
from rolljax.commands.train import main as train
from rolljax.commands.train import parse
from rolljax.concurrency.event_loop import Stopped
from rolljax.metrics import check_row
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.trainer.state import fingerprint

from .conftest import StopAt, check_conserved, rows, summary

TINY = {
    "SamplerConfig.slots": 64,
    "SamplerConfig.prefill_chunk": 256,
    "Evaluation.tasks": 8,
    "warm_start/Phase.steps": 3,
    "warm_start/Phase.prompts_per_step": 8,
    "warm_start/Phase.eval_every": 0,
    "warm_start/Phase.stop_at_reward": None,
    "MeshSpec.data": 1,
}
RL = {
    "ReasoningGym.partial_credit": True,
    "rl/Phase.steps": 3,
    "rl/Phase.prompts_per_step": 8,
    "rl/Phase.group_size": 4,
    "rl/Phase.eval_every": 0,
}
DPO = {"dpo/Phase.steps": 2, "dpo/Phase.prompts_per_step": 8, "dpo/Phase.group_size": 4, "dpo/Phase.eval_every": 0}
DISTILL = {"distill/Phase.steps": 2, "distill/Phase.prompts_per_step": 8, "distill/Phase.eval_every": 0}
RECIPES = {
    "algorithms/ppo": (RL | {"Critic.warmup_steps": 1}, {"critic/explained_var", "critic/loss", "optim/grad_norm"}),
    "algorithms/attention_rhythm": (RL, {"optim/grad_norm"}),
    "quickstart": (
        RL | {"rl/Phase.algorithm": "@DecoupledPpo()", "rl/Phase.async_ratio": 2},
        {"policy/ratio_mean"},
    ),
    "sft_dpo_grpo": (RL | DPO, {"optim/grad_norm"}),
    "distill": (DISTILL | {"Distill.top_k": 8}, {"distill/divergence_nat"}),
    "algorithms/segment_ppo": (RL | DPO | {"Critic.warmup_steps": 1}, {"credit/segment_frac", "critic/loss"}),
    "algorithms/segment_dpo": (RL | DPO, {"credit/segment_frac", "preference/margin_nat"}),
    "algorithms/segment_rft": (RL | DPO, {"credit/segment_frac"}),
    "reward_model_ppo": (
        RL
        | {"reward_model/Phase.steps": 2, "reward_model/Phase.prompts_per_step": 8}
        | {"reward_model/Phase.group_size": 4, "rl/Critic.warmup_steps": 1},
        {"critic/explained_var"},
    ),
}


def arguments(name, run_dir, settings):
    argv = ["--gin", name, "--run_dir", str(run_dir)]
    written = {k: v if str(v).startswith("@") else repr(v) for k, v in (TINY | settings).items()}
    return argv + [a for key, value in written.items() for a in ("--set", f"{key} = {value}")]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_to_its_end(name, tmp_path):
    settings, written = RECIPES[name]
    assert train(arguments(name, tmp_path / "run", settings)) == 0
    run = rows(tmp_path / "run")
    assert all(check_row(row) == [] for row in run)
    assert written <= set().union(*run)
    check_conserved(run)
    assert summary(tmp_path / "run")["stop_reason"] == "all phases done"


@pytest.mark.slow
def test_critics_references_and_memory_survive_a_stop(tmp_path):
    """AsyPPO with an adaptive KL penalty: stopped in the middle of its phase, it ends bitwise as if it had not been."""
    from rolljax import cli

    settings = RL | {
        "rl/Phase.steps": 4,
        "AsyPpo.kl": "@KlReward()",
        "KlReward.coef": 0.05,
        "KlReward.adaptive": "@AdaptiveKl()",
        "AdaptiveKl.target": 0.01,
        "AdaptiveKl.horizon": 100,
        "Critic.warmup_steps": 1,
        "Critic.epochs": 2,
    }

    def run(folder, stop_at=None):
        args = parse(arguments("algorithms/asyppo", folder, settings))
        config = cli.load_recipe(args.gin, args.set)
        plan, out = check_run(config.value), RunFolder(folder)
        out.prepare(config, fresh=False)
        console = StopAt(stop_at)
        return loop.train(plan, out, console, should_stop=lambda: console.stopped)

    full, progress = run(tmp_path / "whole")
    assert progress.algorithm_state["kl_coef"] != 0.05
    with pytest.raises(Stopped):
        run(tmp_path / "parts", stop_at=5)
    again, resumed = run(tmp_path / "parts")
    assert fingerprint(again.state) == fingerprint(full.state)
    assert resumed.algorithm_state == progress.algorithm_state
    a, b = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert [r["critic/loss"] for r in a[3:]] == [r["critic/loss"] for r in b[3:]]
    assert [r["kl/coef"] for r in a[3:]] == [r["kl/coef"] for r in b[3:]]


@pytest.mark.slow
def test_groups_that_teach_nothing_are_replaced(tmp_path):
    """DAPO draws further groups until the step is full of those with different rewards; here one in six is."""
    assert train(arguments("algorithms/dapo", tmp_path / "run", RL | {"rl/Phase.steps": 1})) == 0
    row = rows(tmp_path / "run")[-1]
    assert row["groups/trained_n"] == 8 < row["groups/started_n"]
    assert row["groups/started_n"] == row["groups/trained_n"] + row["groups/no_signal_n"]
    keys = set()
    import json

    for line in (tmp_path / "run" / "rollouts" / "step_4.jsonl").read_text().splitlines():
        keys.add((json.loads(line)["key"]["prompt_index"], json.loads(line)["key"]["sibling"]))
    assert len(keys) == row["groups/started_n"] * 4


@pytest.mark.slow
def test_a_run_ends_when_no_refill_teaches_anything(tmp_path, capsys):
    """As in the authors' code, which raises after `max_num_gen_batches` (github.com/volcengine/verl, recipe/dapo)."""
    settings = RL | {
        "ReasoningGym.partial_credit": False,
        "rl/Phase.steps": 1,
        "GroupFilter.dynamic_sampling_rounds": 2,
    }
    assert train(arguments("algorithms/dapo", tmp_path / "run", settings)) == 5
    said = capsys.readouterr().err
    assert (
        "after 2 dynamic-sampling rounds none of 24 groups has a signal" in said
        and "GroupFilter.dynamic_sampling_rounds" in said
    )
