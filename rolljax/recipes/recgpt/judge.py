"""Judges of RecGPT's three tasks: one question to a judge model about an answer, and a rule in place of the model.

The question is asked by `rewards.judge.Judge` in training, by `data.judge.JudgeFilter` when own answers are chosen to
learn from, and by `pass_rate`. A judge sees the user's behaviour and the answer, never what the user wants in truth.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Mapping, Sequence

from rolljax.chat_models.base import Asking, ChatModelConfig
from rolljax.chat_models.rule import RuleModel
from rolljax.data.judge import JudgeFilter
from rolljax.errors import DataError
from rolljax.judging.judge import JudgePanel
from rolljax.judging.prompts import filled, guarded, mark_of, quoted
from rolljax.judging.verdict import read_label
from rolljax.recipes.recgpt.users import Record, named
from rolljax.rewards.judge import Judge
from rolljax.types import Message

RUBRIC = """A recommender answered a question about a user. In the question `lamp x2 d11` means: two events with \
lamps, the last one on day 11.
{question}
The answer:
{answer}
After `interests:` it must name everything with two or more events, and nothing else. After `next:` its first tag must \
be the one of these with the newest event. After `why` it must name an event of the user and the item's category, and \
no event that the user does not have.
Is the answer acceptable?"""
"""The question to a judge; `Judge` adds the form of the verdict."""
PASS, FAIL = "pass", "fail"
FORM = 'End with one line of JSON: {"verdict": V}, where V is "pass" or "fail".'
_BRIEF = re.compile(r"(\w{1,32}) x(\d{1,6}) d(\d{1,6})")
_QUESTION = re.compile(r"^(interests|next|why ?[\w ]{0,40}): (.{1,2000})$", re.MULTILINE)
_ANSWER = re.compile(r"\[(material \w{1,32})\]\n([^\n]{0,2000})\n\[/\1\]")
_EVENT = re.compile(r"(\w{1,32}) on day (\d{1,6})")


def accepts(question: str, answer: str) -> bool:
    """Return whether an answer to a question of `users` passes: the rule that `RUBRIC` describes.

    Raises:
      DataError: it is no such question.
    """
    found = _QUESTION.search(question)
    if found is None:
        raise DataError("a question is none of interests, next and why")
    task, history = found[1], {tag: (int(n), day) for tag, n, day in _BRIEF.findall(found[2].split(";")[0])}
    liked = {tag for tag, (num, _) in history.items() if num > 1}
    if task == "interests":
        return set(named(answer)) == liked
    if task == "next":
        return named(answer)[:1] == [max(liked, key=lambda tag: int(history[tag][1]))] if liked else False
    said, category = _EVENT.findall(answer), task.removeprefix("why").strip()
    true = all(tag in history and history[tag][1] == day for tag, day in said)
    return bool(said) and true and category in _EVENT.sub("", answer)


def explained(prompt: str, answer: str, record: Record) -> float:
    """Return 1 if `accepts` does: a reward for `Questions.reward`."""
    return float(accepts(prompt, answer))


def verdict(messages: Sequence[Message]) -> str:
    """Answer a prompt with `RUBRIC` by the rule `accepts`, as a judge model would: the last quoted text is the answer.

    Raises:
      DataError: the prompt has no question of `users`.
    """
    said = messages[-1].content
    answers = [text for _, text in _ANSWER.findall(said)]
    return json.dumps({"verdict": PASS if answers and accepts(said, answers[-1]) else FAIL})


RULE_JUDGE = RuleModel(verdict)
"""The judge of tiny runs: the rule, in place of a model."""


@dataclasses.dataclass(frozen=True)
class ExplanationJudge(Judge):
    """The judge that rewards explanations: 1 for a pass, else 0."""

    model: ChatModelConfig = RULE_JUDGE
    """The judge model; the rule, unless another is named."""
    rubric: str = RUBRIC
    """The judge's prompt; `{question}` and `{answer}` are replaced."""
    labels: Mapping[str, float] = dataclasses.field(default_factory=lambda: {PASS: 1.0, FAIL: 0.0})
    """Reward by label."""
    solved_at: float | None = dataclasses.field(default=1.0, kw_only=True)
    """Reward from which on an explanation counts as right."""


def judge_filter(model: ChatModelConfig) -> JudgeFilter:
    """Return the stage that keeps records whose `answer` to their `question` a judge passes."""
    form = r'"verdict":\s?"(pass|fail)"'
    return JudgeFilter(f"{RUBRIC}\n\n{FORM}", form, (PASS,), model=model, temperature=0.0, max_tok=64)


def pass_rate(model: ChatModelConfig, questions: Sequence[str], answers: Sequence[str]) -> float:
    """Return the fraction of answers that a judge passes; one without a verdict does not pass.

    Raises:
      InfraError: the judge does not answer.
    """

    async def verdicts() -> list[str | None]:
        panel = JudgePanel((model,), 1, Asking(0.0, 64))
        try:
            return [
                await _verdict(panel, q, a, str(i)) for i, (q, a) in enumerate(zip(questions, answers, strict=True))
            ]
        finally:
            await panel.close()

    found = asyncio.run(verdicts())
    return sum(label == PASS for label in found) / len(found)


async def _verdict(panel: JudgePanel, question: str, answer: str, address: str) -> str | None:
    mark = mark_of(question, answer)
    prompt = guarded(mark, filled(f"{RUBRIC}\n\n{FORM}", {"question": question, "answer": quoted(mark, answer)}))
    labels = {PASS: PASS, FAIL: FAIL}
    return (await panel.ballot(prompt, lambda text: read_label(text, "verdict", labels), address)).label
