"""The model card of a run: `README.md` of the Hugging Face folder that it writes, with its curves in the same folder.

The Hugging Face hub reads the front matter (https://huggingface.co/docs/hub/model-cards). The rest is for people: the
task, the data, the settings, the held-out rewards and the command. Neither part contains a time, so a continued run has
the same card as one that was never interrupted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rolljax
from rolljax import reading
from rolljax.storage import durable
from rolljax.storage.curves import draw
from rolljax.storage.environment import command_line
from rolljax.storage.layout import CONFIG, CURVES, ENVIRONMENT, RESOLVED

CARD = "README.md"
MAX_GIN_CHARS = 65_536
"""Characters of settings that a card shows; the run folder has all of them."""


def write(
    place: Path, run: Path, heldout: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], of: str
) -> None:
    """Write the card of a run and its curves into a Hugging Face folder.

    Args:
      run: folder with `config.gin`, `config.resolved.json` and `env.json`. heldout: `RunProgress.heldout_reward`.
      rows: of metrics.jsonl, as far as the weights were trained. of: which weights they are, a sentence.

    Raises:
      StorageError: it cannot be written.
    """
    if rows:
        durable.write(place / CURVES, draw(rows, heldout, times=False))
    again = "the command that trained the run writes it again"
    resolved, made = (reading.read_object(run / name, again) for name in (RESOLVED, ENVIRONMENT))
    gin = (run / CONFIG).read_text()
    durable.write(place / CARD, text(resolved, made, gin, heldout, rows, of))


def text(
    resolved: Mapping[str, Any],
    made: Mapping[str, Any],
    gin: str,
    heldout: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    of: str,
) -> str:
    """Return the text of the card.

    Args:
      resolved: every setting by its path. made: versions, devices and command of the run. gin: the settings as a file.
    """
    env, phases = _class(resolved, "env"), _phases(resolved)
    name = _env_name(resolved)
    algorithms = list(dict.fromkeys(_class(resolved, f"phases[{i}].algorithm") for i in range(len(phases))))
    parts = [
        _front_matter(name, algorithms, heldout),
        f"# {name}: {', '.join(algorithms)}\n",
        f"Trained with rolljax {rolljax.__version__}. {of}\n",
        "## Task and data\n",
        f"Tasks of `{env}`, {resolved.get('evaluation.held_out_frac', 0):.0%} of them held out by the hash of their "
        "content and never trained on.\n",
        _table(["setting", "value"], [[f"`{k}`", f"`{v!r}`"] for k, v in _under(resolved, "env").items()]),
        "## Held-out reward\n",
        _heldout(heldout),
        *(["## Curves\n", "![reward, entropy and mismatch over steps](curves.png)\n"] if rows else []),
        "## Training\n",
        _table(["phase", "algorithm", "steps", "prompts x answers", "optimizer", "learning rate"], phases),
        f"Starting weights: {_start(resolved)}. Precision of computations: {resolved.get('dtype', '')}.\n",
        "## Command\n",
        _fenced("bash", _command(made)),
        "With " + ", ".join(f"{k} {v}" for k, v in made.get("packages", {}).items()) + ".\n",
        "## All settings\n",
        _fenced("gin", gin[:MAX_GIN_CHARS].rstrip()),
    ]
    return "\n".join(parts)


def _front_matter(name: str, algorithms: Sequence[str], heldout: Sequence[Mapping[str, Any]]) -> str:
    """Return YAML between two rules. JSON is YAML: nothing in a name can break it."""
    data: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rolljax", "reinforcement-learning", *(re.sub(r"\W+", "-", a).lower() for a in algorithms)],
    }
    if heldout:
        result = {
            "task": {"type": "text-generation"},
            "dataset": {"type": name, "name": name, "split": "held out"},
            "metrics": [{"type": "reward", "name": "mean held-out reward", "value": round(heldout[-1]["mean"], 6)}],
        }
        data["model-index"] = [{"name": f"{name}-rolljax", "results": [result]}]
    lines = [f"{key}: {json.dumps(value, ensure_ascii=True)}" for key, value in data.items()]
    return "\n".join(["---", *lines, "---\n"])


def _heldout(heldout: Sequence[Mapping[str, Any]]) -> str:
    if not heldout:
        return "Not evaluated.\n"
    rows = [[str(e["phase"]), str(e["step"]), f"{e['mean']:.4f}", str(e["n"])] for e in heldout]
    return _table(["after phase", "step", "mean reward", "tasks"], rows)


def _phases(resolved: Mapping[str, Any]) -> list[list[str]]:
    found, i = [], 0
    while f"phases[{i}].name" in resolved:
        of = f"phases[{i}]"
        found.append(
            [
                str(resolved[f"{of}.name"]),
                _class(resolved, f"{of}.algorithm"),
                str(resolved[f"{of}.steps"]),
                f"{resolved[f'{of}.prompts_per_step']} x {resolved[f'{of}.group_size']}",
                _class(resolved, f"{of}.optimizer"),
                f"{resolved.get(f'{of}.optimizer.lr') or 'default'}",
            ]
        )
        i += 1
    return found


def _start(resolved: Mapping[str, Any]) -> str:
    model = resolved.get("model")
    if isinstance(model, str):
        start = f"the folder `{Path(model).name}`"
    else:
        start = f"random ones of a `{_class(resolved, 'model')}`"
    return start + (
        f", with adapters of rank {resolved['lora.rank']} that were added" if "lora.rank" in resolved else ""
    )


def _env_name(resolved: Mapping[str, Any]) -> str:
    """Return the environment's usual name: the setting that names its tasks, or else its class."""
    for setting in ("family", "domain", "id"):
        if isinstance(value := resolved.get(f"env.{setting}"), str):
            return value
    return _class(resolved, "env")


def _class(resolved: Mapping[str, Any], path: str) -> str:
    return str(resolved.get(f"{path}.__class__", "")).rpartition(".")[2]


def _under(resolved: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return settings below a path, by the rest of their paths; absolute paths become file names."""
    inside = {k.removeprefix(f"{path}."): v for k, v in resolved.items() if k.startswith(f"{path}.")}
    plain = {k: v for k, v in inside.items() if not k.endswith("__class__")}
    return {k: Path(v).name if isinstance(v, str) and v.startswith("/") else v for k, v in plain.items()}


def _command(made: Mapping[str, Any]) -> str:
    """Return the command as a user would type it, without the folders of absolute paths."""
    words = [str(word) for word in made.get("command", [])]
    return command_line([Path(word).name if word.startswith("/") else word for word in words])


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fenced(kind: str, text: str) -> str:
    """Return a block of code that its text cannot end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{kind}\n{text}\n{fence}\n"
