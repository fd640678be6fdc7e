"""Rewards by trained reward models: sequence classifiers as `transformers` computes them."""

import asyncio
import dataclasses

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForSequenceClassification

from rolljax.envs.games.guess_number import GuessNumber
from rolljax.errors import CheckpointError, ConfigError, EnvError
from rolljax.model import hf
from rolljax.model.tokenizer import Chat, byte_tokenizer, save_tokenizer
from rolljax.rewards.base import RewardContext
from rolljax.rewards.reward_model import RewardModelScore
from rolljax.types import EVAL_STREAM, Key, Task, Trajectory, Turn

from ..families import FAMILIES, SHAPE, make_folder

CHAT = Chat(byte_tokenizer())


def classifier(folder, name="qwen3", labels=1, **changes):
    """Save a sequence classifier with random weights; return the model of `transformers`."""
    family = FAMILIES[name]
    torch.manual_seed(1)
    config = getattr(transformers, family.config)(**(SHAPE | family.settings | {"num_labels": labels} | changes))
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter, p in model.named_parameters():
            if "norm" in parameter or parameter.endswith("bias"):
                p.add_(torch.empty_like(p).uniform_(*family.norms))
    model.save_pretrained(folder)
    save_tokenizer(folder, byte_tokenizer())
    return model


def theirs(model, tokens):
    with torch.no_grad():
        return float(model(torch.tensor(np.asarray(tokens)[None])).logits[0, 0])


def answered(rng, size, sibling=0, stream=0):
    """Return a closed trajectory of one turn."""
    said = np.array([*rng.integers(0, 250, size), CHAT.closing_ids[0]], np.int32)
    turn = Turn(
        CHAT.prompt_ids(()), said, np.zeros(len(said), np.float32), np.zeros(len(said), np.int32), "stop", 1.0, "x"
    )
    return Trajectory(Key(stream, 0, sibling), Task("guess_number", 0, "1 game 0"), (turn,), 1.0, {}, True, "ok")


def scored(config, trajectories, around=None):
    """Return the rewards of trajectories scored concurrently."""

    async def run():
        scorer = config.open(around or RewardContext(GuessNumber(max_turns=6), chat=CHAT))
        try:
            return await asyncio.gather(*(scorer.score(t.task, t) for t in trajectories)), scorer.counts()
        finally:
            await scorer.close()

    return asyncio.run(run())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_sequence_classifiers_score_as_in_transformers(tmp_path, name):
    reference = classifier(tmp_path, name)
    rng = np.random.default_rng(0)
    trajectories = [answered(rng, size, i) for i, size in enumerate((1, 20, 33, 60, 5))]
    found, counts = scored(RewardModelScore(path=str(tmp_path)), trajectories)
    for trajectory, reward in zip(trajectories, found, strict=True):
        tokens = trajectory.stream()[0]
        np.testing.assert_allclose(reward.value, theirs(reference, tokens), atol=1e-4)
        assert reward.parts == {"reward_model": reward.value, "environment": 1.0} and reward.success is None
    assert counts["calls"] == 5 and 2 <= counts["batches"] <= 5  # lengths of 32 and 64; late calls are one more


def test_a_score_does_not_depend_on_the_batch(tmp_path):
    """Bit by bit, alone, in company and in any order."""
    classifier(tmp_path)
    rng = np.random.default_rng(1)
    config = RewardModelScore(path=str(tmp_path), batch_tok=512)
    trajectories = [answered(rng, int(rng.integers(1, 60)), i) for i in range(30)]
    together = [r.value for r in scored(config, trajectories)[0]]
    backward = [r.value for r in scored(config, trajectories[::-1])[0]][::-1]
    alone = [scored(config, [t])[0][0].value for t in trajectories[:4]]
    assert together == backward and together[:4] == alone and len(set(together)) == 30


def test_a_reward_model_of_another_vocabulary_reads_texts(tmp_path):
    """Prompt and answer, as its own template writes them."""
    reference = classifier(tmp_path)
    spec, said = GuessNumber(max_turns=6), "17"
    tokens = CHAT.answer_ids(said)
    task = spec.task(0)
    turn = Turn(CHAT.prompt_ids(()), tokens, tokens * np.float32(0), tokens * 0, "stop", 0.0, said)
    trajectory = Trajectory(Key(0, 0, 0), task, (turn,), 0.0, {}, False, "ok")
    around = RewardContext(OneGuess(), chat=None)
    (found,), _ = scored(RewardModelScore(path=str(tmp_path)), [trajectory], around)
    messages = [{"role": "user", "content": "1-50?"}, {"role": "assistant", "content": said}]
    ids = byte_tokenizer().apply_chat_template(messages, return_dict=False)
    np.testing.assert_allclose(found.value, theirs(reference, ids), atol=1e-4)
    with pytest.raises(ConfigError, match="several turns"):
        RewardModelScore(path=str(tmp_path)).open(dataclasses.replace(around, env=spec))


class OneGuess(GuessNumber):
    """Its episodes have one turn."""

    max_turns = 1

    def __init__(self):
        object.__setattr__(self, "largest", 50)
        for field in dataclasses.fields(GuessNumber):
            if field.name not in ("largest", "max_turns"):
                object.__setattr__(self, field.name, field.default)


def test_values_are_shifted_scaled_and_clipped(tmp_path):
    classifier(tmp_path)
    rng = np.random.default_rng(2)
    each = [answered(rng, 9, i) for i in range(8)]
    raw = np.array([r.value for r in scored(RewardModelScore(path=str(tmp_path)), each)[0]])
    config = RewardModelScore(path=str(tmp_path), mean=float(raw.mean()), std=float(raw.std()), clip=1.0)
    found = scored(config, each)[0]
    np.testing.assert_allclose([r.value for r in found], np.clip((raw - raw.mean()) / raw.std(), -1, 1), rtol=1e-12)
    assert [r.parts["reward_model"] for r in found] == raw.tolist()


def test_held_out_episodes_get_the_environments_reward(tmp_path):
    classifier(tmp_path)
    trajectory = answered(np.random.default_rng(3), 9, stream=EVAL_STREAM)
    (reference,), counts = scored(RewardModelScore(path=str(tmp_path)), [trajectory])
    assert reference.value == 1.0 and reference.parts == {"environment": 1.0} and not counts.get("calls")
    (model,), _ = scored(RewardModelScore(path=str(tmp_path), heldout="model"), [trajectory])
    assert model.value == model.parts["reward_model"] != 1.0


@pytest.mark.parametrize("size", [600, 0])
def test_what_a_model_cannot_read_is_no_reward(tmp_path, size):
    """More tokens than it has positions, or no answer at all."""
    classifier(tmp_path)
    trajectory = answered(np.random.default_rng(4), size)
    if not size:
        trajectory = dataclasses.replace(trajectory, turns=())
    with pytest.raises(EnvError, match="tokens" if size else "without an answer"):
        scored(RewardModelScore(path=str(tmp_path)), [trajectory])


def test_folders_that_are_no_reward_model_are_refused(tmp_path):
    around = RewardContext(GuessNumber(max_turns=6), chat=CHAT)
    for settings, message in (
        ({}, "needs one of phase and path"),
        ({"phase": "a", "path": "b"}, "needs one of phase and path"),
        ({"phase": "a", "heldout": "model"}, "not possible"),
    ):
        with pytest.raises(ConfigError, match=message):
            RewardModelScore(**settings)
    make_folder(tmp_path / "decoder")
    with pytest.raises(ConfigError, match="of no sequence classifier"):
        RewardModelScore(path=str(tmp_path / "decoder")).open(around)
    classifier(tmp_path / "three", labels=3)
    with pytest.raises(CheckpointError, match="3 labels"):
        hf.read_value_config(tmp_path / "three")
    with pytest.raises(ConfigError, match="neither kind of folder"):
        RewardModelScore(path=str(tmp_path)).check(around)
