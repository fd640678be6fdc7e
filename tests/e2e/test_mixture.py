"""A mixture end to end: shares in the record, resume to the bit, evaluation by domain."""

import pytest

from rolljax import loop
from rolljax.concurrency.event_loop import Stopped
from rolljax.config.loader import load
from rolljax.console.progress import Console
from rolljax.evaluation.settings import Benchmark
from rolljax.recipe import Recipe
from rolljax.run.folder import RunFolder
from rolljax.run.preflight import check

from .conftest import QUICKSTART, StopAt, check_conserved, rows

pytestmark = pytest.mark.slow

MIXTURE = f"""
from __gin__ import dynamic_registration
from rolljax import recipe
from rolljax.envs import mixture
from rolljax.envs import questions
from rolljax.envs.adapters import reasoning_gym
from rolljax.rollout import domains
from rolljax.rollout import filters
from rolljax.rollout import mixture_rules
from rolljax.sampler import settings
include '{QUICKSTART}'
recipe.Recipe.env = @mixture.Mixture()
mixture.Mixture.domains = {{'spell': @spell/mixture.Domain(), 'short': @short/mixture.Domain()}}
spell/mixture.Domain.env = @reasoning_gym.ReasoningGym()
spell/mixture.Domain.weight = 0.55
short/mixture.Domain.env = @short/reasoning_gym.ReasoningGym()
short/mixture.Domain.weight = 0.45
short/mixture.Domain.num_tasks = 9
short/reasoning_gym.ReasoningGym.config = {{'min_word_len': 3, 'max_word_len': 3}}
reasoning_gym.ReasoningGym.partial_credit = True
recipe.Recipe.domains = {{'short': @domains.DomainSettings()}}
domains.DomainSettings.max_answer_tok = 4
domains.DomainSettings.filters = @filters.FilterConfig()
settings.SamplerConfig.slots = 64
settings.SamplerConfig.prefill_chunk = 256
warm_start/recipe.Phase.steps = 4
warm_start/recipe.Phase.prompts_per_step = 7
warm_start/recipe.Phase.eval_every = 0
warm_start/recipe.Phase.stop_at_reward = None
warm_start/recipe.Phase.mixture = @mixture_rules.Scheduled()
mixture_rules.Scheduled.at = {{0: {{'spell': 1.0, 'short': 0.0}}, 3: {{'spell': 0.0, 'short': 1.0}}}}
rl/recipe.Phase.steps = 6
rl/recipe.Phase.prompts_per_step = 6
rl/recipe.Phase.group_size = 4
rl/recipe.Phase.eval_every = 3
rl/recipe.Phase.mixture = @mixture_rules.Curriculum()
recipe.Recipe.evaluation = @recipe.Evaluation()
recipe.Evaluation.tasks = 9
recipe.Recipe.save_every = 2
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folders of an uninterrupted run, and of the same run stopped in both phases and resumed."""
    place = tmp_path_factory.mktemp("mixture")
    (place / "mixture.gin").write_text(MIXTURE)
    loaded = load([place / "mixture.gin"], root=Recipe)
    plan = check(loaded.value)

    def run(name, *stops):
        folder = RunFolder(place / name)
        folder.prepare(loaded, fresh=False)
        for stop in stops:
            console = StopAt(stop)
            with pytest.raises(Stopped):
                loop.train(plan, folder, console, lambda console=console: console.stopped)
        return loop.train(plan, folder, Console())[0], folder.path

    straight, continued = run("straight"), run("continued", 2, 7)
    return straight, continued, loaded.value


def test_resume_is_bitwise(runs):
    (a, straight), (b, continued), _ = runs
    from rolljax.trainer.state import fingerprint

    assert fingerprint(a.state) == fingerprint(b.state)
    keep = lambda row: {k: v for k, v in row.items() if not k.startswith(("time/", "tput/", "sampler/", "trackers/"))}  # noqa: E731
    ours, theirs = ([keep(row) for row in rows(folder)] for folder in (straight, continued))
    assert [{k: r[k] for k in r if not k.endswith("wait_s")} for r in ours] == [
        {k: r[k] for k in r if not k.endswith("wait_s")} for r in theirs
    ]


def test_shares_are_those_of_the_rules(runs):
    (_, folder), _, _ = runs
    every = rows(folder)
    warm, rl = ([r for r in every if r["phase"] == name] for name in ("warm_start", "rl"))
    assert [r["domain/spell/trained_n"] for r in warm] == [7, 5, 2, 0]
    assert [r["domain/spell/share_frac"] for r in warm] == pytest.approx([1, 2 / 3, 1 / 3, 0])
    assert all(r["domain/spell/trained_n"] + r["domain/short/trained_n"] == 6 for r in rl)
    assert rl[0]["domain/spell/share_frac"] == pytest.approx(0.55)
    assert all(r["domain/short/len_tok"] <= 4 for r in rl)
    assert {"domain/spell/heldout_mean", "domain/short/heldout_mean", "heldout/reward_mean"} <= rl[2].keys()
    check_conserved(every)


def test_an_evaluation_knows_the_domains(runs):
    recipe = runs[2]
    tasks = Benchmark.of_recipe(recipe).tasks()
    assert [t.env for t in tasks] == ["spell"] * 5 + ["short"] * 4
