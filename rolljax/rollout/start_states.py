"""Chooses where episodes start: at the task's own start, or after a part of an expert's episode (IPA, arXiv
2512.24873).

A policy that never succeeds from the start learns nothing from outcomes. It can succeed if it starts after all but the
last chunk of a successful episode. Once it does, the start moves one chunk towards the beginning (sequential rollback);
or starts after every chunk are tried in parallel (parallel initialisation). A chunk is one turn: everything that the
policy samples between two observations.

The environment reaches the start by a replay of the expert's actions in a fresh episode. Its observations must be
exactly the ones that the expert got.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np

from rolljax.envs.pool import Pool
from rolljax.errors import Checked, EnvError, Range
from rolljax.model.tokenizer import Chat
from rolljax.types import EXPERT, Expert, Group, Message, Task, Trajectory

MAX_EXPERTS = 4096
"""Maximum number of experts' episodes that are remembered with their success rates."""
RECENT = 32
"""Number of newest episodes for a success rate, so that the rate reflects the current policy."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """One turn of an expert: its text and tokens, and a hash of the environment's observation after it."""

    text: str
    tokens: np.ndarray
    digest: str


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Start:
    """The chunks of an expert to replay before the policy takes over; may be none."""

    expert: Expert
    initial_messages: str
    """Hash of the opening messages."""
    chunks: tuple[Chunk, ...]
    imitate: int
    """Number of first chunks to imitate; replayed chunks after them are not imitated."""
    crucial: Chunk | None = None
    """The next chunk, if it is the crucial one; imitated if all episodes from this start fail."""

    @staticmethod
    def full(initial_messages: str, chunks: Sequence[Chunk]) -> Start:
        """Return the start that replays an expert's whole episode. Episodes with equal text are the same expert."""
        said = json.dumps([initial_messages, *([c.text, c.digest] for c in chunks)])
        return Start(Expert(_hash(said), len(chunks)), initial_messages, tuple(chunks), len(chunks))


def digest(messages: Sequence[Message]) -> str:
    """Return a hash of the messages, 16 hex digits."""
    return _hash(json.dumps([[m.role, m.content] for m in messages]))


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


@dataclasses.dataclass(frozen=True)
class ExpertStarts(Checked):
    """Chunk-level initialised resampling."""

    mode: Literal["rollback", "parallel"] = "rollback"
    """Rollback replays all but the last `distance` chunks; the distance, the same for all tasks, is 1 at first and
    grows by one whenever the success rate of the last `window` episodes at it reaches `threshold`, until episodes start
    at the beginning. Parallel samples a start for every group, uniformly over all chunks."""
    expert: Literal["reference", "success"] = "reference"
    """Reference replays the environment's reference answers; success replays the policy's own newest success on the
    same task (tasks without a success start at their beginning)."""
    threshold: Annotated[float, Range(above=0, high=1)] = 0.7
    """Success rate, 0 to 1, at which the distance grows."""
    window: Annotated[int, Range(low=1)] = 64
    """Number of newest episodes at a distance for its success rate."""
    refresh_every: Annotated[int, Range(low=1)] = 20
    """Steps between updates of the replayed successes to newer ones."""
    fork_gap: Annotated[float, Range(above=0, high=1)] = 0.3
    """Least gain in success rate that makes a chunk the crucial one: from starts before it to starts after it, with
    one-sided p below .05 and at least 8 of the last 32 episodes on either side; the rate after the whole episode is 1.
    Chunks after the crucial one are not imitated. The crucial chunk is imitated when it is replayed, and when a whole
    group that starts before it fails."""


def crucial_fork(rates: Sequence[tuple[int, int]], gap: float = 0.3) -> int | None:
    """Return the index of the crucial chunk: success rates after it are clearly higher than before it.

    Args:
      rates: successes and episodes that started after 0, 1, 2, ... chunks.
      gap: least difference of the rates. Fisher's exact test must hold as well, at one-sided p < .05 with 8 episodes on
        each side.

    Returns:
      The chunk with the largest difference, or None.
    """
    best, found = 0.0, None
    for f, ((s0, n0), (s1, n1)) in enumerate(zip(rates, rates[1:], strict=False)):
        if min(n0, n1) < 8:
            continue
        difference = s1 / n1 - s0 / n0
        if difference > max(gap, best) and _fisher(s0, n0, s1, n1) < 0.05:
            best, found = difference, f
    return found


def _fisher(s0: int, n0: int, s1: int, n1: int) -> float:
    """Return P(at least s1 of the s0 + s1 successes fall on the n1 side) if the side does not matter."""
    from scipy.stats import hypergeom

    return float(hypergeom.sf(s1 - 1, n0 + n1, s0 + s1, n1))


def fallback(start: Start, trajectories: Sequence[Trajectory]) -> Trajectory | None:
    """Return the expert's turns up to the crucial one, if all trajectories failed (arXiv 2512.24873, eq. 10).

    None if the group does not start right before the expert's crucial chunk, or if a trajectory succeeded. The turns
    before the crucial one have weight 0, because every trajectory that replays them imitates them already; the crucial
    turn has the weight of all these trajectories together.
    """
    alive = [t for t in trajectories if t.status != "failed"]
    first = len(start.chunks)
    like = next((t for t in alive if len(t.turns) > first), None)
    if start.crucial is None or like is None or any(t.success for t in alive):
        return None
    none = np.zeros(len(start.crucial.tokens))
    crucial = dataclasses.replace(
        like.turns[first],
        tokens=start.crucial.tokens,
        sampler_logp=none.astype(np.float32),
        versions=np.full(len(none), EXPERT, np.int32),
        finish_reason="stop",
        text=start.crucial.text,
        weight=float(len(alive)),
        experts=None,
        alternatives=None,
    )
    before = (dataclasses.replace(turn, weight=0.0) for turn in like.turns[:first])
    key = dataclasses.replace(like.key, sibling=len(trajectories))
    return Trajectory(key, like.task, (*before, crucial), like.reward, {}, False, "ok", expert=start.expert)


class StartCurriculum:
    """Chooses the start of every group and learns from how they went. All of its state is in `state()`."""

    def __init__(self, settings: ExpertStarts, pool: Pool, chat: Chat, seed: int, max_turns: int) -> None:
        self.settings, self._pool, self._chat, self._seed, self._max_turns = settings, pool, chat, seed, max_turns
        self.distance = 1
        self._recent: list[bool] = []
        """Successes at the distance in use, the newest last."""
        self._rates: dict[str, dict[int, str]] = {}
        """Expert -> chunks replayed -> how the last episodes there went: "1" for a success, the newest last."""
        self._longest = 0
        self._experts: dict[str, dict[str, Any]] = {}
        """Task id -> texts, token ids and hashes of the success that is replayed."""
        self._newer: dict[str, dict[str, Any]] = {}
        self._reference_answer: dict[str, asyncio.Future[Start]] = {}

    def fork(self, expert: Expert) -> int | None:
        """Return the index of the crucial chunk of an expert's episode (`crucial_fork`), or None."""
        went = self._rates.get(expert.id, {})
        rates = [(went.get(j, "").count("1"), len(went.get(j, ""))) for j in range(expert.turns)]
        certain = rates[-1][1]  # after the last chunk the expert has succeeded
        return crucial_fork([*rates, (certain, certain)], self.settings.fork_gap)

    async def choose(self, task: Task, prompt_index: int) -> Start | None:
        """Return the start of group `prompt_index`; None: at the beginning, if there is no expert."""
        expert = await self._expert(task)
        if expert is None:
            return None
        length = len(expert.chunks)
        self._longest = max(self._longest, length)
        if self.settings.mode == "rollback":
            keep = max(0, length - self.distance)
        else:
            keep = int(np.random.default_rng([self._seed, prompt_index]).integers(length))
        fork = self.fork(expert.expert)
        return dataclasses.replace(
            expert,
            chunks=expert.chunks[:keep],
            imitate=keep if fork is None else min(keep, fork + 1),
            crucial=expert.chunks[keep] if keep == fork else None,
        )

    def learn(self, groups: Sequence[Group], step: int) -> None:
        """Take in how a step's episodes went."""
        for group in groups:
            for t in group.trajectories:
                if not t.lost:
                    self._count(t)
        settings = self.settings
        recent = self._recent[-settings.window :]
        if len(recent) == settings.window and np.mean(recent) >= settings.threshold and self.distance < self._longest:
            self.distance += 1
            recent = []
        self._recent = recent
        if settings.expert == "success" and (step + 1) % settings.refresh_every == 0:
            self._experts |= self._newer
            self._newer = {}

    def _count(self, t: Trajectory) -> None:
        if t.expert:
            went = self._rates.pop(t.expert.id, {})
            went[t.num_replayed] = (went.get(t.num_replayed, "") + "01"[t.success])[-RECENT:]
            self._rates[t.expert.id] = went
            self._longest = max(self._longest, t.expert.turns)
            while len(self._rates) > MAX_EXPERTS:
                self._rates.pop(next(iter(self._rates)))
        self._recent.append(t.success)
        if self.settings.expert == "success" and t.success and t.observation_hashes is not None:
            chunks = [
                {"text": turn.text, "tokens": np.asarray(turn.tokens).tolist(), "digest": observation_hashes}
                for turn, observation_hashes in zip(t.turns, t.observation_hashes[1:], strict=True)
            ]
            found = {"opening": t.observation_hashes[0], "chunks": chunks}
            (self._newer if t.task.id in self._experts else self._experts)[t.task.id] = found

    def row(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return the metrics of a step after `learn` has processed its episodes."""
        experts = {t.expert for g in groups for t in g.trajectories if t.expert}
        forks = [self.fork(e) is not None for e in experts]
        return {
            "start_states/distance_n": float(min(self.distance, max(self._longest, 1))),
            "start_states/fork_frac": float(np.mean(forks)) if forks else 0.0,
            "start_states/fallback_n": float(sum(g.demonstration is not None for g in groups)),
            "start_states/experts_n": float(
                len(self._experts) if self.settings.expert == "success" else len(self._reference_answer)
            ),
        }

    def state(self) -> dict[str, Any]:
        """Return the whole state, as a JSON value."""
        return {
            "distance": self.distance,
            "recent": [bool(x) for x in self._recent],
            "rates": {e: {str(j): went for j, went in rates.items()} for e, rates in self._rates.items()},
            "longest": self._longest,
            "experts": self._experts,
            "newer": self._newer,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state()`."""
        self.distance, self._recent, self._longest = state["distance"], list(state["recent"]), state["longest"]
        self._rates = {e: {int(j): went for j, went in rates.items()} for e, rates in state["rates"].items()}
        self._experts, self._newer = dict(state["experts"]), dict(state["newer"])

    async def _expert(self, task: Task) -> Start | None:
        if self.settings.expert == "success":
            found = self._experts.get(task.id)
            if found is None:
                return None
            chunks = [Chunk(c["text"], np.array(c["tokens"], np.int32), c["digest"]) for c in found["chunks"]]
            return Start.full(found["opening"], chunks)
        if task.id not in self._reference_answer:
            while len(self._reference_answer) >= MAX_EXPERTS:
                self._reference_answer.pop(next(iter(self._reference_answer)))
            self._reference_answer[task.id] = asyncio.ensure_future(self._play_reference(task))
        return await self._reference_answer[task.id]

    async def _play_reference(self, task: Task) -> Start:
        """Play the scripted player's episode."""
        episode = await self._pool.open(task)
        try:
            chunks = []
            for _ in range(self._max_turns):
                text = await episode.reference_answer()
                result = await episode.step(text)
                chunks.append(Chunk(text, self._chat.answer_ids(text), digest(result.messages)))
                if result.terminated or result.truncated:
                    break
            if not result.success:
                raise EnvError(f"the scripted answers to task {task.index} do not solve it", stage="reference_answer")
            return Start.full(digest(episode.initial_messages), chunks)
        finally:
            await episode.close()
