"""A whole run: its files, its exports, and that the verbs agree about it."""

import asyncio
import contextlib
import json
import shutil

import numpy as np
import pytest

from rolljax import eval as eval_verb
from rolljax import loop
from rolljax.commands.export import main as export
from rolljax.commands.train import main as train
from rolljax.commands.train import parse, stopped
from rolljax.concurrency.event_loop import Stopped
from rolljax.console.progress import Console
from rolljax.envs.tasks import TaskStream
from rolljax.metrics import MetricsReport, check_row
from rolljax.rollout.episodes import SamplerPolicy, ScriptedPolicy
from rolljax.run.folder import RunFolder
from rolljax.run.phase_rollouts import PhaseRollouts
from rolljax.run.preflight import check as check_run
from rolljax.run.progress import RunProgress
from rolljax.run.runtime import Runtime
from rolljax.run.trained_weights import trained_params
from rolljax.run.trainer import Trainer
from rolljax.sampler.scheduler import Scheduler
from rolljax.types import Group, SamplingParams, Trajectory
from rolljax.viewer import answers
from rolljax.viewer.filters import Filter
from rolljax.viewer.runs import ViewedRun
from tests.compilations import compiled_from_now_on

from .conftest import ROOT, StopAt, arguments, check_conserved, rows, summary


def test_run_folder_holds_everything(trained):
    for name in ("config.gin", "config.resolved.json", "env.json", "metrics.jsonl", "summary.json", "curves.png"):
        assert (trained / name).stat().st_size > 0
    assert (trained / "curves.png").read_bytes().startswith(b"\x89PNG")
    s = summary(trained)
    assert s["stop_reason"] == "all phases done"
    assert s["steps"] == 32
    assert [e["phase"] for e in s["heldout_reward"]] == ["start", "warm_start", "rl"]
    assert all(e["n"] == 16 for e in s["heldout_reward"])
    assert s["heldout_reward"][1]["mean"] > s["heldout_reward"][0]["mean"]
    assert set(s["phase_wall_s"]) == {"warm_start", "rl"} and set(s["other_wall_s"]) == {"start", "save", "result"}
    assert s["wall_s"] == pytest.approx(sum(s["phase_wall_s"].values()) + sum(s["other_wall_s"].values()))


def test_metrics_are_in_range_and_conserve_groups(trained):
    run = rows(trained)
    assert [r["step"] for r in run] == list(range(1, 33))
    assert [check_row(row) for row in run] == [[]] * 32
    assert all(row["groups/waiting_n"] == 0 for row in run)
    check_conserved(run)
    for row in run[24:]:
        assert row["mismatch/abs_max_nat"] <= 1e-5
        assert row["stale/max_ver"] == 0


def test_rollouts_agree_with_metrics(trained):
    for row in rows(trained)[22:]:
        lines = (trained / "rollouts" / f"step_{row['step']}.jsonl").read_text().splitlines()
        episodes = [json.loads(line) for line in lines]
        assert np.mean([e["reward"] for e in episodes]) == pytest.approx(row["reward/mean"])
        for e in episodes:
            assert e["schema"] == 1
            assert e["status"] in ("ok", "truncated")
            (turn,) = e["turns"]
            assert len(turn["tokens"]) == len(turn["sampler_logp"]) == len(turn["versions"]) > 0
            assert e["reward_parts"]["score"] == e["reward"]


def test_the_run_can_be_looked_at(trained):
    """As it is: what training made of tokens, their texts, held-out answers before and after."""
    run = ViewedRun("run", trained)
    said = run.overview()
    assert said["heldout"] == summary(trained)["heldout_reward"] and said["evaluations"] == [
        "start",
        "warm_start",
        "rl",
    ]
    for row in rows(trained)[24:]:
        step = answers.step(run, row["step"], Filter())
        assert step["found"] == 32 and [g["spread"] for g in step["groups"]] == sorted(
            (g["spread"] for g in step["groups"]), reverse=True
        )
        made = [answers.trajectory(run, row["step"], line)["turns"][0] for line in range(32)]
        of_turns = ([t["advantages"]] * len(t["ids"]) for t in made if t["advantages"] is not None)
        advantages = np.array([a for of_turn in of_turns for a in of_turn] or [0.0])
        assert sum(t["advantages"] is not None for t in made) == row["train/sequences_n"]
        assert advantages.mean() == pytest.approx(row["credit/adv_mean"], abs=1e-5)
        assert np.abs(advantages).max() == pytest.approx(row["credit/adv_abs_max"], abs=1e-5)
    assert (
        made[0]["prompt"][0] == ("<|user|>", True)
        and "".join(made[0]["texts"]).removesuffix("<|end|>") == made[0]["text"]
    )
    tasks = answers.heldout(run)["tasks"]
    assert len(tasks) == 16 and all(set(t["answers"]) == {"start", "warm_start", "rl"} for t in tasks)
    assert np.mean([t["answers"]["rl"]["reward"] for t in tasks]) == pytest.approx(said["heldout"][-1]["mean"])


@pytest.mark.slow
def test_export_in_transformers_decodes_as_our_sampler(trained):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rolljax import cli

    config = cli.load_recipe([str(trained / "config.gin")], ["Evaluation.tasks = 50"])
    plan = check_run(config.value)
    params, version = trained_params(plan, trained)
    prompts = []
    env = plan.recipe.env.make()
    for task in plan.heldout:
        prompts.append(plan.chat.prompt_ids(env.reset(task)))
    with Runtime(plan, lambda: params, version) as runtime:
        greedy = SamplingParams(0.0, 8, plan.chat.stop_ids)

        async def everything():
            return await asyncio.gather(*(runtime.sampler.generate(p, greedy, ()) for p in prompts))

        ours = runtime.clock.run(everything())
    model = AutoModelForCausalLM.from_pretrained(trained / "hf", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(trained / "hf")
    for prompt, completion, task in zip(prompts, ours, plan.heldout, strict=True):
        chat = [{"role": "user", "content": task.content}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert list(ids) == prompt.tolist()
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
        assert out[0, len(ids) :].tolist() == completion.tokens.tolist()


def test_verbs_agree(trained, tmp_path, capsys):
    assert eval_verb.main(["--run", str(trained), "--to", str(tmp_path / "eval"), "--json"]) == 0
    of_run = json.loads(capsys.readouterr().out)["rows"][0]
    assert of_run["estimates"]["reward"]["mean"] == pytest.approx(summary(trained)["heldout_reward"][-1]["mean"])
    assert len((tmp_path / "eval" / "answers.jsonl").read_text().splitlines()) == 16
    assert export(["--run", str(trained), "--to", str(tmp_path / "hf")]) == 0
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (trained / "hf" / name).read_bytes()
    assert export(["--model", str(tmp_path / "hf"), "--to", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        trained / "hf" / "model.safetensors"
    ).read_bytes()
    capsys.readouterr()
    greedy = ["--set", "Evaluation.temperature = 0", "--json"]
    assert eval_verb.main(["--model", str(tmp_path / "hf"), "--gin", str(trained / "config.gin"), *greedy]) == 0
    of_folder = json.loads(capsys.readouterr().out)
    assert eval_verb.main(["--run", str(trained), *greedy]) == 0
    assert of_folder["rows"] == json.loads(capsys.readouterr().out)["rows"]


def test_finished_run_is_left_alone(trained, capsys):
    before = (trained / "metrics.jsonl").read_bytes()
    config = ["--gin", str(trained / "config.gin"), "--run_dir", str(trained)]
    assert train(config) == 0
    assert "complete already" in capsys.readouterr().err
    assert (trained / "metrics.jsonl").read_bytes() == before


def test_other_settings_are_refused_on_resume(trained, capsys):
    config = ["--gin", str(trained / "config.gin"), "--run_dir", str(trained)]
    assert train([*config, "--set", "rl/AdamW.lr = 0.5"]) == 2
    err = capsys.readouterr().err
    assert "0.5" in err
    assert "--fresh" in err


@pytest.mark.slow
def test_one_set_points_at_a_model_from_outside(trained, tmp_path, capsys):
    changes = {"Recipe_dot_model": trained / "hf", "warm_start__Phase_dot_steps": 1, "rl__Phase_dot_steps": 2}
    run_dir = tmp_path / "run"
    assert train(arguments(run_dir, MeshSpec_dot_data=1, **changes)) == 0
    start = summary(run_dir)["heldout_reward"][0]["mean"]
    assert start == pytest.approx(summary(trained)["heldout_reward"][-1]["mean"], abs=0.25)
    assert start > summary(trained)["heldout_reward"][0]["mean"]


class Recorder(Console):
    """Names of the programs that are compiled, and how many were at every step."""

    def __init__(self):
        super().__init__()
        self.compiled, self.after_step = compiled_from_now_on(), {}

    def step(self, row):
        self.after_step[int(row["step"])] = len(self.compiled)


def load(argv):
    from rolljax import cli

    args = parse(argv)
    config = cli.load_recipe(args.gin, args.set)
    return config, check_run(config.value)


@pytest.fixture
def sleeps(monkeypatch):
    """Record the policy version each time the sampler is put to sleep."""
    versions, sleep = [], Scheduler.sleep

    def noted(scheduler):
        versions.append(scheduler.version)
        sleep(scheduler)

    monkeypatch.setattr(Scheduler, "sleep", noted)
    return versions


def recorded(run_dir, changes):
    """Run to the end and record the compiled programs."""
    config, plan = load(arguments(run_dir, **changes))
    folder, recorder = RunFolder(run_dir), Recorder()
    folder.prepare(config, fresh=False)
    loop.train(plan, folder, recorder)
    return recorder


@pytest.mark.parametrize(("steps", "lengths"), [(20, 8), pytest.param(52, 20, marks=pytest.mark.sweep)])
def test_nothing_compiles_after_the_first_rl_step(tmp_path, steps, lengths, sleeps):
    changes = {
        "ReasoningGym_dot_config": "{'min_word_len': 3, 'max_word_len': 10}",
        "Recipe_dot_max_answer_tok": 12,
        "rl__Phase_dot_steps": steps,
        "rl__Phase_dot_prompts_per_step": 4,
        "rl__Phase_dot_eval_every": 8,
        "SamplerConfig_dot_record_alternatives": 3,
        "MeshSpec_dot_data": 1,
    }
    recorder = recorded(tmp_path / "run", changes)
    counts = [recorder.after_step[s] for s in sorted(recorder.after_step)]
    assert len(counts) == 6 + steps
    assert counts[0] > 0
    assert counts[7:] == [counts[6]] * (steps - 1), "something was compiled after the first RL step"
    assert sleeps[6:] == [*range(6, 6 + steps)], "the sampler is asleep in every update"
    assert len({r["train/tokens_n"] for r in rows(tmp_path / "run")}) > lengths  # and the lengths did vary
    lines = (tmp_path / "run" / "rollouts" / f"step_{6 + steps}.jsonl").read_text().splitlines()
    turns = [turn for line in lines for turn in Trajectory.from_json(json.loads(line)).turns]
    for turn in turns:
        found = turn.alternatives
        assert found.ids.shape == found.logp.shape == (len(turn.tokens), 3) and (np.diff(found.logp) <= 0).all()
        same = found.ids == turn.tokens[:, None]
        assert same.any() and (found.logp[same] == turn.sampler_logp[same.any(1)]).all()


@pytest.mark.sweep
def test_what_is_recomputed_at_a_publish_was_compiled_before(tmp_path):
    """Answers of many lengths are under way whenever weights come."""
    changes = {
        "rl__Phase_dot_async_ratio": 1,
        "rl__Phase_dot_steps": 8,
        "rl__Phase_dot_prompts_per_step": 2,
        "rl__Phase_dot_eval_every": 0,
        "warm_start__Phase_dot_steps": 1,
        "SamplerConfig_dot_max_context": 512,
        "Recipe_dot_max_answer_tok": 400,
        "Phase_dot_row_len": 512,
        "MeshSpec_dot_data": 1,
    }
    recorder = recorded(tmp_path / "run", changes)
    of_sampler = "jit(run)"
    assert of_sampler in recorder.compiled
    assert of_sampler not in recorder.compiled[recorder.after_step[1] :], "the sampler compiled during RL"


def test_async_ratio_bounds_the_age_and_loses_nothing(tmp_path, sleeps):
    changes = {"rl__Phase_dot_async_ratio": 1.5, "MeshSpec_dot_data": 1}
    config, plan = load(arguments(tmp_path / "run", **changes))
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, fresh=False)
    loop.train(plan, folder, Console())
    assert len(sleeps) == 6, "in the steps of the warm start alone"
    rl = rows(tmp_path / "run")[6:]
    assert [check_row(row) for row in rl] == [[]] * 14
    assert max(r["stale/start_max_ver"] for r in rl) == 2 == max(r["stale/max_ver"] for r in rl)
    assert all(r["stale/max_ver"] <= r["stale/start_max_ver"] <= 2 for r in rl)
    check_conserved(rl)
    assert [r["groups/waiting_n"] for r in rl[:3]] == [12, 12, 12] and rl[-1]["groups/waiting_n"] == 0
    trained = draws(tmp_path / "run", range(7, 21))
    assert sorted(trained) == list(range(14 * 8))


@pytest.mark.sweep
def test_the_best_checkpoint_stays_however_often_a_run_is_stopped(tmp_path):
    """The kept checkpoint is the first one with the highest recorded reward, and has that step's weights."""
    changes = {"Recipe_dot_keep_best": 1, "Recipe_dot_save_every": 100, "rl__Phase_dot_eval_every": 1}
    changes |= {"rl__Phase_dot_steps": 8, "warm_start__Phase_dot_prompts_per_step": 32, "MeshSpec_dot_data": 1}
    argv = arguments(tmp_path / "run", **changes | {"warm_start__Phase_dot_steps": 25})
    config, plan = load(argv)
    folder = RunFolder(tmp_path / "run")
    for stop in (28, 31, None):
        folder.prepare(config, fresh=False)
        console = Console() if stop is None else StopAt(stop)
        with contextlib.suppress(Stopped):
            _, progress = loop.train(plan, folder, console, lambda: getattr(console, "stopped", False))  # noqa: B023
    found = {e["step"]: e["mean"] for e in progress.heldout_reward}
    found |= {r["step"]: r["heldout/reward_mean"] for r in rows(tmp_path / "run") if "heldout/reward_mean" in r}
    best = min(step for step, reward in found.items() if reward == max(found.values()))
    saved = folder.checkpoints.find("best")
    assert (saved.progress.total_steps, saved.progress.weights_reward) == (best, found[best]) and len(found) >= 10
    assert len(folder.checkpoints.names()) in (2, 3)
    params, _ = trained_params(plan, folder.path, "best")
    with Runtime(plan, lambda: params, saved.progress.version) as runtime:
        again = runtime.clock.run(runtime.player.evaluate(best))
    assert np.mean([t.reward for t in again]) == pytest.approx(found[best], abs=1e-12)


def draws(run_dir, steps):
    """Return the prompt indices of the groups of each step, in order."""
    found = []
    for step in steps:
        lines = (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
        found += dict.fromkeys(json.loads(line)["key"]["prompt_index"] for line in lines)
    return found


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("late", ["wait", "resample"])
def test_a_resumed_asynchronous_run_loses_no_draw_and_trains_none_twice(tmp_path, late):
    """Stop once, then resume from older checkpoints as after a kill: finished groups are on disk and are trained on,
    although the weights have changed since."""
    changes = {"rl__Phase_dot_async_ratio": 2, "rl__Phase_dot_late": f"'{late}'", "MeshSpec_dot_data": 1}
    config, plan = load(arguments(tmp_path / "run", Recipe_dot_save_every=1, **changes))
    folder = RunFolder(tmp_path / "run")

    def run(console):
        folder.prepare(config, fresh=False)
        return loop.train(plan, folder, console, lambda: getattr(console, "stopped", False))

    used = []
    for stop in (8, 13, 17):
        with pytest.raises(Stopped):
            run(StopAt(stop))
        name = folder.checkpoints.names()[-1]
        if stop == 13:  # simulate a kill after the last step: the newest checkpoint is the one before
            shutil.rmtree(folder.checkpoints.folder / name)
            name = folder.checkpoints.names()[-1]
        saved = folder.checkpoints.folder / name
        state = json.loads((saved / "progress.json").read_text())["groups"]["buffer"]
        waiting = [Group.from_json(json.loads(line)) for line in (saved / "waiting.jsonl").read_text().splitlines()]
        assert {g.prompt_index for g in waiting} == {e["prompt_index"] for e in state["entries"] if e["ready"]}
        used += [t.to_json() for g in waiting for t in g.trajectories]
    _, progress = run(Console())
    assert progress.finished and progress.step == 14
    rl = rows(tmp_path / "run")[6:]
    assert [r["phase_step"] for r in rl] == list(range(1, 15))
    check_conserved(rl)
    assert sorted(draws(tmp_path / "run", range(7, 21))) == list(range(14 * 8))
    lines = {line for path in (tmp_path / "run" / "rollouts").iterdir() for line in path.read_text().splitlines()}
    trained = [json.loads(line) | {"trained": None} for line in lines]
    used = [t | {"trained": None} for t in used]
    assert used and (late != "wait" or all(t in trained for t in used))


class SparesOnly:
    """Groups after the first `wanted` are sampled without an end; those get the environment's answers, once the
    others are running in the engine, which is held from then on."""

    def __init__(self, runtime, plan, wanted, spares):
        self.sampler, self.wanted, self.spares = runtime.sampler, wanted, spares
        self.endless = SamplerPolicy(runtime.sampler, SamplingParams(1.0, 900), 0)
        self.reference_answer, self.ended, self.release = ScriptedPolicy(plan.chat, 900), 0, None
        self.version = self.endless.version

    async def act(self, prompt_ids, episode, key, turn, min_version=0):
        if key.prompt_index < self.wanted:
            while self.sampler.load().running < self.spares:
                await asyncio.sleep(0)
            self.release = self.release or self.sampler.hold()
            return await self.reference_answer.act(prompt_ids, episode, key, turn)
        try:
            return await self.endless.act(prompt_ids, episode, key, turn)
        finally:
            self.ended += 1


@pytest.mark.slow
def test_cancelled_requests_are_aborted_in_the_engine_at_once(tmp_path):
    changes = {"rl__Phase_dot_spare_prompts": 2, "rl__Phase_dot_late": "'drop'", "SamplerConfig_dot_max_context": 1024}
    config, plan = load(arguments(tmp_path / "run", MeshSpec_dot_data=1, **changes))
    phase, progress = plan.recipe.phases[1], RunProgress(phase=1)
    trainer, spares = Trainer(plan, RunFolder(tmp_path / "run")), 2 * plan.recipe.phases[1].group_size
    trainer.open_phase(progress)
    stream = TaskStream(plan.recipe.env, 0, 0.1)
    with Runtime(plan, trainer.weights, 0) as runtime:
        policy = SparesOnly(runtime, plan, phase.prompts_per_step, spares)
        runtime.player.actor = lambda phase: policy

        async def step():
            parts = (plan.recipe, runtime.player, runtime.sampler, runtime.clock)
            async with PhaseRollouts(*parts, stream, progress, print) as rollouts:
                rollouts.start(0)
                groups = await rollouts.take(0)
                while policy.ended < spares:  # the requests have ended
                    await asyncio.sleep(0)
                before = runtime.sampler.stats
                policy.release()
                while runtime.sampler.load().running:
                    await asyncio.sleep(0)
                line = rollouts.end_step(groups, report := MetricsReport())
            return before, runtime.sampler.stats, report.row(), line

        before, after, row, line = runtime.clock.run(step())
    assert line.prompt_indices == list(range(8)) and line.dropped["late"] == [8, 9] and row["groups/late_n"] == 2
    assert (before.aborted, after.aborted) == (0, spares) and after.dispatches <= before.dispatches + 1  # under way


def test_non_finite_update_stops_before_anything_is_published_or_saved(tmp_path, capsys):
    changes = {"warm_start__Muon_dot_lr": "1e30", "MeshSpec_dot_data": 1, "Recipe_dot_save_every": 1}
    run_dir = tmp_path / "run"
    assert train(arguments(run_dir, **changes)) == 5
    assert "published or saved" in capsys.readouterr().err
    assert list((run_dir / "crash").glob("step_*.npz"))
    assert summary(run_dir)["stop_reason"].startswith("TrainerError")
    bad = len(rows(run_dir)) + 1
    assert RunFolder(run_dir).latest(print).progress.total_steps < bad


def test_a_run_stopped_before_its_first_checkpoint_says_so(tmp_path, capsys):
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    assert stopped(folder, Console()) == 75
    assert summary(folder.path)["stop_reason"] == "stopped by signal" and "begins it again" in capsys.readouterr().err


NEEDS_FILES = {
    "artificial",
    "cli_agent",
    "gsm8k_qwen3_0p6b",
    "dlcot",
    "live_thinking_qwen3_0p6b",
    "lora",
    "palette",
    "palette_warm_up",
    "reward_model_ppo_qwen3_0p6b",
    "rlvr_mixture",
    "rlvr_mixture_qwen3_4b",
    "safety_sft",
    "self_training",
    "stagent",
    "stagent_agent",
    "stagent_agent_sft",
    "terminal_agent",
    "think_j_offline",
    "think_j_qwen3_8b",
}  # planned in test_gsm8k_plan.py, test_judged_mixture.py, test_lora.py, test_terminal_bench.py and test_think_j.py, or by test_docs.py; files of pipelines
# shapes of models and sampling settings, which are included; runs of TPU slices, planned in test_plan.py or simulated
PARTS = {
    *ROOT.glob("rolljax/recipes/*/data.gin"),
    *ROOT.glob("rolljax/recipes/*/judged.gin"),
    ROOT / "rolljax/recipes/stagent/learnability.gin",
    ROOT / "rolljax/recipes/terminal_bench/clean_tasks.gin",
    ROOT / "rolljax/recipes/rome/instances.gin",
    ROOT / "rolljax/recipes/rome/sft_mixture.gin",
    ROOT / "rolljax/recipes/stagent/stagent_agent_desk.gin",
    ROOT / "rolljax/recipes/stagent/stagent_agent_episodes.gin",
    ROOT / "rolljax/recipes/stagent/stagent_agent_funnel.gin",
    *ROOT.glob("configs/models/*.gin"),
    *ROOT.glob("configs/presets/*.gin"),
}
ELSEWHERE = PARTS | {*ROOT.glob("configs/pods/*.gin")}
FILES = {*ROOT.glob("configs/**/*.gin"), *ROOT.glob("rolljax/recipes/*/*.gin")}
SHIPPED = sorted(p for p in FILES - ELSEWHERE if p.stem not in NEEDS_FILES)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_config_passes_a_dry_run(path, capsys):
    assert train(["--gin", str(path), "--dry_run"]) == 0
    out = capsys.readouterr().out
    for part in ("mesh", "parameters", "phase", "first task as the model sees it"):
        assert part in out


@pytest.mark.sampled(1)
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["Tis", "Cispo", "Topr", "DecoupledPpo"])
def test_presets_of_the_dial_pass_a_dry_run(name, ratio, capsys):
    files = ["--gin", "quickstart", "--gin", f"presets/async_ratio_{ratio}"]
    assert train([*files, "--set", f"rl/Phase.algorithm = @{name}()", "--dry_run"]) == 0
    assert "nothing corrects" not in capsys.readouterr().out


@pytest.mark.slow
def test_stop_before_the_first_step_loses_nothing(tmp_path):
    changes = {"warm_start__Phase_dot_steps": 1, "rl__Phase_dot_steps": 1, "MeshSpec_dot_data": 1}
    config, plan = load(arguments(tmp_path / "run", **changes))
    folder = RunFolder(tmp_path / "run")
    folder.prepare(config, fresh=False)
    with pytest.raises(Stopped):
        loop.train(plan, folder, Console(), should_stop=lambda: True)
    _, progress = loop.train(plan, folder, Console())
    assert progress.finished
    assert [e["phase"] for e in progress.heldout_reward] == ["start", "warm_start", "rl"]
