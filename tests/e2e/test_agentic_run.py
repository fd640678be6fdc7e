"""Runs with features of several turns: starts from expert episodes, truncated contexts, spare episodes."""

import json

import numpy as np
import pytest

from rolljax import loop
from rolljax.commands.train import main as train
from rolljax.concurrency.event_loop import Stopped
from rolljax.console.progress import Console
from rolljax.metrics import check_row
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check as check_run
from rolljax.trainer.state import fingerprint

from .conftest import StopAt, rows, summary

IPA = {
    "MeshSpec.data": 1,
    "SamplerConfig.slots": 32,
    "SamplerConfig.prefill_chunk": 256,
    "Evaluation.tasks": 8,
    "KeyDoorChain.length": 4,
    "ExpertStarts.window": 8,
    "ExpertStarts.threshold": 0.01,
    "Recipe.save_every": 100,
    "ipa/Phase.steps": 6,
    "ipa/Phase.prompts_per_step": 4,
    "ipa/Phase.group_size": 4,
    "ipa/Phase.eval_every": 0,
    "optimizer.AdamW.lr": 0.02,
}


def arguments(name, run_dir, settings):
    argv = ["--gin", name, "--run_dir", str(run_dir)]
    return argv + [a for key, value in settings.items() for a in ("--set", f"{key} = {value!r}")]


def trajectories(run_dir, step):
    return [json.loads(x) for x in (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["rollback", "parallel"])
def test_episodes_start_after_the_experts_turns(tmp_path, mode):
    settings = IPA | {"ExpertStarts.mode": mode, "ExpertStarts.threshold": 0.9}
    assert train(arguments("agent_ipa", tmp_path / "run", settings)) == 0
    written = rows(tmp_path / "run")
    assert [check_row(row) for row in written] == [[]] * 6
    replayed = set()
    for step, row in enumerate(written, 1):
        for t in trajectories(tmp_path / "run", step):
            keys = t["task"]["content"].split()[2]
            own = [turn for turn in t["turns"] if turn["versions"][0] >= 0]
            expert = t["turns"][: len(t["turns"]) - len(own)]
            assert t["status"] != "failed" and "".join(turn["text"] for turn in expert) == keys[: len(expert)]
            replayed.add(len(expert))
        assert row["start_states/distance_n"] == 1 and row["mismatch/abs_max_nat"] < 1e-4
    assert replayed == ({3} if mode == "rollback" else {0, 1, 2, 3})
    if mode == "rollback":  # the last key is never found by chance, and it is imitated
        assert sum(row["start_states/fallback_n"] for row in written) > 0


@pytest.mark.slow
def test_where_episodes_start_survives_a_stop(tmp_path):
    """A stopped and resumed run equals an uninterrupted one to the bit, including the learned starts."""
    from rolljax import cli

    argv = arguments("agent_ipa", "", IPA)
    config = cli.load_recipe([argv[1]], argv[5::2])
    plan = check_run(config.value)

    def run(folder, console):
        folder.prepare(config, fresh=False)
        return loop.train(plan, folder, console, lambda: getattr(console, "stopped", False))

    full, progress = run(RunFolder(tmp_path / "whole"), Console())
    assert progress.start_states["rates"] and progress.start_states["longest"] == 4
    half = RunFolder(tmp_path / "half")
    with pytest.raises(Stopped):
        run(half, StopAt(3))
    again, later = run(half, Console())
    assert later.start_states == progress.start_states and fingerprint(again.state) == fingerprint(full.state)


@pytest.mark.slow
def test_a_cut_context_and_spare_episodes_are_trained_on(tmp_path):
    settings = IPA | {
        "KeyDoorChain.length": 8,
        "SamplerConfig.max_context": 48,
        "Recipe.max_answer_tok": 2,
        "ipa/Phase.start_states": None,
        "ipa/Phase.spare_prompts": 2,
        "ipa/Phase.late": "resample",
        "ipa/Phase.spare_siblings": 1,
        "ipa/Phase.steps": 2,
        "ipa/Phase.row_len": 64,
        "RolloutConfig.context": "drop_oldest",
    }
    settings = {k: v for k, v in settings.items() if not k.startswith("ExpertStarts")}
    argv = arguments("agent_ipa", tmp_path / "run", settings)
    argv += ["--set", "Recipe.rollout = @rolljax.rollout.episodes.RolloutConfig()"]
    assert train(argv) == 0
    for step, row in enumerate(rows(tmp_path / "run")):
        assert check_row(row) == []
        begun, late = row["groups/started_n"], row["groups/late_n"]
        assert (begun, late) == ((6, 2), (4, 0))[step] and row["rollout/cancelled_n"] == 4
        kept = row["groups/trained_n"] + row["groups/dropped_credit_n"] + row["groups/dropped_failed_n"]
        assert kept == 4 and row["groups/waiting_n"] == 0
        if row["groups/trained_n"]:
            assert row["mismatch/abs_max_nat"] < 1e-4
    draws = [{t["key"]["prompt_index"] for t in trajectories(tmp_path / "run", step)} for step in (1, 2)]
    assert draws[0] | draws[1] == set(range(8))
    assert summary(tmp_path / "run")["stop_reason"] == "all phases done"
    assert np.isfinite([row["loss/total"] for row in rows(tmp_path / "run")]).all()


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["spares", "tail batching"])
def test_a_resumed_run_takes_back_cancelled_groups(tmp_path, how):
    from rolljax import cli

    settings = {k: v for k, v in IPA.items() if not k.startswith("ExpertStarts")}
    settings |= {"ipa/Phase.start_states": None, "ipa/Phase.steps": 3}
    if how == "spares":
        settings |= {"ipa/Phase.spare_prompts": 2, "ipa/Phase.late": "resample"}
    argv = arguments("agent_ipa", "", settings)
    if how == "tail batching":
        argv += ["--set", "ipa/Phase.tail_batching = @rolljax.rollout.group_buffer.TailBatching()"]
    config = cli.load_recipe([argv[1]], argv[5::2])
    plan, folder = check_run(config.value), RunFolder(tmp_path / "run")
    folder.prepare(config, fresh=False)
    with pytest.raises(Stopped):
        loop.train(plan, folder, console := StopAt(1), lambda: getattr(console, "stopped", False))
    saved = folder.checkpoints.latest(print).progress.groups
    assert len(saved["buffer"]["again"]) == (2 if how == "spares" else 1) and not saved["buffer"]["entries"]
    _, progress = loop.train(plan, folder, Console())
    assert progress.groups["buffer"]["again"] == []
    found = [
        (t["key"]["prompt_index"], t["task"]["index"])
        for step in (1, 2, 3)
        for t in trajectories(tmp_path / "run", step)
    ]
    assert {draw for draw, _ in found} == set(range(12)) and len(set(found)) == 12
    late = {(draw, saved["tasks"][str(draw)]) for draw in saved["buffer"]["again"]}
    assert late < set(found)
    assert sum(row["groups/late_n"] for row in rows(tmp_path / "run")) >= len(late)
