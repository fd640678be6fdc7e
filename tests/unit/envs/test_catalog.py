"""Environments by short name, and tasks by reference."""

import pytest

from rolljax.envs.adapters.reasoning_gym import ReasoningGym
from rolljax.envs.catalog import make_spec, names, prefixes, ref_of, task_of
from rolljax.envs.games.frozen_lake import FrozenLake
from rolljax.errors import ConfigError

REFS = {
    "frozen_lake": FrozenLake(),
    "frozen_lake(size=5, max_turns=12)": FrozenLake(size=5, max_turns=12),
    "rg:chain_sum": ReasoningGym("chain_sum"),
    "rg:chain_sum(config={'min_terms': 2}, seed=3)": ReasoningGym("chain_sum", {"min_terms": 2}, 3),
}


@pytest.mark.parametrize("ref", REFS)
def test_a_reference_makes_the_same_environment_again(ref):
    spec = REFS[ref]
    assert make_spec(ref) == spec == make_spec(ref_of(spec))
    assert ref_of(spec) == ref
    assert task_of(ref_of(spec, 7)) == (spec, spec.task(7))


def test_a_class_of_ones_own():
    assert make_spec("rolljax.envs.games.frozen_lake.FrozenLake(seed=2)") == FrozenLake(seed=2)


@pytest.mark.parametrize(
    "ref, said",
    [
        ("frozen_lak", "did you mean frozen_lake"),
        ("gr:chain_sum", "did you mean rg:"),
        ("frozen_lake(sise=5)", "did you mean size"),
        ("frozen_lake(size=__import__('os'))", "name=literal"),
        ("frozen_lake(5)", "name=literal"),
        ("os.path", "not an EnvSpec"),
        ("no.such.Class", "cannot be imported"),
        ("", "is not an environment"),
    ],
)
def test_what_is_none_is_refused(ref, said):
    with pytest.raises(ConfigError, match=said):
        make_spec(ref)


def test_a_reference_without_index_names_no_task():
    with pytest.raises(ConfigError, match="#0"):
        task_of("frozen_lake")


@pytest.mark.parametrize("path", [*names().values(), *(path for path, _ in prefixes().values())])
def test_every_name_leads_to_a_class(path):
    module, _, name = path.rpartition(".")
    __import__(module)
