"""Runs of stages of data pipelines, with a rule behind a real server as their model."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from rule_server import RuleServer

from rolljax.chat_models.client import EndpointConfig
from rolljax.data import pipeline
from rolljax.data.pipeline import Pipeline


def through(tmp_path, *stages, records, rule=None, **settings):
    """Run records through stages; return the rows, the ledgers, and the server."""
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(r) + "\n" for r in records))
    with RuleServer(rule) as server:
        model = EndpointConfig(server.url, "rule", retries=3, backoff_s=0.1) if rule else None
        found = pipeline.run(Pipeline(stages, model, **settings), str(source), tmp_path / "out", fresh=True)
    rows = [json.loads(line) for name in found.files for line in (found.folder / name).read_text().splitlines()]
    return rows, list(found.stages.values()), server


def coin(messages, rng):
    """Answer right with the probability in the question."""
    chance = float(messages[-1]["content"].split("with ")[1].split()[0])
    return f"Hm. \\boxed{{{7 if rng.random() < chance else 8}}}"
