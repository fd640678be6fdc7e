"""rolljax from Python, for real: inside of an event loop and off the main thread, with what workers cannot import."""

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rolljax
from rolljax.chat_models.base import Asking
from rolljax.config import loader
from rolljax.envs.pool import PoolConfig
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.optimizer import AdamW
from rolljax.types import Message

ROOT = Path(__file__).parents[2]
ROWS = [{"question": f"Sing {i}: "} for i in range(200)]


def recipe(reward, steps=3):
    return Recipe(
        env=Questions(records=ROWS, prompt="{question}", reward=reward),
        phases=[
            Phase(
                "rl",
                Grpo(),
                steps=steps,
                prompts_per_step=4,
                group_size=4,
                updates_per_step=2,
                optimizer=AdamW(lr=3e-3),
            )
        ],
        model=Qwen3Config(init_std=0.1),
        sampler=SamplerConfig(slots=16, max_context=64, prefill_chunk=256),
        pool=PoolConfig(workers=1),
        max_answer_tok=8,
        evaluation=Evaluation(tasks=4),
    )


def vowels():
    """Return a reward that no other process can import."""
    return lambda prompt, answer, record: sum(letter in "aeiou" for letter in answer) / 8


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Train as from a notebook cell: the calling thread has a running event loop, and is not the main one."""
    folder, found = tmp_path_factory.mktemp("library") / "run", []

    async def cell():
        return rolljax.train(recipe(vowels()), run_dir=folder, progress=False)

    thread = threading.Thread(target=lambda: found.append(asyncio.run(cell())))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.slow
def test_a_run_says_what_it_did(run):
    assert run.is_finished and run.num_steps == 3 and run.steps == [1, 2, 3]
    assert list(run.metrics["step"]) == [1, 2, 3] and "reward/mean" in run.metrics
    assert [e["phase"] for e in run.heldout_reward] == ["start", "rl"] and "all phases done" in repr(run)
    assert run.curves()._repr_png_().startswith(b"\x89PNG")
    everyone = run.trajectories(2)
    assert len(everyone) == 16 and everyone[0].task.content.startswith("Sing") and run.trajectories()[0].turns
    with pytest.raises(DataError, match="no rollouts of step 9; nearest: 3"):
        run.trajectories(9)
    assert "letter in" in (run.path / "config.gin").read_text()
    earlier = rolljax.Run(run.path)
    assert earlier.num_steps == 3 and earlier.summary == run.summary


@pytest.mark.slow
def test_the_same_call_resumes(run, tmp_path):
    assert rolljax.train(recipe(vowels()), run_dir=run.path, progress=False).summary == run.summary
    with pytest.raises(ConfigError, match="prompts_per_step is 8 now"):
        rolljax.train(recipe(vowels()), set={"Phase.prompts_per_step": 8}, run_dir=run.path, progress=False)


@pytest.mark.slow
def test_a_run_is_evaluated_exported_and_loaded(run, tmp_path):
    found = rolljax.evaluate(run, set={"Evaluation.temperature": 0})
    assert found.rows[0].answers == len(found.trajectories) == 4
    missing = {"Questions.records": ROWS, "Questions.reward": vowels()}
    again = rolljax.evaluate(run.path, set=missing | {"Evaluation.temperature": 0})
    assert again.rows == found.rows
    with pytest.raises(ConfigError, match="is required and not set"):
        rolljax.evaluate(run.path)
    folder = rolljax.export(run, tmp_path / "out", dtype="bfloat16")
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    for mistake in ({"dtype": "fp8"}, {"max_shard_gb": -1}):
        with pytest.raises(ConfigError, match=next(iter(mistake))):
            rolljax.export(run, tmp_path / "other", **mistake)
    with rolljax.load(run.path) as model:
        one, two = model.generate(["Sing 1: ", [{"role": "user", "content": "Sing 2: "}]], max_tokens=4, seed=1)
        assert len(one.tokens) <= 4 and len(one.logprobs) == len(one.tokens) and str(two) == two.text
        assert model.generate("Sing 1: ", max_tokens=4, seed=1)[0].text == one.text
        said = asyncio.run(model.chat_model().ask([Message("user", "Sing 1: ")], Asking(1.0, 4, seed=1)))
        assert (said.text, said.num_tok) == (one.text, len(one.tokens))
        assert model.generate(["Sing 1: "], max_tokens=4, raw=True, temperature=0)[0].finish_reason in (
            "stop",
            "length",
        )
    with pytest.raises(ConfigError, match="is closed"):
        model.generate("Sing")


OTHER_PROCESS = """
import sys
import rolljax
from rolljax import serve
from rolljax.eval import main as evaluate
from rolljax.commands.export import main as export
run, to = sys.argv[1:]
assert export(["--run", run, "--to", f"{to}/a"]) == 0
assert export(["--run", run, "--step", "3", "--to", f"{to}/b"]) == 0
rolljax.export(run, f"{to}/c")
with rolljax.load(run, step=3) as model:
    print("said", repr(model.generate("Sing 1: ", max_tokens=4, temperature=0)[0].text))
engine, params, version, served = serve.load(run=run, slots=8)
assert version == 3
sys.exit(evaluate(["--run", run, "--env", "countdown", "--tasks", "4", "--max_context", "200", "--json"]))
"""


@pytest.mark.slow
def test_another_process_needs_no_object_of_the_run(run, tmp_path):
    """A model whose rows and reward cannot be imported is exported to the same bytes, served, loaded, evaluated."""
    env = plain_environment()
    command = [sys.executable, "-c", OTHER_PROCESS, str(run.path), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    weights = {(tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights == {(run.path / "hf" / "model.safetensors").read_bytes()}
    with rolljax.load(run) as model:
        assert f"said {model.generate('Sing 1: ', max_tokens=4, temperature=0)[0].text!r}" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_an_interrupted_run_is_saved_and_returned(tmp_path):
    """A resumed run ends with the same bits as an uninterrupted one; the process trains three times."""
    steps = threading.Event()

    def interrupt():
        while not (tmp_path / "cut" / "metrics.jsonl").exists():
            steps.wait(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    reward = vowels()
    threading.Thread(target=interrupt).start()
    cut = rolljax.train(recipe(reward, 12), run_dir=tmp_path / "cut", progress=False)
    assert 0 < cut.num_steps < 12 and not cut.is_finished and cut.stop_reason == "stopped by signal"
    with rolljax.load(cut) as model:  # of a checkpoint, with a reward that no file can name
        assert len(model.generate(["a", "b"], max_tokens=2)) == 2
    going_on = rolljax.train(recipe(reward, 12), run_dir=tmp_path / "cut", progress=False)
    straight = rolljax.train(recipe(reward, 12), run_dir=tmp_path / "straight", progress=False)
    assert going_on.is_finished and going_on.num_steps == 12
    assert going_on.summary["state_sha256"] == straight.summary["state_sha256"]


@pytest.mark.slow
def test_what_ends_a_run_is_an_exception_and_the_run_is_there(tmp_path):
    def broken(prompt, answer, record):
        if len(answer) >= 0 and "Sing" in prompt:
            raise RuntimeError("no such song")

    with pytest.raises(EnvError, match="no such song"):
        rolljax.train(recipe(broken), run_dir=tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()  # it was found before anything began
    with pytest.raises(ConfigError, match="too short"):
        rolljax.train(recipe(vowels()), set={"SamplerConfig.max_context": 16}, run_dir=tmp_path / "run", progress=False)


@pytest.mark.sweep
def test_a_recipe_in_python_and_its_file_are_the_same_run(tmp_path):
    small = {"warm_start/Phase.steps": 3, "rl/Phase.steps": 2, "rl/Phase.prompts_per_step": 4, "Evaluation.tasks": 8}
    by_name = rolljax.train("quickstart", set=small, run_dir=tmp_path / "gin", progress=False)
    by_object = rolljax.train(by_name.config.value, run_dir=tmp_path / "python", progress=False)
    by_file = rolljax.train(by_object.path / "config.gin", run_dir=tmp_path / "again", progress=False)
    assert loader.given(by_name.config.value).resolved == by_file.config.resolved
    assert len({r.summary["state_sha256"] for r in (by_name, by_object, by_file)}) == 1


# ---- the page -------------------------------------------------------------------------------------------------------

MOST_LINES = {"own_reward": 10, "own_env": 40, "own_algorithm": 30}


def examples():
    """Return the blocks of docs/library.md that are files, by name."""
    text = (ROOT / "docs" / "library.md").read_text()
    return dict(re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", text, re.S | re.M))


def test_examples_are_short():
    lines = {name: len([line for line in text.splitlines() if line.strip()]) for name, text in examples().items()}
    assert lines.keys() == MOST_LINES.keys() and all(lines[name] <= MOST_LINES[name] for name in lines), lines


@pytest.mark.sweep
@pytest.mark.parametrize("name", MOST_LINES)
def test_examples_learn(name, tmp_path):
    """The page's examples run as scripts, and the reward rises."""
    shown = "\nimport json; print(json.dumps(run.heldout_reward))"
    (tmp_path / f"{name}.py").write_text(examples()[name] + shown)
    done = subprocess.run(
        [sys.executable, f"{name}.py"],
        cwd=tmp_path,
        env=plain_environment(),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    *_, before, after = [e["mean"] for e in json.loads(done.stdout.splitlines()[-1])]
    assert after > before + 0.1, done.stdout


def plain_environment():
    """Return a user's environment, without the variables with which tests compile fast and run slowly."""
    import os

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_"))}
    return kept | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
