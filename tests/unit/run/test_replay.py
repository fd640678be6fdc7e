"""The log that a run can be replayed from: what it holds is read to the bit, and what it lacks is said."""

import dataclasses
import json

import numpy as np
import pytest

from rolljax import cli
from rolljax.errors import CheckpointError, ConfigError
from rolljax.run.consumed import ConsumedStep
from rolljax.run.folder import RunFolder
from rolljax.run.protocols import StepGroups
from rolljax.run.replay import RunLog, read_log
from rolljax.storage.layout import rollouts_file
from rolljax.types import Expert, Fault, Group, Key, Task, Trajectory, Turn

FLOATS = (0.1, 1 / 3, 5e-324, 1e300)


def turn(chance, version, **changes):
    size = int(chance.integers(1, 9))
    logp = np.nextafter(np.float32(-1), chance.normal(size=size).astype(np.float32))
    ids, versions = chance.integers(0, 2**31 - 1, size, np.int32), np.full(size, version, np.int32)
    return dataclasses.replace(Turn(ids[:1], ids, logp, versions, "length", 0.1 + 0.2, "é\n\ud800"), **changes)


def group(draw, chance, **changes):
    task = Task("task", draw * 7, f"the content of {draw}")
    played = [
        Trajectory(
            Key(1, draw, sibling),
            task,
            (turn(chance, 3), turn(chance, 4, weight=1 / 3, restart=True, finish_reason="stop")),
            FLOATS[sibling % 4],
            {"score": FLOATS[(sibling + 1) % 4], "format": -0.0},
            bool(sibling % 2),
            "ok",
            metrics={"tamper_n": 0.7},
            observation_hashes=("a", "b"),
            expert=Expert("e", 2),
            env_s=1 / 7,
        )
        for sibling in range(3)
    ]
    lost = Trajectory(Key(1, draw, 3), task, (), 0.0, {}, False, "failed", Fault("env", "step", "broke", True))
    return Group(task, draw, (*played, lost), **changes)


def bits(value):
    """Return everything that a value consists of; arrays as dtype and bytes."""
    if dataclasses.is_dataclass(value):
        return {f.name: bits(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    if isinstance(value, (list, tuple)):
        return [bits(v) for v in value]
    if isinstance(value, dict):
        return [(k, bits(v)) for k, v in value.items()]
    return type(value), repr(value)


def written(folder, step, groups):
    """Write a run's files of a step; return the line of its log."""
    line = ConsumedStep(
        step,
        "rl",
        step + 4,
        [g.prompt_index for g in groups.trained],
        [step + 4 - age for age in groups.start_ages],
        {"no_signal": [g.prompt_index for g in groups.dropped], "failed": [], "late": []},
        {},
        "",
        {str(g.prompt_index): g.cancelled for g in groups.all if g.cancelled},
        {str(g.prompt_index): g.demonstration.to_json() for g in groups.all if g.demonstration},
    )
    digest = folder.write_rollouts(step, (t for g in groups.all for t in g.trajectories))
    line = dataclasses.replace(line, rollouts=digest)
    folder.write_consumed(line)
    return line


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "run" / "rollouts").mkdir(parents=True)
    return RunFolder(tmp_path / "run")


def test_groups_are_read_to_the_bit(folder):
    """Also experts' demonstrations, cancelled spares, text that is no Unicode, numbers at the end of the range."""
    chance = np.random.default_rng(0)
    shown = dataclasses.replace(group(5, chance).trajectories[0], turns=(turn(chance, -1, weight=4.0),))
    trained = [group(5, chance, demonstration=shown), group(2, chance, cancelled=2), group(9, chance)]
    step = StepGroups(trained, [2, 0, 1], [group(4, chance)], [])
    line = written(folder, 1, step)
    assert [ConsumedStep(**row) for row in folder.rows("consumed.jsonl")] == [line]
    read = RunLog(folder, [line]).groups(line)
    assert bits(read.all) == bits(step.all) and len(read.trained) == 3
    assert read.start_ages == [2, 0, 1] and read.logged is line


def test_a_file_that_is_not_as_it_was_written_is_not_read(folder):
    line = written(folder, 1, StepGroups([group(0, np.random.default_rng(0))], [0], [], []))
    log, path = RunLog(folder, [line]), rollouts_file(folder.path, 1)
    path.write_bytes(path.read_bytes().replace(b"0.3", b"0.4", 1))
    with pytest.raises(CheckpointError, match=r"step_1.jsonl is not what step 1 of that run wrote"):
        log.groups(line)
    path.unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        log.groups(line)


# ---- what cannot be replayed


def config(*settings):
    return cli.load_recipe(["quickstart"], ["rl/AdamW.schedule = 'constant'", *settings])


@pytest.fixture
def recorded(folder):
    """Write the files of a run of three steps, two of them in its second phase."""
    folder.prepare(config(), fresh=False) if not (folder.path / "rollouts").rmdir() else None
    for step, phase in enumerate(("warm_start", "rl", "rl"), 1):
        line = written(folder, step, StepGroups([group(step, np.random.default_rng(step))], [0], [], []))
        lines = (folder.path / "consumed.jsonl").read_text().splitlines()[:-1]
        lines.append(json.dumps(dataclasses.asdict(dataclasses.replace(line, phase=phase))))
        (folder.path / "consumed.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return folder


def refusal(recorded, into, *settings):
    with pytest.raises(ConfigError) as error:
        read_log(recorded.path, config(*settings), into).check_continues(into)
    assert error.value.remedy
    return error.value


def test_what_may_differ_in_a_replay(recorded, tmp_path):
    into = RunFolder(tmp_path / "again")
    same = ("rl/Phase.steps = 500", "MeshSpec.data = 1", "rl/Phase.micro_rows = 8", "Recipe.remat = 'full'")
    for settings in ((), same, ("Recipe.save_every = 7", "Recipe.rollouts_every = 5")):
        log = read_log(recorded.path, config(*settings), into)
        assert len(log.steps) == 3 and "replaying steps 1 to 3" in log.check_continues(into)


@pytest.mark.parametrize(
    "setting",
    ["Recipe.seed = 5", "rl/AdamW.lr = 0.5", "warm_start/Phase.steps = 3", "rl/Phase.async_ratio = 1"],
)
def test_other_settings_are_refused_in_a_replay(recorded, tmp_path, setting):
    error = refusal(recorded, RunFolder(tmp_path / "again"), setting)
    name = setting.split(" ")[0].split(".")[-1]
    assert name in error.setting and "in the run that is to be replayed" in str(error) and "--gin" in error.remedy


def test_what_a_record_lacks_is_said(recorded, tmp_path):
    into, log = RunFolder(tmp_path / "again"), recorded.path / "consumed.jsonl"
    assert "not a run folder" in str(refusal(RunFolder(tmp_path / "nowhere"), into))
    assert "is the run that is to be trained" in str(refusal(recorded, RunFolder(tmp_path / "again" / ".." / "run")))
    rollouts_file(recorded.path, 2).unlink()
    error = refusal(recorded, into)
    assert "no rollouts of 1 of its steps 1 to 3, the first of step 2" in str(error)
    assert "rollouts_every = 1 and keep_rollouts = None" in error.remedy
    lines = log.read_text().splitlines()
    log.write_text(f"{lines[0]}\n{lines[2]}\n")
    assert "lacks step 2" in str(refusal(recorded, into))
    log.write_text('{"step": 1, "draws": []}\n')
    assert "another version of rolljax" in str(refusal(recorded, into))
    log.write_text("")
    assert "has no step" in str(refusal(recorded, into))


def test_recorded_experts_cannot_be_replayed(recorded, tmp_path):
    resolved = recorded.path / "config.resolved.json"
    settings = json.loads(resolved.read_text()) | {"sampler.record_experts": True}
    resolved.write_text(json.dumps(settings))
    error = refusal(recorded, RunFolder(tmp_path / "again"), "SamplerConfig.record_experts = True")
    assert error.setting == "SamplerConfig.record_experts"
