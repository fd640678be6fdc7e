"""The shipped plan for GSM8K and Qwen3-0.6B, with a folder of the same form that is a thousand times smaller."""

import json
import random

import pytest

from rolljax.commands.train import main as train

from .conftest import ROOT

CONFIG = str(ROOT / "configs" / "gsm8k_qwen3_0p6b.gin")
REWARD_MODEL = "reward_model_ppo_qwen3_0p6b"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Save random bfloat16 weights as transformers saves Qwen3, with a tokenizer that has a chat template."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from rolljax.model.tokenizer import byte_tokenizer

    path = tmp_path_factory.mktemp("qwen3")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(
        **shape,
        head_dim=16,
        intermediate_size=192,
        vocab_size=512,
        tie_word_embeddings=True,
        rope_theta=1e6,
        max_position_embeddings=40_960,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def problems(path, num):
    rng = random.Random(0)
    lines = []
    for i in range(num):
        a, b = rng.randint(2, 99), rng.randint(2, 99)
        question = f"Box {i} holds {a} rows of {b} eggs. How many eggs is that?"
        lines.append(json.dumps({"question": question, "answer": f"{a}*{b}=<<{a}*{b}={a * b}>>{a * b}\n#### {a * b}"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def dry_run(model, path, *more, config=CONFIG):
    settings = [f'Recipe.model="{model}"', f'Questions.path="{path}"', *more]
    return train(["--gin", config, *(a for s in settings for a in ("--set", s)), "--dry_run"])


def test_dry_run(folder, tmp_path, capsys):
    assert dry_run(folder, problems(tmp_path / "train.jsonl", 1500)) == 0
    out = capsys.readouterr().out
    for part in ("2 layers", "bfloat16", "128 slots", "questions, up to 1 turn(s)", "100 held out", "rl: Grpo"):
        assert part in out
    assert "<|user|>Box 0 holds" in out and "\\boxed{}. /no_think<|assistant|>" in out


def test_what_is_missing_is_named(folder, tmp_path, capsys):
    path = problems(tmp_path / "few.jsonl", 20)
    assert dry_run(tmp_path / "none", path) == 2
    assert "Recipe.model is not a Hugging Face model folder" in capsys.readouterr().err
    assert dry_run(folder, tmp_path / "none.jsonl") == 2
    err = capsys.readouterr().err
    assert "Questions.path" in err and "is not a file" in err
    with open(path, "a") as f:
        f.write('{"question": "1+1?"}\n')
    assert dry_run(folder, path) == 3
    assert f"{path}, line 21: lacks 'answer'" in capsys.readouterr().err


@pytest.mark.slow
def test_dry_run_with_a_reward_model(folder, tmp_path, capsys):
    """With a reward model of a phase of the run, and with the folder of a sequence classifier."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = problems(tmp_path / "train.jsonl", 1500)
    assert dry_run(folder, path, config=REWARD_MODEL) == 0
    assert "reward_model: RewardModel, 100 steps" in capsys.readouterr().out
    shape = AutoConfig.from_pretrained(folder, num_labels=1)
    AutoModelForSequenceClassification.from_config(shape).save_pretrained(tmp_path / "scorer")
    settings = ["Recipe.phases = [@rl/Phase()]", "rl/Critic.model = None", "RewardModelScore.phase = ''"]
    scorer = f"RewardModelScore.path = '{tmp_path / 'scorer'}'"
    assert dry_run(folder, path, *settings, scorer, config=REWARD_MODEL) == 0
    assert dry_run(folder, path, *settings, f"RewardModelScore.path = '{folder}'", config=REWARD_MODEL) == 2
    assert "of no sequence classifier" in capsys.readouterr().err


@pytest.mark.slow
def test_live_thinking_on_answers_of_a_teacher(folder, tmp_path, capsys):
    """Its lengths are a column of the rows; the judge is not asked before the run."""
    path, config = tmp_path / "rft.jsonl", "live_thinking_qwen3_0p6b"
    row = {"solution": "<think>6*7</think>\n\\boxed{42}", "answer": "42"}
    rows = [row | {"question": f"6*7? ({i})", "ref_tok": 200 + i} for i in range(1500)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert dry_run(folder, path, config=config) == 0
    assert "rft: Sft" in (out := capsys.readouterr().out) and "rl: Grpo" in out
    path.write_text("".join(json.dumps(row | {"ref_tok": None}) + "\n" for row in rows))
    assert dry_run(folder, path, config=config) == 3
    assert "has no length in 'ref_tok'" in capsys.readouterr().err


def test_a_mixture_of_four_files(folder, tmp_path, capsys):
    """Each domain has a separate file; shipped files replace the data sets."""
    files = {"gsm8k/Questions": "sums", "math/Questions": "formulas", "CodeProblems": "functions"}
    files["open/Questions"] = "thanks"
    settings = [f'{name}.path="{file}.jsonl"' for name, file in files.items()]
    argv = [
        "--gin",
        "rlvr_mixture_qwen3_4b",
        *(a for s in [f'Recipe.model="{folder}"', *settings] for a in ("--set", s)),
    ]
    assert train([*argv, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert all(part in out for part in ("2 layers", "gsm8k", "math", "code", "open", "rl: Grpo"))
