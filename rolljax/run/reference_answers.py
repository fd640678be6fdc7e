"""Reference answers that a supervised phase would imitate: their length and their reward, before anything compiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rolljax.envs.base import EnvSpec
from rolljax.envs.mixture import Mixture
from rolljax.envs.pool import Episode
from rolljax.errors import ConfigError, DataError, EnvError
from rolljax.model.tokenizer import Chat
from rolljax.types import Task

PLAYED = 8
"""Tasks whose reference answers are also given to the environment."""
SHOWN_CHARS = 400


@dataclasses.dataclass(frozen=True)
class ReferenceAnswer:
    """The reference answers of one episode."""

    task: Task
    texts: tuple[str, ...]
    """One for each turn that was looked at."""
    reward: float | None = None
    """Reward of the whole episode; None if it was not played."""
    success: bool = False
    """Whether the whole episode succeeded."""


async def read(episode: Episode, task: Task, max_turns: int, *, play: bool) -> ReferenceAnswer | None:
    """Ask an open episode for its reference answer; None if it has none.

    Args:
      play: give the answers to the environment as well, up to the episode's end.
    """
    try:
        texts = [await episode.reference_answer()]
        if not play:
            return ReferenceAnswer(task, tuple(texts))
        total = 0.0
        while True:
            result = await episode.step(texts[-1])
            total += result.reward
            if result.terminated or result.truncated or len(texts) == max_turns:
                return ReferenceAnswer(task, tuple(texts), total, result.success)
            texts.append(await episode.reference_answer())
    except EnvError:  # a lost episode, as in the run itself
        return None


def check(env: EnvSpec, answers: Sequence[ReferenceAnswer], chat: Chat, max_answer_tok: int) -> Sequence[str]:
    """Check reference answers; return warnings.

    Args:
      max_answer_tok: most tokens of one answer; a trajectory with a longer one is lost.

    Raises:
      DataError: the environment's own reward of an answer is 0 or negative, and its task does not count as solved.
      ConfigError: most answers are too long.
    """
    for a in answers:
        if a.reward is not None and a.reward <= 0 and not a.success:
            raise DataError(
                f"{_name(env, a.task)}: the reference answer is worth {a.reward:g}, and a supervised phase would "
                f"imitate it\n  answer: {_shown(a.texts[-1])}\n  fix:   mend the row or the reward; if {a.reward:g} is "
                "the best reward there is, let the task count as solved at it (Questions.solved_at)"
            )
    lengths = [(len(chat.answer_ids(text)), a.task, text) for a in answers for text in a.texts]
    too_long = [found for found in lengths if found[0] > max_answer_tok]
    if not too_long:
        return ()
    most, task, text = max(too_long, key=lambda found: found[0])
    about = f"{len(too_long)} of the {len(lengths)} reference answers that were looked at are longer"
    if 2 * len(too_long) <= len(lengths):
        return (
            f"{about} than Recipe.max_answer_tok = {max_answer_tok}: they are not trained on; the longest has {most}",
        )
    raise ConfigError(
        f"is too short: {about}, up to {most} tokens; {_name(env, task)}: {_shown(text)}",
        setting="Recipe.max_answer_tok",
        value=max_answer_tok,
        remedy=f"set it to {most}, or leave out rows with long answers",
    )


def _name(env: EnvSpec, task: Task) -> str:
    """Return the file and line of a task, or its number."""
    spec, index = (env.of[task.env].env, env.inner(task).index) if isinstance(env, Mixture) else (env, task.index)
    return spec.location(index) or f"{task.env}, task {task.index}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}...")
