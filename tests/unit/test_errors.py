"""Errors: owner, exit code, standard base class, text."""

import dataclasses
import pickle
import sys
from typing import Annotated

import pytest

from rolljax import errors
from rolljax.errors import (
    Checked,
    ConfigError,
    EnvError,
    HangError,
    Range,
    RolljaxError,
    SamplerError,
    boundary,
    needed,
)

LEAVES = RolljaxError.__subclasses__()


def test_exit_codes_and_owners():
    codes = {e.owner: e.exit_code for e in LEAVES}
    assert len(codes) == len(LEAVES) == len({e.__name__ for e in LEAVES})
    assert codes == {
        "config": 2,
        "data": 3,
        "env": 3,
        "sampler": 4,
        "trainer": 5,
        "checkpoint": 6,
        "hang": 7,
        "memory": 8,
        "storage": 74,
    }
    assert errors.EXIT_PREEMPTED not in codes.values() and RolljaxError.exit_code not in codes.values()


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda e: e.__name__)
def test_leaves_are_standard_errors_too_and_cross_processes(leaf):
    assert issubclass(leaf, (ValueError, RuntimeError, TimeoutError))
    again = pickle.loads(pickle.dumps(leaf("what happened")))
    assert type(again) is leaf and str(again) == "what happened"


def test_config_error_text():
    error = ConfigError("must be positive", setting="AdamW.lr", value=-1.0, remedy="try 1e-3", where="a.gin:7")
    assert str(error) == "a.gin:7: AdamW.lr must be positive\n  value: -1.0\n  fix:   try 1e-3"


def test_config_error_leaves_out_what_is_not_there():
    assert str(ConfigError("is odd")) == "is odd"
    assert str(ConfigError("is None", setting="A.b", value=None)) == "A.b is None\n  value: None"
    assert str(ConfigError("is odd", remedy="even it")) == "is odd\n  fix:   even it"


def test_config_error_keeps_its_first_origin():
    error = ConfigError("is odd", setting="A.b")
    assert error.located_at("x.gin:1") is error and str(error) == "x.gin:1: A.b is odd"
    assert str(error.located_at("y.gin:2")) == "x.gin:1: A.b is odd"


def test_config_error_pickles_with_its_parts():
    error = ConfigError("is odd", setting="A.b", value=3, remedy="even it", where="a.gin:1")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@dataclasses.dataclass(frozen=True)
class Shape(Checked):
    size: Annotated[int, Range(low=1, high=8)] = 4
    share: Annotated[float | None, Range(above=0, below=1, remedy="0.5 is usual")] = None


@dataclasses.dataclass(frozen=True)
class Wider(Shape):
    """A default of its own keeps the range, a range of its own replaces it."""

    size: Annotated[int, Range(low=1, high=16)] = 16
    share: float | None = 0.5


@pytest.mark.parametrize(
    "cls, settings, said",
    [
        (Shape, {"size": 9}, "Shape.size must be at least 1 and at most 8\n  value: 9\n  fix:   the default is 4"),
        (Shape, {"share": 1.0}, "Shape.share must be more than 0 and less than 1\n  value: 1.0\n  fix:   0.5 is usual"),
        (Wider, {"size": 17}, "Wider.size must be at least 1 and at most 16\n  value: 17\n  fix:   the default is 16"),
        (Wider, {"share": 0.0}, "Wider.share must be more than 0 and less than 1\n  value: 0.0\n  fix:   0.5 is usual"),
    ],
)
def test_a_range_at_a_field_is_checked(cls, settings, said):
    assert (Shape(share=None), Wider(size=9)) == (Shape(), Wider(9))
    with pytest.raises(ConfigError) as e:
        cls(**settings)
    assert str(e.value) == said


def test_boundary_gives_foreign_exceptions_an_owner():
    with (
        pytest.raises(EnvError, match="reset of lake: KeyError: 'hole'") as caught,
        boundary(EnvError, "reset of lake"),
    ):
        {}["hole"]
    assert isinstance(caught.value.__cause__, KeyError)


def test_boundary_lets_ours_through_and_leaves_interrupts_alone():
    ours = HangError("slow")
    with pytest.raises(HangError) as caught, boundary(SamplerError, "x"):
        raise ours
    assert caught.value is ours
    with pytest.raises(KeyboardInterrupt), boundary(SamplerError, "x"):
        raise KeyboardInterrupt
    with boundary(SamplerError, "x"):
        pass


def test_a_missing_package_names_what_installs_it():
    with (
        pytest.raises(ConfigError, match="a feature needs the package no_such_package") as e,
        needed("no_such_package", "a feature", install="no-such-package>=1", otherwise="do without"),
    ):
        import no_such_package.inner  # noqa: F401
    assert e.value.remedy == "pip install 'no-such-package>=1', or do without"


def test_a_package_that_another_one_lacks_is_its_own_error():
    with pytest.raises(ModuleNotFoundError, match="no_such_package"), needed("another", "a feature"):
        import no_such_package  # noqa: F401


def test_without_ray_a_pool_names_the_extra(monkeypatch):
    from rolljax.envs.pool.ray_cluster import RayCluster
    from rolljax.envs.pool.settings import PoolConfig

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="needs the package ray") as e:
        RayCluster().join(PoolConfig(where="ray"))
    assert e.value.remedy == "pip install 'rolljax[ray]', or set it to 'process'"
