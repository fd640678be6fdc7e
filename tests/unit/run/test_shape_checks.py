"""Errors that a dry run finds before anything is allocated: in algorithms, rewards, folders and data."""

import asyncio
import dataclasses
import itertools
import json
import sys
import textwrap
import types

import jax
import pytest

from rolljax.aot.programs import batch_shapes
from rolljax.commands.train import main as train
from rolljax.envs import tasks
from rolljax.envs.catalog import make_spec
from rolljax.envs.mixture import Domain, Mixture
from rolljax.envs.pool import EnvPool, PoolConfig
from rolljax.envs.questions import Questions
from rolljax.envs.records import Records
from rolljax.errors import ConfigError, DataError
from rolljax.model import hf
from rolljax.model.decoder import Model
from rolljax.model.families.qwen3 import Qwen3Config
from rolljax.model.tokenizer import byte_tokenizer
from rolljax.recipe import Phase
from rolljax.run import reference_answers, shape_checks
from rolljax.run.reference_answers import ReferenceAnswer
from rolljax.sampler.settings import SamplerConfig
from rolljax.trainer.algorithms.dapo import Dapo
from rolljax.trainer.algorithms.distill import Distill
from rolljax.trainer.algorithms.grpo import Grpo
from rolljax.trainer.algorithms.opd import Opd, Teacher
from rolljax.trainer.batch import PackShape
from rolljax.trainer.credit.shaping import RewardShaping
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.phase_trainer import PhaseTrainer
from tests.synthetic import CLASSES

REQUIRED = {
    Dapo: {"shaping": RewardShaping(overlong_cache=4)},
    Opd: {"teachers": (Teacher("run_start", 0.7), Teacher("phase_start", 0.5, ("toy",))), "reward_coef": 0.5},
    Distill: {"teacher": "run_start"},
}


@pytest.mark.parametrize("max_turns", [1, 4])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_every_algorithm_passes(cls, max_turns, monkeypatch):
    """Also ours with a group of any size; and nothing is compiled for it."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", None)
    rehearse(cls(**REQUIRED.get(cls, {})), max_turns)


def rehearse(algorithm, max_turns):
    size = {"reference": 1, "pairs": 2, "sampler": 4}[algorithm.source]
    phase = Phase("p", algorithm, 2, prompts_per_step=8, group_size=size, row_len=512)
    env = types.SimpleNamespace(name="toy", max_turns=max_turns, specs={"toy": None}, turns_of=lambda task: max_turns)
    recipe = types.SimpleNamespace(
        phases=(phase,), env=env, max_turns=max_turns, max_restarts=0, max_answer_tok=16, seed=0, placement=None,
        sampler=SamplerConfig(slots=8, max_context=80), pack_shape=lambda phase: PackShape(1, 1, 512),
    )  # fmt: skip
    plan = types.SimpleNamespace(mesh=MeshSpec(data=1).build(), model=Model(Qwen3Config()), recipe=recipe)
    shape_checks.rehearse(plan, 0)


@pytest.mark.parametrize(
    "algorithm",
    [Grpo(sft_coef=0.1), *(cls(**REQUIRED.get(cls, {})) for cls in CLASSES)],
    ids=lambda a: type(a).__name__,
)
def test_the_arrays_of_a_batch_are_known_before_the_first_step(algorithm, monkeypatch):
    """`compile_ahead` and `plan` compile an update for these arrays."""
    seen = []
    monkeypatch.setattr(shape_checks, "trace", lambda algorithm, batch: seen.append(batch))
    rehearse(algorithm, 4)
    settings = {"steps": 1, "groups_per_step": 1}
    mesh = MeshSpec(data=1).build()
    trainer = PhaseTrainer(mesh, Model(Qwen3Config()), algorithm, AdamW(), PackShape(1, 1, 512), **settings)
    expected = {name: x.dtype for name, x in batch_shapes(trainer).arrays().items()}
    assert {name: x.dtype for name, x in seen[0].arrays().items()} == expected


# ---- what users write -----------------------------------------------------------------------------------------------

ALGORITHMS = """
    import dataclasses
    import jax.numpy as jnp
    import numpy as np
    from rolljax.trainer.algorithms.grpo import Grpo
    from rolljax.trainer.algorithms.base import TokenLoss
    from rolljax.trainer.credit.episodes import Credit

    @dataclasses.dataclass(frozen=True)
    class InCredit(Grpo):
        def advantages(self, e, rewards, carry):
            return e.reward * e.mask

    @dataclasses.dataclass(frozen=True)
    class InObjective(Grpo):
        def surrogate(self, logp, ratio, batch):
            return -ratio * batch.advantage

    @dataclasses.dataclass(frozen=True)
    class Shapes(Grpo):
        def credit(self, e, carry):
            return Credit(e.rewards)

    @dataclasses.dataclass(frozen=True)
    class Untraceable(Grpo):
        def surrogate(self, logp, ratio, batch):
            return -ratio if float(ratio.sum()) > 0 else ratio

    @dataclasses.dataclass(frozen=True)
    class Nothing(Grpo):
        def objective(self, policy, batch):
            pass

    @dataclasses.dataclass(frozen=True)
    class Deaf(Grpo):
        def prepare(self, e):
            return e.rewards, np.zeros(e.num, bool)

    @dataclasses.dataclass(frozen=True)
    class Summed(Grpo):
        def objective(self, policy, batch):
            return TokenLoss(policy.logp.sum())

    @dataclasses.dataclass(frozen=True)
    class Infinite(Grpo):
        def advantages(self, e, rewards, carry):
            return super().advantages(e, rewards, carry) / np.zeros(())
"""
SAYS = {
    "Deaf": ["keeps nothing to train on, whatever the rewards", "filters"],
    "InCredit": ["credit fails", "AttributeError", "'reward'", "mine.py:11", "in advantages"],
    "InObjective": ["objective cannot be traced", "AttributeError", "'advantage'", "mine.py:16", "in surrogate"],
    "Shapes": ["credit fails", "advantages has shape [32], not [32, "],
    "Untraceable": ["objective cannot be traced", "mine.py:26"],
    "Nothing": ["objective cannot be traced", "returns a NoneType, not a TokenLoss"],
    "Summed": ["objective cannot be traced", "the loss has shape []"],
    "Infinite": ["credit fails", "advantages is not finite"],
}
ENVIRONMENTS = """
    import dataclasses
    from rolljax.envs.base import Env, EnvSpec, StepResult
    from rolljax.types import Message, Task

    class Broken(Env):
        def __init__(self, how): self.how = how
        def reset(self, task): return (Message("user", task.content),)
        def reference_answer(self): return "4"
        def step(self, action):
            if self.how == "raises" and not action:
                raise KeyError("no answer")
            reward = {"nan": float("nan"), "text": "1"}.get(self.how, 1.0)
            return StepResult((), reward, True, success=True)

    @dataclasses.dataclass(frozen=True)
    class Spec(EnvSpec):
        how: str = "raises"
        @property
        def name(self): return "mine"
        def task(self, index): return Task("mine", index, f"what is {index}?")
        def make(self): return Broken(self.how)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of a user's."""

    def write(text):
        (tmp_path / "mine.py").write_text(textwrap.dedent(text).lstrip())
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "mine", raising=False)

    yield write
    sys.modules.pop("mine", None)


def dry_run(capsys, *settings):
    argv = ["--gin", "quickstart", "--dry_run"]
    for setting in settings:
        argv += ["--set", setting]
    code = train(argv)
    return code, capsys.readouterr()


@pytest.mark.parametrize("name", SAYS)
def test_a_mistake_in_an_algorithm(module, capsys, name):
    module(ALGORITHMS)
    code, said = dry_run(capsys, f"rl/Phase.algorithm = @mine.{name}()", "rl/Phase.updates_per_step = 2")
    assert code == 2 and said.out == ""
    for part in (name, "Phase.algorithm", "fix:", *SAYS[name]):
        assert part in said.err, said.err


def test_a_run_begins_with_the_same_checks(module, capsys, tmp_path):
    module(ALGORITHMS)
    argv = ["--gin", "quickstart", "--run_dir", str(tmp_path / "run"), "--set", "rl/Phase.algorithm = @mine.Nothing()"]
    assert train(argv) == 2
    assert "returns a NoneType" in capsys.readouterr().err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("how", "says"),
    [("raises", ["an empty answer", "KeyError", "no answer"]), ("nan", ["nan"]), ("text", ["reward"])],
)
def test_a_broken_reward(module, capsys, how, says):
    module(ENVIRONMENTS)
    code, said = dry_run(capsys, "Recipe.env = @mine.Spec()", f"Spec.how = '{how}'", "PoolConfig.where = 'thread'")
    assert code == 3 and said.out == ""
    for part in ("mine", "task 0", *says):
        assert part in said.err, said.err


# ---- folders --------------------------------------------------------------------------------------------------------


def cut(folder):
    path = folder / hf.WEIGHTS
    path.write_bytes(path.read_bytes()[:-100])


def resized(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 200}))


@pytest.fixture(scope="module")
def folder_of_weights(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("weights"), Model(Qwen3Config())
    hf.save(folder, model, jax.jit(lambda: model.init(0))(), byte_tokenizer())
    return folder


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (cut, ["model.safetensors cannot be read"]),
        (resized, ["shape: model.layers.0.mlp.gate_proj.weight is [192, 64], config.json says [200, 64]"]),
        (lambda f: (f / hf.WEIGHTS).rename(f / "pytorch_model.bin"), ["pytorch_model.bin may run code", "convert"]),
        (lambda f: (f / "tokenizer.json").unlink(), ["holds no tokenizer"]),
        (
            lambda f: (f / "chat_template.jinja").write_text("{% for a in range(10**9) %}x{% endfor %}"),
            ["Range too big"],
        ),
        (None, []),
    ],
    ids=["cut off", "other shapes", "pickled", "no tokenizer", "hostile template", "whole"],
)
def test_a_folder(folder_of_weights, tmp_path, capsys, breaks, says):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in folder_of_weights.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if breaks:
        breaks(folder)
    code, said = dry_run(capsys, f"Recipe.model = '{folder}'")
    if not breaks:
        assert code == 0 and f"checked   24 tensors of {folder}" in said.out
        return
    assert code == (2 if "Range" in says[0] else 6) and said.out == ""
    for part in says:
        assert part in said.err, said.err


def test_a_folder_without_a_learning_rate(folder_of_weights, capsys):
    """However the optimizer came to its settings: here one replaces another."""
    code, said = dry_run(capsys, f"Recipe.model = '{folder_of_weights}'", "rl/Phase.optimizer = @optimizer.Lion()")
    assert code == 2 and "Lion.lr is not set" in said.err and "--set 'Lion.lr = 1e-6'" in said.err


# ---- held-out tasks -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counted(Records):
    """Counts the tasks that are asked for."""

    asked = itertools.count()

    def task(self, index):
        next(self.asked)
        return super().task(index)


def test_too_few_held_out_tasks_of_a_small_file_are_found_out_soon(tmp_path):
    """In numbers of tasks made: 256 of 60 records took 257,000."""
    path = tmp_path / "small.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}", "answer": "x"}) + "\n" for i in range(60)))
    spec = Counted(str(path))
    with pytest.raises(DataError, match=r"only (\d+) .* 60 different ones .* Evaluation.tasks = \1 at most"):
        tasks.held_out(spec, 256, 0.1)
    assert next(spec.asked) < 10_000


def test_a_teacher_that_is_not_there_is_told_of_where_it_is_named(capsys):
    assert train(["--gin", "opd_two_teachers", "--set", "spell/Teacher.policy = 'nowhere'", "--dry_run"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("config error: --set 'spell/Teacher.policy = 'nowhere'', ")
    assert "Teacher.policy names a frozen policy that is not there" in said


def test_the_remedy_fits_what_tasks_come_from(tmp_path):
    rows = [{"prompt": f"{i}?", "answer": "x"} for i in range(60)]
    with pytest.raises(DataError, match="or name files with more rows$"):
        tasks.held_out(Records(records=rows), 256, 0.1)
    with pytest.raises(DataError, match=r"held_out_frac \(now 1\) lower, or name files with more rows$"):
        tasks.TaskStream(Records(records=rows), 0, 1.0)
    with pytest.raises(DataError, match="or widen the family's settings$"):
        tasks.held_out(make_spec("frozen_lake(size=2)"), 256, 0.1)


# ---- reference answers ----------------------------------------------------------------------------------------------


def some(spec, num, texts=None):
    """Return the first tasks' reference answers and their rewards, as `reference_answers.read` does."""
    found = []
    for i in range(num):
        task, env = spec.task(i), spec.make()
        env.reset(task)
        text = texts[i] if texts else env.reference_answer()
        result = env.step(text)
        found.append(ReferenceAnswer(task, (text,), result.reward, result.success))
    return found


def never(prompt, answer, record):
    return 0.0


def costs(prompt, answer, record):
    return -0.01 * len(answer)


def test_a_reference_answer_that_is_worth_nothing_shows_its_text(chat, tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": f"it is {i + 1}"}) + "\n" for i in range(9)))
    spec = Questions(str(path), reward=never)
    with pytest.raises(DataError) as e:
        reference_answers.check(spec, some(spec, 3), chat, 32)
    assert "sums.jsonl, line 1: the reference answer is worth 0" in str(e.value) and "'it is 1'" in str(e.value)
    mixed = Mixture({"sums": Domain(spec), "other": Domain(Questions(str(path), domain="other"))})
    with pytest.raises(DataError, match=r"sums.jsonl, line 1: the reference answer is worth 0"):
        reference_answers.check(mixed, [dataclasses.replace(a, task=mixed.task(0)) for a in some(spec, 1)], chat, 32)
    best = Questions(str(path), reward=costs, solved_at=-1.0)
    assert reference_answers.check(best, some(best, 3), chat, 32) == ()


def test_reference_answers_that_are_longer_than_answers_may_be(chat):
    spec = Records(records=[{"prompt": f"{i}?", "answer": "x" * (10 + 10 * (i > 1))} for i in range(4)])
    answers = some(spec, 4)
    assert reference_answers.check(spec, answers, chat, 32) == ()
    (said,) = reference_answers.check(spec, answers, chat, 15)
    assert "2 of the 4 reference answers" in said and "the longest has 21" in said
    with pytest.raises(
        ConfigError, match=r"4 of the 4 reference answers .* up to 21 tokens; record \d of .*: 'xxx"
    ) as e:
        reference_answers.check(spec, answers, chat, 10)
    assert e.value.setting == "Recipe.max_answer_tok" and "set it to 21" in e.value.remedy


def test_a_conversation_is_worth_what_all_its_answers_are():
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho", "weight": 0}]
    said += [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "Gone"}]
    rows = [{"messages": [{**said[0], "content": f"Hi {i}"}, *said[1:]]} for i in range(20)]
    spec = Records(records=rows)

    async def read():
        pool = EnvPool(PoolConfig(where="thread"), spec)
        try:
            episode = await pool.open(spec.task(0))
            return await reference_answers.read(episode, spec.task(0), spec.max_turns, play=True)
        finally:
            pool.close()

    found = asyncio.run(read())
    assert (found.texts, found.reward, found.success) == (("Ho", "Gone"), 1.0, True)


MINE = """
    def right(prompt, answer, record):
        return float(answer == record["truth"])
"""


def test_a_dry_run_checks_reference_answers_and_says_which_columns_it_took(module, capsys, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "truth": f"#### {i}", "answer": "x"} for i in range(300)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    module(MINE)
    settings = [f"Questions.path = '{path}'", "Questions.reward = @mine.right"]

    def run(*more):
        argv = ["--gin", "questions", "--dry_run"]
        for setting in (*settings, *more):
            argv += ["--set", setting]
        return train(argv), capsys.readouterr()

    code, said = run()
    assert code == 3 and "the reference answer is worth 0" in said.err and "answer: 'x'" in said.err
    code, said = run("Questions.answer_key = 'truth'")
    assert code == 0 and "columns   prompt from `messages`, answer from `truth`\n" in said.out
