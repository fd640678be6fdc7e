"""rolljax.config.loader: what loads, and what every broken config says."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import gin
import pytest

sys.path.insert(0, str(Path(__file__).parent))

import config_fixture as fx

from rolljax.config import loader
from rolljax.config.resolved import ABSENT, diff
from rolljax.errors import ConfigError, DataError

ROOT = Path(__file__).parents[3]
HEAD = "from __gin__ import dynamic_registration\nimport config_fixture as fx\n"  # two lines: bindings start at 3


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Return load(text, *settings, other_file=text): writes main.gin (and others) to the working directory and loads
    it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(text="", *settings, files=("main.gin",), **others):
        Path("main.gin").write_text(HEAD + text)
        for name, other in others.items():
            Path(f"{name}.gin").write_text(other)
        return loader.load(files, settings, root=fx.Recipe)

    yield run
    assert not gin.config._CONFIG and not gin.config._IMPORTS and not gin.config.config_is_locked()


PHASES = """
fx.Recipe.phases = [@warm/fx.Phase(), @main/fx.Phase()]
warm/fx.Phase.steps = 3
main/fx.Phase.steps = %steps
fx.Phase.temperature = 0.7
steps = 100
"""


# ---- good paths -----------------------------------------------------------------------------------------------------


def test_no_files_gives_defaults_with_ints_made_floats(load):
    loaded = loader.load([], root=fx.Recipe)
    assert loaded.value == fx.Recipe()
    assert type(loaded.value.rate) is float


def test_scopes_macros_and_tuples(load):
    value = load(PHASES + "warm/fx.Phase.tags = ['a', 'b']").value
    warm, main = value.phases
    assert warm == fx.Phase(steps=3, temperature=0.7, tags=("a", "b"))
    assert main == fx.Phase(steps=100, temperature=0.7)
    assert type(warm) is fx.Phase and type(value.phases) is tuple and type(warm.tags) is tuple


def test_nested_scopes_and_unscoped_references_inherit(load):
    text = """
        fx.Recipe.optimizer = @big/fx.AdamW()
        fx.AdamW.schedule = @fx.Schedule()
        big/fx.Schedule.warmup_steps = 7
        fx.Recipe.critic = @big/late/fx.Critic()
        big/fx.Critic.lr = 2
    """
    value = load(text).value
    assert value.optimizer.schedule.warmup_steps == 7
    assert value.critic == fx.Critic(lr=2.0)


def test_blocks_and_values(load):
    text = """
fx.Recipe:
    seed = 3
    rate = 2
    folder = '/tmp/x'
    pair = (3, 'b')
    sizes = [1, 2]
    table = {'a': 1, 'b': 2.5}
    envs = {'first': @fx.Gspo()}
    reward_fn = @fx.reward
    maker = @fx.Gspo
    anything = {'k': [1, -2, None, True]}
fx.AdamW.clip = 1
"""
    loaded = load(text)
    v = loaded.value
    assert (v.seed, v.rate, v.folder, v.pair, v.sizes) == (3, 2.0, Path("/tmp/x"), (3, "b"), [1, 2])
    assert v.table == {"a": 1.0, "b": 2.5} and type(v.table["a"]) is float
    assert v.envs == {"first": fx.Gspo()} and v.reward_fn is fx.reward and v.maker is fx.Gspo
    assert v.optimizer.clip == 1.0 and type(v.optimizer.clip) is float
    assert loaded.resolved["envs.first.__class__"] == "config_fixture.Gspo"
    assert loaded.resolved["reward_fn"] == "config_fixture.reward"


def test_include_finds_configs_that_come_with_rolljax(tmp_path, monkeypatch):
    from rolljax.recipe import Recipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.gin").write_text(
        "from __gin__ import dynamic_registration\nfrom rolljax import recipe\n"
        "include 'quickstart.gin'\nrl/recipe.Phase.steps = 7\n"
    )
    assert loader.load(["mine.gin"], root=Recipe).value.phases[1].steps == 7


def test_include_is_beside_the_file_and_may_be_overridden(load, tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "base.gin").write_text(HEAD + "fx.Recipe.seed = 1\nfx.Recipe.name = 'base'\n")
    (tmp_path / "sub" / "top.gin").write_text("include 'base.gin'\n" + HEAD + "fx.Recipe.seed = 2\n")
    value = load(files=["sub/top.gin"]).value
    assert (value.seed, value.name) == (2, "base")


def test_an_empty_file_gives_the_defaults(load):
    assert load(files=["none.gin"], none="").value == fx.Recipe()


def test_modules_of_one_name_are_told_apart(load, tmp_path):
    for package in ("left", "right"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "envs.py").write_text("import config_fixture\nclass Env(config_fixture.Gspo): pass\n")
    text = """
from left import envs
from right import envs as other
fx.Recipe.algo = @envs.Env()
fx.Recipe.anything = @other.Env()
envs.Env.clip_high = 1
other.Env.clip_high = 2
"""
    loaded = load(text)
    assert (loaded.value.algo.clip_high, loaded.value.anything.clip_high) == (1.0, 2.0)
    assert "from right import envs as right_envs" in loaded.operative
    assert load(files=["again.gin"], again=loaded.operative).value == loaded.value
    with pytest.raises(ConfigError, match="is ambiguous"):
        load(text, "Env.clip_high = 3")
    assert load(text, "right.envs.Env.clip_high = 3").value.anything.clip_high == 3.0


def test_the_operative_file_is_plain_gin(load):
    loaded = load(PHASES, "Recipe.seed = 3")
    try:
        with gin.unlock_config():
            gin.parse_config(loaded.operative)
            assert gin.query_parameter("config_fixture.Recipe.seed") == 3
    finally:
        gin.clear_config()


def test_dynamic_registration_line_may_be_left_out(load):
    assert load(files=["bare.gin"], bare="import config_fixture\nconfig_fixture.Recipe.seed = 5").value.seed == 5


def test_later_file_overrides_and_takes_away_what_it_replaces(load):
    base = HEAD + "fx.Recipe.algo = @fx.Grpo()\nfx.Grpo.clip_high = %high\nhigh = 0.3\n"
    loaded = load("fx.Recipe.algo = @fx.Gspo()", base=base, files=["base.gin", "main.gin"])
    assert loaded.value.algo == fx.Gspo()
    assert "Grpo" not in loaded.operative


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("steps = 5", "phases[1].steps", 5),
        ("steps=5", "phases[1].steps", 5),
        ("fx.Recipe.seed = 4", "seed", 4),
        ("Recipe.seed = 4", "seed", 4),
        ("config_fixture.Recipe.seed = 4", "seed", 4),
        ("warm/Phase.steps = 9", "phases[0].steps", 9),
        ("warm/Phase.temperature = 1", "phases[0].temperature", 1.0),
        ("Phase.temperature = 0.5", "phases[1].temperature", 0.5),
        ("Grpo.clip_high = .3", "algo.clip_high", 0.3),
        ("AdamW.betas = [.8, .9]", "optimizer.betas", [0.8, 0.9]),
        ("Schedule.kind = cosine", "optimizer.schedule.kind", "cosine"),
        ("Recipe.folder = ~/runs/a-1", "folder", "~/runs/a-1"),
        ("Recipe.name = 2024-01-01", "name", "2024-01-01"),
        ("Recipe.algo = @Gspo()", "algo.__class__", "config_fixture.Gspo"),
        ("Recipe.critic = @fx.Critic()", "critic.lr", 1e-5),
        ("Recipe.algo = @extra.envs.Mine()", "algo.__class__", "extra.envs.Mine"),
        ("Recipe.phases = [@main/Phase()]", "phases[0].steps", 100),
    ],
)
def test_settings(load, tmp_path, setting, path, value):
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "__init__.py").touch()
    (tmp_path / "extra" / "envs.py").write_text("from config_fixture import Gspo\nclass Mine(Gspo): pass\n".replace(
        "class", "import dataclasses\n@dataclasses.dataclass(frozen=True)\nclass"))  # fmt: skip
    loaded = load(PHASES, setting)
    assert loaded.resolved[path] == value
    again = load(files=["again.gin"], again=loaded.operative)
    assert (again.value, again.resolved, again.operative) == (loaded.value, loaded.resolved, loaded.operative)
    for name in [name for name in sys.modules if name.startswith("extra")]:
        del sys.modules[name]


def test_default_object_keeps_its_own_values_under_an_override(load):
    loaded = load("", "Schedule.warmup_steps = 4", "AdamW.clip = 1.0")
    assert loaded.value.optimizer == fx.AdamW(lr=3e-6, clip=1.0, schedule=fx.Schedule(warmup_steps=4))


def test_a_setting_finds_classes_beside_those_of_the_config():
    """In a process that has not imported them, and imports no others for it."""
    code = f"""if True:
        import sys
        from rolljax.config import loader
        from rolljax.recipe import Recipe
        for name in "Cispo", "cispo.Cispo", "trainer.algorithms.cispo.Cispo":
            settings = [f"rl/Phase.algorithm = @{{name}}()", "Cispo.clip_high = 3.0"]
            loaded = loader.load(["{ROOT}/configs/quickstart.gin"], settings, root=Recipe)
            print(loaded.value.phases[-1].algorithm.clip_high, "rolljax.trainer.algorithms.gigpo" in sys.modules)
        try:
            loader.load(["{ROOT}/configs/quickstart.gin"], ["rl/Phase.algorithm = @Gigpoo()"], root=Recipe)
        except Exception as e:
            print("did you mean 'GiGpo'?" in str(e), "rolljax.trainer.algorithms.gigpo" in sys.modules)
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.split() == [*["3.0", "False"] * 3, "True", "False"], ran.stderr


def test_the_last_setting_wins(load):
    assert load("", "Recipe.seed = 1", "Recipe.seed = 2").value.seed == 2


def test_setting_a_field_of_an_object_that_a_setting_brings(load):
    assert load("", "Recipe.critic = @Critic()", "Critic.lr = 1").value.critic == fx.Critic(lr=1.0)


def test_resolved_has_every_field_and_is_json(load):
    resolved = load(PHASES).resolved
    assert json.loads(json.dumps(resolved)) == resolved
    tops = {path.partition(".")[0].partition("[")[0] for path in resolved}
    assert tops == {f.name for f in dataclasses.fields(fx.Recipe)} | {"__class__"}
    assert resolved["__class__"] == "config_fixture.Recipe"
    assert resolved["phases[0].__class__"] == "config_fixture.Phase" and resolved["phases[1].tags"] == []
    assert resolved["optimizer.schedule.warmup_steps"] == 10 and resolved["folder"] is None


def test_operative_is_a_runnable_file_with_macros(load):
    loaded = load(PHASES + "fx.Recipe.rate = 1e999", 'Recipe.name = it\'s "q"')
    assert "steps = 100" in loaded.operative and "%steps" in loaded.operative
    again = load("", "steps = 7", files=["again.gin"], again=loaded.operative)
    assert diff(loaded.resolved, again.resolved) == [("phases[1].steps", 100, 7)]


def test_diff(load):
    one, two = load(PHASES), load(PHASES, "Recipe.phases = [@warm/Phase()]", "Recipe.seed = 2")
    changes = {path: (a, b) for path, a, b in diff(one.resolved, two.resolved)}
    assert changes["seed"] == (0, 2)
    assert changes["phases[1].steps"] == (100, ABSENT)
    assert not diff(one.resolved, one.resolved)


def test_loads_are_independent(load):
    first = load(PHASES, "Recipe.seed = 9")
    assert load("").value == fx.Recipe()
    with pytest.raises(ConfigError):
        load("fx.Recipe.seed = 'x'")
    assert load(PHASES, "Recipe.seed = 9") == first


def test_locate(load):
    loaded = load(PHASES, "Recipe.seed = 2")

    def where(setting):
        return loaded.locate(ConfigError("bad", setting=setting)).where

    assert where("Recipe.seed") == "--set 'Recipe.seed = 2'"
    assert where("Phase.temperature") == "main.gin:7"
    assert where("Phase.steps") == "main.gin:5, main.gin:6"
    assert where("warm/Phase.steps") == "main.gin:5"
    assert where("AdamW.lr") == "default of config_fixture.AdamW.lr"
    assert where("Phase") == "main.gin:4"
    assert where("Nothing.known") == ""


def test_threads_that_load_at_the_same_time_do_not_meet():
    def seeds(first):
        return [loader.load([], [f"Recipe.seed = {i}"], root=fx.Recipe).value.seed for i in range(first, first + 20)]

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        found = list(threads.map(seeds, range(0, 80, 20)))
    assert sum(found, []) == list(range(80))


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Is built once both threads build one, and loads a config meanwhile."""

    seed: int = 0
    both: ClassVar = threading.Barrier(2, timeout=60)

    def __post_init__(self) -> None:
        self.both.wait()
        assert loader.load([], [f"Recipe.seed = {self.seed}"], root=fx.Recipe).value.seed == self.seed


def test_no_load_waits_for_another_one():
    """Neither one of another thread nor one inside of it: a load has no state that another one could meet."""
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = list(threads.map(lambda i: loader.load([], [f"Meeting.seed = {i}"], root=Meeting).value.seed, (3, 4)))
    assert found == [3, 4]


def test_each_reference_builds_its_own_object_in_its_scope(load):
    """A macro's value is built in the scope of the macro's name, once for every place that reads it."""
    text = """
big = @fx.AdamW()
big/fx.AdamW.lr = 0.25
fx.Recipe.optimizer = %big
fx.Recipe.anything = [%big, @fx.AdamW(), @big/fx.AdamW()]
"""
    value = load(text).value
    first, plain, scoped = value.anything
    assert value.optimizer == first == scoped == fx.AdamW(lr=0.25) and plain == fx.AdamW()
    assert len({id(o) for o in (value.optimizer, first, scoped)}) == 3


# ---- broken configs: (id, main.gin after HEAD, settings, fragments of the message) ----------------------------------

BROKEN = [
    ("field", "fx.Grpo.clip_hihg = 0.3", [], ["main.gin:3", "fx.Grpo.clip_hihg", "did you mean 'clip_high'?", "clip_low"]),
    ("scoped field", "a/fx.Phase.step = 3", [], ["main.gin:3", "did you mean 'steps'?"]),
    ("class", "fx.Grop.clip_high = 0.3", [], ["main.gin:3", "no 'Grop' in config_fixture", "did you mean 'Grpo'?"]),
    ("class in value", "\nfx.Recipe.algo = @fx.Gsop()", [], ["main.gin:4", "did you mean 'Gspo'?"]),
    ("symbol", "fxx.Grpo.clip_high = 0.3", [], ["main.gin:3", "'fxx' is not imported", "did you mean 'fx'?"]),
    ("no symbol", "Grpo.clip_high = 0.3", [], ["main.gin:3", "write fx.Grpo"]),
    ("block", "fx.Grop:\n  clip_high = 0.3", [], ["main.gin:4", "did you mean 'Grpo'?"]),
    ("module", "import rolljax.erors", [], ["main.gin:3", "no module 'rolljax.erors'", "did you mean 'errors'?"]),
    ("top module", "import nowhere_at_all", [], ["main.gin:3", "no module 'nowhere_at_all'", "PYTHONPATH"]),
    ("needs module", "import needs_it", [], ["main.gin:3", "needs_it was found", "importing it failed", "absent_dependency"]),
    ("raises", "import raises_it", [], ["main.gin:3", "raises_it was found", "ValueError: boom"]),
    ("gin feature", "from __gin__ import telepathy", [], ["main.gin:3", "not a feature of gin"]),
    ("include", "include 'bsae.gin'", [], ["main.gin:3: bsae.gin does not exist", "did you mean 'base.gin'?"]),
    ("include itself", "include 'main.gin'", [], ["main.gin:3", "includes itself"]),
    ("macro", "stepz = 3\nfx.Recipe.seed = %steps", [], ["main.gin:4: Recipe.seed reads %steps, which is not defined", "did you mean 'stepz'?"]),
    ("unread macro", "steps = 3", [], ["main.gin:3: steps sets nothing", "Class.field = %steps"]),
    ("unread class", "fx.Gspo.clip_high = 3", [], ["main.gin:3", "no Gspo is built", "@config_fixture.Gspo()"]),
    ("unread scope", PHASES + "wram/fx.Phase.temperature = 3", [], ["main.gin:9: wram/Phase.temperature", "did you mean 'warm'?"]),
    ("unread after same file", "fx.Recipe.algo = @fx.Gspo()\nfx.Grpo.clip_high = 1.0", [], ["main.gin:4", "no Grpo is built"]),
    ("syntax", "fx.Recipe.seed = = 3", [], ["main.gin:3", "fx.Recipe.seed = = 3"]),
    ("open bracket", "fx.Recipe.sizes = [1,\n", [], ["main.gin:3", "syntax error", "fx.Recipe.sizes = [1,", "a bracket or quote is open"]),
    ("two values", "fx.Recipe.seed = 1 2", [], ["main.gin:3", "syntax error", "newline"]),
    ("word", "fx.Recipe.name = run", [], ["main.gin:3", "cannot read the value 'run'", "quotes: 'run'"]),
    ("twice", "fx.Recipe.seed = 1\n\nfx.Recipe.seed = 2", [], ["main.gin:5", "already set at main.gin:3", "keep one"]),
    ("macro twice", "n = 1\nn = 2\nfx.Recipe.seed = %n", [], ["main.gin:4: n is already set at main.gin:3"]),
    ("include after", "fx.Recipe.seed = 1\ninclude 'base.gin'", [], ["base.gin:2", "already set at main.gin:3", "above"]),
    ("str for int", "fx.Recipe.seed = '3'", [], ["main.gin:3: Recipe.seed must be int", "'3'", "without quotes"]),
    ("float for int", "fx.Recipe.seed = 1e4", [], ["main.gin:3", "must be int", "10000.0", "write 10000"]),
    ("half for int", "fx.Recipe.seed = 1.5", [], ["main.gin:3", "must be int", "an integer"]),
    ("bool for int", "fx.Recipe.seed = True", [], ["main.gin:3", "must be int", "True", "write 1"]),
    ("str for float", "fx.Recipe.rate = 'fast'", [], ["main.gin:3", "must be float", "'fast'"]),
    ("int for bool", "fx.Recipe.debug = 1", [], ["main.gin:3", "must be bool", "write True"]),
    ("int for str", "fx.Recipe.name = 3", [], ["main.gin:3", "must be str", "write '3', with quotes"]),
    ("through a macro", "n = 'x'\nfx.Recipe.seed = %n", [], ["main.gin:4: Recipe.seed must be int"]),
    ("optional", "fx.AdamW.clip = 'no'", [], ["main.gin:3", "must be float or None"]),
    ("optional class", "fx.Recipe.critic = @fx.Gspo()", [], ["main.gin:3", "must be Critic or None", "@config_fixture.Critic()"]),
    ("literal", "fx.Schedule.kind = 'cosin'", [], ["main.gin:3", "'constant' or 'cosine'", "did you mean 'cosine'?"]),
    ("not called", "fx.Recipe.optimizer = @fx.AdamW", [], ["main.gin:3", "must be AdamW", "@config_fixture.AdamW()"]),
    ("scope, not called", "fx.Recipe.maker = @a/fx.Gspo", [], ["main.gin:3", "write @a/fx.Gspo()"]),
    ("protocol", "fx.Recipe.algo = @fx.Critic()", [], ["main.gin:3", "an object like Algorithm", "clip_high, loss"]),
    ("item", "fx.Recipe.sizes = [1, 2.5]", [], ["main.gin:3", "must be int (item 1 is 2.5)"]),
    ("no list", "fx.Recipe.phases = @fx.Phase()\nfx.Phase.steps = 1", [], ["main.gin:3", "tuple[Phase, ...]", "brackets"]),
    ("length", "fx.Recipe.pair = [1]", [], ["main.gin:3", "tuple[int, str]: 2 values, not 1"]),
    ("dict", "fx.Recipe.table = {'a': 'b'}", [], ["main.gin:3", "must be float (['a'] is 'b')"]),
    ("callable", "fx.Recipe.reward_fn = 'reward'", [], ["main.gin:3", "a function (@module.function)"]),
    ("missing in a scope", "fx.Recipe.phases = [@a/fx.Phase()]", [], ["main.gin:3: Phase.steps", "a/Phase.steps = ..."]),
    ("missing", "fx.Recipe.phases = [@fx.Phase()]", [], ["main.gin:3: Phase.steps", "has no default and is not set"]),
    ("required", "fx.Recipe.seed = %gin.REQUIRED", [], ["main.gin:3: Recipe.seed is required", "--set 'Recipe.seed = value'"]),
    ("post init", PHASES, ["warm/Phase.steps = -1"], ["--set 'warm/Phase.steps = -1': Phase.steps must not be negative"]),
    ("post init scope", PHASES.replace("= 3", "= -3"), [], ["main.gin:5: Phase.steps must not be negative"]),
    ("post init default", "fx.Grpo.clip_low = 0.9", [], ["default of config_fixture.Grpo.clip_high: Grpo.clip_high must be"]),
    ("value error", PHASES, ["Phase.temperature = -1"], ["main.gin:4: Phase cannot be built: ValueError: temperature"]),
    ("not frozen", "fx.Thawed.size = 1", [], ["main.gin:3: fx.Thawed is not a frozen dataclass", "frozen=True"]),
    ("not a dataclass", "fx.Recipe.anything = @fx.NotAConfig()", [], ["main.gin:3", "is not a frozen dataclass"]),
    ("function field", "fx.reward.text = 'a'", [], ["main.gin:3", "fx.reward is not a frozen dataclass"]),
    ("not callable", "fx.Recipe.anything = @fx.TABLE", [], ["main.gin:3", "not a class or function"]),
    ("circle", "a = %b\nb = %a\nfx.Recipe.seed = %a", [], ["main.gin:3: a refers to itself in a circle: a -> b -> a"]),
    ("object in itself", "fx.Recipe.anything = @fx.Recipe()", [], ["main.gin:3", "in a circle: Recipe.anything -> Recipe.anything"]),
    ("circle of two", "fx.Recipe.optimizer = @fx.AdamW()\nfx.AdamW.schedule = @s/fx.Recipe()", [],
     ["main.gin:3", "in a circle: Recipe.optimizer -> AdamW.schedule -> Recipe.optimizer"]),
    ("union", "fx.Recipe.limit = 'nnoe'", [], ["main.gin:3", "must be int or 'none'", "did you mean 'none'?"]),
    ("open quote", "fx.Recipe.name = 'abc", [], ["main.gin:3", "syntax error", "'abc"]),
    ("field in a block", "fx.Grpo:\n  clip_low = 0\n  clip_hihg = 0.3", [], ["main.gin:5", "did you mean 'clip_high'?"]),
    ("set: no equals", "", ["steps"], ["--set 'steps'", "name = value"]),
    ("set: macro", PHASES, ["stpes = 3"], ["--set 'stpes = 3'", "did you mean 'steps'?"]),
    ("set: bare field", "", ["seed = 3"], ["neither a macro", "did you mean 'Recipe.seed'?"]),
    ("set: field", "", ["Recipe.sede = 3"], ["--set 'Recipe.sede = 3'", "did you mean 'seed'?"]),
    ("set: class", "", ["Recpie.seed = 3"], ["Recpie is not a class of this config", "did you mean 'Recipe'?"]),
    ("set: class of module", "", ["fx.Recpie.seed = 3"], ["no 'Recpie' in config_fixture", "did you mean 'Recipe'?"]),
    ("set: ambiguous", "import other_fixture\nfx.Recipe.algo = @other_fixture.Grpo()\nfx.Recipe.anything = @fx.Grpo()",
     ["Grpo.clip_high = 1"], ["is ambiguous", "config_fixture.Grpo, other_fixture.Grpo"]),
    ("set: value", "", ["Recipe.sizes = [1, 2"], ["--set 'Recipe.sizes = [1, 2'", "bracket"]),
    ("set: type", "", ["Recipe.seed = many"], ["--set 'Recipe.seed = many': Recipe.seed must be int", "'many'"]),
    ("set: bool", "", ["Recipe.debug = true"], ["must be bool", "write True"]),
    ("set: unread", "", ["Critic.lr = 1"], ["--set 'Critic.lr = 1'", "no Critic is built", "@config_fixture.Critic()"]),
    ("set: shadowed", PHASES, ["Phase.steps = 7"], ["sets nothing", "warm/Phase.steps (main.gin:5)", "set warm/Phase.steps and"]),
    ("set: macro not reached", PHASES, ["steps = 7", "main/Phase.steps = 8"], ["--set 'steps = 7': steps sets nothing"]),
    ("set: module", "", ["Recipe.algo = @rolljax.erors.X()"], ["no module 'rolljax.erors'", "did you mean 'errors'?"]),
    ("set: attribute", "", ["Recipe.algo = @rolljax.errors.DataEror()"], ["--set", "did you mean 'DataError'?"]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "settings", "fragments"), [row[1:] for row in BROKEN], ids=[row[0] for row in BROKEN])
def test_broken(load, tmp_path, text, settings, fragments):
    (tmp_path / "needs_it.py").write_text("import absent_dependency")
    (tmp_path / "raises_it.py").write_text("raise ValueError('boom')")
    (tmp_path / "other_fixture.py").write_text(
        "import dataclasses, config_fixture\n@dataclasses.dataclass(frozen=True)\nclass Grpo(config_fixture.Gspo): pass\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(text, *settings, base="import config_fixture as fx\nfx.Recipe.seed = 8\n")
    sys.modules.pop("other_fixture", None)
    message = str(caught.value)
    for fragment in fragments:
        assert fragment in message, message
    assert "rolljax.config.loader." not in message and "In call to configurable" not in message
    assert type(caught.value) is ConfigError


def test_missing_file_suggests_a_sibling(load):
    with pytest.raises(ConfigError, match=r"mian.gin does not exist\n  fix:   did you mean 'main.gin'\?"):
        load(files=["mian.gin"])


def test_missing_field_of_the_root(load):
    with pytest.raises(ConfigError, match="Needs.path has no default and is not set"):
        loader.load([], root=fx.Needs)


def test_root_must_be_a_frozen_dataclass():
    with pytest.raises(ConfigError, match="not a frozen dataclass"):
        loader.load([], root=fx.NotAConfig)


def test_what_a_class_says_of_its_data_is_its_own_sentence(load, tmp_path):
    (tmp_path / "noisy.py").write_text(
        "import dataclasses, config_fixture\nfrom rolljax.errors import DataError\n"
        "@dataclasses.dataclass(frozen=True)\nclass Rows(config_fixture.Gspo):\n"
        "    def __post_init__(self):\n        raise DataError('rows.jsonl has no column answer')\n"
    )
    with pytest.raises(DataError) as e:
        load("import noisy\nfx.Recipe.algo = @noisy.Rows()")
    assert str(e.value) == "rows.jsonl has no column answer" and type(e.value) is DataError
