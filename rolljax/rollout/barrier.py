"""Episodes that begin together, and how many are done."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from rolljax.types import EVAL_STREAM, Key


class Barrier:
    """Lets episodes begin together, in the order of their keys, when all of them are open.

    What a dispatch computes depends in its last bits on which requests share it. Where opening an episode takes
    microseconds, a step's prompts wait for each other, and a run that is repeated is the same to the bit.

    episodes: how many there will be. hold: keeps the sampler from beginning until what it returns is called.
    """

    def __init__(self, episodes: int, hold: Callable[[], Callable[[], None]] | None = None) -> None:
        self._expected, self._hold = episodes, hold
        self._waiting: list[tuple[tuple[int, int], asyncio.Future[None]]] = []

    async def arrive(self, key: Key) -> None:
        """Wait for the others."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((key.draw, key.sibling), future))
        self._open()
        await future

    def leave(self, episodes: int = 1) -> None:
        """Expect this many episodes fewer: they will not arrive."""
        self._expected -= episodes
        self._open()

    def _open(self) -> None:
        if len(self._waiting) >= self._expected:
            release = self._hold() if self._hold else None
            for _, future in sorted(self._waiting, key=lambda w: w[0]):
                if not future.done():
                    future.set_result(None)
            if release:  # behind the episodes, which submit their first prompts now
                asyncio.get_running_loop().call_soon(release)


class EpisodeCounts:
    """Episodes done and under way, by stream, of the streams that have any under way."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def counted(self, key: Key) -> Iterator[None]:
        """Around one episode."""
        done, under_way = self._counts.get(key.stream, (0, 0))
        self._counts[key.stream] = done, under_way + 1
        try:
            yield
        finally:
            done, under_way = self._counts[key.stream]
            self._counts[key.stream] = done + 1, under_way - 1
            if under_way == 1:
                del self._counts[key.stream]

    def __str__(self) -> str:
        """One clause for each stream: `training: 448 episodes done, 64 under way`."""
        return "; ".join(
            f"{'evaluation' if stream == EVAL_STREAM else 'training'}: {done} episodes done, {under_way} under way"
            for stream, (done, under_way) in list(self._counts.items())
        )
