"""Single-player games of textarena with their original rules; the policy sends one message per turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from rolljax.envs.adapters.border import MAX_ACTION_CHARS, BorrowedRandom, library
from rolljax.envs.base import Env, EnvSpec, Runs, StepResult
from rolljax.envs.pool.episode_runner import flag, number
from rolljax.errors import ConfigError, EnvError, Range, boundary, check_fields
from rolljax.types import Message, Task

GAMES = tuple(
    "2048 Bandit Blackjack Countdown Crosswords Cryptarithm FifteenPuzzle FrozenLake GuessTheNumber LightsOut "
    "LogicPuzzle Mastermind Minesweeper PegJump RushHour Secretary Set Slitherlink Sokoban Sudoku ThreeCardMonte "
    "TowerOfHanoi".split()
)
"""Games for one player that need nothing from outside."""

GAME = -1
"""The sender number of the game's own messages."""

NEEDS: Mapping[str, str] = {
    **dict.fromkeys("Hangman WordLadder WordSearch Wordle SpellingBee".split(), "a word list that nltk downloads"),
    **dict.fromkeys("GuessWho TwentyQuestions".split(), "a language model behind an API key"),
    "Klondike": "Python 3.12",
}
"""Single-player games that the adapter does not offer, and the missing requirement of each."""


@dataclasses.dataclass(frozen=True)
class TextArena(EnvSpec):
    """One game of textarena (https://github.com/LeonGuertler/TextArena).

    The reward comes at the end, as the game gives it: 1 for a solved game, a share of 1 for what was reached in most,
    and in the same way after a second illegal move in a row, which ends a game. A game that is cut by `max_turns` gives
    0; so does an illegal end in the three games that put its reason into the reward's place.
    """

    runs: ClassVar[Runs] = "process"

    id: str = "GuessTheNumber-v0"
    """Id of the game in textarena, without the ending of a wrapper, such as `GuessTheNumber-v0` or `Sudoku-v0-easy`;
    one of `GAMES`."""
    seed: int = 0
    """Seed of the tasks."""
    max_turns: Annotated[int, Range(low=1)] = 30
    """Turns after which the episode is cut; games also have their own limits."""

    def __post_init__(self) -> None:
        game = self.id.partition("-")[0]
        if game not in GAMES:
            why = f"needs {NEEDS[game]}" if game in NEEDS else "is no game for one player that this adapter offers"
            raise ConfigError(why, setting="TextArena.id", value=self.id, remedy=f"one of {', '.join(GAMES)}")
        check_fields(self)

    @property
    def name(self) -> str:
        return self.id

    def task(self, index: int) -> Task:
        """Return a task that is identified by its seed: the first observation does not show the hidden state."""
        return Task(self.name, index, f"{self.id} with seed {self._seed(index)}")

    def warm(self) -> None:
        self.make().reset(self.task(0))

    def make(self) -> Env:
        return TextArenaEnv(self)

    def _seed(self, index: int) -> int:
        return (self.seed * 1_000_003 + index) % 2**31


class TextArenaEnv(Env):
    """One game."""

    def __init__(self, spec: TextArena) -> None:
        self._spec = spec
        self._game: Any = None
        self._over = True

    def reset(self, task: Task) -> tuple[Message, ...]:
        if task != self._spec.task(task.index):
            raise EnvError(f"task {task.index} is not one of {self._spec.id} with this seed")
        textarena = library("textarena", "textarena==0.7.4")
        seed = self._spec._seed(task.index)
        self._random = BorrowedRandom(seed)
        with self._random.lent(), boundary(EnvError, f"reset of {self._spec.id}"):
            self._game = textarena.make(f"{self._spec.id}-raw")
            self._game.reset(num_players=1, seed=seed)
            self._turns, self._over = 0, False
            return (self._heard(),)

    def step(self, action: str) -> StepResult:
        if self._over:
            raise EnvError("step before reset, or after the episode's end")
        self._turns += 1
        with self._random.lent(), boundary(EnvError, f"step of {self._spec.id}"):
            done, _ = self._game.step(action if len(action) <= MAX_ACTION_CHARS else "")
            done = flag(done, "done")
            self._over = done or self._turns == self._spec.max_turns
            if not self._over:
                return StepResult((self._heard(),), 0.0, terminated=False)
            rewards, infos = self._game.close() if done else ({}, {})
        illegal = bool((infos or {}).get(0, {}).get("invalid_move"))
        score = (rewards or {}).get(0) if done else 0.0
        reward = 0.0 if illegal and isinstance(score, str) else number(score)
        return StepResult(
            (),
            reward,
            terminated=done,
            truncated=not done,
            success=reward >= 1 and not illegal,
            reward_parts={"game": reward},
            metrics={"illegal_end_n": float(illegal)},
        )

    def reference_answer(self) -> str:
        raise EnvError("textarena has no reference actions")

    def _heard(self) -> Message:
        """Return the game's messages since the policy's last move, without that move."""
        _, said = self._game.get_observation()
        return Message("user", "\n".join(text for sender, text, _ in said if sender == GAME) or "Your move.")
