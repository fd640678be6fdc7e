"""Common first mistakes: one message that says what to do, the right exit code, and no traceback."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rolljax
from rolljax import plan, play, serve, validate
from rolljax.commands.export import main as export
from rolljax.commands.train import main as train
from rolljax.eval import main as evaluate

ROOT = Path(rolljax.__file__).parents[1]
DRY = ["--gin", "quickstart", "--dry_run"]
HUB = "hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B"
CLASSES = ["AdamW", "Grpo", "PoolConfig", "Qwen3Config", "ReasoningGym", "SamplerConfig"]
NO_SETTINGS = ["StepResult", "TokenBatch", "DecodeState", "Model", "Message", "PoolStats", "Law"]

MODULES = {
    "noenv.py": "import dataclasses\nclass Foo: pass\n@dataclasses.dataclass(frozen=True)\nclass Bar:\n    x: int = 1\n",
    "broken.py": "1 / 0\n",
    "mine.gin": "",
    "program.py": "print(1)\n",
    "folder/thesis.txt": "years of work",
    "empty/.keep": "",
}


def setting(text):
    return [*DRY, "--set", text]


# verb, arguments, exit code, what must be said, what must not
TABLE = [
    (train, ["--gin", "configs/quikstart.gin"], 2, ["did you mean 'quickstart'", "comes with rolljax"], []),
    (train, ["--gin", "quikstart"], 2, ["did you mean 'quickstart'"], []),
    (train, ["--gin", "algorithms/grop"], 2, ["did you mean 'algorithms/grpo"], []),
    (train, ["--gin", "mien.gin"], 2, ["did you mean 'mine.gin'"], ["quickstart"]),
    (train, ["--gin", "nowhere/qqqq.gin"], 2, ["files that come with rolljax", "quickstart"], []),
    (train, ["--gin", "folder"], 2, ["is a folder, not a gin file"], ["Errno"]),
    (train, ["--gin", "program.py"], 2, ["program.py:1: syntax error", "a line is"], []),
    (train, setting("Recipe.model = Qwen/Qwen3-0.6B"), 2, ["Recipe.model", HUB], []),
    (train, setting("Recipe.model = Qwen3-0.6B"), 2, ["name a local folder"], ["hf download"]),
    (train, setting("Recipe.model = empty"), 2, ["it has no config.json", "name a local folder"], []),
    (train, setting("Recipe.model = @Qwen3Confg()"), 2, ["did you mean 'Qwen3Config'", *CLASSES], NO_SETTINGS),
    (train, setting("Gropo.clip_high = 1"), 2, ["did you mean 'Grpo'", *CLASSES], NO_SETTINGS),
    (train, setting("steps = 3"), 2, ["did you mean 'Phase.steps'"], NO_SETTINGS),
    (train, setting("Recipe.env = sokoban"), 2, ["must be EnvSpec", "@package.module.Class()"], []),
    (train, setting("Recipe.env = @noenv.Foo()"), 2, ["frozen dataclass", "dataclass(frozen=True)"], []),
    (train, setting("Recipe.env = @noenv.Bar()"), 2, ["must be EnvSpec", "derive Bar from rolljax.envs.base.EnvSpec"], []),
    (train, setting("Recipe.env = @broken.Env()"), 2, ["importing it failed", "ZeroDivisionError", "python -c"], []),
    (train, setting("Recipe.env = @nomodule.Env()"), 2, ["no module 'nomodule'", "PYTHONPATH"], NO_SETTINGS),
    (train, setting("Recipe.env = @__main__.Env()"), 2, ["no 'Env' in __main__", "mine.Env"], ["__spec__"]),
    (evaluate, ["--run", "nowhere"], 6, ["is not a run folder"], []),
    (evaluate, ["--model", "Qwen/Qwen3-0.6B"], 2, ["--env or --gin says which tasks"], []),
    (evaluate, ["--model", "Qwen/Qwen3-0.6B", "--gin", "quickstart"], 2, [HUB], []),
    (evaluate, ["--endpoint", "127.0.0.1:8000", "--env", "sokoban"], 2, ["EndpointConfig.url is not", "--endpoint", "'127.0.0.1:8000'"], []),
    (evaluate, ["--endpoint", "http://127.0.0.1:1/v1", "--env", "sokoban"], 2, ["does not list its models", "--model_name"], []),
    (export, ["--model", "Qwen/Qwen3-0.6B", "--to", "out"], 6, [HUB], []),
    (export, ["--run", "folder", "--to", "out"], 6, ["is not a run folder"], []),
    (serve.main, ["--model", "Qwen/Qwen3-0.6B"], 2, [HUB], []),
    (serve.main, ["--run", "nowhere"], 2, ["is not a run folder", "runs/"], []),
    (plan.main, ["--gin", "quikstart", "--topology", "v5e:2x2"], 2, ["did you mean 'quickstart'"], []),
    (play.main, ["sokobn"], 2, ["did you mean sokoban?"], []),
    (play.main, ["noenv.Foo"], 2, ["is not an EnvSpec", "derive Foo"], []),
    (play.main, ["nomodule.Foo"], 2, ["No module named 'nomodule'", "check the spelling"], []),
    (play.main, ["broken.Env"], 2, ["ZeroDivisionError", "python -c 'import broken'"], []),
    (play.main, ["frozen_lake(size='a')"], 2, ["cannot be made", "TypeError"], []),
    (play.main, ["frozen_lake(sise=5)"], 2, ["did you mean size?"], []),
    (play.main, ["sokoban#999999999"], 2, ["is no index of a task"], []),
    (validate.main, ["sokobn"], 2, ["did you mean sokoban?"], []),
    (validate.main, ["noenv.Bar"], 2, ["is not an EnvSpec"], []),
    (validate.main, ["sokoban", "--tasks", "0"], 2, ["must be at least 1"], []),
]  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    for name, text in MODULES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "verb, argv, code, said, unsaid",
    TABLE,
    ids=[f"{v.__module__.rpartition('.')[2]} {' '.join(a[-1:])}" for v, a, *_ in TABLE],
)
def test_mistakes_of_a_first_day(folder, capfd, verb, argv, code, said, unsaid):
    assert verb(argv) == code
    out, err = capfd.readouterr()
    assert len(re.findall(r"(?m)^\w+ error: ", err)) == 1 and "Traceback" not in err + out
    assert err.split(" error: ")[0] in ("config", "checkpoint"), "a library spoke before us"
    for part in said:
        assert part in err, err
    for part in unsaid:
        assert part not in err, err
    assert not (folder / "out").exists() and not (folder / "runs").exists()


def run(*argv, **environ):
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": paths, **environ}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env, timeout=300)


def test_a_platform_that_is_not_there(folder):
    done = run("-m", "rolljax.train", *DRY, JAX_PLATFORMS="cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("config error: JAX_PLATFORMS asks for devices that are not here"), done.stderr
    assert "'cuda'" in done.stderr and "rolljax[cuda]" in done.stderr and "Traceback" not in done.stderr


SCRIPT = """
import dataclasses, sys
from rolljax.commands.train import main as train
from rolljax.envs.base import EnvSpec, PureEnv, StepResult
from rolljax.types import Message, Task

@dataclasses.dataclass(frozen=True)
class Doubling(EnvSpec):
    {runs}

    name = "doubling"

    def task(self, index):
        return Task(self.name, index, str(index))

    def make(self):
        return One()

class One(PureEnv):
    def reset(self, task):
        self.n = int(task.content)
        return (Message("user", f"twice {{self.n}}"),)

    def step(self, action):
        return StepResult((), float(action == self.reference_answer()), terminated=True)

    def reference_answer(self):
        return str(2 * self.n)

if __name__ == "__main__":
    sys.exit(train(sys.argv[1:]))
"""
OWN = """from __gin__ import dynamic_registration
import __main__
from rolljax import recipe
from rolljax.envs import pool
include 'quickstart.gin'
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("runs", ['runs = "inline"', "pass"])
def test_an_environment_in_the_script_that_is_started(folder, runs):
    """In the trainer, and in worker processes, which cannot import it: it travels by value."""
    (folder / "script.py").write_text(SCRIPT.format(runs=runs))
    (folder / "own.gin").write_text(OWN)
    binding = ["--set", "Recipe.env = @__main__.Doubling()", "--set", "PoolConfig.where = auto"]
    done = run("script.py", "--gin", "own.gin", *binding, "--dry_run", JAX_PLATFORMS="cpu")
    assert done.returncode == 0, done.stderr
    assert "twice 0" in done.stdout and "Traceback" not in done.stderr


def test_a_missing_sandbox_is_said_once(folder, monkeypatch, capfd):
    from rolljax.sandbox import command_line, host, provider

    monkeypatch.setattr(command_line, "bwrap", lambda: "")
    monkeypatch.setattr(host, "_works", type(host._works)())
    monkeypatch.setattr(provider, "_shared", {})
    for verb, argv in ((validate, ["terminal", "--tasks", "3"]), (play, ["terminal"])):
        assert verb.main(argv) == 2
        out, err = capfd.readouterr()
        assert (out + err).count("bubblewrap is not installed") == 1 and "apt-get install bubblewrap" in err


def test_play_says_what_to_type(folder, capsys, monkeypatch):
    def no_more(*_):
        raise EOFError

    monkeypatch.setattr("rich.console.Console.input", no_more)
    for env, example in (("sokoban", "such as '"), ("rg:chain_sum", "Type what the policy would say;")):
        assert play.main([env]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert example in out and "Ctrl-D ends" in out and "--scripted" in out
    assert play.main(["sokoban", "--scripted"]) == 0
    assert "Type what" not in capsys.readouterr().out


def test_an_old_python_is_named_before_anything_is_installed(folder):
    old = folder / "python3.10"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.10.4" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", "-f", ROOT / "Makefile", "setup", f"PYTHON={old}", f"VENV={folder}/v", "-C", ROOT],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 and not (folder / "v").exists()
    assert "rolljax needs Python 3.11 or newer" in done.stderr and "Python 3.10.4" in done.stderr
    assert "make setup PYTHON=" in done.stderr
