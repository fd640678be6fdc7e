"""Token ids of a run as texts, with the tokenizer that the run's folder, its settings or its model have."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rolljax.errors import CheckpointError
from rolljax.model.tokenizer import byte_core, load_tokenizer
from rolljax.model.vocabulary import Vocabulary
from rolljax.storage.layout import RESULT


class TokenTexts:
    """The texts of single tokens.

    Args:
      vocabulary: None where no tokenizer was found; tokens are then shown by their numbers.
    """

    def __init__(self, vocabulary: Vocabulary | None) -> None:
        self._vocabulary = vocabulary

    @property
    def known(self) -> bool:
        """Return whether there is a tokenizer."""
        return self._vocabulary is not None

    def texts(self, ids: Sequence[int]) -> list[str]:
        """Return the text of each token. For a character of several tokens, the last has it and the others are
        empty."""
        if self._vocabulary is None:
            return [f"⟨{i}⟩" for i in ids]
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        found = [utf8.decode(self._vocabulary.raw(i)) for i in ids]
        if found:
            found[-1] += utf8.decode(b"", final=True)
        return found

    def alone(self, token: int) -> str:
        """Return the text of one token by itself; its bytes if it is part of a character."""
        if self._vocabulary is None:
            return f"⟨{token}⟩"
        return self._vocabulary.raw(token).decode("utf-8", "backslashreplace")

    def special(self, ids: Sequence[int]) -> list[int]:
        """Return the indices of the special tokens, which no text can spell."""
        specials = self._vocabulary.specials if self._vocabulary else frozenset()
        return [place for place, i in enumerate(ids) if i in specials]

    def segments(self, ids: Sequence[int]) -> list[tuple[str, bool]]:
        """Split a prompt into texts in order, each with a flag for special tokens."""
        if self._vocabulary is None:
            return [("".join(self.texts(ids)), False)] if ids else []
        places, found, at = self.special(ids), list[tuple[str, bool]](), 0
        for place in places:
            found += [("".join(self.texts(ids[at:place])), False), (self.texts(ids[place : place + 1])[0], True)]
            at = place + 1
        found.append(("".join(self.texts(ids[at:])), False))
        return [(text, special) for text, special in found if text]


def token_texts(run: Path, model: str | None) -> TokenTexts:
    """Load the tokenizer of a run's result, else of the folder that its settings name.

    Args:
      model: that folder; None: the run started from a random model over bytes.
    """
    for folder in (run / RESULT, Path(model) if model else None):
        if folder and folder.is_dir() and (found := _of_folder(folder)):
            return TokenTexts(found)
    return TokenTexts(None if model else Vocabulary(_Core(byte_core())))


def _of_folder(folder: Path) -> Vocabulary | None:
    """Load a folder's tokenizer, without `transformers` if it is one file."""
    try:
        if (folder / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            return Vocabulary(_Core(Tokenizer.from_file(str(folder / "tokenizer.json"))))
        return Vocabulary(load_tokenizer(folder))
    except (CheckpointError, OSError):
        return None
    except Exception:  # border: a foreign file, read by a library that raises nothing more exact
        return None


class _Core:
    """A tokenizer of the `tokenizers` library, as far as `Vocabulary` asks."""

    def __init__(self, core: Any) -> None:
        self.backend_tokenizer = core
        self.added_tokens_decoder = core.get_added_tokens_decoder()
        self.get_vocab = core.get_vocab
        self.convert_ids_to_tokens = core.id_to_token

    def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return str(self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
