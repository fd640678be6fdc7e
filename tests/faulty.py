"""An environment that fails on purpose, in the way that the task says. Worker processes import it by its name."""

import ctypes
import dataclasses
import os
import signal
import stat
import sys
import threading
import time
import uuid
from pathlib import Path

import numpy as np

from rolljax.envs.base import Env, EnvSpec, StepResult
from rolljax.errors import ConfigError, DataError, EnvError, InfraError
from rolljax.types import Message, Task

TURNS = 3

ENV = {
    "reset": ["raise", "sysexit", "empty", "strobs", "dictobs"],
    "step": (
        "raise unprintable sysexit nan inf huge strreward nanpart strmetric intname weight both flag none tuple empty "
        "strobs dictobs bytesobs many late"
    ).split(),
}
"""Faults of the environment that any backend survives, by stage."""

WORKER = {
    "reset": ["hang", "exit", "segv"],
    "step": (
        "hang hold exit segv abort memory floodthenexit shortline oversizedline notjson notutf8 deep schema pickle "
        "closed"
    ).split(),
}
"""Faults of the environment that only a worker process survives."""

HARMLESS = ["step_surrogate", "step_oversized", "step_slow", "close_raise", "close_late", "close_sysexit"]
"""The episode goes on to its end."""

WORKER_HARMLESS = ["close_hang", "close_exit", "step_flood", "step_fds", "step_zombies", "step_thread"]

INFRA = ["reset_once_infra", "step_once_infra"]
"""Lost once, complete when tried again."""

WORKER_INFRA = ["reset_once_kill", "step_once_kill", "step_once_wrongid", "step_once_duplicate"]


def names(table):
    return [f"{stage}_{fault}" for stage, faults in table.items() for fault in faults]


async def play(pool, task):
    """Play a whole episode; return the sum of its rewards."""
    episode = await pool.open(task)
    try:
        shown, reward = episode.initial_messages[-1].content, 0.0
        for _ in range(TURNS):
            result = await episode.step(str(int(shown) + 1) if shown.isdigit() else "")
            reward += result.reward
            if result.terminated:
                return reward
            shown = result.messages[-1].content
        raise AssertionError("no end")
    finally:
        await episode.close()


async def play_again(pool, task, attempts=200):
    """Call `play` again after faults of the infrastructure."""
    for attempt in range(attempts):
        try:
            return await play(pool, task)
        except InfraError as e:
            if attempt == attempts - 1 or e.stage == "pool":
                raise


@dataclasses.dataclass(frozen=True)
class Faulty(EnvSpec):
    """Counts: the policy answers the number it was shown plus one, `TURNS` times, for a reward of 1 each.

    faults: name of the fault of each task, "" for none; the task at `index` has `faults[index % len(faults)]`.
    folder: where faults that happen once leave a mark, and closed episodes their name. latency_s: of each step.
    """

    runs = "inline"

    faults: tuple[str, ...] = ("",)
    folder: str = ""
    latency_s: float = 0.0

    @property
    def name(self):
        return "faulty"

    @property
    def max_turns(self):
        return TURNS

    def task(self, index):
        return Task(self.name, index, f"{index} {self.faults[index % len(self.faults)]}")

    def make(self):
        return FaultyEnv(self)


@dataclasses.dataclass(frozen=True)
class FaultyProcess(Faulty):
    runs = "process"


@dataclasses.dataclass(frozen=True)
class FaultyThread(Faulty):
    runs = "thread"


@dataclasses.dataclass(frozen=True)
class Unpicklable(FaultyProcess):
    """Settings that the worker cannot read."""

    how: str = "raise"

    def __reduce__(self):
        return _unreadable, (self.how,)


def _unreadable(how):
    sys.stderr.write("the library is not there\n")
    if how == "hang":
        time.sleep(1000)
    if how == "exit":
        os._exit(9)
    raise ImportError("no module named nowhere")


class FaultyEnv(Env):
    def __init__(self, spec):
        self._spec = spec

    def reset(self, task):
        index, _, fault = task.content.partition(" ")
        self._index, self._stage, self._fault, self._turn = int(index), "reset", fault, 0
        self._n = int(index)
        result = self._commit()
        return (Message("user", str(self._n)),) if result is None else result.messages

    def step(self, action):
        self._stage = "step"
        if self._spec.latency_s:
            time.sleep(self._spec.latency_s)
        right = action == self.reference_answer()
        self._n, self._turn = self._n + 1, self._turn + 1
        if self._turn == 2 and (result := self._commit()) is not None:
            return result
        over = self._turn == TURNS
        return StepResult(() if over else (Message("user", str(self._n)),), float(right), over, success=right)

    def reference_answer(self):
        if self._stage == "step" and self._fault == "gold_hangs":
            time.sleep(1000)
        return str(self._n + 1)

    def close(self):
        if self._spec.folder:
            Path(self._spec.folder, f"closed-{self._index}-{os.getpid()}-{uuid.uuid4().hex}").touch()
        self._stage = "close"
        self._commit()

    def _commit(self):
        """Commit the task's fault if it belongs to this stage: `step_hang` is a `hang` of the second step."""
        stage, _, fault = self._fault.partition("_")
        if stage != self._stage:
            return None
        if fault.startswith("once_"):  # and never again, in any process
            try:
                Path(self._spec.folder, f"{self._fault}-{self._index}").touch(exist_ok=False)
            except FileExistsError:
                return None
            fault = fault.removeprefix("once_")
        return getattr(self, "_" + fault)()

    def _hang(self):
        time.sleep(1000)

    def _hold(self):
        """Hang while holding the interpreter's lock."""
        ctypes.PyDLL(None).sleep(1000)

    def _slow(self):
        time.sleep(0.2)

    def _late(self):
        time.sleep(1.0)

    def _raise(self):
        raise KeyError("hole")

    def _enverror(self):
        raise EnvError("the board is gone", stage="board")

    def _infra(self):
        raise InfraError("the server is gone")

    def _data(self):
        raise DataError("no such file")

    def _config(self):
        raise ConfigError("needs chess", setting="Chess.board", remedy="pip install chess")

    def _unprintable(self):
        class Odd(Exception):
            def __str__(self):
                raise RuntimeError

        raise Odd

    def _sysexit(self):
        sys.exit(3)

    def _exit(self):
        sys.stderr.write("last words\n")
        os._exit(7)

    def _segv(self):
        ctypes.string_at(0)

    def _abort(self):
        os.abort()

    def _memory(self):
        return [bytearray(2**28) for _ in range(1000)]

    def _later(self):
        """End the worker between two calls."""
        threading.Timer(0.2, os.abort).start()

    def _kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def _flood(self):
        line = b"x" * 1023 + b"\n"
        for _ in range(2000):
            os.write(1, line)
            os.write(2, line)

    def _floodthenexit(self):
        self._flood()
        self._exit()

    def _fds(self):
        self._leak = [os.open(os.devnull, os.O_RDONLY) for _ in range(50)]
        globals().setdefault("LEAKS", []).append(self._leak)

    def _zombies(self):
        """Leave children that are never reaped: one that ended, and one that lives on in its own session."""
        if os.fork() == 0:
            os._exit(0)
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)

    def _thread(self):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()

    # results that break the rules

    def _nan(self):
        return StepResult((), float("nan"), True)

    def _inf(self):
        return StepResult((), float("-inf"), True)

    def _huge(self):
        return StepResult((), 10**400, True)

    def _strreward(self):
        return StepResult((), "1.0", True)

    def _nanpart(self):
        return StepResult((), 1.0, True, reward_parts={"goal": float("nan")})

    def _strmetric(self):
        return StepResult((), 1.0, True, metrics={"n": "3"})

    def _intname(self):
        return StepResult((), 1.0, True, metrics={3: 1.0})

    def _weight(self):
        return StepResult((), 1.0, True, weight=-1.0)

    def _both(self):
        return StepResult((), 1.0, True, True)

    def _flag(self):
        return StepResult((), 1.0, "yes")

    def _none(self):
        return ()

    def _tuple(self):
        return ((), 1.0, True, False, {})

    def _empty(self):
        return StepResult((), 0.0, False)

    def _strobs(self):
        return StepResult("hello", 0.0, False)

    def _dictobs(self):
        return StepResult(({"role": "user", "content": "x"},), 0.0, False)

    def _bytesobs(self):
        return StepResult((Message("user", b"x"),), 0.0, False)

    def _many(self):
        return StepResult((Message("user", "x"),) * 100_000, 0.0, False)

    # results that are mended

    def _numpy(self):
        parts = {"a": np.float32(0.5), "b": np.int64(1)}
        return StepResult([Message("user", "n")], np.float32(0.5), np.True_, reward_parts=parts)

    def _surrogate(self):
        return StepResult((Message("user", "a\udc80b\ud83d\ude00"),), 0.0, False)

    def _oversized(self):
        return StepResult((Message("user", "é" * 500_000),), 0.0, False)

    # what a worker may say on its connection

    def _connection(self):
        for fd in range(3, 256):
            try:
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    return fd
            except OSError:
                pass
        raise AssertionError("no socket")

    def _say(self, data):
        os.write(self._connection(), data)
        time.sleep(1000)

    def _line(self, payload):
        self._say(payload + b"\n")

    def _shortline(self):
        os.write(self._connection(), b"only this")
        os._exit(0)

    def _oversizedline(self):
        self._say(b"x" * 2**26)

    def _notjson(self):
        self._line(b"{nonsense")

    def _notutf8(self):
        self._line(b'[1,"ok","\xff\xfe"]')

    def _deep(self):
        self._line(b"[" * 200_000)

    def _schema(self):
        self._line(b'{"reward": 1.0}')

    def _wrongid(self):
        self._line(b'[999999999,"ok",null]')

    def _pickle(self):
        self._line(b"cos\nsystem\n(S'touch pwned'\ntR.")

    def _closed(self):
        os.close(self._connection())
        time.sleep(1000)

    def _duplicate(self):
        """Send every reply twice from now on."""
        import rolljax.envs.pool.wire as wire

        reply = wire.reply
        wire.reply = lambda *said: b"\n".join([reply(*said)] * 2)
