"""Recipes are found by name: gin files, data files, classes, environments. Nothing else imports them."""

import ast
import fnmatch
import tomllib
from pathlib import Path

import pytest

import rolljax
from rolljax import cli
from rolljax.config.files import find_config
from rolljax.envs.catalog import make_spec, ref_of
from rolljax.envs.data.rows import find_files
from rolljax.errors import ConfigError

PACKAGE = Path(rolljax.__file__).parent
RECIPES = PACKAGE / "recipes"
FOLDERS = sorted(p.parent for p in RECIPES.glob("*/__init__.py"))


@pytest.mark.parametrize("name", ["think_j/think_j", "dlcot/data", "bsa/judged", "stagent/learnability"])
def test_a_gin_file_is_found_with_its_folder_and_where_it_is_alone_without(name):
    assert find_config(name) == str(RECIPES / f"{name}.gin")
    stem = name.split("/")[1]
    alone = len(list(RECIPES.glob(f"*/{stem}.gin"))) == 1
    assert alone or stem in ("data", "judged")
    assert find_config(stem) == (str(RECIPES / f"{name}.gin") if alone else stem)


def test_a_misspelled_recipe_is_named():
    with pytest.raises(ConfigError, match="did you mean 'think_j'"):
        cli.load_recipe(["think_jj"], [])


def test_a_class_and_an_environment_are_found_by_their_names():
    recipe = cli.load_recipe(["quickstart"], ["Recipe.env = @Travel()", "Travel.num_cities = 4"]).value
    assert recipe.env == make_spec("travel(num_cities=4)") and ref_of(recipe.env) == "travel(num_cities=4)"


def test_data_are_found_by_the_name_of_their_file():
    assert find_files("thinking_sums.jsonl", "x") == [RECIPES / "live_thinking" / "thinking_sums.jsonl"]


def test_the_core_imports_no_recipe():
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if RECIPES in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [f"{path}: {name}" for name in names if name.startswith("rolljax.recipes")]
    assert wrong == []


def test_every_recipe_has_a_page_and_travels_in_the_wheel():
    assert len(FOLDERS) > 10 and [f.name for f in FOLDERS if not (f / "README.md").is_file()] == []
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    globs = [g.replace("**", "*") for g in settings["package-data"]["rolljax.recipes"]]
    inside = [p for p in RECIPES.rglob("*") if p.is_file() and p.suffix not in (".py", ".pyc", ".md", ".png")]
    names = {p.relative_to(RECIPES).as_posix() for p in inside}
    assert [name for name in names if not any(fnmatch.fnmatch(name, g) for g in globs)] == []
