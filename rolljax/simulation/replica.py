"""One replica of a sampler that only takes time: sequences decode together, at a pace that depends on all of them."""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
import functools
import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection

import numpy as np

from rolljax.cluster.router import RoutedRequest
from rolljax.simulation.timings import EngineTimings

STEP_ERROR = 1e-6
"""Share of a decode step that may be lost to rounding."""
MOST_TOK = 2**31
"""More tokens than an answer has."""
FIRST_TURN, GONE = -1, -2
"""`SimulatedAnswer.home` without a replica: there was no turn before, or the replica of that turn was lost."""


@functools.lru_cache(typed=True)
def same(value: np.generic) -> np.ndarray:
    """Return an array `[MOST_TOK]` of one value, which takes no memory; slicing it is cheaper than making a new one."""
    return np.broadcast_to(value, MOST_TOK)


@dataclasses.dataclass(eq=False)
class SimulatedAnswer:
    """A requested answer, from its request to the end of its decoding."""

    priority: int
    """The lowest is served first."""
    group: tuple[int, int]
    """Stream and prompt index of its group."""
    prompt_tok: int
    """Number of tokens of the answer's context."""
    new_tok: int
    """Number of tokens of the context after the part that its replica `home` may still have in its cache."""
    answer_tok: int
    """Number of tokens that the answer will have, from here on if it was on a lost replica."""
    num_steps: int
    """Number of decode steps for which the answer holds its slot: up to the end of a dispatch."""
    done: asyncio.Future[None]
    asked_s: float
    home: int = FIRST_TURN
    """The replica of the episode's turn before, or `FIRST_TURN`, `GONE`."""
    request: RoutedRequest | None = None
    """The answer as the router sees it."""
    kept_tok: int = 0
    """Tokens of the context that were sampled on replicas that are lost."""
    computed_tok: int = 0
    """Tokens of the context that its replica computed."""
    replica: int = -1
    slot: int = -1
    started_s: float = 0.0
    ended_s: float = -1.0
    first_step: float = 0.0
    versions: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    """Policy version of each token that its last replica sampled `[T]`."""
    kept: list[np.ndarray] = dataclasses.field(default_factory=list)
    """Those of the tokens that lost replicas had sampled."""

    @property
    def is_over(self) -> bool:
        """Ended, or given up."""
        return self.done.done()


class Replica:
    """`slots` sequences at most, which get a token at each decode step.

    Args:
      finished: called with each answer when it has all of its tokens.
    """

    def __init__(
        self, index: int, slots: int, timings: EngineTimings, finished: Callable[[SimulatedAnswer], None]
    ) -> None:
        self.index, self.free_slots = index, list(range(slots))
        self.up_since_s = 0.0
        self.steps, self.sequence_steps, self.running_s, self.peak_tok = 0.0, 0.0, 0.0, 0.0
        self._held_s = self._held_until_s = 0.0
        self._timings, self._finished = timings, finished
        self._running: list[tuple[float, int, SimulatedAnswer]] = []  # by the step that ends them
        self._num_running, self._context_tok, self._started = 0, 0.0, 0
        self._until_s = 0.0  # what was decoded is accounted for up to here; in the future while it does something else
        self._weights: list[tuple[float, int]] = [(0.0, 0)]  # decode step from which on a version is used
        self._prefilled: dict[tuple[int, int], int] = {}  # groups whose prompt it has, and how many of them run
        self._rows: dict[int, tuple[float, int]] = {}  # of the last prefill program by length: its start, and rows left
        self._timer: asyncio.TimerHandle | asyncio.Handle | None = None

    def __len__(self) -> int:
        return self._num_running

    # ---- what happens to it

    def begin(self, answer: SimulatedAnswer) -> None:
        """Start to decode an answer."""
        self._count_held()
        now = self._advance()
        if answer.home == self.index:
            tokens = answer.new_tok
        elif answer.home == FIRST_TURN and self._prefilled.get(answer.group, 0):
            tokens = answer.kept_tok
        else:
            tokens = answer.prompt_tok
        answer.computed_tok = tokens
        self._prefilled[answer.group] = self._prefilled.get(answer.group, 0) + 1
        self._prefill(tokens)
        answer.replica, answer.slot, answer.started_s = self.index, heapq.heappop(self.free_slots), now
        answer.first_step = self.steps
        self._started += 1
        heapq.heappush(self._running, (self.steps + answer.num_steps, self._started, answer))
        self._num_running += 1
        self._context_tok += answer.prompt_tok
        self._look_soon()

    def running(self) -> list[tuple[SimulatedAnswer, int]]:
        """Return the running answers in the order of their starts, and the tokens that each has got here."""
        self._advance()
        answers = [a for _, _, a in sorted(self._running, key=lambda entry: entry[1]) if not a.is_over]
        return [(answer, int(self.steps - answer.first_step)) for answer in answers]

    def evict(self, answers: Collection[SimulatedAnswer], steps_per_dispatch: int) -> None:
        """Stop decoding some of the running answers, which keep the tokens of their whole dispatches."""
        self._advance()
        for answer in answers:
            self._leave(answer, steps_per_dispatch)
        self._running = [entry for entry in self._running if entry[2] not in answers]
        heapq.heapify(self._running)
        self._look_soon()

    def held_s(self) -> float:
        """Return the seconds that answers have occupied slots so far, summed over slots."""
        if self._num_running:
            self._count_held()
        return self._held_s

    def _count_held(self) -> None:
        now = asyncio.get_running_loop().time()
        self._held_s += self._num_running * (now - self._held_until_s)
        self._held_until_s = now

    def give_up(self, answer: SimulatedAnswer) -> None:
        """Stop decoding an aborted answer."""
        self._advance()
        self._leave(answer)
        self._look_soon()

    def lose(self, steps_per_dispatch: int) -> None:
        """Stop, and forget everything. Running answers keep the tokens of their whole dispatches."""
        now = self._advance()
        for _, _, answer in self._running:
            if not answer.is_over:
                self._leave(answer, steps_per_dispatch)
        self._running, self._prefilled, self._rows = [], {}, {}
        self._until_s = now
        self._look_soon()

    def start(self, version: int) -> None:
        """Restart with a version, and an empty cache."""
        self.up_since_s = self._advance()
        self._weights.append((self.steps, version))

    def take_weights(self, version: int, *, recompute: bool) -> None:
        """Continue with new weights. recompute: compute the keys and values of all running answers again."""
        self._advance()
        self._weights.append((self.steps, version))
        if recompute:
            running = [answer for _, _, answer in sorted(self._running) if not answer.is_over]
            siblings = Counter(answer.group for answer in running if answer.home == FIRST_TURN)
            prompts = {a.group: a.prompt_tok - a.kept_tok for a in running if siblings[a.group] > 1}
            for tokens in prompts.values():
                self._prefill(tokens)
            for answer in running:
                shared = prompts.get(answer.group, 0) if answer.home == FIRST_TURN else 0
                self._prefill(round(answer.prompt_tok + self.steps - answer.first_step) - shared)
            self._prefilled = {}

    def pause(self, seconds: float) -> None:
        """Keep the replica busy with other work for `seconds`, from now or after other work already planned."""
        now = self._advance()
        self._until_s = max(self._until_s, now) + seconds
        self._look_soon()

    def _prefill(self, tokens: int) -> None:
        """Compute tokens of a prompt: in a program that has not started and has room, and the rest in further ones."""
        t, seconds = self._timings, tokens * self._timings.prefill_s
        now = asyncio.get_running_loop().time()
        while t.prefill_call_s and tokens > 0:
            room = t.prefill_sizes[-1]
            size = next(size for size in t.prefill_sizes if size >= min(tokens, room))
            start, rows = self._rows.get(size, (-1.0, 0))
            if start < now or not rows:
                start, rows = max(self._until_s, now) + seconds, room // size
                seconds += t.prefill_call_s
            self._rows[size] = start, rows - 1
            tokens -= size
        self.pause(seconds)

    # ---- decoding

    def _step_s(self) -> float:
        """Return the seconds of the next decode step."""
        t = self._timings
        return t.step_s + t.sequence_s * self._num_running + t.context_s * self._context_tok

    def _seconds_for(self, steps: float) -> float:
        """Return the seconds of `steps` steps with the running answers, whose contexts grow by a token each."""
        return steps * self._step_s() + self._timings.context_s * self._num_running * steps * steps / 2

    def _steps_in(self, seconds: float) -> float:
        pace = self._step_s()
        root = math.sqrt(pace * pace + 2 * self._timings.context_s * self._num_running * seconds)
        return 2 * seconds / (pace + root) if pace + root else math.inf

    def _advance(self) -> float:
        """Account for the time up to now, which is returned; no answer ends in it."""
        now = asyncio.get_running_loop().time()
        if now > self._until_s:
            if self._running:
                left = max(0.0, self._running[0][0] - self.steps)
                steps = min(self._steps_in(now - self._until_s), left)
                self.steps += steps
                self.sequence_steps += steps * self._num_running
                self._context_tok += steps * self._num_running
                self.peak_tok = max(self.peak_tok, self._context_tok)
                self.running_s += now - self._until_s
            self._until_s = now
        return now

    def _look_soon(self) -> None:
        """Reset the timer once all events of this moment are done."""
        if not isinstance(self._timer, asyncio.TimerHandle) and self._timer is not None:
            return
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_soon(self._set_timer)

    def _set_timer(self) -> None:
        self._timer = None
        while self._running and self._running[0][2].is_over:
            heapq.heappop(self._running)
        if self._running:
            left_s = self._seconds_for(max(0.0, self._running[0][0] - self.steps))
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(self._until_s, loop.time()) + left_s, self._look)

    def _look(self) -> None:
        """End the answers that are due now."""
        self._timer = None
        now = self._advance()
        if not self._running[0][2].is_over and now >= self._until_s:
            self.steps = max(self.steps, self._running[0][0])
        ended = []
        while self._running and (self._running[0][0] <= self.steps + STEP_ERROR or self._running[0][2].is_over):
            answer = heapq.heappop(self._running)[2]
            if not answer.is_over:
                ended.append(answer)
        for answer in ended:
            self._leave(answer)
            self._finished(answer)
        self._look_soon()

    def _leave(self, answer: SimulatedAnswer, steps_per_dispatch: int | None = None) -> None:
        """Free an answer's slot. steps_per_dispatch: only the tokens of whole dispatches have arrived."""
        self._count_held()
        decoded = self.steps - answer.first_step
        self._num_running -= 1
        self._context_tok = self._context_tok - answer.prompt_tok - decoded if self._num_running else 0.0
        self._prefilled[answer.group] = self._prefilled.get(answer.group, 1) - 1
        if self._prefilled[answer.group] <= 0:
            del self._prefilled[answer.group]
        heapq.heappush(self.free_slots, answer.slot)
        answer.ended_s = asyncio.get_running_loop().time()
        tokens = min(answer.answer_tok, math.ceil(decoded - STEP_ERROR))
        if steps_per_dispatch:
            whole = math.floor((decoded + STEP_ERROR) / steps_per_dispatch) * steps_per_dispatch
            tokens = min(answer.answer_tok - 1, whole)
        answer.versions = self._versions(answer, tokens)

    def _versions(self, answer: SimulatedAnswer, tokens: int) -> np.ndarray:
        """Return the policy version of each token `[T]`."""
        first = bisect.bisect_right(self._weights, (answer.first_step + STEP_ERROR, math.inf)) - 1
        since = [(math.ceil(step - answer.first_step - STEP_ERROR), version) for step, version in self._weights[first:]]
        parts = [(max(0, token), version) for token, version in since if token < max(tokens, 1)]
        if len(parts) == 1:
            return same(np.int32(parts[0][1]))[:tokens]
        starts = [token for token, _ in parts]
        return np.repeat([np.int32(version) for _, version in parts], np.diff([*starts, tokens]))
