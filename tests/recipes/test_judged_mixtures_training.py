"""A judge's work as an environment: what it asks is what the judge of a run is asked, and reference verdicts are read back."""

import dataclasses
import json

import pytest

from rolljax import cli
from rolljax.chat_models.client import EndpointConfig
from rolljax.envs import checks
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.judging.prompts import mark_of
from rolljax.recipes.judged_mixtures.judge_training import JudgeTraining
from rolljax.rewards.base import RewardContext
from rolljax.rewards.judge import Judge

ENV = Questions(records=[{"question": f"Thank me for {i}.", "answer": f"Thank you for {i}."} for i in range(3)])
MODEL = EndpointConfig("http://127.0.0.1:1/v1", "judge")
LABELS = Judge(MODEL, "{question} {answer} {reference}", labels={"good": 1.0, "fair": 0.5, "bad": 0.0})
MARKS = Judge(
    MODEL, "{question} {answer}", {"facts": 1.0, "tone": 3.0}, veto="made_up", calibration=((0.0, 1.0), (1.0, 0.0))
)
ROWS = [{"index": 1, "answer": "Thanks.", "label": 1}, {"index": 1, "answer": "No.", "label": 0}]
ROWS += [{"index": 2, "answer": "Hm.", "label": 0.4}]


@pytest.fixture
def spec(tmp_path):
    path = tmp_path / "labelled.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return JudgeTraining(LABELS, ENV, str(path))


def episode(spec, index, action=None):
    env = spec.make()
    env.reset(spec.task(index))
    return env.step(env.reference_answer() if action is None else action)


def test_the_environment_asks_the_question_of_a_runs_judge(spec):
    for index, row in enumerate(ROWS):
        task = ENV.task(row["index"])
        asked = LABELS.prompts(RewardContext(ENV, seed=7), task, row["answer"])[""]
        assert f"Thank you for {row['index']}." in asked[1].content
        mark = {seed: mark_of(seed, task.id, row["answer"]) for seed in (7, index)}
        same = [m.content.replace(mark[7], mark[index]) for m in asked]
        assert [m.content for m in spec.make().reset(spec.task(index))] == same
    assert spec.task(0).content == spec.task(1).content != spec.task(2).content, "a question's answers stay together"
    assert spec.num_tasks == 3 and spec.task(3).content == spec.task(0).content


def test_the_checks_of_every_environment(spec):
    checks.reference_solves(spec, 3)
    checks.bad_actions_fail(spec, 3)
    checks.well_formed(spec, 3)
    checks.ends_are_final(spec, 2)
    checks.tasks_are_their_index(spec, 3)
    checks.interleave(spec, 2)
    checks.snapshots_continue(spec, 3)


@pytest.mark.parametrize("judge", [LABELS, MARKS, dataclasses.replace(MARKS, scale=(1.0, 5.0), veto="")])
def test_a_reference_verdict_is_read_back_as_what_the_answer_is_worth(spec, judge):
    spec = dataclasses.replace(spec, judge=judge)
    for index, row in enumerate(ROWS):
        done = episode(spec, index)
        assert done.success and done.terminated
        nearest = {0.4: 0.5}.get(row["label"], row["label"]) if judge.labels else row["label"]
        assert done.reward == pytest.approx(1 - abs(nearest - row["label"]))


@pytest.mark.parametrize(
    "index, said, reward, success",
    [
        (0, "good", 1.0, True),
        (0, "fair", 0.5, True),
        (0, "bad", 0.0, False),
        (1, "good", 0.0, False),
        (2, "bad", 0.6, False),
    ],
)
def test_what_a_verdict_is_worth(spec, index, said, reward, success):
    done = episode(spec, index, json.dumps({"verdict": said}))
    assert (done.reward, done.success, done.metrics) == (reward, success, {"no_verdict_n": 0.0})


@pytest.mark.parametrize("said", ["", "good", '{"verdict": "great"}', '{"verdict": 1}', '{"verdict": "good"} I think'])
def test_what_cannot_be_read_is_no_verdict(spec, said):
    done = episode(spec, 0, said)
    assert (done.reward, done.success, done.metrics) == (0.0, False, {"no_verdict_n": 1.0})


def test_what_is_wrong_is_said(spec, tmp_path):
    with pytest.raises(ConfigError, match="JudgeTraining.labelled is not a file or folder"):
        dataclasses.replace(spec, labelled="none.jsonl").task(0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"index": 0, "answer": "", "label": 2}\n')
    with pytest.raises(DataError, match="line 1: label is 2, not from 0 to 1"):
        dataclasses.replace(spec, labelled=str(bad)).task(0)
    env = spec.make()
    with pytest.raises(EnvError, match="before reset"):
        env.step("")
    with pytest.raises(EnvError, match="was the file changed"):
        env.reset(dataclasses.replace(spec.task(0), index=2))


def test_the_shipped_judge_is_asked_what_the_shipped_mixture_asks():
    """The judge is trained with the rubric that the mixture has, about answers to its tasks."""
    judge, mixture = (cli.load_recipe([name], []).value for name in ("rlvr_judge", "rlvr_mixture"))
    of_mixture = mixture.domains["thanks"].reward.terms["judge"]
    assert judge.env.judge == of_mixture
    thanks = mixture.env.domains["thanks"].env
    assert judge.env.env == thanks
    for index in range(judge.env.num_tasks):
        labelled = judge.env.answer(index)
        assert labelled.label == (labelled.answer == thanks.record(labelled.index)["kind"])
