"""A broken config ends with code 2 and a message that says what is wrong, where, and what to do; never a traceback."""

import pytest

from rolljax.commands.train import main as train
from rolljax.run.folder import RunFolder

from .conftest import QUICKSTART

HEAD = f"include '{QUICKSTART}'\n"
IMPORTS = """from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.envs.adapters import reasoning_gym
from rolljax.model.families import qwen3
from rolljax.sampler import settings
from rolljax.trainer import mesh
from rolljax.trainer import optimizer
from rolljax.trainer.algorithms import grpo
"""

# (name, lines after the shipped quickstart, --set, what the message must say)
TABLE = [
    ("misspelt field", "grpo.Grpo.clip_hihg = 0.3", [], ["broken.gin:10", "clip_hihg", "clip_high"]),
    ("misspelt class", "grpo.Grop.clip_high = 0.3", [], ["broken.gin:10", "Grop", "Grpo"]),
    ("misspelt module", "from rolljax.trainer.algorithms import grop", [], ["broken.gin:10", "grop", "grpo"]),
    ("wrong type", "rl/recipe.Phase.steps = 'many'", [], ["broken.gin:10", "Phase.steps", "'many'", "int"]),
    ("float for int", "rl/recipe.Phase.steps = 1e4", [], ["broken.gin:10", "10000"]),
    ("missing include", "include 'quickstrat.gin'", [], ["broken.gin:10", "quickstrat.gin"]),
    ("syntax", "rl/recipe.Phase.steps = [1", [], ["broken.gin"]),
    ("macro nobody reads", "stepz = 5", [], ["broken.gin:10", "stepz", "sets nothing"]),
    ("scope that builds nothing", "lr/recipe.Phase.steps = 5", [], ["broken.gin:10", "rl"]),
    ("set: unknown", "", ["Phase.stepz = 3"], ["--set 'Phase.stepz = 3'", "steps"]),
    ("set: no equals sign", "", ["Phase.steps 3"], ["--set 'Phase.steps 3'"]),
    ("unknown family", "reasoning_gym.ReasoningGym.family = 'spel_backward'", [], ["broken.gin:10", "spell_backward"]),
    ("family that runs programs", "reasoning_gym.ReasoningGym.family = 'codeio'", [], ["broken.gin:10", "codeio"]),
    (
        "unknown family setting",
        "reasoning_gym.ReasoningGym.config = {'min_len': 3}",
        [],
        ["broken.gin:10", "min_word_len"],
    ),
    (
        "family refuses",
        "reasoning_gym.ReasoningGym.config = {'min_word_len': 9, 'max_word_len': 4}",
        [],
        ["broken.gin:10"],
    ),
    (
        "unknown environment",
        "recipe.Recipe.env = @reasoning_gym.Gsm8k()",
        [],
        ["broken.gin:10", "Gsm8k", "ReasoningGym"],
    ),
    ("not an environment", "recipe.Recipe.env = @grpo.Grpo()", [], ["Recipe.env", "broken.gin:10", "EnvSpec"]),
    ("batch does not divide", "rl/recipe.Phase.updates_per_step = 3", [], ["prompts_per_step", "multiple of 3"]),
    ("rows do not divide", "recipe.Phase.micro_rows = 6", ["MeshSpec.data = 4"], ["broken.gin:10", "micro_rows", "4"]),
    ("slots do not divide", "", ["SamplerConfig.slots = 6", "MeshSpec.data = 4"], ["slots", "multiple of 4"]),
    ("mesh too large", "", ["MeshSpec.data = 16"], ["--set 'MeshSpec.data = 16'", "16 devices", "8"]),
    ("tensor does not divide", "", ["MeshSpec.tensor = 4", "MeshSpec.data = 1"], ["MeshSpec.tensor", "kv_heads", "2"]),
    ("context too short", "settings.SamplerConfig.max_context = 48", [], ["broken.gin:10", "max_context", "set it to"]),
    ("row too short", "rl/recipe.Phase.row_len = 64", [], ["broken.gin:10", "row_len", "80"]),
    ("no room for a prompt", "recipe.Recipe.max_answer_tok = 80", [], ["broken.gin:10", "max_answer_tok"]),
    ("inert clip", "rl/recipe.Phase.updates_per_step = 1", [], ["clip_high", "no effect", "updates_per_step"]),
    ("group of one", "rl/recipe.Phase.group_size = 1", [], ["broken.gin:10", "group_size", "baseline"]),
    ("copies of one answer", "warm_start/recipe.Phase.group_size = 4", [], ["broken.gin:10", "group_size = 1"]),
    ("stop that is never checked", "rl/recipe.Phase.stop_at_reward = 0.5", ["rl/Phase.eval_every = 0"], ["eval_every"]),
    ("inert async ratio", "warm_start/recipe.Phase.async_ratio = 1", [], ["broken.gin:10", "async_ratio", "no effect"]),
    ("greedy training", "rl/recipe.Phase.temperature = 0.0", [], ["broken.gin:10", "temperature"]),
    ("heads do not divide", "qwen3.Qwen3Config.num_kv_heads = 3", [], ["broken.gin:10", "num_kv_heads"]),
    ("vocabulary too small", "qwen3.Qwen3Config.vocab_size = 100", [], ["broken.gin:10", "261"]),
    ("two phases of a name", "rl/recipe.Phase.name = 'warm_start'", [], ["broken.gin:10", "name"]),
    ("a phase called start", "rl/recipe.Phase.name = 'start'", [], ["broken.gin:10", "is taken", "'warm_start'"]),
    ("no phases", "recipe.Recipe.phases = []", [], ["broken.gin:10", "phases"]),
    ("no such algorithm setting", "", ["rl/AdamW.learning_rate = 1"], ["learning_rate", "lr"]),
]


@pytest.mark.parametrize(("lines", "settings", "says"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE])
def test_broken_config(tmp_path, monkeypatch, capsys, lines, settings, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.gin").write_text(HEAD + IMPORTS + lines + "\n")
    argv = ["--gin", "broken.gin", "--dry_run", *(a for s in settings for a in ("--set", s))]
    assert train(argv) == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert captured.out == ""
    for part in says:
        assert part in captured.err, captured.err


def test_missing_file_names_a_near_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text("")
    assert train(["--gin", "mien.gin"]) == 2
    err = capsys.readouterr().err
    assert "mien.gin" in err
    assert "mine.gin" in err


def test_folder_of_something_else_is_not_touched(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    for extra in ([], ["--fresh"]):
        assert train(["--gin", QUICKSTART, "--run_dir", str(tmp_path), *extra]) == 2
        assert "not a run folder" in capsys.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_path_that_is_not_a_model_folder_is_refused(tmp_path, capsys):
    argv = ["--gin", QUICKSTART, "--dry_run", "--set", f"Recipe.model = {tmp_path}"]
    assert train(argv) == 2
    err = capsys.readouterr().err
    assert "Recipe.model" in err
    assert "config.json" in err


def test_a_folder_that_is_being_written_is_left_alone(tmp_path, capsys):
    with RunFolder(tmp_path / "run").lock():
        assert train(["--gin", QUICKSTART, "--run_dir", str(tmp_path / "run")]) == 2
    assert "another process" in capsys.readouterr().err
