"""Tokens and text: the ids of a text, and the text of ids, of finished answers and of answers that grow.

An answer follows a prompt, and its text is the text that its tokens add to the prompt. Decoding the answer alone gives
another text: decoders like SentencePiece's drop the first space of everything that they decode. Therefore this module
joins the bytes that every single token adds. The parts of an answer then join to its text however it is cut, a
character of several tokens appears when it is complete, and a token costs one look-up in a table.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Ids = Sequence[int] | np.ndarray

SURE_CHARS = 16
"""Characters per available token up to which a text is tokenised at once; a longer text is tokenised in parts."""
PART_CHARS = 16 * 1024
SEPARATORS = ("\n", ":", ">")
"""Texts to put before a text, so that it is tokenised as if it were in the middle of a longer text."""


class Vocabulary:
    """The tokens of a tokenizer. Safe to use from several threads.

    specials: ids that are left out of texts. added: ids of further added tokens, whose spelling is never split
    ("<tool_call>"), except tokens of white space or of a single character, which have no meaning beyond their text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._core = getattr(tokenizer, "backend_tokenizer", None)
        if self._core is not None:  # `encode` uses it as it is
            self._core.no_truncation()
            self._core.no_padding()
        known = tokenizer.added_tokens_decoder
        self.specials = frozenset(i for i, t in known.items() if t.special)
        self.added = frozenset(i for i, t in known.items() if not t.special and _is_marker(t.content))
        self._spelled = {i: t.content for i, t in known.items()}
        self._of_char = _byte_alphabet() if "ByteLevel" in _decoder_types(self._core) else {}
        self._raw = _Table(self._bytes_of)
        self._shown = _Table(lambda token: b"" if token in self.specials else self._raw[token])

    # ---- text to ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Return the ids of a text; the spelling of an added token becomes that token.

        Args:
          special: also add the tokens that the tokenizer puts around a text (such as one for its beginning).
        """
        if self._core is None:
            return self._tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        # a batch of one text: unlike `encode` it lets other threads run, and it is fast
        return self._core.encode_batch_fast([text], add_special_tokens=special)[0].ids

    def encode_inside(self, text: str) -> list[int]:
        """Return the ids of a text that follows another, without the space that some tokenizers put before a text."""
        if self._puts_space_before:
            for separator in SEPARATORS:
                head, joined = self.encode(separator), self.encode(separator + text)
                if joined[: len(head)] == head:
                    return joined[len(head) :]
        return self.encode(text)

    def encode_plain(self, text: str, hidden: frozenset[int]) -> list[int]:
        """Return the ids of a text that follows another, none in `hidden`: a text that spells one of these is cut."""
        ids = self.encode_inside(text)
        if len(text) < 2 or hidden.isdisjoint(ids):
            return ids
        half = len(text) // 2
        return self.encode_plain(text[:half], hidden) + self.encode_plain(text[half:], hidden)

    def spelling(self, ids: frozenset[int]) -> re.Pattern[str]:
        """Return the pattern that matches the spellings of added tokens in a text, the longest first."""
        texts = {self._spelled[i] for i in ids}
        texts |= {self.normalized(text) for text in texts} - {""}
        return re.compile("|".join(map(re.escape, sorted(texts, key=lambda t: (-len(t), t)))) or r"(?!)")

    def normalized(self, text: str) -> str:
        """Return a text in the form in which the tokenizer looks for tokens."""
        normalizer = None if self._core is None else self._core.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def exceeds(self, text: str, most: int) -> bool:
        """Return whether a text certainly has more than `most` tokens, without tokenising much more than these.

        False does not mean that the text fits; it means that the text is short enough to be tokenised. A text cut into
        parts has a few tokens more than the whole, so only twice as many are certain.
        """
        if len(text) <= SURE_CHARS * most:
            return False
        if len(text.encode()) > self.longest * most:
            return True
        counted = 0
        for start in range(0, len(text), PART_CHARS):
            counted += len(self.encode(text[start : start + PART_CHARS]))
            if counted > 2 * most:
                return True
        return False

    @functools.cached_property
    def longest(self) -> int:
        """Bytes of the longest token, at least."""
        return max(len(spelling.encode()) for spelling in self._tokenizer.get_vocab())

    # ---- ids to text

    def text(self, ids: Ids, behind: Ids = ()) -> str:
        """Return the text that `ids [T]` add after the ids `behind`, which end the prompt; special tokens are left
        out."""
        decoder = self.decoder(behind)
        return decoder.add(ids) + decoder.end()

    def decoder(self, behind: Ids = ()) -> TextDecoder:
        """Return a decoder for an answer that grows after a prompt."""
        return TextDecoder(self, any(map(self.appears, map(int, reversed(behind)))))

    def appears(self, token: int) -> bool:
        """Return whether a token has text."""
        return token not in self.specials and self._tokenizer.convert_ids_to_tokens(token) is not None

    def raw(self, token: int) -> bytes:
        """Return the bytes that a token adds to the UTF-8 text; special tokens are spelled out, unknown ids are
        empty."""
        return self._raw[token]

    def shown(self, token: int) -> bytes:
        """Return the bytes of a token in texts, where special tokens are left out."""
        return self._shown[token]

    def first(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text."""
        raw = self._shown[token]
        if self._of_char or not raw:
            return raw
        text = self._decode([token])
        return raw if "\ufffd" in text else text.encode()

    @functools.lru_cache(maxsize=65536)  # noqa: B019  # one vocabulary lives as long as its server
    def name(self, token: int) -> str:
        """Return a token's text; `bytes:\\xe2\\x82` if it is part of a character, `token_id:N` if it has no text."""
        raw = self.raw(token)
        try:
            return raw.decode() if raw else f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)

    # ---- single tokens

    def _bytes_of(self, token: int) -> bytes:
        spelling = self._tokenizer.convert_ids_to_tokens(token)
        if spelling is None:
            return b""
        if self._of_char:
            if token not in self.specials and all(c in self._of_char for c in spelling):
                return bytes(self._of_char[c] for c in spelling)
            return spelling.encode()
        before = self._decode([self._anchor])
        text = self._decode([self._anchor, token]).removeprefix(before)
        if text == "\ufffd" and re.fullmatch("<0x[0-9A-F]{2}>", spelling):
            return bytes([int(spelling[3:5], 16)])
        return text.encode()

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    @functools.cached_property
    def _anchor(self) -> int:
        """A token of text."""
        return self.encode("a")[-1]

    @functools.cached_property
    def _puts_space_before(self) -> bool:
        return self.text(self.encode("a"), behind=[self._anchor]) != "a"


class TextDecoder:
    """Decodes one growing answer. The texts that `add` and finally `end` return make up the text of all tokens.

    Args:
      begun: whether there is text before the answer.
    """

    def __init__(self, vocabulary: Vocabulary, begun: bool) -> None:
        self._vocabulary, self._begun = vocabulary, begun
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Ids) -> str:
        """Return the text that becomes known with these tokens; an incomplete character waits."""
        bytes_of = self._vocabulary.shown if self._begun else self.bytes_of
        return self._utf8.decode(b"".join(map(bytes_of, map(int, ids))))

    def end(self) -> str:
        """Return the incomplete text that was waiting for further tokens."""
        return self._utf8.decode(b"", final=True)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes that the next token adds."""
        vocabulary = self._vocabulary
        if self._begun or not vocabulary.appears(token):
            return vocabulary.shown(token)
        self._begun = True
        return vocabulary.first(token)


class TextStream:
    """The text of one growing answer up to the first stop text, in parts that are never taken back.

    Args:
      stops: texts the answer ends before.

    Attributes:
      stopped: the stop text that ended it; empty: none so far.
    """

    def __init__(self, decoder: TextDecoder, stops: Sequence[str]) -> None:
        self._decoder, self._stops = decoder, stops
        self._longest = max(map(len, stops), default=0)
        self._shown: list[str] = []
        self._held = ""
        self.stopped = ""

    @property
    def shown(self) -> str:
        """All the text that was returned so far."""
        return "".join(self._shown)

    def add(self, ids: Ids, *, last: bool) -> str:
        """Take more tokens; returns the text that can be shown now, all of it if these are the last."""
        if self.stopped:
            return ""
        text = self._held + self._decoder.add(ids) + (self._decoder.end() if last else "")
        found = [(i, stop) for stop in self._stops if (i := text.find(stop)) >= 0]
        sure = len(text) if last else self._sure(text)
        end, self.stopped = min(found, default=(sure, ""))
        self._shown.append(text[:end])
        self._held = text[end:]
        return text[:end]

    def _sure(self, text: str) -> int:
        """Return the number of leading characters that cannot be part of an unfinished stop text."""
        for n in range(min(self._longest - 1, len(text)), 0, -1):
            if any(len(s) > n and text.endswith(s[:n]) for s in self._stops):
                return len(text) - n
        return len(text)


class _Table(dict[int, bytes]):
    """Values that are computed at their first use."""

    def __init__(self, make: Callable[[int], bytes]) -> None:
        self._make = make

    def __missing__(self, token: int) -> bytes:
        value = self[token] = self._make(token)
        return value


def _is_marker(spelling: str) -> bool:
    return len(spelling) > 1 and bool(spelling.strip(" \t\r\n\u2581"))


def _decoder_types(core: Any) -> set[str]:
    """Return the types of a decoder's steps."""
    if core is None or core.decoder is None:
        return set()
    decoder = json.loads(core.decoder.__getstate__())
    return {step["type"] for step in decoder.get("decoders", [decoder])}


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's table: printable bytes map to their own characters, the others to characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}
