"""Tokenizers and chat templates: prompts as token ids, and the exact tokens between two turns.

Token streams only ever grow. The tokens of a later turn's observation are the text that the chat template puts between
the end of the last answer and the start of the next one. Sampled tokens are never tokenised again. Text that happens to
spell a special token ("<|assistant|>" in an observation) is encoded as plain text. So is text that spells any other
token that was added to the vocabulary ("<tool_call>"), unless it is in a system message or in an assistant message.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rolljax.errors import CheckpointError, ConfigError, boundary
from rolljax.model import templates, training_templates
from rolljax.model.files import copied, inside, read_json
from rolljax.model.growth import check_growth
from rolljax.model.vocabulary import Ids, Vocabulary
from rolljax.types import Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
BYTE_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}"
    "{{ '<|user|>' if m['role'] == 'tool' else '<|' + m['role'] + '|>' }}{{ m['content'] }}"
    "{% for c in m['tool_calls'] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OURS = (BYTE_TEMPLATE, *(training_templates.plain_template(begins=begins) for begins in (False, True)))
"""Templates that are rendered in this process."""
CONFIG = "tokenizer_config.json"
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip
FILES = (
    *VOCABULARIES, CONFIG, "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
"""Files of a folder that a tokenizer is read from."""
TEMPLATE = "chat_template.jinja"
"""Name of the file with the chat template; `transformers` prefers it to the template in `CONFIG`."""
MARK, UNMARK = "\ufdd0", "\ufdd1"
"""Unicode noncharacters around the number of a text that a template must not see as it is."""


def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer of 256 bytes and five special tokens with a chat template, as `transformers` saves and loads
    it.

    One special token opens each role and `<|end|>` closes an answer, so the template adds two tokens to a question.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_core(),
        pad_token=PAD,
        eos_token=END,
        chat_template=BYTE_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def byte_core() -> Tokenizer:
    """Return the tokens of `byte_tokenizer`, without a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([PAD, END, USER, ASSISTANT, SYSTEM])
    return core


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a local Hugging Face folder. Code in the folder is not run.

    Raises:
      CheckpointError: the folder has no tokenizer, or one that needs its own code, or one that can make a text a
        thousand times as long (`check_growth`).
    """
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not any(inside(folder, name).is_file() for name in VOCABULARIES):
        raise CheckpointError(f"{folder} holds no tokenizer: none of {', '.join(VOCABULARIES)}")
    for name in ("config.json", *FILES):
        if inside(folder, name).is_file() and name.endswith(".json"):
            found = read_json(
                folder / name, "a file of a tokenizer" if name in FILES else "JSON that describes a model"
            )
            if name == "tokenizer.json":
                check_growth(found, folder / name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # border: a foreign file; a panic of the Rust library is not an Exception
        raise CheckpointError(f"no tokenizer could be read from {folder}: {type(e).__name__}: {e}") from e
    core = getattr(tokenizer, "backend_tokenizer", None)
    if core is not None and core.normalizer is not None:  # of a file in another format, made while it was read
        check_growth({"normalizer": json.loads(core.normalizer.__getstate__())}, folder)
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: Any, source: str | Path | None = None) -> None:
    """Write a tokenizer into a folder that is there, as `transformers` 4 and 5 read it.

    Args:
      source: the folder it came from (None: it was made here). Its files go along byte for byte, unless only version 5
        reads them. A chat template that did not come from there takes the place of the one that did.
    """
    if source is not None and _for_both(Path(source)):
        for name in FILES:
            copied(Path(source), name, folder)
        _replace_template(folder, tokenizer.chat_template)
        return
    tokenizer.save_pretrained(str(folder))
    path = folder / CONFIG
    config = json.loads(path.read_text())
    config.pop("backend", None)  # these three are said in words of version 5
    if str(config.get("tokenizer_class")).endswith("Backend"):
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _replace_template(folder: Path, template: Any) -> None:
    """Write a chat template into a folder whose files hold another one, or none."""
    path, config = folder / CONFIG, {}
    if path.is_file():
        config = read_json(path, "a file of a tokenizer")
    stored = config.get("chat_template")
    if (folder / TEMPLATE).is_file():
        stored = (folder / TEMPLATE).read_text(encoding="utf-8")
    if not isinstance(template, str) or template == stored:
        return
    (folder / TEMPLATE).write_text(template, encoding="utf-8")
    (folder / "chat_template.json").unlink(missing_ok=True)
    if config.pop("chat_template", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")


def _for_both(source: Path) -> bool:
    """Return whether versions 4 and 5 of `transformers` can both read the tokenizer of a folder."""
    path = inside(source, CONFIG)
    if not path.is_file():
        return inside(source, "tokenizer.json").is_file()
    config = read_json(path, "a file of a tokenizer")
    only_five = str(config.get("tokenizer_class")).endswith("Backend")
    return not only_five and not isinstance(config.get("extra_special_tokens"), list)


_BASE = (Message("user", "q"), Message("assistant", "a"))
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
"""A call by which templates are tried."""


@dataclasses.dataclass(frozen=True, eq=False)
class Chat:
    """A tokenizer with its chat template, for conversations as token streams."""

    tokenizer: Any
    replaced: bool = False
    """The template is another one than the tokenizer came with."""
    day: str | None = None
    """Current date for templates that write the date, in ISO 8601 format; None: today."""

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError(
                "has no chat template, so it is a base model",
                setting="tokenizer",
                value=getattr(self.tokenizer, "name_or_path", ""),
                remedy=f"set {training_templates.SETTING} (serve, chat, eval: --chat_template) to "
                f"{training_templates.PLAIN!r}, or to the path of a template ({training_templates.DOCS})",
            )

    @staticmethod
    def of(tokenizer: Any, template: str = "") -> Chat:
        """Return a tokenizer with a chat template of the user's choice.

        Args:
          template: the path of a file, or 'plain': the unmodified texts; empty: the tokenizer's own template.

        Raises:
          ConfigError: there is no such file; 'plain' with a tokenizer that has no end-of-text token; an empty template
            and a tokenizer that has none.
        """
        if not template:
            return Chat(tokenizer)
        if template != training_templates.PLAIN:
            return Chat(_with(tokenizer, training_templates.read_template(template)), replaced=True)
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "needs an end-of-text token, and the tokenizer has none",
                setting=training_templates.SETTING,
                value=template,
                remedy="add eos_token to tokenizer_config.json, or set the path of a chat template",
            )
        begun = Vocabulary(tokenizer).encode("a", special=True)
        begins = tokenizer.bos_token_id is not None and begun[:1] == [tokenizer.bos_token_id]
        return Chat(_with(tokenizer, training_templates.plain_template(begins=begins)), replaced=True)

    def for_streams(self) -> Chat:
        """Return the chat for conversations that are token streams.

        It has the training template of a known original (`rolljax.model.training_templates`), and the day stays.
        """
        chat, own = dataclasses.replace(self, day=self.day or datetime.date.today().isoformat()), self.tokenizer
        template = own.chat_template
        if isinstance(template, str) and (trained := training_templates.training_template(template)) != template:
            chat = dataclasses.replace(chat, tokenizer=_with(own, trained), replaced=True)
        return chat

    @functools.cached_property
    def stop_ids(self) -> tuple[int, ...]:
        """Token ids that end an answer: the tokenizer's eos, and the first token with which the template closes an
        assistant message."""
        ids = {self.tokenizer.eos_token_id}
        closing = self.closing_ids
        if closing:
            ids.add(closing[0])
        return tuple(sorted(i for i in ids if i is not None))

    def prompt_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of a conversation with the header of the assistant's next message, `[P]` int32."""
        return self._prompt_ids(tuple(messages))

    @functools.lru_cache(maxsize=4096)  # noqa: B019  # one Chat lives as long as its run
    def _prompt_ids(self, messages: tuple[Message, ...]) -> np.ndarray:
        return self._ids(messages, generate=True)

    def complete_ids(self, messages: Sequence[Message]) -> np.ndarray:
        """Return the ids of a conversation rendered by the template, with its last answer closed, `[T]` int32."""
        return self._ids(messages, generate=False)

    def answer_ids(self, text: str) -> np.ndarray:
        """Return the ids of an answer and its closing token, as a policy would have sampled them, `[T]` int32."""
        closing = self.closing_ids
        end = closing[0] if closing else self.tokenizer.eos_token_id
        parts = re.split(f"({self._specials.pattern})", text)
        ids = [i for part in parts if part for i in self.vocabulary.encode_plain(part, self.vocabulary.specials)]
        return np.array([*ids, end], np.int32)

    def delta_ids(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        closed: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Return the ids that follow an answer when `messages` are added: the rest of its closing, the messages, the
        next header.

        Args:
          messages: as environments send them, or in the form of the OpenAI API.
          closed: whether the sampled tokens ended with the closing token (otherwise it is added here).
          tools, options: of the conversation, see `conversation_ids`.

        Raises:
          ConfigError: the template rewrites earlier turns, or refuses the messages.
        """
        how: dict[str, Any] = {"tools": tools, "options": options} if tools or options else {}
        if not how and all(isinstance(m, Message) for m in messages):
            return self._observation_ids(tuple(messages), closed)
        return self._delta_ids(messages, closed, how)

    @functools.lru_cache(maxsize=512)  # noqa: B019  # one Chat lives as long as its run; observations can be long
    def _observation_ids(self, messages: tuple[Message, ...], closed: bool) -> np.ndarray:
        return self._delta_ids(messages, closed, {})

    def _delta_ids(
        self, messages: Sequence[Message | Mapping[str, Any]], closed: bool, how: dict[str, Any]
    ) -> np.ndarray:
        closing, head = self.closing_ids, self._base_ids
        if how:
            head = self._ids(_BASE, generate=False, **how)
        extended = self._ids([*_BASE, *messages], generate=True, **how)
        if not np.array_equal(extended[: len(head)], head):
            raise training_templates.refusal(self._template(bool(how.get("tools"))))
        rest = closing[1:] if closed else closing
        return np.array([*rest, *extended[len(head) :]], np.int32)

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The texts of the tokenizer's tokens."""
        return Vocabulary(self.tokenizer)

    def text(self, ids: Ids, behind: Ids) -> str:
        """Return the plain text of an answer `ids [T]` after a prompt `[P]`, without special tokens."""
        return self.vocabulary.text(ids, behind)

    @functools.cached_property
    def closing_ids(self) -> list[int]:
        """Tokens that the template writes after the text of an assistant message ("<|im_end|>\\n" for Qwen)."""
        answer = f"{MARK}{UNMARK}"
        text = self._render([{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}])
        rest = text.partition(answer)[2]
        return self.vocabulary.encode_inside(rest) if rest else []

    def conversation_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Return the ids of a conversation in the form of the OpenAI API, with the header of the assistant's next
        message, `[P]` int32.

        Args:
          messages: of any role, each with text as `content`; `tool_calls` with their arguments as objects.
          tools: functions that the template describes to the model.
          options: further variables of the template ("enable_thinking").

        Raises:
          ConfigError: the template refuses the conversation, or would leave tools out of it.
        """
        with_tools = bool(tools) or any(m["role"] == "tool" or m.get("tool_calls") for m in messages)
        if with_tools and not self.knows_tools:
            raise ConfigError(
                "shows no tools, tool calls or tool results to the model",
                setting="chat template",
                remedy="leave `tools` and tool messages out, or serve a model whose template knows them",
            )
        return self._ids(messages, generate=True, tools=tools, options=options)

    @functools.cached_property
    def knows_tools(self) -> bool:
        """Return whether the template writes tools, the calls of an assistant and their results."""
        user = {"role": "user", "content": "q"}
        silent = {"role": "assistant", "content": ""}
        call = {**silent, "tool_calls": [CALL]}
        results = [{"role": "tool", "content": text, "tool_call_id": "1", "name": "f"} for text in ("r", "s")]
        try:
            told = self._render([user], tools=[_TOOL]) != self._render([user])
            called = self._render([user, call]) != self._render([user, silent])
            answered = self._render([user, call, results[0]]) != self._render([user, call, results[1]])
        except ConfigError:
            return False
        return told and called and answered

    def written_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return a conversation in which the assistant calls a tool, as the template writes it; empty if it does not
        know tools."""
        call = CALL | {"function": {"name": name, "arguments": arguments}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        return self._render([{"role": "user", "content": "q"}, said]) if self.knows_tools else ""

    @functools.cached_property
    def _specials(self) -> re.Pattern[str]:
        """Spellings of special tokens."""
        return self.vocabulary.spelling(self.vocabulary.specials)

    @functools.cached_property
    def _added(self) -> re.Pattern[str]:
        """Spellings of all added tokens."""
        return self.vocabulary.spelling(self.vocabulary.specials | self.vocabulary.added)

    @functools.cached_property
    def _base_ids(self) -> np.ndarray:
        return self._ids(_BASE, generate=False)

    def _ids(
        self,
        messages: Sequence[Message | Mapping[str, Any]],
        *,
        generate: bool,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> np.ndarray:
        """Render the template, then tokenise. Message text that spells a special or added token is tokenised
        separately, as plain text."""
        plain: list[str] = []
        said = [{"role": m.role, "content": m.content} if isinstance(m, Message) else m for m in messages]
        said = [self._marked_message(m, plain) for m in said]
        tools, options = self._marked(list(tools), plain, self._added), self._marked(options or {}, plain, self._added)
        text = self._render(said, generate=generate, tools=tools, options=options)
        vocabulary, ids = self.vocabulary, list[int]()
        for i, part in enumerate(re.split(f"{MARK}([0-9]+){UNMARK}", text)):
            if i % 2:
                ids += vocabulary.encode_plain(plain[int(part)], vocabulary.specials | vocabulary.added)
            elif part:
                ids += vocabulary.encode_inside(part) if i else vocabulary.encode(part)
        return np.array(ids, np.int32)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        variables = {
            **self.tokenizer.special_tokens_map,
            **(options or {}),
            "messages": list(messages),
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": generate,
        }
        template = self._template(bool(tools))
        return templates.render(template, variables, day=self.day, trusted=template in OURS)

    @functools.lru_cache(maxsize=2)  # noqa: B019  # one Chat lives as long as its run
    def _template(self, with_tools: bool) -> str:
        """Return the template for a conversation: some tokenizers have a separate one for tools."""
        with boundary(ConfigError, "the tokenizer offers no chat template"):
            return self.tokenizer.get_chat_template(None, [_TOOL] if with_tools else None)

    def _marked_message(self, message: Mapping[str, Any], plain: list[str]) -> dict[str, Any]:
        """Mark the texts of a message. System and assistant messages may spell added tokens, but no special ones."""
        own = ("content", "reasoning_content") if message["role"] in ("system", "assistant") else ()
        return {
            name: self._marked(value, plain, self._specials if name in own else self._added)
            for name, value in message.items()
        }

    def _marked(self, value: Any, plain: list[str], spelling: re.Pattern[str]) -> Any:
        """Replace every spelling of a token in the texts of a JSON value by a mark, and append the original text to
        `plain`."""
        if isinstance(value, str):
            return self._marked_text(value, plain, spelling)
        if isinstance(value, Mapping):
            return {self._marked(k, plain, spelling): self._marked(v, plain, spelling) for k, v in value.items()}
        if isinstance(value, list):
            return [self._marked(v, plain, spelling) for v in value]
        return value

    def _marked_text(self, text: str, plain: list[str], spelling: re.Pattern[str]) -> str:
        def mark(spelled: str) -> str:
            plain.append(spelled)
            return f"{MARK}{len(plain) - 1}{UNMARK}"

        marked = re.sub(f"{spelling.pattern}|{MARK}|{UNMARK}", lambda found: mark(found[0]), text)
        # tokens are also looked for in what the tokenizer's normalizer makes of a text ("\uff1c" may become "<")
        return mark(text) if spelling.search(self.vocabulary.normalized(marked)) else marked


def _with(tokenizer: Any, template: str) -> Any:
    """Return a copy of a tokenizer with another chat template; the given tokenizer is unchanged."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer
