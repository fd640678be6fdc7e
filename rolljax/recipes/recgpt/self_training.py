"""RecGPT's stages one after the other: `python -m rolljax.recipes.recgpt.self_training FOLDER`.

The policy of recgpt.gin is trained (base, then aligned). It answers questions about users whose interests nobody has
written down, a judge reads the answers, and the policy imitates the answers that passed. If it was stopped, the same
command continues.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rolljax.chat_models.base import ChatModelConfig
from rolljax.chat_models.local import LocalModel
from rolljax.data.attempts import SampleAttempts
from rolljax.data.pipeline import Pipeline, PipelineResult, run
from rolljax.data.rejection import RejectionSampling
from rolljax.library.run import Run
from rolljax.library.verbs import train
from rolljax.recipes.recgpt import users
from rolljax.recipes.recgpt.judge import RULE_JUDGE, judge_filter
from rolljax.sampler.settings import SamplerConfig
from rolljax.storage import durable

UNLABELLED_SEED = 1000
"""Added to the seed of users without labels, so that they are no others."""


def align(folder: Path, seed: int = 0) -> Run:
    """Train recgpt.gin in `folder/aligned`."""
    return train("recgpt", set={"Recipe.seed": seed}, run_dir=folder / "aligned", progress=False)


def unlabelled(folder: Path, num: int, seed: int) -> Path:
    """Write the three questions about each of `num` new users, without answers, unless they are there; return the
    file."""
    path = folder / "unlabelled.jsonl"
    if path.is_file():  # what answers them would take another file for other questions
        return path
    items = users.synthetic_items()
    new = users.synthetic_users(num, items, seed=UNLABELLED_SEED + seed)
    rows: list[Mapping[str, Any]] = [
        *users.interest_questions(new),
        *users.tag_questions(new),
        *users.explanation_questions(new, items),
    ]
    durable.write(path, _lines({"question": row["question"]} for row in rows))
    return path


def own_answers(aligned: Run, questions: Path, folder: Path, *, k: int = 2, seed: int = 0) -> PipelineResult:
    """Write the policy's answers to a file of questions to `folder/data.jsonl`. k: answers to each question, sampled at
    temperature 1; equal ones are kept once."""
    policy = LocalModel(str(aligned.path), SamplerConfig(slots=192, max_context=128))
    sample = SampleAttempts(k=k, prompt="{question}", score=_candidate, temperature=1.0, max_tok=24)
    stages = (sample, RejectionSampling(cap=k, similarity=1.0))
    pipeline = Pipeline(stages, policy, key="question", seed=seed, concurrency=192)
    return run(pipeline, str(questions), folder, setup={"k": k, "seed": seed})


def passed(answers: Path, folder: Path, judge: ChatModelConfig) -> PipelineResult:
    """Write those records of `answers/data.jsonl` that a judge passes to `folder/data.jsonl`."""
    return run(Pipeline((judge_filter(judge),)), str(answers / "data.jsonl"), folder)


def imitate(folder: Path, aligned: Run, answers: Path, seed: int = 0) -> Run:
    """Train self_training.gin in `folder`, from the aligned policy, on `answers/data.jsonl`."""
    settings = {
        "Recipe.model": str(aligned.path / "hf"),
        "Records.path": str(answers / "data.jsonl"),
        "Recipe.seed": seed,
    }
    return train("recgpt/self_training", set=settings, run_dir=folder, progress=False)


def self_train(folder: Path, *, num: int = 300, seed: int = 0, judge: ChatModelConfig | None = None) -> Run:
    """Do all of it in a folder; return the last run. num: users without labels. judge: None: `RULE_JUDGE`."""
    aligned = align(folder, seed)
    own_answers(aligned, unlabelled(folder, num, seed), folder / "answers", seed=seed)
    passed(folder / "answers", folder / "passed", judge or RULE_JUDGE)
    return imitate(folder / "self_trained", aligned, folder / "passed", seed)


def _candidate(record: Mapping[str, Any], answer: str) -> float:
    """Score every answer that is not empty alike: the judge decides later."""
    return float(bool(answer.strip()))


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    """Train in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--users", type=int, default=300, help="users without labels")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    self_train(args.folder, num=args.users, seed=args.seed)


if __name__ == "__main__":
    main()
