"""Unrequested warnings about a run: limits that cut most answers, failing environments, a reward that never moves; and
sample answers."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from rolljax.console.terminal import visible
from rolljax.metrics import ENV_PREFIX
from rolljax.recipe import Phase, Recipe
from rolljax.types import Group, Trajectory

MOST = 0.5
"""Share of a step's trajectories from which on something is worth a notice."""
STILL_STEPS = 10
"""Steps after which a reward that was the same for every trajectory is worth one."""
FAR = 100.0
"""Factor by which a token's probability may change between sampling and training before it is worth one."""
DRIFT = 3.0
"""Factor by which a count of the environment may change since the first steps before it is worth one."""
DRIFT_STEPS = 10
"""Steps of which the means are compared."""
SHOWN_CHARS = 60


@dataclasses.dataclass
class PreemptionRule:
    """The factor by which to change the number of devices of a sampler's weights, from the number of preempted
    sequences per round of rollouts (RollPacker, arXiv 2509.21009): 2 when that grew, 1/2 when it did not happen for a
    while."""

    growth: float = 1.05
    """Growth factor of the number of preemptions from one round to the next above which they are too frequent."""
    quiet_rounds: int = 4
    """Without any, after which fewer devices do."""
    _before: int | None = None
    _quiet: int = 0

    def after_round(self, preemptions: int) -> float:
        """Return the factor after a round with this many preemptions; 1: no change."""
        before, self._before = self._before, preemptions
        self._quiet = 0 if preemptions else self._quiet + 1
        if before is not None and preemptions > self.growth * before:
            return 2.0
        if self._quiet == self.quiet_rounds:
            self._quiet = 0
            return 0.5
        return 1.0


class Alerts:
    """Notices about the steps of a phase, each given once."""

    def __init__(self, recipe: Recipe, phase: Phase) -> None:
        self._recipe, self._phase = recipe, phase
        self._given: set[str] = set()
        self._rewards: set[float] = set()
        self._steps = 0
        self._preemptions: defaultdict[bool, PreemptionRule] = defaultdict(PreemptionRule)
        """Of long rounds (`TailBatching`) and of all others, each by itself."""
        self._counts: defaultdict[str, list[float]] = defaultdict(list)
        """The environment's counts per trajectory, by step."""

    def step(self, groups: Sequence[Group]) -> list[str]:
        """Return warnings about the trajectories of a step; about reference answers only that they fail."""
        every = [t for g in groups for t in g.trajectories]
        texts = [self._failures(every)]
        if self._phase.algorithm.source == "sampler":
            texts += [self._cuts(every), self._first_answers(every), self._stillness(every)]
        return [text for text in texts if text]

    def row(self, row: Mapping[str, float]) -> list[str]:
        """Return warnings about a step's metrics."""
        return [*self._pages(row), *self._distance(row), *self._drift(row)]

    def _drift(self, row: Mapping[str, float]) -> list[str]:
        """Return a notice for each count of the environment, such as commands or time-outs per trajectory, that is far
        from that of the phase's first steps: the policy has found another way to behave, which need not be a better
        one. (ROLL's notes on agents at a terminal watch these counts.)"""
        texts = []
        for name in (n for n in row if n.startswith(ENV_PREFIX) and n.endswith("_n")):
            seen = self._counts[name]
            seen.append(row[name])
            if len(seen) <= 2 * DRIFT_STEPS:
                continue
            del seen[DRIFT_STEPS]
            before, now = (sum(part) / DRIFT_STEPS for part in (seen[:DRIFT_STEPS], seen[DRIFT_STEPS:]))
            low, high = sorted((before, now))
            if high - low > 0.5 and high > DRIFT * low and self._once(f"drift {name}"):
                texts.append(
                    f"{name} is {now:.2f} per trajectory in the last {DRIFT_STEPS} steps, and was {before:.2f} in the "
                    f"first {DRIFT_STEPS}: the policy behaves differently. Look at what it does in rollouts/ (`python "
                    "-m rolljax.show`) before you believe the reward"
                )
        return texts

    def _distance(self, row: Mapping[str, float]) -> list[str]:
        """Return a notice if the policy has moved too far from the one that sampled, in asynchronous training."""
        ratio = row.get("policy/ratio_max", 0.0)
        if not self._phase.async_ratio or not ratio > FAR or not self._once("far"):
            return []
        return [
            f"a token became {ratio:.0f} times as likely between sampling and training (policy/ratio_max): the policy "
            f"moves too fast for samples that are so old. Lower the learning rate, or Phase.async_ratio = "
            f"{self._phase.async_ratio:g}; if this continues, learning may collapse"
        ]

    def _pages(self, row: Mapping[str, float]) -> list[str]:
        """Return warnings about the sampler's settings; none if pages cannot run out."""
        cfg = self._recipe.sampler
        if cfg.pages is None or "sampler/preempt_n" not in row:
            return []
        rule, number = self._preemptions[row.get("groups/long_rounds_n", 0) > 0], int(row["sampler/preempt_n"])
        factor, tensor = rule.after_round(number), cfg.tensor or self._recipe.mesh.tensor
        if factor > 1 and self._once("preempted"):
            return [
                f"{number} sequences of this step gave up their pages and resumed later, more than before: "
                f"SamplerConfig.pages = {cfg.pages} are too few. Split the sampler's weights over twice as many "
                "devices of a host (SamplerConfig.tensor), which leaves room for more pages, or lower "
                "SamplerConfig.slots"
            ]
        if factor < 1 and tensor > 1 and self._once("quiet"):
            return [
                f"no sequence gave its pages back for {rule.quiet_rounds} steps: half as many devices for the "
                f"sampler's weights (SamplerConfig.tensor = {tensor // 2}) may do, and decode more side by side; "
                "`python -m rolljax.plan` says what fits"
            ]
        return []

    @property
    def _answer_limit(self) -> str:
        return f"Recipe.max_answer_tok = {self._recipe.max_answer_tok}"

    def _once(self, name: str) -> bool:
        is_new = name not in self._given
        self._given.add(name)
        return is_new

    def _failures(self, every: Sequence[Trajectory]) -> str:
        failed = [t for t in every if t.status == "failed"]
        if not failed or not self._once("failures"):
            return ""
        return (
            f"{len(failed)} of {len(every)} episodes of this step failed and are left out; the first: {failed[0].fault}"
        )

    def _cuts(self, every: Sequence[Trajectory]) -> str:
        """Return a warning that names the limit that cut most of the trajectories."""
        stages = Counter(t.fault.stage for t in every if t.status == "truncated" and t.fault)
        stage, number = stages.most_common(1)[0] if stages else ("", 0)
        if number < MOST * len(every) or not self._once(f"cut {stage}"):
            return ""
        r = self._recipe
        limits = {
            "answer": f"answers were cut at {self._answer_limit}: raise it, or ask for shorter answers",
            "context": f"episodes filled SamplerConfig.max_context = {r.sampler.max_context}: raise it, or set "
            "RolloutConfig.context = 'drop_oldest'",
            "turns": f"episodes used up their {r.max_turns} turns: raise {type(r.env).__name__}.max_turns, or choose "
            "easier tasks",
        }
        what = limits.get(stage, f"episodes were cut by a limit ({stage})")
        return f"{number} of {len(every)} {what}"

    def _first_answers(self, every: Sequence[Trajectory]) -> str:
        """Return a warning about episodes of several turns that a cut first answer ended."""
        if self._recipe.max_turns == 1:
            return ""
        ended = [t for t in every if len(t.turns) == 1 and t.fault and t.fault.stage == "answer"]
        if len(ended) < MOST * len(every) or not self._once("first answers"):
            return ""
        return (
            f"{len(ended)} of {len(every)} episodes of up to {self._recipe.max_turns} turns ended with their first "
            f"answer, because it was cut at {self._answer_limit}: nothing is learned of the turns behind it"
        )

    def _stillness(self, every: Sequence[Trajectory]) -> str:
        self._rewards |= {t.reward for t in every if t.status != "failed"}
        self._steps += 1
        if len(self._rewards) != 1 or self._steps < STILL_STEPS or not self._once("still"):
            return ""
        [reward] = self._rewards
        return (
            f"all trajectories of the first {self._steps} steps of {self._phase.name} have reward {reward:g}: nothing "
            "is learned from that. Look at rollouts/ for what the model says and at `python -m rolljax.validate` for "
            "what the environment rewards; start from a model that succeeds occasionally, or with easier tasks"
        )


def unfilled_step(phase: Phase, found: int, drawn: int) -> str:
    """Return a warning that dynamic sampling did not fill a step: `found` of the `drawn` groups have a signal."""
    algorithm = phase.algorithm
    return (
        f"only {found} of {phase.prompts_per_step} groups of a step have a signal after "
        f"{algorithm.dynamic_sampling_rounds} rounds ({drawn} groups drawn): steps like this train on fewer. Raise "
        "GroupFilter.dynamic_sampling_rounds, or choose tasks that are neither always nor never solved"
    )


def best_and_worst(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Return the trajectories of highest and of lowest reward, the first of equals; one if they are the same, none if
    all failed."""
    alive = [t for t in trajectories if t.status != "failed" and t.turns]
    if not alive:
        return []
    best, worst = max(alive, key=lambda t: t.reward), min(alive, key=lambda t: t.reward)
    return [best] if best is worst else [best, worst]


def samples(trajectories: Sequence[Trajectory]) -> list[str]:
    """Return a good and a bad answer, a line each (`best_and_worst`)."""
    return [sample_line(name, t) for name, t in zip(("good", "bad"), best_and_worst(trajectories), strict=False)]


def sample_line(name: str, t: Trajectory) -> str:
    """Return one line: reward, the end of the task, the last answer."""
    turns = f" (turn {len(t.turns)})" if len(t.turns) > 1 else ""
    question, answer = shortened(t.task.content, head=False), shortened(t.turns[-1].text)
    return f"  {name:4} {t.reward:6.3f}  {question} -> {answer}{turns}"


def shortened(text: str, *, head: bool = True) -> str:
    """Format text on one line, control characters written out; of a long text keep the beginning, or the end."""
    cut = text[:SHOWN_CHARS] if head else text[-SHOWN_CHARS:]
    line = visible(cut, lines=False)
    dots = "..." if len(text) > SHOWN_CHARS else ""
    return f"{line}{dots}" if head else f"{dots}{line}"
