"""Every code block of README and docs works as described (`docs_blocks` says how each kind is run)."""

import gzip
import shutil
import sys
from pathlib import Path

import pytest

from rolljax.commands.train import main as train
from rolljax.recipes.terminal_bench.terminal import OWN_TASKS

from .conftest import arguments
from .docs_blocks import KINDS, ROOT, Runner, blocks, commands, reason_not_to_run

# pages of algorithms are made from their configs, and tests/e2e/test_recipes.py runs those
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "rolljax/recipes").glob("*/README.md")),
]


def name_of(page):
    """Return the name of a page in test ids: its recipe's, or its file's."""
    return page.parent.name if page.parent.parent.name == "recipes" else page.name


DATA = ROOT / "tests" / "data"
# names under which the docs speak of folders of a user's own
MODELS = ("models/Qwen3-0.6B", "models/Qwen3-0.6B-Base", "Qwen3-0.6B", "Qwen3-8B", "some/hf/folder")
RUNS = ("quickstart", "a", "lora", "think_j_init", "palette_base", "palette_warm_up")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the quickstart briefly."""
    folder = tmp_path_factory.mktemp("docs") / "run"
    short = {"warm_start__Phase_dot_steps": 2, "rl__Phase_dot_steps": 2, "Recipe_dot_keep_checkpoints": 5}
    assert train(arguments(folder, **short)) == 0
    return folder


@pytest.fixture
def scratch(tmp_path, run, monkeypatch):
    """Set up a folder as a user has it: the repository's folders, a run, models and data under the names in the
    pages."""
    for name in ("configs", "deploy", "examples", "benchmarks", "docs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    for name in RUNS:
        shutil.copytree(run, tmp_path / "runs" / name)
    rollouts = tmp_path / "runs" / "a" / "rollouts"
    shutil.copy(rollouts / "step_4.jsonl", rollouts / "step_150.jsonl")
    for name in MODELS:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(run / "hf", tmp_path / name)
    (tmp_path / "my_tasks").symlink_to(OWN_TASKS)
    (tmp_path / "gsm8k").mkdir()
    shutil.copy(DATA / "word_problems.jsonl", tmp_path / "gsm8k" / "train.jsonl")
    with gzip.open(tmp_path / "HumanEval.jsonl.gz", "wb") as f:
        f.write((DATA / "code_problems.jsonl").read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:  # modules that pages write are theirs
        if Path(getattr(sys.modules[name], "__file__", None) or "/").is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page):
    wrong = [f"{block}: {block.kind or 'no kind'}" for block in blocks(page) if block.kind not in KINDS]
    assert not wrong


@pytest.mark.sweep
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.kind != "text" for b in blocks(p))], ids=name_of)
def test_every_block_runs(page, scratch):
    runner = Runner(page)
    try:
        for block in blocks(page):
            try:
                runner.run(block)
            except BaseException as e:
                raise AssertionError(f"{block} ({block.kind}): {type(e).__name__}: {e}\n{block.text}") from e
    finally:
        runner.close()


def test_most_commands_of_the_docs_are_run():
    every = [c for page in PAGES for b in blocks(page) if b.kind == "bash" for c in commands(b.text)]
    left_out = [c for c in every if reason_not_to_run(c)]
    assert len(left_out) < len(every) / 2, left_out


def test_commands_are_read_as_a_shell_reads_them():
    text = "a 1 \\\n    2  # why\n# all\nb 'x # y'\npython - <<'PY'\nprint(1)  # kept\nPY\nc"
    assert list(commands(text)) == ["a 1 2", "b 'x # y'", "python - <<'PY'\nprint(1)  # kept\nPY", "c"]
