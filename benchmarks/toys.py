"""Problems that are small enough to solve in seconds, learned by the trainer's own code.

The policy is a table of logits, one row for every state it can be in, and critics are tables of values. Everything else
is what a run uses: `Episodes`, `Algorithm.credit`, the scales of the aggregation, `TokenBatch`, `Algorithm.objective`,
`Algorithm.critic_loss` and the critics' optimizer. What a step does, and in which order, is `PhaseTrainer.step`.

Shape letters: S seeds that are trained side by side, R rows of the table, V symbols, N trajectories, T tokens of one,
M critics; B rows of a batch (groups) and L tokens of such a row.
"""

from __future__ import annotations

import abc
import argparse
import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rolljax.trainer import masked
from rolljax.trainer.aggregation import token_scales
from rolljax.trainer.algorithms.base import Algorithm, PolicyOutputs
from rolljax.trainer.batch import TokenBatch
from rolljax.trainer.credit.episodes import Credit, Episodes
from rolljax.trainer.update import clean_batch


@dataclasses.dataclass(frozen=True, eq=False)
class Played:
    """The trajectories of a step, members of a group side by side, all groups of one size.

    rows, tokens [N, T]: state in which each token was chosen (row of the policy's table), and the token.
    value_rows [N, T]: the same for the critics' tables.
    """

    episodes: Episodes
    rows: np.ndarray
    tokens: np.ndarray
    value_rows: np.ndarray

    def valued(self, values: np.ndarray) -> Played:
        """Return the trajectories with the values of critics, whose tables are `values [M, R]`."""
        return dataclasses.replace(self, episodes=dataclasses.replace(self.episodes, values=values[:, self.value_rows]))


class Toy(abc.ABC):
    """A problem with a random generator of its own. One instance is one seed."""

    rows: int
    symbols: int
    value_rows: int
    group_size: int
    limit_tok: int
    max_turns: int

    @abc.abstractmethod
    def play(self, table: np.ndarray, step: int) -> Played:
        """Return trajectories of the policy whose logits are `table [R, V]`."""

    @abc.abstractmethod
    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        """Measure the quality of the policy exactly."""

    def start(self) -> np.ndarray:
        """Return the logits of the untrained policy, `[R, V]`."""
        return np.zeros((self.rows, self.symbols))

    def played(
        self,
        step: int,
        rewards: np.ndarray,
        rows: np.ndarray,
        tokens: np.ndarray,
        logp: np.ndarray,
        *,
        states: np.ndarray | None = None,
        mask: np.ndarray | None = None,
        expert: np.ndarray | None = None,
    ) -> Played:
        """Return trajectories whose turns are one token long, rewarded `[N]` in the last turn.

        Args:
          rows, tokens, logp: `[N, T]`; the table's row for each token, and the token's log-prob.
          states: `[N, T]` int, the state that critics see before each token (None: `rows`).
          mask: where there is a token (None: everywhere). expert: replayed tokens (None: none).
        """
        num, length = rows.shape
        states = rows if states is None else states
        mask = np.ones((num, length), bool) if mask is None else mask
        turn_rewards = np.zeros((num, length))
        turn_rewards[np.arange(num), mask.sum(1) - 1] = rewards
        letters = np.ascontiguousarray(tokens + ord("a"), np.uint8).view(f"S{length}")[:, 0].astype(str)
        found = Episodes(
            rewards=rewards,
            groups=np.arange(num) // self.group_size,
            mask=mask,
            turns=np.where(mask, np.arange(length), -1),
            turn_rewards=turn_rewards,
            turn_weights=np.where(mask, 1.0, 0.0),
            states=states.astype(np.int64),
            num_turns=mask.sum(1),
            cut=np.zeros((num, length), bool),
            truncated=np.zeros(num, bool),
            success=rewards > 0,
            texts=tuple(letters.tolist()),
            domains=("toy",) * num,
            parts=({},) * num,
            sampler_logp=np.where(mask, logp, 0.0),
            expert=np.zeros((num, length), bool) if expert is None else expert,
            expert_turns=mask.sum(1),
            limit_tok=self.limit_tok,
            step=step,
        )
        return Played(found, rows, tokens, states)

    def teacher(self) -> np.ndarray:
        """Return the logits of a good policy, for algorithms that learn from a teacher."""
        raise NotImplementedError(f"{type(self).__name__} has no teacher")


def log_softmax(table: np.ndarray) -> np.ndarray:
    top = table - table.max(-1, keepdims=True)
    return top - np.log(np.exp(top).sum(-1, keepdims=True))


def draw(rng: np.random.Generator, logp: np.ndarray) -> np.ndarray:
    """Sample one symbol for each row of log-probs `[..., V]`."""
    cumulative = np.cumsum(np.exp(logp), -1)
    chosen = (cumulative < rng.random((*logp.shape[:-1], 1)) * cumulative[..., -1:]).sum(-1)
    return np.minimum(chosen, logp.shape[-1] - 1)


def one_turn_episodes(
    rewards: np.ndarray,
    groups: np.ndarray,
    mask: np.ndarray,
    logp: np.ndarray,
    *,
    limit_tok: int,
    states: np.ndarray | None = None,
    step: int = 0,
    **read: np.ndarray,
) -> Episodes:
    """Return episodes `[N, T]` that are one answer each.

    Args:
      groups, states: `[N]` int; the state before the answer (None: the group).
      read: further fields of `Episodes`, for algorithms that ask for them.
    """
    num = len(rewards)
    rewards = np.asarray(rewards, np.float64)
    return Episodes(
        rewards=rewards,
        groups=groups,
        mask=mask,
        turns=np.where(mask, 0, -1),
        turn_rewards=rewards[:, None],
        turn_weights=np.ones((num, 1)),
        states=(groups if states is None else states)[:, None].astype(np.int64),
        num_turns=np.ones(num, np.int64),
        cut=np.zeros((num, 1), bool),
        truncated=np.zeros(num, bool),
        success=rewards > 0,
        texts=("",) * num,
        domains=("toy",) * num,
        parts=({},) * num,
        sampler_logp=np.asarray(logp, np.float64),
        expert=np.zeros(mask.shape, bool),
        expert_turns=np.ones(num, np.int64),
        limit_tok=limit_tok,
        step=step,
        **read,
    )


# ---- the problems ---------------------------------------------------------------------------------------------------


class Bandit(Toy):
    """Say `length` symbols, rewarded if the first of them are a hidden string; a step is `samples` attempts.

    Every symbol is a turn, so that algorithms with credit by turn have an effect. The policy sees the position, critics
    also the symbols so far as they matter for the reward.

    wrong: reward of a failed attempt. noise: deviation of gaussian noise on the sampler's logits, drawn every step.
    """

    def __init__(
        self,
        seed: int,
        *,
        symbols: int = 5,
        target: int = 3,
        length: int = 6,
        samples: int = 64,
        group_size: int = 8,
        wrong: float = 0.0,
        noise: float = 0.0,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows, self.symbols, self.group_size, self.samples = length, symbols, group_size, samples
        self.limit_tok, self.max_turns = length, length
        self.wrong, self.noise = wrong, noise
        self.hidden = self.rng.integers(0, symbols, target)
        self.value_rows = sum(symbols ** min(t, target) for t in range(length))

    def play(self, table: np.ndarray, step: int) -> Played:
        logp = log_softmax(table + self.noise * self.rng.normal(size=table.shape))
        rows = np.broadcast_to(np.arange(self.rows), (self.samples, self.rows))
        tokens = draw(self.rng, logp[rows])
        right = (tokens[:, : len(self.hidden)] == self.hidden).all(1)
        rewards = np.where(right, 1.0, self.wrong)
        states = self._prefixes(tokens)
        return self.played(step, rewards, rows, tokens, logp[rows, tokens], states=states)

    def _prefixes(self, tokens: np.ndarray) -> np.ndarray:
        """Return a number for every position and the symbols before it, as far as they matter for the reward."""
        out = np.zeros(tokens.shape, np.int64)
        first, said = 0, np.zeros(len(tokens), np.int64)
        for t in range(tokens.shape[1]):
            out[:, t] = first + said
            first += self.symbols ** min(t, len(self.hidden))
            if t < len(self.hidden):
                said = said * self.symbols + tokens[:, t]
        return out

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        logp = log_softmax(table)
        success = float(np.exp(logp[np.arange(len(self.hidden)), self.hidden].sum()))
        apart = logp - log_softmax(self.teacher())
        return {
            "success": success,
            "largest_logit": float(np.abs(table).max()),
            "teacher_kl": float((np.exp(logp) * apart).sum()),
        }

    def teacher(self) -> np.ndarray:
        table = self.start()
        table[np.arange(len(self.hidden)), self.hidden] = 6.0
        return table


class Chain(Toy):
    """`turns` decisions in a row, each with one right action among `actions`; rewarded if all are right.

    An expert's run is known. start: `beginning`; `rollback`: after all but one of the expert's turns, and one earlier
    each time that a step succeeds more often than `threshold`; `everywhere`: after 0, 1, ... of its turns, a group
    each.
    """

    def __init__(
        self,
        seed: int,
        *,
        start: Literal["beginning", "rollback", "everywhere"] = "beginning",
        turns: int = 8,
        actions: int = 4,
        samples: int = 64,
        threshold: float = 0.7,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = self.value_rows = self.limit_tok = self.max_turns = turns
        self.symbols, self.samples, self.threshold = actions, samples, threshold
        self.group_size = samples // turns if start == "everywhere" else samples
        self.expert = self.rng.integers(0, actions, turns)
        self.everywhere = start == "everywhere"
        self.replayed = turns - 1 if start == "rollback" else 0

    def play(self, table: np.ndarray, step: int) -> Played:
        rows = np.broadcast_to(np.arange(self.rows), (self.samples, self.rows))
        first = np.arange(self.samples) // self.group_size if self.everywhere else np.full(self.samples, self.replayed)
        replayed = rows < first[:, None]
        logp = log_softmax(table)
        tokens = np.where(replayed, self.expert, draw(self.rng, logp[rows]))
        rewards = (tokens == self.expert).all(1).astype(np.float64)
        if self.replayed and rewards.mean() > self.threshold:
            self.replayed -= 1
        return self.played(step, rewards, rows, tokens, np.where(replayed, 0.0, logp[rows, tokens]), expert=replayed)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        logp = log_softmax(table)
        return {
            "success": float(np.exp(logp[np.arange(self.rows), self.expert].sum())),
            "replayed": float(self.replayed),
        }


class GuessTheNumber(Toy):
    """Find a number from 1 to `largest` in `max_turns` guesses; each wrong one is answered with "higher" or "lower".

    The policy knows which numbers are still possible (lowest, highest) and may guess any. Reward 1 for the right one.
    """

    group_size = 1

    def __init__(self, seed: int, *, largest: int = 10, max_turns: int = 10, samples: int = 64) -> None:
        self.rng = np.random.default_rng(seed)
        self.samples, self.symbols, self.max_turns, self.limit_tok = samples, largest, max_turns, max_turns
        low, high = np.triu_indices(largest)
        self.low, self.high = low, high
        self.rows = self.value_rows = len(low)
        self.row = np.zeros((largest, largest), np.int64)
        self.row[low, high] = np.arange(self.rows)
        guess = np.arange(largest)
        inside = (guess >= low[:, None]) & (guess <= high[:, None])
        width = (high - low + 1)[:, None]
        # for every row and guess: how likely the number is smaller, or larger, and the row that follows
        self.smaller = np.where(inside, (guess - low[:, None]) / width, guess > high[:, None])
        self.larger = np.where(inside, (high[:, None] - guess) / width, guess < low[:, None])
        stay = np.broadcast_to(np.arange(self.rows)[:, None], inside.shape)
        left, right = np.where(inside, guess - 1, 0), np.where(inside, guess + 1, 0)
        self.if_smaller = np.where(inside & (guess > low[:, None]), self.row[low[:, None], left], stay)
        self.if_larger = np.where(
            inside & (guess < high[:, None]), self.row[np.minimum(right, largest - 1), high[:, None]], stay
        )

    def play(self, table: np.ndarray, step: int) -> Played:
        logp = log_softmax(table)
        number = self.rng.integers(0, self.symbols, self.samples)
        row = np.full(self.samples, self.row[0, self.symbols - 1])
        shape = (self.samples, self.max_turns)
        rows, tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        going = np.ones(self.samples, bool)
        for k in range(self.max_turns):
            guess = draw(self.rng, logp[row])
            rows[:, k], tokens[:, k], mask[:, k] = row, guess, going
            after = np.where(number < guess, self.if_smaller[row, guess], self.if_larger[row, guess])
            row = np.where(number == guess, row, after)
            going = going & (number != guess)
        solved = ~going
        return self.played(step, solved.astype(np.float64), rows, tokens, logp[rows, tokens], mask=mask)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        p = np.exp(log_softmax(table))
        turns, solved = np.zeros(self.rows), np.zeros(self.rows)
        hit = p * (1 - self.smaller - self.larger)
        for _ in range(self.max_turns):  # by turns that are left
            after = [self.smaller * x[self.if_smaller] + self.larger * x[self.if_larger] for x in (turns, solved)]
            turns, solved = 1 + (p * after[0]).sum(1), (hit + p * after[1]).sum(1)
        first = self.row[0, self.symbols - 1]
        return {"turns": float(turns[first]), "success": float(solved[first])}


class Nim(Toy):
    """Take 1 to `most` of up to `stones` stones, in turn; who takes the last one wins. The policy plays both roles.

    It sees how many stones are left. Games start where the first role can win. Taking more than there are loses.

    edge: share of the games that the first role is given, however they were played.
    """

    def __init__(
        self, seed: int, *, stones: int = 11, most: int = 3, samples: int = 16, group_size: int = 1, edge: float = 0.8
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = self.value_rows = stones
        self.limit_tok = self.max_turns = stones
        self.symbols, self.samples, self.group_size, self.edge = most, samples, group_size, edge
        left = np.arange(1, stones + 1)
        self.best = left % (most + 1) - 1  # the symbol that wins, by row; -1: none does
        self.starts = left[self.best >= 0]

    def play(self, table: np.ndarray, step: int) -> Played:
        logp = log_softmax(table)
        left = self.rng.choice(self.starts, self.samples)
        shape = (self.samples, self.max_turns)
        rows, tokens, mask = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, bool)
        outcome = np.zeros(self.samples)
        for k in range(self.max_turns):
            going = outcome == 0
            row = np.maximum(left, 1) - 1
            taken = draw(self.rng, logp[row])
            rows[:, k], tokens[:, k], mask[:, k] = row, taken, going
            left = left - taken - 1
            of_mover = np.where(left == 0, 1.0, np.where(left < 0, -1.0, 0.0))
            outcome = np.where(going, of_mover * (-1) ** k, outcome)
        outcome = np.where(self.rng.random(self.samples) < self.edge, 1.0, outcome)
        return self.played(step, outcome, rows, tokens, logp[rows, tokens], mask=mask)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        """Measure the chance of the winning move, on average over the positions that have one."""
        winning = np.flatnonzero(self.best >= 0)
        return {"right": float(np.exp(log_softmax(table))[winning, self.best[winning]].mean())}


class Walk(Toy):
    """A random walk of `length` steps up or down that no policy steers: a problem for critics to predict.

    Rewarded at the end with the height reached, over the square root of the length, and gaussian noise. The value of a
    state is therefore its height over that root (`true_values`).
    """

    def __init__(
        self, seed: int, *, length: int = 12, samples: int = 64, group_size: int = 8, noise: float = 1
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows, self.symbols, self.limit_tok, self.max_turns = length, 2, length, length
        self.samples, self.group_size, self.noise = samples, group_size, noise
        self.value_rows = length * (2 * length + 1)

    def play(self, table: np.ndarray, step: int) -> Played:
        rows = np.broadcast_to(np.arange(self.rows), (self.samples, self.rows))
        tokens = self.rng.integers(0, 2, rows.shape)
        height = np.cumsum(2 * tokens - 1, 1)
        before = np.concatenate([np.zeros((self.samples, 1), np.int64), height[:, :-1]], 1)
        states = rows * (2 * self.rows + 1) + before + self.rows
        rewards = height[:, -1] / np.sqrt(self.rows) + self.noise * self.rng.normal(size=self.samples)
        return self.played(step, rewards, rows, tokens, np.full(rows.shape, np.log(0.5)), states=states)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        return {}

    @property
    def true_values(self) -> np.ndarray:
        """`[value_rows]`."""
        return np.tile(np.arange(-self.rows, self.rows + 1) / np.sqrt(self.rows), self.rows)


class Prompts(Toy):
    """Several prompts, each with a string of its own to say; `hard` of them are hard, the others easy from the start.

    easy_rate, hard_rate: how often the untrained policy says all of the string. length, easy_length: symbols of it (0:
    easy ones are as long as hard ones). A group of answers to every prompt.
    """

    def __init__(
        self,
        seed: int,
        *,
        prompts: int = 20,
        hard: int = 2,
        easy_rate: float = 0.95,
        hard_rate: float = 0.05,
        symbols: int = 5,
        length: int = 3,
        easy_length: int = 0,
        group_size: int = 8,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = self.value_rows = prompts * length
        self.symbols, self.group_size, self.prompts, self.length = symbols, group_size, prompts, length
        self.limit_tok = self.max_turns = length
        self.hidden = self.rng.integers(0, symbols, (prompts, length))
        self.hard = np.arange(prompts) < hard
        self.rates = np.where(self.hard, hard_rate, easy_rate)
        self.lengths = np.where(self.hard, length, easy_length or length)
        self.asked = np.arange(length) < self.lengths[:, None]

    def start(self) -> np.ndarray:
        table = np.zeros((self.rows, self.symbols))
        right = self.rates ** (1 / self.lengths)
        logit = np.log(right * (self.symbols - 1) / (1 - right))
        table[np.arange(self.rows), self.hidden.reshape(-1)] = np.repeat(logit, self.length)
        return table

    def play(self, table: np.ndarray, step: int) -> Played:
        prompt = np.repeat(np.arange(self.prompts), self.group_size)
        rows = prompt[:, None] * self.length + np.arange(self.length)
        logp = log_softmax(table)
        tokens = draw(self.rng, logp[rows])
        mask = self.asked[prompt]
        rewards = ((tokens == self.hidden[prompt]) | ~mask).all(1).astype(np.float64)
        return self.played(step, rewards, rows, tokens, logp[rows, tokens], mask=mask)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        logp = log_softmax(table)[np.arange(self.rows), self.hidden.reshape(-1)]
        success = np.exp((logp.reshape(self.prompts, self.length) * self.asked).sum(1))
        return {"hard": float(success[self.hard].mean()), "easy": float(success[~self.hard].mean())}


class Worth(Toy):
    """One string to say to every prompt, rewarded by the share of it that is right; but prompts are worth more or less
    than others, far more than the string, and rewards are noisy. Who does not know a prompt's worth learns from noise.

    Every answer begins with a symbol that does not count, by the same row of the table as the first that does; critics
    do not see there which prompt it is.

    pool: prompts there are, of which a step has `per_step`. worth, noise: deviations of a prompt's worth, and of what
    is added to each reward.
    """

    def __init__(
        self,
        seed: int,
        *,
        pool: int = 400,
        per_step: int = 8,
        group_size: int = 8,
        symbols: int = 5,
        length: int = 4,
        worth: float = 3.0,
        noise: float = 0.3,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows, self.symbols, self.group_size = length, symbols, group_size
        self.limit_tok = self.max_turns = length + 1
        self.pool, self.per_step, self.noise = pool, per_step, noise
        self.hidden = self.rng.integers(0, symbols, length)
        self.worth = worth * self.rng.normal(size=pool)
        self.value_rows = 1 + pool * length

    def play(self, table: np.ndarray, step: int) -> Played:
        logp = log_softmax(table)
        prompt = np.repeat(self.rng.choice(self.pool, self.per_step, replace=False), self.group_size)
        place = np.arange(self.limit_tok) - 1
        rows = np.broadcast_to(np.maximum(place, 0), (len(prompt), self.limit_tok))
        tokens = draw(self.rng, logp[rows])
        right = (tokens[:, 1:] == self.hidden).mean(1)
        rewards = right + self.worth[prompt] + self.noise * self.rng.normal(size=len(prompt))
        states = np.where(place < 0, 0, 1 + prompt[:, None] * self.rows + place)
        return self.played(step, rewards, rows, tokens, logp[rows, tokens], states=states)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        return {"right": float(np.exp(log_softmax(table)[np.arange(self.rows), self.hidden]).mean())}


class Span(Toy):
    """Say 16 symbols, of which four in a row should be a hidden string, rewarded by the share of it that is right, with
    noise. The others are style: the policy has one at the start, and rewards do not depend on it.

    informed: whether the teacher knows the string; otherwise it differs from the start by as much at random places.
    """

    def __init__(
        self,
        seed: int,
        *,
        informed: bool = True,
        symbols: int = 5,
        length: int = 16,
        samples: int = 64,
        group_size: int = 8,
        noise: float = 0.3,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = self.value_rows = self.limit_tok = self.max_turns = length
        self.symbols, self.samples, self.group_size, self.noise = symbols, samples, group_size, noise
        self.first = self.rng.normal(size=(length, symbols))
        begins = int(self.rng.integers(2, length - 6))
        self.span = np.arange(begins, begins + 4)
        self.first[self.span] = 0.0
        self.hidden = self.rng.integers(0, symbols, len(self.span))
        change = self.rng.normal(scale=0.1, size=(length, symbols))
        at = self.span if informed else self.rng.permutation(length)[: len(self.span)]
        change[at, self.hidden if informed else self.rng.integers(0, symbols, len(at))] += 3.0
        self.taught = self.first + change

    def start(self) -> np.ndarray:
        return self.first.copy()

    def play(self, table: np.ndarray, step: int) -> Played:
        rows = np.broadcast_to(np.arange(self.rows), (self.samples, self.rows))
        logp = log_softmax(table)
        tokens = draw(self.rng, logp[rows])
        right = (tokens[:, self.span] == self.hidden).mean(1)
        rewards = right + self.noise * self.rng.normal(size=self.samples)
        return self.played(step, rewards, rows, tokens, logp[rows, tokens])

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        law, first = log_softmax(table), log_softmax(self.first)
        style = np.setdiff1d(np.arange(self.rows), self.span)
        return {
            "right": float(np.exp(law[self.span, self.hidden]).mean()),
            "drift": float((np.exp(first) * (first - law)).sum(1)[style].mean()),
        }

    def teacher(self) -> np.ndarray:
        return self.taught


class Ladder(Toy):
    """One string to say to every prompt, of which prompts ask for the first 1, 2, ... symbols: reward 1 if these are
    all right. Two symbols at the end never count.

    Critics see the place, whether all symbols so far were right, and the prompt only as one of `cells`, which prompts
    of all difficulties share if there are fewer cells than prompts.

    pool: prompts there are, of which a step has `per_step`.
    """

    def __init__(
        self,
        seed: int,
        *,
        pool: int = 40,
        cells: int = 40,
        per_step: int = 8,
        group_size: int = 8,
        symbols: int = 4,
        length: int = 4,
        filler: int = 2,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.rows = self.limit_tok = self.max_turns = length + filler
        self.symbols, self.group_size, self.pool, self.per_step = symbols, group_size, pool, per_step
        self.hidden = self.rng.integers(0, symbols, length)
        self.asks = 1 + np.arange(pool) % length
        self.cell = self.rng.integers(0, cells, pool) if cells < pool else np.arange(pool)
        self.value_rows = cells * self.rows * 2

    def play(self, table: np.ndarray, step: int) -> Played:
        logp = log_softmax(table)
        prompt = np.repeat(self.rng.choice(self.pool, self.per_step, replace=False), self.group_size)
        place = np.arange(self.rows)
        rows = np.broadcast_to(place, (len(prompt), self.rows))
        tokens = draw(self.rng, logp[rows])
        fine = place >= self.asks[prompt][:, None]
        fine[:, : len(self.hidden)] |= tokens[:, : len(self.hidden)] == self.hidden
        so_far = np.logical_and.accumulate(np.pad(fine, ((0, 0), (1, 0)), constant_values=True), 1)[:, :-1]
        states = (self.cell[prompt][:, None] * self.rows + place) * 2 + so_far
        return self.played(step, fine.all(1).astype(np.float64), rows, tokens, logp[rows, tokens], states=states)

    def measure(self, table: np.ndarray) -> Mapping[str, float]:
        right = np.exp(log_softmax(table)[np.arange(len(self.hidden)), self.hidden])
        return {"right": float(np.cumprod(right)[self.asks - 1].mean())}


# ---- what scripts print and take ------------------------------------------------------------------------------------


def arguments(doc: str | None, seeds: int) -> argparse.Namespace:
    """Return the arguments of a script: `figure`, `seeds`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", type=Path, help="where to draw")
    parser.add_argument("--seeds", type=int, default=seeds)
    return parser.parse_args()


def spread(values: np.ndarray, digits: int = 2) -> str:
    """Format mean, least and largest over seeds."""
    mean, low, high = (f"{x:.{digits}f}" for x in (values.mean(), values.min(), values.max()))
    return f"{mean} ({low} to {high})"


# ---- one step of the trainer, for tables ----------------------------------------------------------------------------


def pack(algorithm: Algorithm, played: Played, credit: Credit, kl_coef: float = 0.0) -> TokenBatch:
    """Pack a step as `PhaseTrainer.apply_credit` and `batch.pack` do, one group per row; `positions`: table rows."""
    e = played.episodes
    mask = e.mask if credit.mask is None else credit.mask & e.mask
    keep = (np.ones(e.num, bool) if credit.keep is None else credit.keep) & mask.any(1)
    mask = mask & keep[:, None]
    num, length = mask.shape
    size = int(np.count_nonzero(e.groups == 0))
    into_rows = lambda x: np.ascontiguousarray(np.reshape(x, (num // size, size * length, *x.shape[2:])))  # noqa: E731
    members = [[n for n in range(g, g + size) if keep[n]] for g in range(0, num, size)]
    kept = [group for group in members if group]
    scale = np.zeros(mask.shape)
    masks, turns = ([[x[n] for n in group] for group in kept] for x in (mask, e.turns))
    scales = token_scales(masks, algorithm.aggregation, e.limit_tok, turns)
    for group, values in zip(kept, scales, strict=True):
        scale[group] = values
    sequence = np.broadcast_to(1 + np.arange(num)[:, None] % size, mask.shape)
    floats: dict[str, np.ndarray | None] = {
        "scale": scale,
        "advantages": credit.advantages,
        "sampler_logp": e.behaviour_logp,
        "trainer_logp": e.trainer_logp,
        "ref_logp": e.ref_logp,
        "weights": np.broadcast_to(credit.weights, mask.shape),
        "entropy_weights": credit.entropy_weights,
        "rewards": credit.rewards,
        "reference_points": credit.reference_points,
        **_critic_columns(algorithm, e, credit, mask),
    }
    ints = {
        "tokens": played.tokens,
        "positions": played.rows,
        "segment_ids": np.ones(mask.shape),
        "branch_ids": sequence,
        "prev": np.zeros(mask.shape),
        "sequence_ids": np.where(e.mask, sequence, 0),
        "turn_ids": np.where(e.mask, (sequence - 1) * length + e.turns + 1, 0),
    }
    return TokenBatch(
        **{n: into_rows(x).astype(np.int32) for n, x in ints.items()},  # type: ignore[arg-type]
        **{n: None if x is None else into_rows(x).astype(np.float32) for n, x in floats.items()},  # type: ignore[arg-type]
        num_micro=np.int32(1),  # type: ignore[arg-type]
        num_tokens=np.float32(mask.sum()),  # type: ignore[arg-type]
        num_computed=np.float32(e.mask.sum()),  # type: ignore[arg-type]
        num_sequences=np.float32(mask.any(1).sum()),  # type: ignore[arg-type]
        temperature=np.float32(1),  # type: ignore[arg-type]
        kl_coef=np.float32(kl_coef),  # type: ignore[arg-type]
    )


def _critic_columns(algorithm: Algorithm, e: Episodes, credit: Credit, part: np.ndarray) -> dict[str, np.ndarray]:
    if not algorithm.needs().critics:
        return {}
    values = np.moveaxis(e.required("values"), 0, -1)
    assert credit.returns is not None
    if credit.critic_weights is None:
        weights = np.ones(values.shape)
    else:
        weights = np.moveaxis(np.asarray(credit.critic_weights, np.float64), 0, -1)
        own = (weights * part[..., None]).sum((0, 1))
        weights = weights * np.where(own > 0, part.sum() / np.maximum(own, 1), 0)
    return {"returns": credit.returns, "old_values_C": values, "critic_weights_C": weights}


def read_table(table: jax.Array, batch: TokenBatch) -> PolicyOutputs:
    """Return the outputs of a table `[R, V]` for rows `[B, L]`."""
    logp = jax.nn.log_softmax(table)
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return PolicyOutputs(logp[batch.positions, batch.tokens], entropy[batch.positions])


def policy_loss(algorithm: Algorithm, table: jax.Array, batch: TokenBatch) -> jax.Array:
    """Compute the loss as `update.policy_loss` does."""
    policy = jax.tree.map(lambda x: masked.clean(x, batch.scale), read_table(table, batch))
    return masked.total(algorithm.objective(policy, clean_batch(batch, policy.logp)).loss, batch.scale)


def critic_loss(algorithm: Algorithm, values: jax.Array, critic: jax.Array, batch: TokenBatch) -> jax.Array:
    """Compute the loss of the table of one critic `[R]` as `update.critic_loss` does."""
    scale = algorithm.critic_scale(batch) * masked.clean(batch.required("critic_weights_C")[..., critic], batch.scale)
    batch = dataclasses.replace(batch, scale=scale)
    old = masked.clean(batch.required("old_values_C")[..., critic], scale)
    returns = masked.clean(batch.required("returns"), scale)
    loss, _ = algorithm.critic_loss(masked.clean(values[batch.positions], scale), returns, old, batch)
    return masked.total(loss, scale)


@functools.partial(jax.jit, static_argnums=0)
def policy_gradients(algorithm: Algorithm, tables: jax.Array, batch: TokenBatch) -> jax.Array:
    """Compute gradients `[S, R, V]`, for batches with a leading S."""
    return jax.vmap(jax.grad(functools.partial(policy_loss, algorithm)))(tables, batch)


@functools.partial(jax.jit, static_argnums=(0, 1))
def critic_update(algorithm: Algorithm, steps: int, values: jax.Array, state: Any, batch: TokenBatch):
    """Apply one update of the critics of every seed: their tables `[S, M, R]` and the states of their optimizer."""
    settings = algorithm.needs().critics
    assert settings is not None
    tx = settings.optimizer.build(steps * settings.epochs)
    which = jnp.arange(values.shape[1])

    def one(values: jax.Array, state: Any, critic: jax.Array, batch: TokenBatch):
        grads = jax.grad(lambda v: critic_loss(algorithm, v, critic, batch))(values)
        updates, state = tx.update(grads, state, values)
        return values + updates, state

    return jax.vmap(jax.vmap(one, in_axes=(0, 0, 0, None)), in_axes=(0, 0, None, 0))(values, state, which, batch)


@dataclasses.dataclass
class Critics:
    """The tables of the critics of all seeds, `[S, M, R]`, and the states of their optimizers."""

    values: np.ndarray
    state: Any

    @staticmethod
    def of(algorithm: Algorithm, toys: Sequence[Toy], steps: int, std: float) -> Critics | None:
        settings = algorithm.needs().critics
        if settings is None:
            return None
        shape = (settings.num, toys[0].value_rows)
        values = np.stack([std * np.random.default_rng([7, s]).normal(size=shape) for s in range(len(toys))])
        init = settings.optimizer.build(steps * settings.epochs).init
        return Critics(values, jax.vmap(jax.vmap(init))(jnp.float32(values)))

    def fitted(self, algorithm: Algorithm, steps: int, every: Sequence[Played], batch: TokenBatch) -> Critics:
        """Return the critics after all updates of a step, for the batches of all seeds."""
        settings = algorithm.needs().critics
        assert settings is not None
        where = np.stack([p.value_rows for p in every]).reshape(batch.tokens.shape).astype(np.int32)
        batch, values, state = dataclasses.replace(batch, positions=where), jnp.float32(self.values), self.state
        for _ in range(settings.epochs):
            values, state = critic_update(algorithm, steps, values, state, batch)
        return Critics(np.array(values, np.float64), state)


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """What training left: by name, what `Toy.measure` found after every step, `[S, steps + 1]`; tables `[S, R, V]`;
    critics `[S, M, R]`; gradient norms `[S, steps]`; the statistics of every credit, seed by seed."""

    measured: Mapping[str, np.ndarray]
    tables: np.ndarray
    values: np.ndarray | None
    grad_norms: np.ndarray

    def steps_to(self, level: float, name: str = "success") -> np.ndarray:
        """Return the steps until the measure first reaches `level`, by seed `[S]`; inf if it never does."""
        reached = self.measured[name] >= level
        return np.where(reached.any(1), reached.argmax(1), np.inf)


def train(
    make: Callable[[int], Toy],
    algorithm: Algorithm,
    *,
    seeds: int,
    steps: int,
    lr: float,
    lag: int = 0,
    epochs: int = 1,
    value_std: float = 0.1,
    advance: Callable[[], None] = lambda: None,
) -> History:
    """Train `seeds` tables by plain gradient descent, each on a problem of its own.

    Args:
      make: the problem of a seed. lr: rate, for the loss as the algorithm aggregates it. lag: age in steps of the
        sampler's table. epochs: updates on the same trajectories. value_std: of critics' first values.
      advance: called after every step.
    """
    toys = [make(s) for s in range(seeds)]
    tables = np.stack([toy.start() for toy in toys])
    first = tables.copy()
    critics = Critics.of(algorithm, toys, steps, value_std)
    settings = algorithm.needs().critics
    memories: list[Mapping[str, float]] = [{} for _ in toys]
    past = collections.deque([tables], maxlen=lag + 1)
    measured = [[toy.measure(t) for toy, t in zip(toys, tables, strict=True)]]
    norms = []
    for step in range(steps):
        every, credited = [], []
        for s, toy in enumerate(toys):
            values = None if critics is None else critics.values[s]
            played = read(algorithm, toy, toy.play(past[0][s], step), tables[s], first[s], values)
            credit = algorithm.credit(played.episodes, memories[s])
            if critics is not None and step == 0:
                mean = _mean_return(played.episodes, credit)
                critics.values[s] += mean
                old = dataclasses.replace(played.episodes, values=played.episodes.required("values") + mean)
                played = dataclasses.replace(played, episodes=old)
            every.append(played)
            credited.append(credit)
        batch = _stacked(algorithm, every, credited, memories)
        if critics is not None and settings is not None:
            critics = critics.fitted(algorithm, steps, every, batch)
            if settings.first:
                every = [p.valued(values) for p, values in zip(every, critics.values, strict=True)]
                credited = [algorithm.credit(p.episodes, m) for p, m in zip(every, memories, strict=True)]
                batch = _stacked(algorithm, every, credited, memories)
        memories = [credit.algorithm_state for credit in credited]
        if settings is None or step >= settings.warmup_steps:
            for _ in range(epochs):
                grads = np.asarray(policy_gradients(algorithm, jnp.float32(tables), batch), np.float64)
                tables = tables - lr * grads
            norms.append(np.sqrt((grads**2).sum((1, 2))))
        past.append(tables)
        measured.append([toy.measure(t) for toy, t in zip(toys, tables, strict=True)])
        advance()
    names = measured[0][0]
    return History(
        {n: np.array([[m[n] for m in row] for row in measured]).T for n in names},
        tables,
        None if critics is None else critics.values,
        np.array(norms).T,
    )


def _stacked(
    algorithm: Algorithm, every: Sequence[Played], credited: Sequence[Credit], memories: Sequence[Mapping[str, float]]
) -> TokenBatch:
    """Return the batches of all seeds, with a leading S."""
    batches = [
        pack(algorithm, played, credit, algorithm_state.get("kl_coef", algorithm.kl_coef))
        for played, credit, algorithm_state in zip(every, credited, memories, strict=True)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *batches)


def _mean_return(e: Episodes, credit: Credit) -> float:
    assert credit.returns is not None
    keep = np.ones(e.num, bool) if credit.keep is None else credit.keep
    mask = e.mask if credit.mask is None else credit.mask & e.mask
    return float(credit.returns[mask & keep[:, None]].mean())


def read(
    algorithm: Algorithm, toy: Toy, played: Played, table: np.ndarray, first: np.ndarray, values: np.ndarray | None
) -> Played:
    """Return the trajectories with all arrays that the algorithm needs: the teacher is the toy's, the policies of the
    start of the phase and of the run are `first`."""
    needs = algorithm.needs()
    at = lambda t: log_softmax(t)[played.rows, played.tokens]  # noqa: E731
    named = lambda name: at(first if name in ("phase_start", "run_start") else toy.teacher())  # noqa: E731
    found: dict[str, Any] = {}
    if needs.trainer_logp:
        found["trainer_logp"] = at(table)
    if needs.ref:
        found["ref_logp"] = named(needs.ref)
    if needs.scorer:
        found["scorer_logp"] = named(needs.scorer)
    if needs.teachers:
        found["teacher_logp"] = np.stack([named(name) for name in needs.teachers])
    played = dataclasses.replace(played, episodes=dataclasses.replace(played.episodes, **found))
    return played if values is None else played.valued(values)
