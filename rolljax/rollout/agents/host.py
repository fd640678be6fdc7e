"""Episodes played by agent programs: a server for their calls, processes that run them, and a trajectory of each
episode.

    task -> EnvPool -> opening messages -> program -> calls -> sampler
                                              |          |
                            its answer -> Episode.step   +-> Session -> Turn* -> Trajectory

The environment opens the episode and judges the program's answer, in one step. Everything in between is up to the
program: its prompts, its tools, how it cuts its context. The server that answers its calls records them. A program may
also run inside the sandbox of its episode (`Env.play`); then the environment scores the files that it leaves there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import time
from collections.abc import AsyncIterator

import uvicorn

from rolljax.envs.base import ProgramLaunch, StepResult, api_variables
from rolljax.envs.pool import Episode
from rolljax.errors import EnvError, InfraError, SamplerError
from rolljax.model.tokenizer import Chat
from rolljax.rollout.agents.program import AgentProgram
from rolljax.rollout.agents.worker import GRACE_S, AgentProcess
from rolljax.rollout.builder import TrajectoryBuilder
from rolljax.rollout.episodes import Rollouts, SamplerPolicy
from rolljax.rollout.start_states import Start
from rolljax.sampler.client import SamplerClient
from rolljax.serving.schema import ServedModel
from rolljax.serving.server import ServerLimits, Service
from rolljax.serving.session import Call, Session, SessionRules, Sessions
from rolljax.types import Message, Turn

MIN_WAIT_S = 0.02
"""Shortest wait between two checks of an episode's clock."""
KEEP_ALIVE_S = 3600
"""Idle connections are the program's to close: one that is closed here may lose the call it is just then used for."""


class OutOfTime(Exception):
    """A program did not answer in time."""


@dataclasses.dataclass(frozen=True, slots=True)
class AgentTask:
    """The task of a program: its name, the environment's messages, and the session of its calls."""

    name: str
    messages: tuple[Message, ...]
    session: Session

    @property
    def text(self) -> str:
        """The text of the last message."""
        return self.messages[-1].content


class AgentHost:
    """The server that a run's agent programs talk to, and their processes. It lives on one event loop.

    Args:
      max_context: tokens of prompt and answer. model_name: the name that `/v1/models` tells.
    """

    def __init__(
        self, program: AgentProgram, sampler: SamplerClient, chat: Chat, max_context: int, model_name: str = "policy"
    ) -> None:
        self.program, self.sampler, self.sessions = program, sampler, Sessions()
        vocab_size = sampler.limits.vocab_size
        served = ServedModel(model_name, chat.tokenizer, chat, vocab_size, max_context)
        self.service = Service(sampler, served, ServerLimits(), self.sessions)
        self.address = ("127.0.0.1", 0)
        """Host and port of the server; port 0 until it is open."""
        self._opening = asyncio.Lock()
        self.places = asyncio.Semaphore(program.concurrency)
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Future[None] | None = None
        self._workers: set[AgentProcess] = set()
        self._idle: list[AgentProcess] = []
        self._stopping: set[asyncio.Future[None]] = set()

    @property
    def url(self) -> str:
        """The server's URL, without a path."""
        return "http://{}:{}".format(*self.address)

    async def open(self) -> None:
        """Begin to serve, on a free port of this machine, unless that is so already."""
        async with self._opening:
            if self._serving is not None:
                return
            listener = socket.socket()
            listener.bind(self.address)
            self.address = listener.getsockname()
            self._server = self.service.make_server(keep_alive_s=KEEP_ALIVE_S, closing_s=1)
            self._serving = asyncio.ensure_future(self._server.serve(sockets=[listener]))
            while not self._server.started:
                if self._serving.done():
                    raise InfraError("the server for agent programs did not start", stage="reset")
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End every program, then the server."""
        self.service.draining = True
        for worker in self._workers:
            worker.child.kill()
        await asyncio.gather(*self._stopping, *(w.child.astop() for w in self._workers), return_exceptions=True)
        self._workers.clear()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        self.service.close()

    @contextlib.asynccontextmanager
    async def worker(self, task: AgentTask) -> AsyncIterator[AgentProcess]:
        """Open a program for one episode alone. It is reused for the next episode if the settings allow it and nothing
        failed."""
        async with self.places:
            while self._idle and not self._idle[-1].child.alive:
                self._retire(self._idle.pop())
            worker = self._idle.pop() if self._idle else self._start(task)
            well = False
            try:
                yield worker
                well = True
            finally:
                if well and self.program.reuse:
                    self._idle.append(worker)
                else:
                    self._retire(worker, kill=not well)

    async def play(self, worker: AgentProcess, task: AgentTask) -> str:
        """Return the program's answer.

        Raises:
          OutOfTime: the program gave no answer in time. EnvError: the program failed.
        """
        asking = asyncio.ensure_future(worker.ask(self._launch(task).sent(self.url)))
        start_s = time.monotonic()
        try:
            while not asking.done():
                left_s = self.program.deadline_s - (time.monotonic() - start_s - task.session.busy_s())
                if left_s <= 0:
                    raise OutOfTime
                await asyncio.wait([asking], timeout=max(left_s, MIN_WAIT_S))
            return asking.result()
        finally:
            asking.cancel()

    async def play_inside(self, episode: Episode, task: AgentTask) -> StepResult:
        """Run a program in the sandbox of its episode; return how the environment scores what it left there."""
        return await episode.play(self._launch(task))

    def _launch(self, task: AgentTask) -> ProgramLaunch:
        program, command = self.program, self.program.command_of(task.text)
        if command[0] == "python":
            command = ("python3", *command[1:])
        sent = {"id": task.name, "messages": [{"role": m.role, "content": m.content} for m in task.messages]}
        return ProgramLaunch(command, sent, self.address, task.session.key, program.env, program.deadline_s)

    def _start(self, task: AgentTask) -> AgentProcess:
        variables = {} if self.program.reuse else api_variables(self.url, task.session.key)
        worker = AgentProcess(self.program, variables, task.text)
        self._workers.add(worker)
        return worker

    def _retire(self, worker: AgentProcess, *, kill: bool = False) -> None:
        """End a program in the background, while other episodes run."""
        self._workers.discard(worker)
        ending = asyncio.ensure_future(worker.child.astop(0 if kill else GRACE_S))
        self._stopping.add(ending)
        ending.add_done_callback(self._stopping.discard)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class AgentRollouts(Rollouts):
    """Rollouts whose episodes are played by the host's programs. `policy` must be the sampler's."""

    host: AgentHost

    async def run_episode(self, episode: Episode, builder: TrajectoryBuilder, start: Start | None) -> None:
        assert isinstance(self.policy, SamplerPolicy) and start is None
        await self.host.open()
        program, key, sessions = self.host.program, builder.key, self.host.sessions
        address = (self.policy.seed % 2**31, key.stream, key.prompt_index, key.sibling)
        rules = SessionRules(
            self.policy.params, address, program.max_calls, program.max_restarts, min_version=builder.version
        )
        session = sessions.open(rules)
        task = AgentTask(f"{key.stream}-{key.prompt_index}-{key.sibling}", episode.initial_messages, session)
        answer: str | StepResult = ""
        failure: EnvError | OutOfTime | None = None
        try:
            start_s = time.perf_counter()
            try:
                if program.sandbox == "task":
                    async with self.host.places:
                        start_s = time.perf_counter()
                        answer = await self.host.play_inside(episode, task)
                else:
                    async with self.host.worker(task) as worker:
                        start_s = time.perf_counter()
                        answer = await self.host.play(worker, task)
            finally:
                builder.sample_s += session.busy_s()
                builder.env_s += time.perf_counter() - start_s - session.busy_s()
        except (EnvError, OutOfTime) as e:
            failure = e
        finally:
            self.host.service.end(session)
        calls = self._take_down(session, builder)
        if self.host.sampler.error:
            raise SamplerError(str(self.host.sampler.error))
        if isinstance(failure, EnvError) and not session.limit:
            raise failure
        if not builder.turns:
            raise EnvError("the program made no call of the model that was answered", stage="program")
        if isinstance(failure, OutOfTime):
            builder.truncate("time", f"the program did not answer within {program.deadline_s:g} s of its own")
        elif failure is not None:
            builder.truncate("calls", f"the program failed when it had had its {session.limit}: {failure}")
        await self._judge(episode, answer, builder, calls)

    async def _judge(
        self, episode: Episode, answer: str | StepResult, builder: TrajectoryBuilder, calls: list[Call]
    ) -> None:
        """Give an answer to the environment, unless it has scored the episode already; the reward belongs to the call
        that was made last."""
        result = await self.env_step(episode, answer, builder) if isinstance(answer, str) else answer
        builder.last_turn = last = max(range(len(calls)), key=lambda i: calls[i].index)
        builder.turns[last] = dataclasses.replace(builder.turns[last], reward=result.reward)
        builder.reward, builder.success = result.reward, result.success
        builder.parts |= result.reward_parts
        builder.metrics |= result.metrics
        if builder.status != "ok":
            return
        if result.truncated:
            builder.truncate("env", "the environment ended the episode before its end")
        elif not result.terminated:
            builder.truncate("program", "the environment does not take the program's answer for an end", kind="agent")
        elif builder.turns[last].finish_reason != "stop":
            builder.truncate("answer", f"the model's last answer was cut: {builder.turns[last].finish_reason}")

    def _take_down(self, session: Session, builder: TrajectoryBuilder) -> list[Call]:
        """Put the calls that were answered on builder, a turn for each; returns them in the same order."""
        streams = session.streams()
        calls = [call for stream in streams for call in stream]
        builder.turns = [_turn(call) for call in calls]
        if builder.turns:
            builder.turns[0] = dataclasses.replace(builder.turns[0], restart=False)
        builder.metrics |= {
            "agent_calls_n": float(len(builder.turns)),
            "agent_restarts_n": float(max(len(streams) - 1, 0)),
            "agent_dropped_n": float(session.dropped),
            "agent_overridden_n": float(sum(bool(call.overridden) for call in calls)),
        }
        return calls


def _turn(call: Call) -> Turn:
    assert call.completion is not None
    sampled, restart = call.completion, call.before is None
    return Turn(
        call.new_ids,
        sampled.tokens,
        sampled.sampler_logp,
        sampled.versions,
        sampled.finish_reason,
        0.0,
        call.text,
        restart=restart,
        experts=sampled.experts,
        alternatives=sampled.alternatives,
        sampler=sampled.sampler,
    )
