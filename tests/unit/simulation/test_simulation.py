"""The loop on a virtual clock: its time, the replicas that decode, what is fitted to a run, and the verb."""

import asyncio
import dataclasses
import functools
import json
import math
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolljax import simulate as verb
from rolljax.config import loader
from rolljax.envs.pool import PoolConfig
from rolljax.errors import CheckpointError, ConfigError, HangError
from rolljax.metrics import check_row
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Recipe
from rolljax.simulate import simulate
from rolljax.simulation import clock, fitting, report, roofline
from rolljax.simulation.replica import Replica, SimulatedAnswer
from rolljax.simulation.timings import (
    Distribution,
    EngineTimings,
    EnvTimings,
    Slices,
    Timings,
    TrainerTimings,
    from_json,
    to_json,
)
from tests.simulations import recipe, step_s, timings

# ---- time


def test_time_is_virtual():
    async def wait():
        loop, ends = asyncio.get_running_loop(), []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            ends.append((seconds, loop.time()))

        await asyncio.gather(*map(sleeper, (1e6, 0.5, 3.0, 0.0)))
        return ends

    assert clock.run(wait()) == [(0.0, 0.0), (0.5, 0.5), (3.0, 3.0), (1e6, 1e6)]


def test_what_waits_for_nothing_is_an_error():
    async def wait():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(HangError, match="nothing is under way"):
        clock.run(wait())


# ---- decoding


def decode(engine, answers, publish=(), recompute=False):
    """Play a replica: answers are (begin, prompt, tokens); returns when each ended, and its versions."""

    async def play():
        loop = asyncio.get_running_loop()
        replica = Replica(0, len(answers), engine, lambda answer: answer.done.set_result(None))
        made = [
            SimulatedAnswer((i,), (0, i), prompt, prompt, tok, tok, loop.create_future(), 0.0)
            for i, (_, prompt, tok) in enumerate(answers)
        ]
        for (begin, _, _), answer in zip(answers, made, strict=True):
            loop.call_at(begin, replica.begin, answer)
        for at, version in publish:
            loop.call_at(at, lambda v=version: replica.take_weights(v, recompute=recompute))
        await asyncio.gather(*(a.done for a in made))
        return [a.ended_s for a in made], [a.versions.tolist() for a in made], replica

    return clock.run(play())


def by_tokens(engine, answers):
    """Return when each answer ends if all begin at 0, simulated one decode step after the other."""
    left, context, now = [tok for _, _, tok in answers], [p for _, p, _ in answers], 0.0
    ends = [0.0] * len(left)
    now += sum(context) * engine.prefill_s
    while any(left):
        alive = [i for i, n in enumerate(left) if n]
        # half a token more than at the step's begin: the context grows during the step
        held = sum(context[i] for i in alive) + len(alive) / 2
        now += engine.step_s + engine.sequence_s * len(alive) + engine.context_s * held
        for i in alive:
            left[i] -= 1
            context[i] += 1
            ends[i] = now
    return ends


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.just(0.0), st.integers(1, 300), st.integers(1, 80)), min_size=1, max_size=6),
    st.floats(1e-3, 1),
    st.floats(0, 0.1),
    st.floats(0, 1e-2),
    st.floats(0, 1e-2),
)
def test_a_replica_takes_the_time_of_its_decode_steps(answers, step, sequence, context, prefill):
    """Events at the ends of answers give what a walk over all tokens does."""
    engine = EngineTimings(step_s=step, sequence_s=sequence, context_s=context, prefill_s=prefill)
    ends, _, replica = decode(engine, answers)
    assert ends == pytest.approx(by_tokens(engine, answers), rel=1e-6)
    assert replica.sequence_steps == pytest.approx(sum(tok for _, _, tok in answers))
    assert len(replica) == 0 and sorted(replica.free_slots) == list(range(len(answers)))


def test_tokens_have_the_version_that_decoded_them():
    engine = EngineTimings(step_s=1.0)
    ends, versions, _ = decode(engine, [(0.0, 1, 6), (2.0, 1, 2), (4.5, 1, 3)], publish=[(3.0, 1), (5.0, 2)])
    assert ends == pytest.approx([6, 4, 7.5])
    assert versions == [[0, 0, 0, 1, 1, 2], [0, 1], [1, 2, 2]]


def test_a_prefill_program_takes_its_time_whatever_is_in_it():
    """Programs of 128 tokens: 8 rows of 16, 4 of 32, one of 128; each takes 10 s, a decode step 1 s."""
    engine = EngineTimings(step_s=1.0, prefill_call_s=10.0, prefill_sizes=(16, 32, 128))

    def ends(*prompts, **how):
        return decode(engine, [(begin, prompt, 3) for begin, prompt in prompts], **how)[0]

    assert ends((0, 5), (0, 16), (0, 1)) == pytest.approx([13, 13, 13])  # in one program
    assert ends(*[(0, 16)] * 9) == pytest.approx([23] * 9)  # the ninth in another
    assert ends((0, 16), (0, 17)) == pytest.approx([23, 23])  # a program has prompts of one padded length
    assert ends((0, 129)) == pytest.approx([23])  # in two chunks
    assert ends((0, 16), (2, 16)) == pytest.approx([23, 23])  # the first program has begun
    # at 11.5 s, with 1.5 of 3 tokens, keys and values are made again; two of 32 fit into a program
    assert ends((0, 30), (0, 20), publish=[(11.5, 1)], recompute=True) == pytest.approx([23, 23])


def test_siblings_share_their_prompt():
    world = timings(
        Distribution(center=10.0), EngineTimings(step_s=1.0, prefill_s=0.1), prompt_tok=Distribution(center=100.0)
    )
    runtime, recorder = simulate(recipe(slots=4, prompts=1, group=4, steps=1), world)
    assert recorder.rows[0]["time/step_s"] == pytest.approx(20)
    stats = runtime.sampler.stats
    assert (stats.prefill_tok, stats.reused_tok, stats.sampled_tok) == (100, 300, 40)


# ---- a run


def test_a_synchronous_step_by_hand():
    """Three waves of 10 s on 2 slots, 0.5 s for each of 6 x 10 tokens and a prompt of 1, weights in 2 s."""
    world = timings(
        Distribution(center=10.0), trainer=TrainerTimings(step_s=1.0, token_s=0.5, publish_s=2.0, save_s=1.5)
    )
    runtime, recorder = simulate(recipe(slots=2, prompts=2, group=3, steps=3), world)
    for row in recorder.rows:
        assert row["time/rollout_s"] == pytest.approx(30)
        assert row["time/update_s"] == pytest.approx(1 + 0.5 * (60 + 2))
        assert row["time/publish_s"] == pytest.approx(2)
        assert row["time/step_s"] == pytest.approx(65.5)
        assert row["sampler/slot_frac"] == 1.0
        assert row["sampler/idle_frac"] == pytest.approx(32 / 62)  # until the update's end
        assert row["groups/wait_s"] == pytest.approx((10 + 0) / 2)  # one group is done with the second wave
        assert check_row({k: v for k, v in row.items() if k != "phase"}) == []
    found = report.summarize(runtime, recorder)
    assert found.numbers["sampler_busy_frac"] == pytest.approx(30 / 65.5)
    assert found.numbers["trainer_busy_frac"] == pytest.approx(32 / 65.5)
    assert found.token_ages == {0: 1.0}


def test_side_by_side_a_step_takes_what_its_slower_half_does():
    world = timings(Distribution(center=10.0), trainer=TrainerTimings(step_s=32.0))
    shared = dataclasses.replace(world, shared_devices=True)
    run = recipe(slots=2, prompts=2, group=3, steps=12, async_ratio=1.0)
    assert step_s(run, world, skip=2) == pytest.approx(32, rel=0.05)
    assert step_s(run, shared, skip=2) == pytest.approx(62, rel=0.05)


def test_what_hangs_is_cut_by_the_pool():
    """The real pool, with its limits: an episode that hangs fails after `step_s`, and takes no part."""
    hanging = Distribution(center=1.0, hang_frac=0.2, hang=1000.0)
    run = recipe(slots=64, prompts=4, group=8, steps=4, pool=PoolConfig(where="process", step_s=30.0))
    _, recorder = simulate(run, timings(Distribution(center=5.0), env=EnvTimings(step_s=hanging)))
    assert max(row["time/step_s"] for row in recorder.rows) == pytest.approx(35)
    assert 0 < np.mean([row["rollout/fail_frac"] for row in recorder.rows]) < 0.5


def test_the_same_seed_gives_the_same_times():
    world = timings(env=EnvTimings(step_s=Distribution("lognormal", 3.0, 1.0)), turns=Distribution(center=3.0))
    run = recipe(slots=16, prompts=4, group=4, steps=6, async_ratio=0.5)
    first, again = (simulate(run, world)[1].rows for _ in range(2))
    assert first == again
    assert simulate(dataclasses.replace(run, seed=1), world)[1].rows != first


@pytest.mark.slow
def test_evaluations_take_their_time():
    world = timings(Distribution(center=10.0))
    run = recipe(slots=512, prompts=2, group=2, steps=4, eval_every=2)
    _, recorder = simulate(run, world)
    assert [row["time/step_s"] for row in recorder.rows] == pytest.approx([10, 20, 10, 10])


# ---- timings


def test_json_there_and_back():
    world = Timings(
        answer_tok=Distribution("recorded", 1.0, values=(1.0, 2.0)),
        engine=EngineTimings(replicas=4, scheduling="group"),
        slices=Slices(train_chips=8),
        shared_devices=True,
    )
    assert from_json(json.loads(json.dumps(to_json(world))), Timings) == world
    assert to_json(Timings()) == {}


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"engin": {}}, r"Timings\.engin is not known"),
        ({"engine": {"replicas": 1.5}}, r"EngineTimings\.replicas is of another type"),
        ({"engine": {"replicas": 0}}, r"EngineTimings\.replicas must be at least 1"),
        ({"engine": 3}, r"Timings\.engine is of another type"),
        ({"answer_tok": {"kind": "gamma"}}, r"Distribution\.kind is of another type"),
        ({"answer_tok": {"kind": "recorded"}}, r"Distribution\.values"),
        ({"shared_devices": 1}, r"Timings\.shared_devices is of another type"),
    ],
)
def test_wrong_timings_are_refused(record, said):
    with pytest.raises(ConfigError, match=said):
        from_json(record, Timings)


def test_timings_of_slices():
    """Qwen3-32B: 65.5 GB of weights, 256 KiB of keys and values for a token."""
    shape = Qwen3Config(
        vocab_size=151936, num_layers=64, hidden_size=5120, num_heads=64, num_kv_heads=8, head_dim=128, ffn_size=25600,
        tie_embeddings=False,
    )  # fmt: skip
    work = roofline.ModelWork.of(shape)
    assert work.weight_bytes == pytest.approx(65.5e9, rel=0.01) and work.kv_bytes == 256 * 1024
    slices = Slices(sample_chips=32, chips_per_replica=16, collective_s=0.0, hbm_frac=1.0, train_chips=256)
    engine = roofline.engine(work, slices, EngineTimings())
    assert engine.replicas == 2 and engine.step_s == pytest.approx(65.5e9 / (16 * 819e9), rel=0.01)
    assert engine.kv_tok == pytest.approx((16 * 15.75 * 2**30 * 0.9 - 65.5e9) / 2**18, rel=0.01)
    trainer = roofline.trainer(work, slices, TrainerTimings(), mean_tok=0.0)
    assert trainer.token_s == pytest.approx(6 * 32e9 / (256 * 459e12 * 0.45), rel=0.01)


ONE_TURN = EnvTimings(step_s=Distribution(center=0.5, spread=0.2))
MANY_TURNS = EnvTimings(step_s=Distribution(center=1.0, spread=1.0, hang_frac=0.002, hang=30.0))


@pytest.mark.parametrize(
    ("env", "turns", "steps", "limit_s"),
    [
        (ONE_TURN, 1.0, 40, 1e6),
        pytest.param(MANY_TURNS, 5.0, 150, 30.0, marks=pytest.mark.sweep, id="hanging ones fail"),
    ],
)
def test_timings_of_a_run_give_its_step_times(tmp_path, env, turns, steps, limit_s):
    """From the records of a run, here those of a simulated one; the first step is left out, as it compiles. Episodes
    that hung up to the limit of a call, and failed, count with what was waited for them. Also the times of the same
    recipe with another `async_ratio`, where slow episodes are not waited for at once."""
    world = Timings(
        answer_tok=Distribution("lognormal", 60.0 / turns**2, 0.5, group_spread=0.5 / turns),
        prompt_tok=Distribution(center=50.0, spread=10.0),
        turns=Distribution(center=turns),
        engine=EngineTimings(step_s=0.05, sequence_s=0.002),
        env=env,
        trainer=TrainerTimings(step_s=1.0, token_s=0.001, publish_s=0.3),
        shared_devices=True,
    )
    pool = PoolConfig(where="process", step_s=limit_s, max_fault_frac=1.0)
    run = recipe(slots=16, prompts=4, group=8, steps=steps, answer_tok=400, pool=pool)
    write_run(tmp_path, run, world)
    found = fitting.fitted(tmp_path, run)
    assert found.trainer.publish_s == pytest.approx(0.3)
    assert found.trainer.token_s == pytest.approx(0.001, rel=0.01)
    for other in (dataclasses.replace(run, seed=5), verb.with_setting(run, "async_ratio", 2)):
        assert step_s(other, found, skip=3) == pytest.approx(step_s(other, world, skip=3), rel=0.1)


def test_answers_to_one_prompt_are_alike_as_they_were():
    """The spread between prompts is separated from the spread between answers to one prompt; without a spread between
    prompts the recorded values are drawn."""
    draws = np.random.default_rng(0)
    world = Distribution("lognormal", 200.0, 0.3, group_spread=0.8)
    groups = [[(of := world.of_group(draws)).draw(draws), *(of.draw(draws) for _ in range(3))] for _ in range(3000)]
    found = fitting._in_groups(groups)
    logs = np.log([[(of := found.of_group(draws)).draw(draws), of.draw(draws)] for _ in range(4000)])
    assert logs.mean() == pytest.approx(np.log(200), abs=0.05)
    assert (logs[:, 0] - logs[:, 1]).std() / np.sqrt(2) == pytest.approx(0.3, rel=0.05)
    assert logs.mean(1).std() == pytest.approx(np.sqrt(0.8**2 + 0.3**2 / 2), rel=0.05)
    assert found.mean == pytest.approx(np.mean(groups), rel=0.05)
    same = fitting._in_groups([[1.0, 9.0], [9.0, 1.0], [1.0, 9.0]])
    assert same.group_values == () and set(same.values) == {1.0, 9.0}


def keeping_groups(run, world):
    """Return the rows of a run, and the groups of each step."""
    from rolljax import loop
    from rolljax.simulation.episodes import SimulatedTasks
    from rolljax.simulation.runtime import SimulatedRecorder, SimulatedRuntime

    kept = []

    class Keeping(SimulatedRecorder):
        def commit(self, phase, step, logged, report):
            kept.append(step.all)
            super().commit(phase, step, logged, report)

    async def play():
        runtime = SimulatedRuntime(verb.sampling_part(run, None), world)
        recorder = Keeping(runtime)
        await loop.train_phases(runtime.recipe, SimulatedTasks(), *runtime.parts(), recorder)
        return recorder

    return clock.run(play()), kept


def write_run(folder, run, world):
    """Write the records that a run would leave of a simulation."""
    (folder / "rollouts").mkdir()
    recorder, kept = keeping_groups(run, world)
    for row, groups in zip(recorder.rows, kept, strict=True):
        lines = [json.dumps(t.to_json()) for g in groups for t in g.trajectories]
        (folder / "rollouts" / f"step_{row['step']}.jsonl").write_text("\n".join(lines) + "\n")
    rows = [{"time/schedule_s": 0.0, **row} for row in recorder.rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def changed(*path, value=...):
    """Return a function that replaces the value at a path of keys in a record, or removes the last key."""

    def change(line):
        record = json.loads(line)
        *parents, last = path
        inside = functools.reduce(lambda outer, key: outer[key], parents, record)
        inside.pop(last) if value is ... else inside.__setitem__(last, value)
        return json.dumps(record)

    return change


METRICS, ROLLOUTS = "metrics.jsonl", "rollouts/step_2.jsonl"
DAMAGE = [
    (METRICS, changed("phase"), "phase is missing"),
    (METRICS, changed("phase", value=3), "phase is 3, not a text"),
    (METRICS, changed("step"), "step is missing"),
    (METRICS, changed("step", value="2"), "step is '2', not a whole number"),
    (METRICS, changed("step", value=2.5), "step is 2.5, not a whole number"),
    *((METRICS, changed(name), f"{name} is missing") for name in fitting.AMOUNTS),
    *((METRICS, changed(name, value=math.nan), f"{name} is nan, not a finite number") for name in fitting.AMOUNTS),
    *((METRICS, changed(name, value=math.inf), f"{name} is inf, not a finite number") for name in fitting.PAUSES),
    (METRICS, changed("time/update_s", value=-1.0), "time/update_s is -1.0, not a finite number of at least 0"),
    (METRICS, changed("time/update_s", value=True), "time/update_s is True, not"),
    (METRICS, changed("time/update_s", value=None), "time/update_s is null, not"),
    (METRICS, changed("time/update_s", value={"a": [1]}), "time/update_s is an object of 1, not"),
    (METRICS, changed("time/update_s", value=10**400), "time/update_s is a number out of range, not"),
    *((ROLLOUTS, changed(name), f"{name} is missing") for name in ("status", "turns", "key", "env_s", "reward", "success")),
    (ROLLOUTS, changed("key", "prompt_index"), "key.prompt_index is missing"),
    (ROLLOUTS, changed("key", "stream", value="0"), "key.stream is '0', not a whole number"),
    (ROLLOUTS, changed("turns", value=7), "turns is 7, not a list"),
    (ROLLOUTS, changed("turns", 0, value=[1]), "turns[0] is a list of 1, not an object"),
    (ROLLOUTS, changed("turns", 0, "tokens"), "turns[0].tokens is missing"),
    (ROLLOUTS, changed("turns", 0, "prompt_ids", value="ab"), "turns[0].prompt_ids is 'ab', not a list"),
    (ROLLOUTS, changed("env_s", value=math.nan), "env_s is nan, not a finite number"),
    (ROLLOUTS, changed("reward", value=math.nan), "reward is nan, not a finite number"),
    (ROLLOUTS, changed("success", value=1), "success is 1, not true or false"),
    (ROLLOUTS, changed("status", value="failed"), "fault is null, not an object"),
    *(
        (name, change, words)
        for name in (METRICS, ROLLOUTS)
        for change, words in [
            (lambda line: line[: len(line) // 2], "not JSON"),
            (lambda line: "", "not JSON"),
            (lambda line: "[]", "the line is a list of 0, not an object"),
            (lambda line: '{"a":' * 900 + "1" + "}" * 900, "nested too deeply"),
            (lambda line: "[" * 100_000, "nested too deeply"),
        ]
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    folder, run = tmp_path_factory.mktemp("recorded"), recipe(slots=4, prompts=2, group=2, steps=3)
    write_run(folder, run, timings())
    return folder, run


@pytest.mark.parametrize(("name", "change", "words"), DAMAGE)
def test_a_damaged_record_is_named_with_file_line_and_key(recorded, tmp_path, name, change, words):
    folder, run = recorded
    path = shutil.copytree(folder, tmp_path / "run") / name
    first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([first, change(second), *rest]) + "\n")
    with pytest.raises(CheckpointError) as error:
        fitting.fitted(tmp_path / "run", run)
    said = str(error.value)
    assert said.startswith(f"{path}, line 2 is damaged: {words}") and "\n" not in said
    assert said.endswith("; delete the line in a copy of the run, or name another run")


@pytest.mark.parametrize(("name", "change", "words"), [DAMAGE[2], DAMAGE[-1]])
def test_the_verb_says_in_one_line_what_is_damaged(recorded, tmp_path, capsys, name, change, words):
    path = shutil.copytree(recorded[0], tmp_path / "run") / name
    path.write_text(change(path.read_text().splitlines()[0]) + "\n")
    assert verb.main(["--gin", "quickstart", "--run", str(tmp_path / "run")]) == CheckpointError.exit_code
    assert f"line 1 is damaged: {words}" in capsys.readouterr().err


def test_a_run_without_rollouts_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--run"):
        fitting.fitted(tmp_path, recipe(slots=4, prompts=2, group=2, steps=2))


# ---- the verb


def test_the_verb(tmp_path, capsys):
    settings = ["--set", "rl/Phase.prompts_per_step=4", "--set", "EngineTimings.step_s = 0.5", "--steps", "4"]
    assert verb.main(["--gin", "quickstart", *settings, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "seconds of a step" in said.out and "defaults, not those of this recipe" in said.err
    found = json.loads((tmp_path / "simulation.json").read_text())
    assert found["steps"] == 4 and found["timings"] == {"engine": {"step_s": 0.5}}
    assert found["step_s"] == pytest.approx(4.0)  # one dispatch of eight decode steps
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_given_timings_are_not_called_defaults(tmp_path, capsys):
    """Those of a file, of another simulation's, of a sweep: whatever is given."""
    small = ["--gin", "quickstart", "--set", "rl/Phase.prompts_per_step=4", "--steps", "2"]
    timings = {"engine": {"step_s": 0.25}}
    (tmp_path / "own.json").write_text(json.dumps(timings))
    (tmp_path / "report.json").write_text(json.dumps({"steps": 4, "timings": timings}))
    for name in ("own.json", "report.json"):
        assert verb.main([*small, "--timings", str(tmp_path / name), "--out", str(tmp_path)]) == 0
        assert "defaults" not in capsys.readouterr().err
        assert json.loads((tmp_path / "simulation.json").read_text())["timings"] == timings
    (tmp_path / "part.json").write_text(json.dumps({"programs": [], "timings": None}))
    assert verb.main([*small, "--timings", str(tmp_path / "part.json")]) == 2
    assert "is a plan without the programs of a step" in capsys.readouterr().err
    assert verb.main([*small, "--sweep", "async_ratio=0,1"]) == 0
    assert "defaults, not those of this recipe" in capsys.readouterr().err


def test_a_sweep(tmp_path, capsys):
    (tmp_path / "slow.json").write_text(json.dumps({"trainer": {"step_s": 4.0}, "engine": {"step_s": 0.5}}))
    command = ["--gin", "quickstart", "--set", "rl/Phase.prompts_per_step=4", "--timings", str(tmp_path / "slow.json")]
    assert verb.main([*command, "--steps", "6", "--sweep", "async_ratio=0,1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "sweep.json").read_text())
    assert found["0"]["step_s"] == pytest.approx(8.0) and found["1"]["step_s"] == pytest.approx(4.0, rel=0.1)
    assert "2.00x" in capsys.readouterr().out
    assert (tmp_path / "sweep.png").is_file()
    assert verb.main([*command, "--steps", "2", "--sweep", "EngineTimings.step_s=1,2"]) == 0


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--sweep", "Phase.colour=1,2"], "is no setting to sweep"),
        (["--timings", "nowhere.json"], "timings/qwen3_32b_v5p_256_v5e_512"),
        (["--set", "EngineTimings.replica=2"], "EngineTimings.replica is not known"),
        (["--set", "EngineTimings.replicas=7"], "SamplerConfig.slots"),
    ],
)
def test_wrong_arguments_end_with_2(more, said, capsys):
    assert verb.main(["--gin", "quickstart", "--steps", "2", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_without_sampling_is_refused():
    config = loader.load(["quickstart"], ["Recipe.phases = [@warm_start/Phase()]"], root=Recipe)
    with pytest.raises(ConfigError, match="nothing to sample"):
        simulate(config.value, Timings())
