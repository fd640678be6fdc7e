"""The notebooks run from scratch in a separate kernel, and their stored outputs match."""

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from .conftest import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_KIB = 400
"""Of one with its outputs: they are read in a browser, and kept in git."""
LIMIT_S = 900


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(outputs):
    """Return the text of outputs."""
    return "\n".join(o.get("text", "") or o.get("data", {}).get("text/plain", "") for o in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_kept_and_small(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [c.execution_count for c in cells] == [*range(1, len(cells) + 1)], "executed from top to bottom"
    assert not [o for c in cells for o in c.outputs if o.output_type == "error"]
    assert path.stat().st_size < MAX_KIB * 1024 and "image/png" in path.read_text()
    assert f"/blob/main/notebooks/{path.name})" in notebook.cells[0].source and "colab-badge.svg" in path.read_text()
    assert not re.search(r"/(?:home|root|tmp|work)/", json.dumps([c.outputs for c in cells]))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_lead_somewhere(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for link in re.findall(r"\]\(((?!https?:)[^)#]+)", cell.source) if cell.cell_type == "markdown" else ():
            assert (path.parent / link).exists(), link


@pytest.mark.sweep
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    """With a plain user's JAX; the reward is up at the end, and progress was one output."""
    for name in ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    trained = [c for c in code_cells(notebook) if "rolljax.train(" in c.source]
    assert bool(trained) == Path(tmp_path / "runs").is_dir()
    for cell in trained:
        assert len(cell.outputs) <= 2 and any("text/html" in o.get("data", {}) for o in cell.outputs), cell.outputs
    said = "\n".join(texts(cell.outputs) for cell in code_cells(notebook))
    rewards = re.findall(r"(?:held-out reward|right:) ([\d.]+(?: -> [\d.]+)+)", said)[-1].split(" -> ")
    assert float(rewards[-1]) > float(rewards[0]) + 0.1, rewards
