"""The generated pages of algorithms are complete, and the examples of the hand-written one run."""

import dataclasses
import importlib
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rolljax import cli
from rolljax.commands.train import main as train
from rolljax.trainer.algorithms import cispo, distill, dpo, grpo, gspo, kimi, reinforce, reward_model, tis, topr
from rolljax.trainer.algorithms.decoupled_ppo import DecoupledPpo
from rolljax.trainer.algorithms.ipa import Ipa
from rolljax.trainer.batch import PackShape, Sample
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.mesh import MeshSpec
from rolljax.trainer.optimizer import AdamW
from rolljax.trainer.paper import Stated
from rolljax.trainer.phase_trainer import PhaseTrainer
from rolljax.types import Key, Task, Trajectory, Turn

DOCS = Path(__file__).parents[3] / "docs"
sys.path.insert(0, str(DOCS))
pages = importlib.import_module("make_algorithm_pages")
sys.path.remove(str(DOCS))
CLASSES = [cls for classes in pages.algorithm_classes().values() for cls in classes]
each = pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)


# ---- pages ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made():
    """Return every page of algorithms, by file name."""
    return pages.pages()


def test_there_is_a_page_for_every_file(made):
    assert made.keys() == {"index.md", "defaults.md", *(f"{name}.md" for name in pages.algorithm_classes())}
    assert all(f"## {pages.module_of(cls)}.{cls.__name__}\n" in made[f"{pages.module_of(cls)}.md"] for cls in CLASSES)


def test_a_figure_appears_once_it_is_measured(tmp_path, made):
    (tmp_path / "curves.json").write_text('{"bandit": {"tis.Tis|0": {}, "tis.Tis|8": {}, "topr.SequenceTopr|0": {}}}')
    measured = pages.pages(tmp_path / "curves.json")
    assert "![Learning curve of Tis](curves/tis.png)" in measured["tis.md"]
    assert "curves/sequence_topr.png" in measured["topr.md"] and "curves/topr.png" not in measured["topr.md"]


def test_every_algorithm_is_in_the_index_and_most_are_in_the_table_of_choices(made):
    text = (DOCS / "algorithms.md").read_text()
    table = text[text.index("## Choose") : text.index("## Write your own")]
    for module, classes in pages.algorithm_classes().items():
        for cls in classes:
            assert f"[`{module}.{cls.__name__}`]({module}.md#" in made["index.md"]
    named = set(re.findall(r"trainer/algorithms/(\w+)\.py\)", table))
    assert len(named) >= 18 and named <= set(pages.algorithm_classes())


@each
def test_a_page_explains_every_setting(cls):
    meanings = pages.meanings_of(cls)
    assert set(meanings) == {f.name for f in dataclasses.fields(cls)} and all(meanings.values())
    assert len(pages.when(cls)) > 20


def test_attribute_docstrings_are_read_also_of_bases():
    assert pages.paragraphs_of(topr.Topr)[0].startswith("TOPR (arXiv 2503.14286): trajectories of positive")
    meanings = pages.meanings_of(topr.Topr)
    assert meanings["positive"].startswith("Weight of") and meanings["kl"]
    assert pages.meanings_of(distill.Distill)["coef"] == "Weight of the divergence."
    assert pages.shown(DecoupledPpo().correction) == "Correction(weight_cap=2.0)"


# ---- what papers state ----------------------------------------------------------------------------------------------


def flaws(cls):
    """Yield the errors in a class's statements about its paper."""
    paper, defaults = pages.paper_of(cls), {f.name: pages.field_default(f) for f in dataclasses.fields(cls)}
    if "none" not in pages.papers(cls) and not paper:
        yield "it names a paper: what does that state? Write `paper` (rolljax.trainer.paper)"
    for name, stated in paper.items():
        if not re.search(r"arXiv \d{4}\.\d{4,5}|doi 10\.|github\.com/", stated.where):
            yield f"{name}: which paper, and where?"
        if name not in defaults:
            yield f"{name} is no setting"
        elif defaults[name] == stated.value and stated.why:
            yield f"{name} is what the paper states: there is nothing to explain"
        elif defaults[name] != stated.value and len(stated.why.split()) <= 3:
            yield f"{name} is not {stated.value!r}: say why"


@each
def test_a_default_that_is_not_the_papers_says_why(cls):
    """The class of a paper says what the paper states, in `paper`; and where its own default is another one, why."""
    assert list(flaws(cls)) == []


def test_every_flaw_is_found():
    def of(**paper):
        return dataclasses.make_dataclass("Made", [], bases=(grpo.Grpo,), frozen=True, namespace={"paper": paper})

    at, why = "arXiv 2402.03300, equation 3", "because it is better so"
    for paper, says in [
        ({"clip_low": Stated(0.3, at)}, "say why"),
        ({"clip_low": Stated(0.2, at, why)}, "nothing to explain"),
        ({"clip_lo": Stated(0.2, at)}, "no setting"),
        ({"clip_low": Stated(0.2, "as usual")}, "which paper"),
    ]:
        (flaw,) = flaws(of(**paper))
        assert says in flaw
    assert list(flaws(of(clip_low=Stated(0.3, at, why), mean=Stated("group", at)))) == []
    Made = of()
    Made.__doc__ = "Something (arXiv 2402.03300)."
    assert ["what does that state" in flaw for flaw in flaws(Made)] == [True]


@each
def test_an_outside_oracle_is_named(cls):
    """Each test that `ORACLES` names is there; who has none says why."""
    for where, what in pages.oracles(cls):
        assert len(what.split()) >= 2
        if where != "none":
            file, _, test = where.partition("::")
            assert f"def {test}(" in (DOCS.parent / file).read_text(), f"{where} is not there"


def test_the_page_about_defaults_has_every_difference(made):
    text = made["defaults.md"]
    for cls in CLASSES:
        assert f"## {cls.__name__}\n" in text
        for name, stated in pages.paper_of(cls).items():
            assert f"| `{name}` | " in text and pages.linked(stated.why) in text.replace("\\|", "|")
    assert "| `kl` | `None` | `KlLoss(coef=0.04)` | " in text and "| `aggregation` | `'seq-mean-token-mean'` | " in text


# ---- gradients, against the tables of the papers' formulas ---------------------------------------------------------

# objective coefficients c at ratio .5, .95, 1.05, 1.5 for A = 1, then for A = -1
TABLES = [
    (reinforce.Reinforce(), (1, 1, 1, 1), (-1, -1, -1, -1)),
    (grpo.Grpo(), (0.5, 0.95, 1.05, 0), (0, -0.95, -1.05, -1.5)),
    (grpo.Grpo(dual_clip=1.3), (0.5, 0.95, 1.05, 0), (0, -0.95, -1.05, 0)),
    (DecoupledPpo(), (0.5, 0.95, 1.05, 0), (0, -0.95, -1.05, -1.5)),
    (tis.Tis(), (0.5, 0.95, 1, 1), (-0.5, -0.95, -1, -1)),
    (topr.Topr(), (1, 1, 1, 1), (-0.5, -0.95, -1, -1)),
    (topr.SequenceTopr(), (1, 1, 1, 1), (-0.5, -0.95, -1, -1)),
    (Ipa(), (1, 1, 1, 1), (-0.5, -0.95, -1, -1)),
    (cispo.Cispo(clip_low=0.1, clip_high=0.1), (0.9, 0.95, 1.05, 1.1), (-0.9, -0.95, -1.05, -1.1)),
    (cispo.Cispo(clip_low=0.1, clip_high=0.1, unified_mask=True), (0.9, 0.95, 1.05, 0), (0, -0.95, -1.05, -1.1)),
    (kimi.Kimi(), (1.069315, 1.005129, 0.995121, 0.959453), (-0.930685, -0.994871, -1.004879, -1.040547)),
    (gspo.Gspo(clip_low=0.2, clip_high=0.2), (0.5, 0.95, 1.05, 0), (0, -0.95, -1.05, -1.5)),
]


@pytest.mark.parametrize(("algorithm", "good", "bad"), TABLES, ids=lambda v: type(v).__name__)
def test_coefficients(algorithm, good, bad):
    got = pages.coefficients(algorithm)
    np.testing.assert_allclose([got[1.0, r] for r in pages.RATIOS], good, rtol=2e-6, atol=1e-7)
    np.testing.assert_allclose([got[-1.0, r] for r in pages.RATIOS], bad, rtol=2e-6, atol=1e-7)


def test_coefficients_of_pairs():
    got = pages.pair_coefficients(dpo.Dpo(beta=0.2))
    for margin, (chosen, rejected) in got.items():
        assert chosen == pytest.approx(0.2 / (1 + np.exp(0.2 * margin)), rel=1e-5) and rejected == -chosen
    scores = pages.score_coefficients(reward_model.RewardModel())
    assert scores[0.0] == pytest.approx((0.5, -0.5)) and scores[2.0][0] == pytest.approx(1 / (1 + np.exp(2)), rel=1e-5)


# ---- recipes --------------------------------------------------------------------------------------------------------


@each
def test_there_is_a_recipe(cls):
    config, settings = pages.command_of(cls)
    recipe = cli.load_recipe([config], settings).value
    assert type(recipe.phases[-1].algorithm) is cls


def test_no_recipe_is_left_over():
    assert {p.stem for p in pages.RECIPES.glob("*.gin")} == {
        pages.recipe_name(cls) for cls in CLASSES if cls.__name__ not in pages.FEW_SETTINGS
    }
    assert pages.FEW_SETTINGS.keys() <= {cls.__name__ for cls in CLASSES}


# ---- the example ----------------------------------------------------------------------------------------------------


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return a function that imports an example's file from the working directory as a user's."""
    made = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name):
        (code,) = re.findall(rf"```python\n(# {name}\.py\n.*?)```", (DOCS / "algorithms.md").read_text(), re.DOTALL)
        assert len([line for line in code.splitlines() if line.strip()]) <= 21
        (tmp_path / f"{name}.py").write_text(code)
        made.append(name)
        return importlib.import_module(name)

    yield load
    for name in made:
        del sys.modules[name]


def test_the_examples_command_is_accepted(example, capsys):
    example("raft")
    text = (DOCS / "algorithms.md").read_text()
    setting = re.search(r"python -m rolljax.train --gin quickstart --set '(rl/Phase.algorithm = @raft[^']*)'", text)[1]
    assert train(["--gin", "quickstart", "--set", setting, "--dry_run"]) == 0
    out = capsys.readouterr().out
    assert "rl: Raft" in out
    assert train(["--gin", "quickstart", "--set", setting, "--set", "Raft.treshold = 1", "--dry_run"]) == 2
    assert "threshold" in capsys.readouterr().err


def test_the_second_example_is_accepted(example, capsys):
    """Credit and objective of its own, rehearsed."""
    example("best_of")
    setting = "rl/Phase.algorithm = @best_of.BestOf()"
    assert train(["--gin", "quickstart", "--set", setting, "--dry_run"]) == 0
    assert "rl: BestOf" in capsys.readouterr().out


def test_every_field_is_explained():
    """Writers of algorithms find all that credit gets and gives."""
    text = (DOCS / "algorithms.md").read_text()
    for cls in (Episodes, Credit):
        table = re.search(rf"\| `{cls.__name__}` \| shape .*?\n\n", text, re.DOTALL)[0]
        first = [line.split("|")[1] for line in table.splitlines()[2:] if line]
        assert re.findall(r"`(\w+)`", " ".join(first)) == [f.name for f in dataclasses.fields(cls)]


def trajectory(rng, group, sibling, prompt, reward):
    tokens = rng.integers(0, 264, 6).astype(np.int32)
    turn = Turn(prompt, tokens, np.full(6, -5.6, np.float32), np.zeros(6, np.int32), "stop", reward, "")
    return Trajectory(Key(0, group, sibling), Task("t", group, "t"), (turn,), reward, {}, reward > 0, "ok")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["raft", "best_of"])
def test_the_example_learns(example, name, model, params):
    """One update makes what was rewarded likelier, and the rest not much."""
    module = example(name)
    rng = np.random.default_rng(0)
    groups = []
    for g in range(4):
        prompt = rng.integers(0, 264, 8).astype(np.int32)
        groups.append([trajectory(rng, g, s, prompt, float(s == g)) for s in range(4)])
    algorithm = module.Raft() if name == "raft" else module.BestOf()
    mesh = MeshSpec().build(jax.devices()[:1])
    optimizer = AdamW(lr=1e-3)
    trainer = PhaseTrainer(
        mesh, model, algorithm, optimizer, PackShape(1, 4, 64), steps=1, groups_per_step=4, limit_tok=6
    )
    state = trainer.states.init(jax.tree.map(jnp.copy, params))
    samples = [[Sample.of(t) for t in group] for group in groups]
    e = Episodes.of(groups, limit_tok=6)

    reader = dataclasses.replace(trainer, algorithm=grpo.Grpo(anchor="proximal"))  # it reads log-probs
    before = reader.compute_credit_inputs(state, reader.pack_samples(samples), e).trainer_logp
    step_state, step = trainer.step(state, groups, {}, 0)
    after = reader.compute_credit_inputs(step_state, reader.pack_samples(samples), e).trainer_logp
    rise = (after - before).mean(1)
    assert step.num_trained == 4 and rise[e.rewards == 1].min() > 0.02
    assert rise[e.rewards == 1].mean() > 2 * np.abs(rise[e.rewards == 0]).mean()
