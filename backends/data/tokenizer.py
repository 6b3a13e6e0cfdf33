"""Tokenizers of the `tokenizers` package: loaded from a `tokenizer.json`, to encode and decode.

The package is an extra (`meshdsl[text]`), imported only where a tokenizer is asked for.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.diagnostics import did_you_mean, fail

FILE = "tokenizer.json"
"""The name of a tokenizer's file in the folder of a model."""

CONFIG = "tokenizer_config.json"
"""The file beside it that says which of its tokens ends a text."""

INSTALL = "`pip install 'meshdsl[text]'` installs it"


class Tokenizer:
    """Tokens of text and text of tokens, as a `tokenizer.json` says.

    `size` is one more than the largest token, and `end` the token that ends a text, where the
    folder of the tokenizer says so.
    """

    def __init__(self, inner: Any, path: str) -> None:
        self._inner, self.path = inner, path
        numbers = inner.get_vocab(with_added_tokens=True)
        self.size = max(numbers.values(), default=-1) + 1
        self._numbers: dict[str, int] = numbers
        named = _end_named(Path(path).with_name(CONFIG))
        self.end = None if named is None else self._numbers.get(named)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The tokens of a text; with the `special` ones that the file adds around a text."""
        tokens: list[int] = self._inner.encode(text, add_special_tokens=special).ids
        return tokens

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of each text, as `encode` has them, on all cores."""
        return [found.ids for found in self._inner.encode_batch_fast(list(texts))]

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens; `special` ones are left out unless they are wanted."""
        text: str = self._inner.decode(list(tokens), skip_special_tokens=not special)
        return text

    def stream(self) -> Stream:
        """What yields the text of tokens that come one by one."""
        return Stream(self._inner)

    def number(self, token: str) -> int:
        """The number of a token by its text. Raises MD0583 where there is none."""
        if token not in self._numbers:
            special = [t.content for t in self._inner.get_added_tokens_decoder().values()]
            close = did_you_mean(token, special) or _listed(special)
            fail("MD0583", f"{self.path} has no token {token!r}", help=close)
        return self._numbers[token]


class Stream:
    """The text that each further token of a sequence adds."""

    def __init__(self, inner: Any) -> None:
        decoders = importlib.import_module("tokenizers.decoders")
        self._inner, self._decoding = inner, decoders.DecodeStream(skip_special_tokens=True)

    def text(self, token: int) -> str:
        """What `token` adds: nothing while a character of several tokens is not complete."""
        return self._decoding.step(self._inner, token) or ""


def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, or of a folder that has one. Raises MD0583.

    Truncation and padding that the file asks for are left off: what is made of a text is all of it.
    """
    file = os.path.join(path, FILE) if os.path.isdir(path) else path
    try:
        package = importlib.import_module("tokenizers")
    except ImportError:
        fail("MD0583", f"{file} needs the package `tokenizers`", help=INSTALL)
    try:
        inner = package.Tokenizer.from_str(read_regular(file).decode("utf-8"))
    except OSError as error:
        help = "name the file `tokenizer.json` of a model, or the folder it lies in"
        fail("MD0583", f"cannot read {file}: {error.strerror or error}", help=help)
    except Exception as error:  # the package raises plain `Exception`s
        reason = str(error).partition("\n")[0]
        help = "a `tokenizer.json` of the `tokenizers` package is read"
        fail("MD0583", f"{file} is no tokenizer: {reason}", help=help)
    inner.no_truncation()
    inner.no_padding()
    return Tokenizer(inner, file)


def _end_named(config: Path) -> str | None:
    """The text of the token that ends a text, as the file `config` has it."""
    try:
        settings = json.loads(read_regular(str(config)).decode("utf-8"))
    except (OSError, ValueError):
        return None
    named = settings.get("eos_token") if isinstance(settings, dict) else None
    named = named.get("content") if isinstance(named, dict) else named
    return named if isinstance(named, str) else None


def _listed(special: Sequence[str]) -> str:
    if not special:
        return "it has no special tokens"
    return "its special tokens are " + ", ".join(special[:8])


def batched(texts: Iterator[str], size: int) -> Iterator[list[str]]:
    """The texts in lists of about `size` characters, so that no more are in memory."""
    batch, room = list[str](), size
    for text in texts:
        batch.append(text)
        room -= len(text)
        if room <= 0:
            yield batch
            batch, room = [], size
    if batch:
        yield batch
