"""The same loop trains several turns per trajectory; token streams only grow."""

import json

import numpy as np
import pytest

from rolljax.commands.train import main as train
from rolljax.model.tokenizer import Chat, byte_tokenizer
from rolljax.types import Message

from .conftest import ROOT, rows

SETTINGS = {
    "MeshSpec.data": 1,
    "FrozenLake.max_turns": 6,
    "SamplerConfig.slots": 32,
    "SamplerConfig.max_context": 200,
    "SamplerConfig.prefill_chunk": 512,
    "Evaluation.tasks": 16,
    "warm_start/Phase.steps": 40,
    "warm_start/Phase.prompts_per_step": 8,
    "warm_start/Phase.eval_every": 0,
    "warm_start/Phase.stop_at_reward": None,
    "rl/Phase.steps": 3,
    "rl/Phase.prompts_per_step": 12,
    "rl/Phase.group_size": 4,
    "rl/Phase.updates_per_step": 2,
    "rl/Phase.eval_every": 0,
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lake") / "run"
    argv = ["--gin", str(ROOT / "configs" / "frozen_lake.gin"), "--run_dir", str(run_dir)]
    assert train(argv + [a for k, v in SETTINGS.items() for a in ("--set", f"{k} = {v}")]) == 0
    return run_dir


def episodes(run_dir, step):
    lines = (run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_several_turns_are_sampled_and_trained(lake):
    rl = rows(lake)[40:]
    assert all(r["rollout/turns_n"] > 1 for r in rl)
    # trainer and sampler agree on every sampled token of every turn: the streams they saw are the same
    trained = [r for r in rl if r["groups/trained_n"]]
    assert trained
    assert all(r["mismatch/abs_max_nat"] <= 1e-5 for r in trained)


def test_observations_follow_the_sampled_tokens_as_the_template_says(lake):
    chat = Chat(byte_tokenizer())
    longer = [e for step in range(41, 44) for e in episodes(lake, step) if len(e["turns"]) > 1]
    assert longer
    for e in longer:
        messages = []
        stream = []
        for turn in e["turns"]:
            stream += turn["prompt_ids"]
            text = chat.tokenizer.decode(turn["prompt_ids"], skip_special_tokens=True)
            assert text.count("P") == 1
            assert len(text.split("\n")) == 4
            messages.append(Message("user", text))
            # what the policy was shown is the chat template of the conversation so far, as long as what it said
            # reads back as the same tokens
            if all(chat.answer_ids(t["text"]).tolist() == t["tokens"] for t in e["turns"]):
                assert stream == chat.prompt_ids(messages).tolist()
            stream += turn["tokens"]
            messages.append(Message("assistant", turn["text"]))
        assert e["reward"] == pytest.approx(sum(t["reward"] for t in e["turns"]))


def test_only_sampled_tokens_have_weight(lake):
    for step in range(41, 44):
        trained = rows(lake)[step - 1]["train/trained_tok_n"]
        groups = {}
        for e in episodes(lake, step):
            groups.setdefault(e["key"]["prompt_index"], []).append(e)
        kept = [g for g in groups.values() if np.ptp([e["reward"] for e in g]) > 0]
        assert trained == sum(len(t["tokens"]) for g in kept for e in g for t in e["turns"])
