"""Complementary RL: the bank, its retrieval, the extractor's operations."""

import dataclasses
import types
from collections import Counter

import numpy as np
import pytest

import rolljax
from rolljax.envs.tools import ToolEnv
from rolljax.recipes.complementary.bank import Bank, Retrieval, banks_of, scores, similarity
from rolljax.recipes.complementary.experience import PART, WithExperience
from rolljax.recipes.complementary.extraction import Extraction
from rolljax.recipes.complementary.key_rules import KEYS, TURNED, KeyRules
from rolljax.recipes.complementary.later_uses import ExtractorCispo, LaterUses, leaks, train_weights
from rolljax.recipes.complementary.operations import Add, Return, Update, read_operations, written
from rolljax.rewards.base import RewardContext
from rolljax.trainer.credit import estimators as credits
from rolljax.types import EVAL_STREAM, Key, Trajectory, Turn


def bank_of(*texts):
    bank = Bank()
    for title, content in texts:
        bank, _ = bank.applied(Add(title, content), f"task of {title}")
    return bank


def test_scores_penalise_popular_experiences():
    found = scores((0.9, 0.85, 0.6), (20, 0, 0), (False,) * 3)
    np.testing.assert_allclose(found, (-0.317809, 0.85, 0.6), atol=1e-6)
    assert found.argmax() == 1
    np.testing.assert_allclose(scores((0.9, 0.85), (0, 0), (True, False)), (-0.1, 0.85))


def test_operations_add_merge_update_and_return():
    bank, first = bank_of(("room ab", "red")).applied(Add("room cd", "blue"), "t1")
    assert first == 2
    bank, same = bank.applied(Add("room cd", "blue"), "t2")
    assert same == 2 and len(bank.experiences) == 2 and bank.get(2).sources == ("t1", "t2")
    bank, number = bank.applied(Update(1, "gold"), "t3")
    assert number == 1 and bank.get(1).text == "room ab: gold" and bank.get(1).extractions == 2
    assert bank.applied(Update(7, "gold"), "t4") == (bank, 0) and bank.applied(Return(), "t4") == (bank, 0)
    bank, number = bank.newest(1).applied(Add("room ab", "red"), "t5")
    assert number == 3 and [e.number for e in bank.experiences] == [1, 3], "what was written last stays, and its number"


def test_what_an_experience_says_already_is_merged_into_it():
    bank = bank_of(("room ab", "red"), ("room cd", "blue gold"))
    merged, number = bank.applied(Add("room cd", "blue"), "t1")
    assert number == 2 and merged.get(2).content == "blue gold" and "t1" in merged.get(2).sources
    for words in ("gold", "blue go", "blue gold teal"):
        assert bank.applied(Add("room cd", words), "t1")[1] == 3


def test_recently_used_experiences_are_demoted_half_of_the_time_and_the_same_ones_again():
    bank = bank_of(("room ab", "red"), ("room ab", "blue")).used({1: 1}, round_=0)
    settings = Retrieval(popularity=0.0)
    at_once = Bank(1, bank.experiences, bank.added)
    found = [at_once.retrieve("room ab", settings, str(i)).number for i in range(400)]
    assert found == [at_once.retrieve("room ab", settings, str(i)).number for i in range(400)]
    assert 0.4 < np.mean(np.array(found) == 2) < 0.6
    later = Bank(2, bank.experiences, bank.added)
    assert {later.retrieve("room ab", settings, str(i)).number for i in range(50)} == {1}


def test_an_experience_is_not_shown_in_the_episode_that_it_was_made_from():
    bank = bank_of(("room ab", "red"))
    assert bank.retrieve("room ab", Retrieval(), "0", task_id="task of room ab") is None
    assert bank.retrieve("room ab", Retrieval(), "0", task_id="another").number == 1
    assert bank.retrieve("room xy", Retrieval(least_similarity=0.9), "0") is None
    assert similarity("room ab", "room xy") == pytest.approx(0.5) and similarity("", "x") == 0


def test_a_bank_is_read_back_and_a_torn_line_is_not(tmp_path):
    bank = bank_of(("room ab", "red")).used({1: 3}, round_=0)
    bank.append_to(tmp_path / "bank.jsonl")
    with (tmp_path / "bank.jsonl").open("a") as f:
        f.write('{"round": 1, "exp')
    assert banks_of(tmp_path / "bank.jsonl") == [bank]


@pytest.mark.parametrize("operation", [Add("room ab", 'a "red" key'), Update(12, "blue"), Return()])
def test_written_operations_are_read_back(operation):
    assert read_operations(written(operation)) == (operation,)
    assert read_operations(f" {written(operation) * 3}\n") == (operation,) * 3


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "<op>",
        "red",
        "x<op>{}</op>",
        written(Return()) * 4,
        written(Return()) + "!",
        '<op>{"op":"drop"}</op>',
        '<op>{"op":"return","why":1}</op>',
        '<op>{"op":"add","title":"","content":"x"}</op>',
        '<op>{"op":"add","title":"x","title":"y","content":"x"}</op>',
        '<op>{"op":"update","number":true,"content":"x"}</op>',
        f'<op>{{"op":"update","number":1,"content":"{"x" * 2001}"}}</op>',
        "<op>" * 100_000,
        "<op>" + "[" * 5000 + "</op>",
    ],
)
def test_any_other_answer_has_no_effect(answer):
    assert read_operations(answer) is None


def test_a_group_is_compared_within_its_halves():
    rewards, shown = np.array([0, 0, 1, 0, 1, 1, 1, 0.0]), np.array([0, 0, 0, 0, 7, 7, 7, 7])
    halves = credits.split_groups(np.zeros(8, int), shown)
    want = [-0.25, -0.25, 0.75, -0.25, 0.25, 0.25, 0.25, -0.75]
    np.testing.assert_array_equal(credits.normalise(rewards, halves, std="none"), want)
    np.testing.assert_array_equal(credits.split_groups(np.array([0, 0, 1, 1]), np.zeros(4)), [0, 0, 1, 1])


def test_the_weight_of_an_extraction_falls_with_those_before_it():
    np.testing.assert_allclose(train_weights(np.arange(4)), [1, 0.7071, 0.5774, 0.5], atol=5e-5)


def test_an_answer_that_is_recorded_does_not_enter_the_bank():
    assert leaks(Add("sum", "the answer is 42"), "42") and leaks(Update(1, "Paris"), "paris")
    assert not leaks(Add("sum", "carry the one"), "42") and not leaks(Return(), "42") and not leaks(Add("a", "b"), None)


@pytest.fixture
def spec(tmp_path):
    """Return rooms with the bank of two rounds: nothing, then a lesson about room aa from the task at 64."""
    env = KeyRules()
    bank, _ = Bank(1).applied(Add("room aa", "teal"), env.task(64).id)
    for each in (Bank(0), bank):
        each.append_to(tmp_path / "bank.jsonl")
    return WithExperience(env, str(tmp_path / "bank.jsonl"), prompts_per_round=10)


def opened(spec, index, key):
    env = spec.make()
    return env, env.reset(spec.form(spec.task(index), key))[-1].content


def test_every_second_sibling_is_shown_the_experience_of_its_round(spec):
    assert [opened(spec, 0, Key(0, 10, s))[1] for s in range(3)] == ["room aa", "room aa\nroom aa: teal", "room aa"]
    assert opened(spec, 0, Key(0, 9, 1))[1] == "room aa", "the first round has no experience"
    assert opened(spec, 64, Key(0, 10, 1))[1] == "room aa", "not the task that it was made from"
    everywhere = dataclasses.replace(spec, shown="all")
    assert opened(everywhere, 0, Key(EVAL_STREAM, 0, 0))[1] == "room aa\nroom aa: teal"
    parts = [opened(spec, 0, Key(0, 10, s))[0].step("red").reward_parts[PART] for s in range(2)]
    assert parts == [0, 1]


def test_a_tool_asks_for_an_experience(spec):
    spec = ToolEnv(inner=dataclasses.replace(spec, shown="none"))
    env, text = opened(spec, 0, Key(0, 10, 0))
    assert "search_and_ask" in env.reset(spec.form(spec.task(0), Key(0, 10, 0)))[0].content and "teal" not in text
    call = '<tool_call>{"name": "search_and_ask", "arguments": {"query": "QUERY"}}</tool_call>'
    assert env.step(call.replace("QUERY", "room aa")).messages[0].content == "room aa: teal"
    env, _ = opened(spec, 64, Key(0, 10, 0))
    assert env.step(call.replace("QUERY", "room aa")).messages[0].content == "no experience fits"


def test_the_extractor_reads_what_the_actor_said_and_how_it_ended():
    spec = Extraction()
    env = spec.make()
    lines = env.reset(spec.task(3))[0].content.split("\n")
    assert lines[0].startswith("room ") and lines[-2].startswith("> ") and lines[-1] in ("solved", "failed")
    assert env.step(env.reference_answer()).success
    rehearsed = Extraction(rehearse=True)
    said = []
    for i in range(40):
        env = rehearsed.make()
        env.reset(rehearsed.task(i))
        said.append(env.reference_answer())
    assert 2 <= said.count(written(Return())) <= 20 and len(set(said)) > 20


def test_a_warm_start_may_write_only_the_words_that_are_right():
    rooms = KeyRules(keys=3, rooms=8, fixed=False)
    spec = Extraction(rooms, rehearse=True, right=TURNED, return_failed=0.1, solved=0.3)
    said, solved = Counter(), 0
    for i in range(400):
        env = spec.make()
        lines = env.reset(spec.task(i))[0].content.split("\n")
        answer, turned = lines[-3].removeprefix("> "), int(lines[-2].removeprefix("turned "))
        right = " ".join(answer.split(" ")[:turned])
        written_down = env.reference_answer() != written(Return())
        assert not written_down or env.reference_answer() == written(Add(lines[0], right))
        said[turned, written_down] += 1
        solved += lines[-1] == "solved"
    assert said[0, True] == 0 and said[1, True] > 30 and said[2, True] > 90 and 90 <= solved <= 150
    assert sum(said[n, False] for n in (1, 2)) < 50, "return is rare where a key turned"


@pytest.mark.parametrize(("answer", "turned"), [("0 1 2", 2), ("0 1 x", 2), ("0 x x", 1), ("x 1 2", 0), ("x x x", 0)])
def test_an_episode_tells_how_many_first_keys_turned(answer, turned):
    rooms = KeyRules(keys=3)
    env = rooms.make()
    env.reset(rooms.task(5))
    keys = env.reference_answer().split(" ")
    wrong = next(key for key in KEYS if key not in keys)
    said = " ".join(wrong if word == "x" else keys[int(word)] for word in answer.split(" "))
    assert env.step(said).reward_parts == {TURNED: turned}
    for spec, said in ((rooms, "red"), (KeyRules(), "red")):  # an answer that is not legal, a door with one key
        env = spec.make()
        env.reset(spec.task(5))
        assert env.step(said).reward_parts == {}


def test_several_keys_are_an_answer_that_no_experience_may_say():
    rooms = KeyRules(keys=3)
    task = rooms.task(5)
    keys = rooms.reference(task)
    assert KeyRules().reference(KeyRules().task(5)) is None and rooms.reference(rooms.task(5 + rooms.rooms)) == keys
    assert leaks(Add("room af", keys), keys) and not leaks(Add("room af", keys.rpartition(" ")[0]), keys)
    one = KeyRules().make()
    one.reset(KeyRules().task(5))
    for num, shown, seen in ((3, False, None), (1, True, one.reference_answer()), (3, True, keys.rpartition(" ")[0])):
        spec = KeyRules(keys=num, shown=shown)
        lines = spec.make().reset(spec.task(5 + spec.rooms))[0].content.split("\n")
        assert lines[1:] == ([f"room af: {seen}"] if seen else [])


def test_the_newest_experience_of_a_title_may_replace_the_others():
    bank = bank_of(("room ab", "red"), ("room cd", "blue"), ("room ab", "gold"))
    assert [e.text for e in bank.newest(9).experiences] == ["room ab: red", "room cd: blue", "room ab: gold"]
    assert [e.text for e in bank.newest(9, one_per_title=True).experiences] == ["room cd: blue", "room ab: gold"]
    assert [e.text for e in bank.newest(1, one_per_title=True).experiences] == ["room ab: gold"]


def test_extractions_that_nobody_used_may_be_left_out():
    rewards = np.array([1.0, -1.0, 0.0, 0.0, -1.0])
    uses = [{"uses": 2}, {"uses": 1}, {"uses": 2}, {"uses": 0}, {"uses": 0}]  # the last one is malformed
    episodes = types.SimpleNamespace(parts=uses, groups=np.zeros(5, int))
    np.testing.assert_allclose(ExtractorCispo().scores(episodes, rewards, {}), rewards - rewards.mean())
    left = ExtractorCispo(train_unused=False).scores(episodes, rewards, {})
    np.testing.assert_allclose(left, [1.2, -0.8, 0.2, 0.0, -0.8])


def said(spec, place, text):
    """Return an extraction of round 0 as the extractor's run makes it."""
    key, none = Key(0, place, 0), np.zeros(0, np.int32)
    turn = Turn(none, none, none.astype(np.float32), none, "stop", 0.0, text)
    return Trajectory(key, spec.task(place), (turn,), 0.0, {"well_formed": 1.0}, False, "ok")


@pytest.mark.slow
def test_a_round_makes_the_bank_trains_the_actor_and_rewards_what_was_used(tmp_path):
    """Without a bank the actor is GRPO to the bit. A round that is played again changes nothing."""
    rooms, run, bank = KeyRules(rooms=1), str(tmp_path / "actor"), str(tmp_path / "bank.jsonl")
    small = {"Evaluation.tasks": 4, "rl/Phase.eval_every": 0, "rl/Phase.prompts_per_step": 4, "rl/Phase.steps": 2}
    own = {"WithExperience.env": rooms, "WithExperience.bank": bank, "WithExperience.prompts_per_round": 8}
    first = rolljax.train("complementary/actor", set={**small, **own}, run_dir=run, progress=False)
    plain = {"Recipe.env": rooms, "Grpo.split_by": ""}
    grpo = rolljax.train("complementary/actor", set={**small, **plain}, run_dir=tmp_path / "grpo", progress=False)
    assert first.summary["state_sha256"] == grpo.summary["state_sha256"]

    spec = Extraction(rooms, run, bank, prompts_per_round=4, steps_per_round=2)
    scorer = LaterUses(settings={**small, **own}).open(RewardContext(spec))
    texts = (written(Add("room aa", "teal")), written(Return()), "no operation", written(Update(9, "red")))
    extractions = [said(spec, place, text) for place, text in enumerate(texts)]
    rewards = scorer.play(0, extractions)
    after = rolljax.Run(run)
    shown = [t for step in (3, 4) for t in after.trajectories(step) if t.reward_parts[PART] == 1]
    assert {t.key.sibling % 2 for t in shown} == {1} and len(shown) in (28, 32), "all but those of its own task"
    assert rewards[0].value == pytest.approx(np.mean([1.0 if t.success else -1.0 for t in shown]))
    assert [r.value for r in rewards[1:]] == [0.0, -1.0, 0.0] and rewards[0].parts["uses"] == len(shown)
    written_before = (tmp_path / "bank.jsonl").read_bytes()
    rolljax.train(
        "complementary/actor", set={**small, **own, "rl/Phase.steps": 6}, run_dir=run, progress=False
    )  # a later round, before the extractor was killed and plays this one again
    assert scorer.play(0, extractions) == rewards and (tmp_path / "bank.jsonl").read_bytes() == written_before
    assert rolljax.Run(run).num_steps == 6
