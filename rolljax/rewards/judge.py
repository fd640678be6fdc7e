"""Models as judges: a chat model sees an answer and a rubric; its verdict, parsed strictly, is the reward.

A verdict that does not have exactly the requested form is rejected and requested again. The policy's text is
untrusted: it is quoted between random marks, and the prompt tells the judge to follow no instructions between them.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from rolljax.chat_models.base import Asking, ChatModelConfig
from rolljax.envs.questions import Questions
from rolljax.envs.text import after_thinking
from rolljax.errors import ConfigError, Range, check_fields
from rolljax.judging.calls import CallLimits
from rolljax.judging.judge import all_of, ask
from rolljax.judging.prompts import Prompt, digest, filled, guarded, mark_of, quoted
from rolljax.judging.verdict import Unreadable, VerdictForm
from rolljax.rewards.base import Reward, RewardConfig, RewardContext
from rolljax.rewards.compose import on_curve
from rolljax.types import Task, Trajectory

Verdict = dict[str, Any]
"""The fields of a verdict by name."""


@dataclasses.dataclass(frozen=True)
class ModelJudge(RewardConfig):
    """The settings of every judge. Subclasses define the questions, and the reward for the verdicts."""

    model: ChatModelConfig
    """The judge model."""
    _: dataclasses.KW_ONLY
    num: Annotated[int, Range(low=1)] = 1
    """Number of verdicts requested for each question."""
    solved_at: float | None = None
    """Reward from which on the task counts as solved; None: the judge does not decide."""
    part: str = "judge"
    """Name of this reward in `reward_parts`."""
    temperature: Annotated[float, Range(low=0)] = 0.0
    """Sampling temperature of the judge's answers."""
    max_tok: Annotated[int, Range(low=1)] = 1024
    """Maximum number of tokens in an answer of the judge."""
    max_chars: Annotated[int, Range(low=1)] = 20_000
    """Maximum number of characters of an answer that the judge is shown."""
    limits: CallLimits = CallLimits()
    """Limits on the judge's calls, in addition to the limits of its model."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.num > 1 and not self.temperature:
            raise ConfigError(
                "would be the same answer several times: temperature is 0",
                setting=f"{type(self).__name__}.num",
                value=self.num,
                remedy="set temperature to 0.7 or so, or num to 1",
            )

    @property
    def name(self) -> str:
        return self.part

    def check(self, around: RewardContext) -> None:
        self.model.check()
        self.prompts(around, around.env.task(0), "")

    def open(self, around: RewardContext) -> JudgeScorer:
        return JudgeScorer(self, around)

    @abc.abstractmethod
    def prompts(self, around: RewardContext, task: Task, answer: str) -> Mapping[str, Prompt]:
        """Return the judge's prompts about an answer, by name.

        Raises:
          ConfigError: the prompts need the task's reference answer, and the task has none.
        """

    @abc.abstractmethod
    def read(self, text: str) -> Verdict:
        """Parse a judge's answer.

        Raises:
          Unreadable: it holds no verdict.
        """

    def write(self, verdict: Verdict) -> str:
        """Return the shortest text that `read` parses as this verdict; it is kept of an answer."""
        return json.dumps(verdict)

    @abc.abstractmethod
    def reward(self, verdicts: Mapping[str, Sequence[Verdict]]) -> Reward:
        """Compute the reward from all verdicts on the questions of `prompts`."""

    def shown(self, text: str) -> str:
        """Return the part of an answer that a judge sees: the text after its thinking, cut to the end of a long one."""
        return after_thinking(text).strip()[-self.max_chars :]

    def solves(self, value: float) -> bool | None:
        """Return whether a reward counts the task as solved; None: it does not decide."""
        return None if self.solved_at is None else value >= self.solved_at


class JudgeScorer:
    """An open judge."""

    def __init__(self, cfg: ModelJudge, around: RewardContext) -> None:
        self._cfg, self._around = cfg, around
        self._model = cfg.model.open()
        identity = json.dumps([cfg.model.identity, cfg.temperature, cfg.max_tok])
        self._calls = around.calls(cfg.name, identity, cfg.limits)

    async def score(self, task: Task, trajectory: Trajectory) -> Reward:
        """Return the reward of an episode that did not fail."""
        return await self.judge(task, trajectory.turns[-1].text)

    async def judge(self, task: Task, answer: str) -> Reward:
        """Return the reward of an answer."""
        cfg = self._cfg
        prompts = cfg.prompts(self._around, task, answer)
        asked = await all_of([self._ask(prompt, i) for prompt in prompts.values() for i in range(cfg.num)])
        return cfg.reward({name: asked[k * cfg.num : (k + 1) * cfg.num] for k, name in enumerate(prompts)})

    async def _ask(self, prompt: Prompt, number: int) -> Verdict:
        """Return verdict `number` on a question."""
        cfg = self._cfg

        async def once(attempt: int) -> str:
            how = Asking(cfg.temperature, cfg.max_tok, int(digest(f"{number} {attempt}")[:7], 16))
            return cfg.write(await ask(self._model, prompt, how, cfg.read))

        def kept(said: Any) -> Verdict:
            if not isinstance(said, str):
                raise Unreadable("the kept verdict is not a text")
            return cfg.read(said)

        return await self._calls.answer(json.dumps([[[m.role, m.content] for m in prompt], number]), once, kept)

    def counts(self) -> Mapping[str, int]:
        """Return the number of calls, and of faults of calls and their model by kind; `failed` counts the model's own
        faults only."""
        own = collections.Counter(self._calls.counts())
        del own["failed"]
        return own + collections.Counter(self._model.counts())

    async def close(self) -> None:
        """Release all resources."""
        await self._calls.close()
        await self._model.close()


@dataclasses.dataclass(frozen=True)
class Judge(ModelJudge):
    """A judge that marks an answer by a rubric, in one or more dimensions, with an optional veto.

    The prompt has the judge end with one JSON object, `{"facts": 8, "service": 6, "made_up": false}`: every dimension a
    number within `scale`, the veto true or false. The reward is the weighted mean of the marks, each from 0 to 1; 0
    where the veto is true (STAgent).
    """

    rubric: str
    """The judge's prompt; `{question}`, `{answer}` and `{reference}` are replaced by the task, the last answer, and the
    task's reference answer."""
    dimensions: Mapping[str, float] = dataclasses.field(default_factory=lambda: {"score": 1.0})
    """Weights of the marks by name."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best mark."""
    veto: str = ""
    """Name of the veto; empty: there is none."""
    labels: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Reward by label, instead of `dimensions`: the judge ends with `{"verdict": "..."}`, which must be one of these
    labels."""
    combine: Literal["mean", "majority"] = "mean"
    """Combination of the `num` verdicts: their mean, or the most frequent of `labels`."""
    calibration: tuple[tuple[float, float], ...] = ()
    """Points `(reward, calibrated reward)` in rising order, as `calibration.isotonic` fits them on a labelled set;
    linear in between, constant beyond the ends. Empty: no calibration."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{answer}" not in self.rubric:
            raise ConfigError(
                "does not contain {answer}", setting="Judge.rubric", value=self.rubric, remedy="add {answer}"
            )
        if self.scale[0] >= self.scale[1]:
            raise ConfigError("is empty", setting="Judge.scale", value=self.scale, remedy="like (0, 10)")
        if not self.labels and not (self.dimensions and sum(self.dimensions.values()) > 0):
            raise ConfigError(
                "weighs nothing", setting="Judge.dimensions", value=dict(self.dimensions), remedy="weights above 0"
            )
        if self.combine == "majority" and not self.labels:
            raise ConfigError(
                "counts labels, and there are none", setting="Judge.combine", value=self.combine, remedy="set labels"
            )
        if self.veto in self.dimensions:
            raise ConfigError("is a dimension", setting="Judge.veto", value=self.veto, remedy="choose another name")

    @property
    def form(self) -> VerdictForm:
        """Return the form of a verdict."""
        if self.labels:
            return VerdictForm(labels={"verdict": list(self.labels)})
        return VerdictForm(marks=dict.fromkeys(self.dimensions, self.scale), flags=[self.veto] if self.veto else [])

    def read(self, text: str) -> Verdict:
        return self.form.read(text)

    def prompts(self, around: RewardContext, task: Task, answer: str) -> Mapping[str, Prompt]:
        mark, reference = mark_of(around.seed, task.id, answer), ""
        if "{reference}" in self.rubric:
            reference = reference_of(around, task, "Judge.rubric")
        texts = {"question": task.content, "answer": quoted(mark, self.shown(answer)), "reference": reference}
        return {"": guarded(mark, f"{filled(self.rubric, texts)}\n\n{self.form.request()}")}

    def reward(self, verdicts: Mapping[str, Sequence[Verdict]]) -> Reward:
        return self.worth(verdicts[""])

    def worth(self, verdicts: Sequence[Verdict]) -> Reward:
        """Compute the reward from all verdicts on one answer."""
        parts: dict[str, float] = {}
        if self.labels:
            said = collections.Counter(v["verdict"] for v in verdicts)
            most = max(said.values())
            chosen = [label for label in self.labels if said[label] == most]
            worths = [self.labels[label] for label in (chosen[:1] if self.combine == "majority" else said.elements())]
            value = sum(worths) / len(worths)
            parts["agreed"] = most / len(verdicts)
        else:
            low, high = self.scale
            for name in self.dimensions:
                parts[name] = sum((v[name] - low) / (high - low) for v in verdicts) / len(verdicts)
            total = sum(self.dimensions.values())
            value = sum(weight * parts[name] for name, weight in self.dimensions.items()) / total
            if self.veto:
                parts[self.veto] = float(sum(v[self.veto] for v in verdicts) * 2 > len(verdicts))
                value *= 1 - parts[self.veto]
        if self.calibration:
            parts["uncalibrated"] = value
            value = on_curve(self.calibration, value)
        return Reward(value, parts, self.solves(value))


@dataclasses.dataclass(frozen=True)
class PairJudge(ModelJudge):
    """The settings of every judge that compares the policy's answer with the task's reference answer. In a prompt, the
    policy's answer is `a` or `b`, which is the name of the question."""

    _: dataclasses.KW_ONLY
    orders: Literal["both", "random"] = "both"
    """Order of the two answers in the prompt. `both`: the judge is asked once with the policy's answer first and once
    with it second, and the reward is the mean; a judge that always prefers the same position then gives every answer
    the same reward. `random`: asked once, in an order chosen by the answer's hash."""

    def prompts(self, around: RewardContext, task: Task, answer: str) -> Mapping[str, Prompt]:
        other = reference_of(around, task, type(self).__name__, whole=True)
        drawn = "a" if int(digest(f"{around.seed} {task.id} {answer}"), 16) % 2 == 0 else "b"
        sides = ("a", "b") if self.orders == "both" else (drawn,)
        return {side: self._prompt(around.seed, task, answer, other, side) for side in sides}

    def _prompt(self, seed: int, task: Task, answer: str, other: str, side: str) -> Prompt:
        a, b = (answer, other) if side == "a" else (other, answer)
        mark = mark_of(seed, task.id, f"{a}\0{b}")
        return guarded(mark, self.text(mark, task.content, quoted(mark, self.shown(a)), quoted(mark, self.shown(b))))

    @abc.abstractmethod
    def text(self, mark: str, question: str, a: str, b: str) -> str:
        """Return the question about two quoted answers."""

    def preference(self, verdict: Verdict, side: str) -> float:
        """Return 1 if a verdict prefers the answer on this side, 0 if it prefers the other, 0.5 for a tie."""
        return 0.5 if verdict["better"] == "tie" else float(verdict["better"] == side)

    def worth(self, verdict: Verdict, side: str) -> float:
        """Return the reward of one verdict. side: of the policy's answer."""
        return self.preference(verdict, side)

    def reward(self, verdicts: Mapping[str, Sequence[Verdict]]) -> Reward:
        means = [sum(self.worth(v, side) for v in found) / len(found) for side, found in verdicts.items()]
        wins = [sum(self.preference(v, side) for v in found) for side, found in verdicts.items()]
        value, parts = sum(means) / len(means), {}
        if len(wins) == 2:
            parts["orders_agree"] = float(wins[0] == wins[1])
        return Reward(value, parts, self.solves(value))


@dataclasses.dataclass(frozen=True)
class Comparison(PairJudge):
    """A judge that compares the policy's answer with the task's reference answer. The reward is 1 where the policy's is
    better, 0 where the other is, 0.5 for a tie."""

    FORM: ClassVar = VerdictForm(labels={"better": ("a", "b", "tie")})

    rubric: str
    """The judge's prompt; `{question}`, `{a}`, `{b}` are replaced by the task and both answers."""
    part: str = dataclasses.field(default="comparison", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if "{a}" not in self.rubric or "{b}" not in self.rubric:
            raise ConfigError(
                "does not contain {a} and {b}", setting="Comparison.rubric", value=self.rubric, remedy="add both"
            )

    def text(self, mark: str, question: str, a: str, b: str) -> str:
        return f"{filled(self.rubric, {'question': question, 'a': a, 'b': b})}\n\n{self.FORM.request()}"

    def read(self, text: str) -> Verdict:
        return self.FORM.read(text)


def reference_of(around: RewardContext, task: Task, setting: str, *, whole: bool = False) -> str:
    """Return the task's reference answer. whole: with its solution steps.

    Raises:
      ConfigError: there is none.
    """
    if not isinstance(around.env, Questions):
        raise ConfigError(
            f"asks for recorded answers, and {around.env.name} has none",
            setting=setting,
            remedy="an environment of envs.questions, or another rubric",
        )
    question = around.env.question(task.index)
    text = "\n".join(filter(None, (question.solution, question.answer))) if whole else question.answer
    if not text:
        raise ConfigError(f"asks for recorded answers, and task {task.index} has none", setting=setting)
    return text
