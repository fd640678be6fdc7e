"""Chat with a model in a terminal: `python -m rolljax.chat RUN | HF_DIR [--env ENV] [--probs N]`.

Each line you type is a message. The answer is shown while it is sampled; Ctrl-C ends the answer. The conversation is
one token stream, as in training: sampled tokens are never tokenised again. With `--env` the tools of an environment
answer the model's calls.

Commands: `/probs [N]` probabilities of each token of the next answers, with N alternatives (0: none) · `/temp X` ·
`/task [N]` asks task N of the environment · `/new` starts over · `/help` · Ctrl-D ends.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolljax import cli
from rolljax.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from rolljax.concurrency.event_loop import EventLoop
    from rolljax.envs.base import EnvSpec
    from rolljax.envs.tools.env import ToolEpisode
    from rolljax.model.tokenizer import Chat
    from rolljax.sampler.client import SamplerClient
    from rolljax.types import Message, Sampled

MAX_TOKENS = 256
"""Default limit of an answer; the run or `--max_tokens` overrides it."""
MOST_PROBS = 10
MAX_TOOL_TURNS = 8
"""Most consecutive answers that call tools before the user's next message."""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; `--help` explains each argument. None: this process's arguments."""
    parser = argparse.ArgumentParser(prog="python -m rolljax.chat", description="Chat with a model in a terminal.")
    parser.add_argument(
        "model", metavar="RUN|HF_DIR", help="run folder (its newest checkpoint, or --step), or Hugging Face folder"
    )
    parser.add_argument("--step", help="of a run: of a kept checkpoint, or 'best': of the highest held-out reward")
    parser.add_argument("--env", metavar="ENV", help="whose tools answer the model's calls: calculator, ...")
    parser.add_argument("--chat_template", metavar="FILE|plain", help=cli.TEMPLATE_HELP)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: %(default)s)")
    parser.add_argument("--top_p", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--max_tokens", type=int, help=f"of one answer (default: the run's, or {MAX_TOKENS})")
    parser.add_argument("--max_context", type=int, help="tokens of the conversation (default: the run's, or 4096)")
    parser.add_argument("--probs", type=int, nargs="?", const=3, default=0, metavar="N", help="see /probs")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds and messages give equal answers")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the command with its arguments; return its exit code (docs/runs.md)."""
    args = parse(argv)
    cli.quiet()

    def run() -> int:
        check_arguments(args)
        env = open_env(args.env)
        import jax

        from rolljax import serve
        from rolljax.concurrency.event_loop import EventLoop
        from rolljax.model.tokenizer import Chat
        from rolljax.sampler.client import Sampler

        of_run = is_run(args.model)
        engine, params, version, served = serve.load(
            run=args.model if of_run else None,
            model=None if of_run else args.model,
            step=cli.read_step(args.step),
            chat_template=args.chat_template,
            slots=jax.device_count(),  # one conversation; slots divide over devices
            steps_per_dispatch=1,
            max_context=args.max_context,
        )
        sampler = Sampler(engine, params, version, vocabulary=served.vocabulary, longest_prompt=0)
        event_loop = EventLoop(lambda: False)
        try:
            chat = (served.chat or Chat(served.tokenizer)).for_streams()
            talk = ChatSession(sampler, chat, event_loop, args, env)
            talk.run()
        finally:
            event_loop.close()
            sampler.close()
            if env is not None:
                env[1].close()
        return 0

    return cli.run_verb(run)


def check_arguments(args: argparse.Namespace) -> None:
    """Raise `ConfigError` for arguments that are wrong before anything is loaded."""
    if not is_run(args.model) and not (Path(args.model) / "config.json").is_file():
        raise ConfigError(
            "is neither a run folder (it has no config.gin) nor a Hugging Face folder (it has no config.json)",
            setting="RUN|HF_DIR",
            value=args.model,
            remedy="name a folder under runs/, or one with config.json, a tokenizer and safetensors",
        )
    for name, low, high in (("temperature", 0, 100), ("top_p", 1e-6, 1), ("probs", 0, MOST_PROBS)):
        if not low <= getattr(args, name) <= high:
            raise ConfigError(f"must be {low:g} to {high:g}", setting=f"--{name}", value=getattr(args, name))
    if args.max_tokens is not None and args.max_tokens < 1:
        raise ConfigError("must be positive", setting="--max_tokens", value=args.max_tokens)


def is_run(path: str) -> bool:
    """Return whether a folder is a run folder."""
    return (Path(path) / "config.gin").is_file()


def open_env(name: str | None) -> tuple[EnvSpec, ToolEpisode] | None:
    """Open an environment with its tools.

    Raises:
      ConfigError: the environment has no tools.
    """
    if name is None:
        return None
    from rolljax.envs.catalog import make_spec
    from rolljax.envs.tools.env import ToolEpisode

    spec = make_spec(name)
    env = spec.make()
    if not isinstance(env, ToolEpisode):
        env.close()
        raise ConfigError("has no tools", setting="--env", value=name, remedy="name one that has: calculator")
    return spec, env


@dataclasses.dataclass
class ChatStream:
    """The tokens of a conversation so far, and whether the model's last answer was closed by the model."""

    ids: np.ndarray | None = None
    closed: bool = True


class ChatSession:
    """One user, one model, and perhaps tools."""

    def __init__(
        self,
        sampler: SamplerClient,
        chat: Chat,
        event_loop: EventLoop,
        args: argparse.Namespace,
        env: tuple[EnvSpec, ToolEpisode] | None,
    ) -> None:
        from rich.console import Console

        self._sampler, self._chat, self._event_loop = sampler, chat, event_loop
        self._args, self._env = args, env
        self._page = Console(markup=False, highlight=False, emoji=False)
        self._max_tokens = args.max_tokens or run_answer_tok(args.model) or MAX_TOKENS
        self._stream, self._opening = ChatStream(), self._opened()
        self._answers = 0

    def run(self) -> None:
        """Chat until the end of input."""
        self._say("Ctrl-D ends, Ctrl-C ends an answer, /help shows commands; the first answer takes a while to compile")
        while (line := self._ask()) is not None:
            if line.startswith("/"):
                self._command(*line[1:].split())
            elif line:
                self._converse(line)

    def _opened(self) -> list[Message]:
        """Return the messages before the user's first: the given system text, and the description of the tools."""
        from rolljax.types import Message

        opening = [Message("system", self._args.system)] if self._args.system else []
        if self._env is not None:
            spec, env = self._env
            told = [m for m in env.reset(spec.task(0)) if m.role == "system"]
            texts = [m.content for m in (*opening, *told)]
            opening = [Message("system", "\n\n".join(texts))] if texts else []
        return opening

    def _ask(self) -> str | None:
        try:
            return self._page.input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            self._page.print()
            return None

    def _say(self, text: str) -> None:
        self._page.print(text, style="dim", soft_wrap=True)

    def _command(self, name: str = "help", *values: str) -> None:
        try:
            if name == "new":
                self._stream, self._opening = ChatStream(), self._opened()
            elif name == "probs":
                self._args.probs = within(int(values[0]) if values else 0 if self._args.probs else 3, 0, MOST_PROBS)
            elif name == "temp":
                self._args.temperature = within(float(values[0]), 0, 100)
            elif name == "task":
                self._ask_task(int(values[0]) if values else 0)
                return
            else:
                self._say(str(__doc__).partition("Commands: ")[2].replace("\n", " ").strip())
                return
        except (ValueError, IndexError):
            self._say(f"/{name} takes another value; /help shows commands")
            return
        self._say({"new": "a new conversation"}.get(name, f"/{name}: probabilities {self._args.probs}, temperature "
                                                          f"{self._args.temperature:g}"))  # fmt: skip

    def _ask_task(self, index: int) -> None:
        """Ask a task of the environment, in a new conversation."""
        if self._env is None:
            self._say("/task needs --env")
            return
        spec, env = self._env
        self._stream, self._opening = ChatStream(), []
        messages = env.reset(spec.task(index))
        for m in messages:
            self._tell(m)
        self._answer(messages)

    def _converse(self, line: str) -> None:
        from rolljax.types import Message

        if self._env is not None:
            self._env[1].allow_uses_again()
        opening, self._opening = self._opening, []
        self._answer([*opening, Message("user", line)])

    def _answer(self, messages: Sequence[Message]) -> None:
        """Answer messages, and tool results, until an answer calls no tool."""
        for _ in range(MAX_TOOL_TURNS):
            text = self._sample(messages)
            told = self._env[1].use_tools(text) if self._env is not None and text is not None else None
            if told is None:
                return
            messages = told.messages
            for m in messages:
                self._tell(m)

    def _tell(self, message: Message) -> None:
        from rolljax.console.terminal import visible

        self._page.print(f"[{message.role}] {visible(message.content)}", style="dim")

    def _sample(self, messages: Sequence[Message]) -> str | None:
        """Sample and show one answer; return its text, or None if the context has no room for an answer."""
        import numpy as np

        s = self._stream
        fresh = s.ids is None
        added = self._chat.prompt_ids(messages) if fresh else self._chat.delta_ids(messages, closed=s.closed)
        prompt = np.concatenate([np.zeros(0, np.int32) if s.ids is None else s.ids, added]).astype(np.int32)
        room = self._sampler.limits.max_context - len(prompt)
        if room < 1:
            self._say(f"the context of {self._sampler.limits.max_context} tokens is full; /new starts over")
            return None
        sampled = self._generate(prompt, min(room, self._max_tokens))
        tokens = sampled.tokens if sampled is not None else np.zeros(0, np.int32)
        closed = bool(len(tokens)) and int(tokens[-1]) in self._chat.stop_ids
        self._stream = ChatStream(np.concatenate([prompt, tokens]).astype(np.int32), closed)
        if sampled is not None and self._args.probs:
            self._page.print(probabilities(self._chat, sampled))
        if not closed:
            self._say(f"(cut after {len(tokens)} tokens)")
        return self._chat.text(tokens, behind=prompt)

    def _generate(self, prompt: np.ndarray, most: int) -> Sampled | None:
        """Sample an answer to a prompt `[P]` and show its text while it is sampled; Ctrl-C ends it. Return None if no
        token was sampled."""
        from rolljax.console.terminal import visible
        from rolljax.types import Sampled, SamplingParams

        params = SamplingParams(
            temperature=self._args.temperature,
            top_p=self._args.top_p,
            max_tokens=most,
            stop_ids=self._chat.stop_ids,
            top_logprobs=self._args.probs,
        )
        decoder, parts = self._chat.vocabulary.decoder(prompt), []

        def take(part: Sampled) -> None:
            parts.append(part)
            ids = [i for i in part.tokens.tolist() if i not in self._chat.stop_ids]
            self._page.print(visible(decoder.add(ids)), end="", soft_wrap=True)

        self._answers += 1
        address = (self._args.seed % 2**31, self._answers)
        try:
            self._event_loop.run(self._sampler.generate(prompt, params, address, on_tokens=take))
        except KeyboardInterrupt:
            self._say(" (stopped)")
        self._page.print(visible(decoder.end()), soft_wrap=True)
        return Sampled.concatenate(parts) if parts else None


def within(value: Any, low: float, high: float) -> Any:
    """Return the value. Raise `ValueError` if it is outside a range."""
    if not low <= value <= high:
        raise ValueError(value)
    return value


def run_answer_tok(path: str) -> int:
    """Return the most tokens of an answer in a run; 0 if the folder is not a run folder."""
    from rolljax.storage.run_reader import RunReader

    return int(RunReader(path).resolved()["max_answer_tok"]) if is_run(path) else 0


def probabilities(chat: Chat, sampled: Sampled) -> Any:
    """Return a table of sampled tokens: each with its probability under the model, and the most likely others."""
    import numpy as np
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from rolljax.console.terminal import visible

    def name(token: int) -> str:
        return visible(chat.vocabulary.name(token), lines=False).replace(" ", "\N{MIDDLE DOT}")

    table = Table("token", "probability", "likely", box=box.SIMPLE_HEAD)
    for token, logp, ids, tops in zip(
        sampled.tokens.tolist(), sampled.model_logp, sampled.top_ids.tolist(), sampled.top_model_logp, strict=True
    ):
        others = "  ".join(f"{name(i)} {np.exp(p):.3f}" for i, p in zip(ids, tops, strict=True))
        table.add_row(Text(name(token)), f"{np.exp(logp):.4f}", Text(others))
    return table


if __name__ == "__main__":
    sys.exit(main())
