"""rolljax from Python: the package itself, recipes as objects, calls from anywhere, and what a notebook shows."""

import asyncio
import dataclasses
import importlib
import inspect
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import rolljax
from rolljax.config import loader, objects
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.envs.questions import Questions
from rolljax.errors import ConfigError, RolljaxError
from rolljax.library.notebook import NotebookConsole, curve_svg
from rolljax.library.run import Trajectories
from rolljax.library.separate_thread import run_apart
from rolljax.library.verbs import config_of
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.recipe import Evaluation, Phase, Recipe
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.sft import Sft
from rolljax.trainer.optimizer import AdamW
from rolljax.types import Key, Task, Trajectory, Turn

ROOT = Path(__file__).parents[3]


# ---- the package ----------------------------------------------------------------------------------------------------


def test_a_verb_is_the_function_whatever_is_imported():
    """In a process of its own: the import of a module never takes the name, whether it comes first or last."""
    code = """if True:
        import contextlib, importlib, pkgutil, types
        import rolljax
        verbs = ("train", "evaluate", "export", "load")
        for name in (*verbs, *(info.name for info in pkgutil.iter_modules(rolljax.__path__)), "commands.train"):
            for is_first in (True, False):
                if is_first:
                    for verb in verbs:
                        rolljax.__dict__.pop(verb, None)  # as before its first use
                with contextlib.suppress(ImportError):
                    importlib.import_module(f"rolljax.{name}")
                assert all(isinstance(getattr(rolljax, verb), types.FunctionType) for verb in verbs), name
        from rolljax import train, export
        assert (train, export) == (rolljax.library.verbs.train, rolljax.library.verbs.export)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["train", "export"])
def test_a_module_that_only_runs_names_the_one_to_import(name):
    with pytest.raises(ImportError, match=f"rolljax.{name} is a function; the command is rolljax.commands.{name}"):
        importlib.import_module(f"rolljax.{name}")


def test_verbs_are_typed_functions():
    assert {"train", "evaluate", "export", "load", "Run", "Recipe", "Phase"} <= {*dir(rolljax)} & {*rolljax.__all__}
    for name in ("train", "evaluate", "export", "load"):
        verb = getattr(rolljax, name)
        assert inspect.signature(verb).return_annotation != inspect.Signature.empty and "Raises:" in verb.__doc__
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        rolljax.trian  # noqa: B018


# ---- recipes as objects ---------------------------------------------------------------------------------------------


def small(**changes):
    phases = [
        Phase("warm", Sft(), steps=2),
        Phase("rl", Grpo(), steps=3, group_size=4, updates_per_step=2, optimizer=AdamW(lr=1e-3)),
    ]
    return Recipe(**{"env": FrozenLake(size=3), "phases": phases, "evaluation": Evaluation(tasks=8)} | changes)


@pytest.mark.parametrize(
    "name", ["quickstart", "sft_dpo_grpo", "reward_model_ppo", "agent_ipa", "qwen3_32b_split_v5p_64"]
)
def test_a_recipe_as_objects_is_the_gin_file_of_the_same_values(name, tmp_path):
    """From file to objects to file again: each setting has the same value."""
    config = loader.load([name], root=Recipe)
    (tmp_path / "again.gin").write_text(loader.given(config.value).operative)
    assert loader.load([tmp_path / "again.gin"], root=Recipe).resolved == config.resolved


def test_objects_are_taken_as_a_gin_file_is():
    config = loader.given(small(), {"Phase.steps": 5, "AdamW.lr": 1, "FrozenLake.size": 5})
    assert config.value.phases == loader.given(dataclasses.replace(small(), phases=config.value.phases)).value.phases
    assert [p.steps for p in config.value.phases] == [5, 5] and isinstance(config.value.phases, tuple)
    assert config.resolved["phases[1].optimizer.lr"] == 1.0 and isinstance(config.value.phases[1].optimizer.lr, float)
    assert config.value.env == FrozenLake(size=5)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"Phase.stesp": 1}, "Phase.stesp is not a field of Phase(?s:.*)did you mean 'steps'"),
        ({"steps": 1}, r"is neither a macro of these files nor Class.field(?s:.*)did you mean .Phase.steps"),
        ({"rl/Phase.steps": 1}, "no Phase is built in scope .rl."),
        ({"Phase.steps": "many"}, "must be int"),
        ({"Recipe.env": "sokoban"}, "must be EnvSpec"),
        ({"Phase.steps": 0}, "must be at least 1"),
    ],
)
def test_settings_over_objects_that_cannot_be_used(settings, said):
    with pytest.raises(ConfigError, match=said):
        loader.given(small(), settings)


def test_an_object_that_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"Recipe.model must be DecoderConfig or str"):
        loader.given(small(model=3))


def test_objects_stand_in_a_gin_file_s_place():
    phases = [Phase("only", Sft(), steps=3)]
    config = config_of("quickstart", {"Recipe.env": FrozenLake(size=3), "Recipe.phases": phases, "Recipe.seed": 4})
    assert config.value.env == FrozenLake(size=3) and config.value.phases == tuple(phases) and config.value.seed == 4
    assert config.value.model == loader.load(["quickstart"], root=Recipe).value.model
    again = config_of("quickstart", {"rl/Phase.algorithm": Grpo(clip_high=0.3), "warm_start/Phase.steps": 7}).value
    assert again.phases[1].algorithm == Grpo(clip_high=0.3) and again.phases[0].steps == 7
    with pytest.raises(ConfigError, match=r"(?s)set=\{'Grpo.clip_hihg'.*did you mean 'clip_high'"):
        config_of("quickstart", {"Grpo.clip_hihg": 0.3})
    with pytest.raises(ConfigError, match="must be EnvSpec"):
        config_of("quickstart", {"Recipe.env": Grpo()})


def test_what_no_file_can_name_is_given_again(tmp_path):
    rows = [{"question": f"{i}?", "answer": "1"} for i in range(20)]
    reward = lambda prompt, answer, record: float(len(answer))  # noqa: E731
    config = loader.given(small(env=Questions(records=rows, reward=reward)))
    assert "# " in config.operative and "float(len(answer))" in config.operative
    assert "20 rows in memory" in config.operative and config.operative.count(objects.REQUIRED) == 2
    (path := tmp_path / "config.gin").write_text(config.operative)
    with pytest.raises(ConfigError, match="is required and not set"):
        loader.load([path], root=Recipe)
    again = loader.load([path], {"Questions.records": rows, "Questions.reward": reward}, root=Recipe)
    assert again.value == config.value and again.resolved == config.resolved


def test_a_class_that_no_file_can_name_is_given_again(tmp_path):
    @dataclasses.dataclass(frozen=True)
    class Mine(FrozenLake):
        extra: int = 3

    config = loader.given(small(env=Mine(size=5)))
    (path := tmp_path / "config.gin").write_text(config.operative)
    assert "Recipe.env = %gin.REQUIRED" in config.operative and "Mine(" in config.operative
    assert loader.load([path], {"Recipe.env": Mine(size=5)}, root=Recipe).resolved == config.resolved


def test_several_objects_of_a_class_keep_their_values(tmp_path):
    config = loader.given(
        small(
            phases=[
                Phase(f"p{i}", Grpo(clip_high=0.2 + i / 10), i + 1, group_size=2, updates_per_step=2, optimizer=AdamW())
                for i in range(3)
            ],
            model=Qwen3Config(init_std=0.1),
            sampler=SamplerConfig(slots=8),
        )
    )
    assert "p1/recipe.Phase.steps = 2" in config.operative
    (path := tmp_path / "config.gin").write_text(config.operative)
    assert loader.load([path], root=Recipe).value == config.value


# ---- calls from anywhere --------------------------------------------------------------------------------------------


def test_work_may_start_event_loops_of_its_own():
    async def inside():
        return run_apart(lambda _: asyncio.run(asyncio.sleep(0, "done")))

    assert asyncio.run(inside()) == "done"
    found = []
    thread = threading.Thread(target=lambda: found.append(run_apart(lambda _: 5)))
    thread.start()
    thread.join()
    assert found == [5]
    with pytest.raises(ZeroDivisionError):
        run_apart(lambda _: 1 / 0)


def test_the_first_interrupt_asks_and_the_second_leaves():
    free, told_once = threading.Event(), threading.Event()

    def work(told_to_stop, *, stubborn):
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        while not told_to_stop():
            free.wait(0.01)
        told_once.set()
        if stubborn:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            free.wait(60)
        return "saved"

    assert run_apart(lambda told: work(told, stubborn=False)) == "saved" and told_once.is_set()
    with pytest.raises(KeyboardInterrupt):
        run_apart(lambda told: work(told, stubborn=True))
    free.set()


# ---- notebooks ------------------------------------------------------------------------------------------------------

HOSTILE = "<script>alert(1)</script>\x1b[2J\u202e"


def test_a_table_of_trajectories_shows_text_as_text():
    none = [0.5]
    turn = Turn(none, none, none, none, "stop", 0.0, HOSTILE)
    t = Trajectory(Key(0, 1, 0), Task("e", 0, HOSTILE), (turn,), 0.5, {}, False, "ok")
    shown = Trajectories([t] * 40)._repr_html_()
    assert "<script" not in shown and "&lt;script" in shown and "\x1b" not in shown and "\u202e" not in shown
    assert "and 8 more" in shown and repr(Trajectories([t] * 40)[:2]) == "2 trajectories, mean reward 0.500"
    better = dataclasses.replace(t, reward=1.0)
    assert [x.reward for x in Trajectories([t, better]).sorted()] == [1.0, 0.5]


def test_progress_in_a_notebook_is_one_output(monkeypatch):
    console = NotebookConsole()
    console.start_phase("rl", 10, 0)
    row = {"phase_step": 1, "step": 1, "reward/mean": 0.25, "rollout/len_tok": 5.0, "tput/sample_tok_s": 9.0}
    row |= {"time/step_s": 1.0, "time/rollout_s": 0.5, "rollout/fail_frac": 0.0}
    console.step(row)
    assert "<svg" not in console._repr_html_()
    console.step(row | {"phase_step": 2, "step": 2, "reward/mean": 0.5, "heldout/reward_mean": 0.4})
    console.say(HOSTILE)
    console.warn("answers were cut")
    shown = console._repr_html_()
    assert "rl 2/10" in shown and "<polyline" in shown and "<circle" in shown and "reward 0.500" in shown
    assert "<script" not in shown and "<b>answers were cut</b>" in shown
    assert "reward 0.500" in repr(console) and len(shown) < 4000


CELL = """
import rolljax
rolljax.evaluate("nothing", envs=["sokoban"], set={"Recipe.seed": 1})
"""


def test_an_error_in_a_notebook_is_the_line_that_called_and_the_message(capsys):
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    result = shell.run_cell(CELL)
    assert isinstance(result.error_in_exec, RolljaxError)
    *_, where, said = capsys.readouterr().out.strip().splitlines()
    assert where.startswith('line 2: rolljax.evaluate("nothing"') and said.startswith("CheckpointError: nothing is not")
    shell.history_manager.end_session()


def test_an_error_that_was_not_raised_has_a_message():
    assert ConfigError("is wrong", setting="A.b")._render_traceback_() == ["ConfigError: A.b is wrong"]


def test_a_curve_has_few_points_however_long_the_run_is():
    svg = curve_svg([(i, i / 5000) for i in range(5000)], [])
    assert svg.count(",") <= 300 and curve_svg([(0, 1.0)], []) == ""
