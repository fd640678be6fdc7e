"""Models write the traces of a judge and a critic, and pairs for offline training are made of them (Think-J)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rolljax.chat_models.base import Asking, ChatModel
from rolljax.concurrency.event_loop import SteppedLoop
from rolljax.envs.base import NUM_INDICES
from rolljax.envs.tasks import training_indices
from rolljax.envs.text import bounded
from rolljax.errors import ConfigError, DataError
from rolljax.recipes.think_j import thought_pairs
from rolljax.recipes.think_j.judging import JudgeQuestion, Judging
from rolljax.recipes.think_j.thought_pairs import Traces
from rolljax.storage import durable, journal

if TYPE_CHECKING:
    from rolljax.library.model import LoadedModel

TRACES, PAIRS = "traces.jsonl", "pairs.jsonl"
"""The files of the folder: every trace in the order of arrival, and the pairs, made again from all traces."""


@dataclasses.dataclass(frozen=True)
class JudgePairs:
    """The result: the pairs and their statistics."""

    pairs: Path
    """Path of the file of pairs, with rows of prompt, chosen and rejected."""
    counts: Mapping[str, int]
    """Number of questions by outcome (`thought_pairs.Outcome`)."""

    @property
    def num(self) -> int:
        """Number of pairs in the file."""
        return self.counts.get("judge_right", 0) + self.counts.get("judge_wrong", 0)


def make(
    env: Judging,
    judge: ChatModel | LoadedModel,
    critic: ChatModel | LoadedModel | None = None,
    *,
    to: str | Path,
    num: int,
    held_out_frac: float = 0.1,
    how: Asking = Asking(temperature=1.0),  # noqa: B008  # frozen
    concurrency: int = 64,
) -> JudgePairs:
    """Ask a judge about `num` pairs of answers, a critic about each trace, and write the pairs of traces.

    They are the first `num` pairs that are not held out, each once, with the order of the two answers drawn at random.
    Traces in the folder are not requested again, so the same call continues where it was interrupted.

    Args:
      env: whose questions; of a critic's ones (`DigitSums.critic_frac`) the label is left out. critic: None: the judge
        is its own. to: a folder for `TRACES` and `PAIRS`. held_out_frac: share of the pairs that are left out for
      evaluations, as `Evaluation.held_out_frac`; 0: none. how: temperature, tokens and seed of the traces.
      concurrency: most questions at a time.

    Raises:
      InfraError: a model gave no answer. ConfigError: the folder holds traces of other questions. DataError: there are
        fewer pairs.
    """
    folder = Path(to)
    folder.mkdir(parents=True, exist_ok=True)
    indices = _indices(env, num, held_out_frac)
    done = _read(folder / TRACES, indices)

    asking = _Asking(env, _chat(judge), _chat(judge if critic is None else critic), how)

    async def one(index: int) -> None:
        done[index] = await asking.traces(index)
        journal.append(folder / TRACES, done[index].to_json())

    with SteppedLoop() as loop:
        for _ in loop.each([i for i in indices if i not in done], one, concurrency):
            pass
    records, counts = thought_pairs.build(env, (done[i] for i in indices))
    durable.write(folder / PAIRS, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
    return JudgePairs(folder / PAIRS, {str(k): n for k, n in counts.items()})


@dataclasses.dataclass(frozen=True)
class _Asking:
    env: Judging
    judge: ChatModel
    critic: ChatModel
    how: Asking

    async def traces(self, index: int) -> Traces:
        question = dataclasses.replace(self.env.question(index), told=None)
        judged = await self._ask(self.judge, question, 2 * index)
        label = thought_pairs.label_for_critic(self.env, question, judged)
        return Traces(index, judged, await self._ask(self.critic, self.env.critic(question, label), 2 * index + 1))

    async def _ask(self, model: ChatModel, question: JudgeQuestion, number: int) -> str:
        how = dataclasses.replace(self.how, seed=(self.how.seed * 1_000_003 + number) % 2**31)
        answer = await model.ask(self.env.prompt(question), how)
        if not answer.is_whole and self.env.read(answer.text) is not None:
            return ""  # cut after a text that only looks like a verdict
        return bounded(answer.text)


def _chat(model: ChatModel | LoadedModel) -> ChatModel:
    from rolljax.library.model import LoadedModel

    return model.chat_model() if isinstance(model, LoadedModel) else model


def _indices(env: Judging, num: int, held_out_frac: float) -> list[int]:
    """Return the indices of the first `num` different tasks of the training split."""
    found = training_indices(env, held_out_frac, num, range(0, NUM_INDICES, 2))
    if len(found) < num:
        raise DataError(f"{env.name} has only {len(found)} different pairs to train on, {num} were asked for")
    return found


def _read(path: Path, indices: Sequence[int]) -> dict[int, Traces]:
    """Return the traces in the file; an incomplete last line is dropped."""
    found = {t.index: t for t in journal.read_lines(path, lambda record: Traces(**record))}
    if strange := sorted(set(found) - set(indices)):
        raise ConfigError(
            f"holds traces of question {strange[0]}, which is not asked about", setting="to", value=str(path.parent),
            remedy="name another folder",
        )  # fmt: skip
    return found
