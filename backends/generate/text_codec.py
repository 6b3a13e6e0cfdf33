"""Tokens of texts, and the text of tokens that come one by one, up to a stop string."""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable, Sequence

from meshdsl.backends.data.tokenizer import Tokenizer, load_tokenizer
from meshdsl.diagnostics import counted, fail
from meshdsl.records import dataclass

Decode = Callable[[int | None], str]
"""The text that a further token adds, a character of several tokens with its last one; of None:
what is left of a character that was begun."""


@dataclass(frozen=True, slots=True)
class TextCodec:
    """The tokens of a text: `bytes`, `chars`, those of a `tokenizer`, or the `numbers` in it.

    Of `none` there is no text, only tokens.

    `source` has the characters in the order of their tokens, or is the path of the tokenizer.
    """

    kind: str
    source: str = ""

    def known(self, words: int) -> int:
        """How many of the program's `words` tokens there are."""
        sizes = {"bytes": 256, "chars": len(self.source), "numbers": words, "none": words}
        size = self._tokenizer.size if self.kind == "tokenizer" else sizes[self.kind]
        return min(words, size)

    @property
    def end(self) -> int | None:
        """The token that ends a text, where the folder of a tokenizer says so."""
        return self._tokenizer.end if self.kind == "tokenizer" else None

    @property
    def _tokenizer(self) -> Tokenizer:
        return _loaded(self.source)

    def tokens(self, text: str, what: str = "the prompt") -> tuple[int, ...]:
        """The tokens of a text. Raises MD0626 for characters without one."""
        if self.kind == "none":
            help = "write the numbers of its tokens, or say how text is read: `tokens='bytes'`"
            fail("MD0626", f"{what} is text, and nothing says which tokens it has", help=help)
        if self.kind == "numbers":
            return _numbers_of(text, what)
        if self.kind == "tokenizer":
            return tuple(self._tokenizer.encode(text))
        if self.kind == "bytes":
            return _bytes_of(text, what)
        numbers = {char: n for n, char in enumerate(self.source)}
        for at, char in enumerate(text):
            if char not in numbers:
                message = f"{char!r}, character {at} of {what}, is not among those trained on"
                fail("MD0626", message, help=f"those are {_shown(self.source)}")
        return tuple(numbers[char] for char in text)

    def number(self, text: str) -> int:
        """The one token that a text is. Raises MD0583, MD0626 and MD0627."""
        if self.kind == "tokenizer":
            return self._tokenizer.number(text)
        tokens = self.tokens(text, "the end token")
        if len(tokens) != 1:
            message = f"the end token {text!r} is {counted(len(tokens), 'token')}"
            fail("MD0627", message, help="give one token, or a stop string")
        return tokens[0]

    def decoder(self) -> Decode:
        """What yields the text of the tokens of one text."""
        if self.kind == "none":
            return lambda token: ""
        if self.kind == "numbers":
            return _Numbers()
        if self.kind == "tokenizer":
            return _Decoder(self._tokenizer)
        if self.kind == "chars":
            return lambda token: "" if token is None else self.source[token]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return lambda token: (
            decoder.decode(b"", True) if token is None else decoder.decode(bytes([token]))
        )

    def text(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        decode = self.decoder()
        return "".join(decode(token) for token in (*tokens, None))


def _bytes_of(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError as error:
        message = f"{what} has half of a character, {text[error.start]!r}"
        fail("MD0626", message, help="give the whole character, or the bytes as numbers")


def _numbers_of(text: str, what: str) -> tuple[int, ...]:
    words = text.split()
    for word in words:
        if re.fullmatch(r"[0-9]{1,18}", word) is None:
            help = "write the numbers of its tokens with spaces between them, as in '5 6 7'"
            fail("MD0626", f"{word!r} of {what} is not the number of a token", help=help)
    return tuple(int(word) for word in words)


class _Numbers:
    """The numbers of tokens, with spaces between them."""

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, token: int | None) -> str:
        space = "" if self._is_first else " "
        self._is_first = False
        return "" if token is None else f"{space}{token}"


class _Decoder:
    """The text that each token of a tokenizer adds, and of None what its stream waits with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stream = tokenizer, tokenizer.stream()
        self._tokens: list[int] = []
        self._size = 0

    def __call__(self, token: int | None) -> str:
        if token is None:
            return self._tokenizer.decode(self._tokens)[self._size :]
        self._tokens.append(token)
        added = self._stream.text(token)
        self._size += len(added)
        return added


@functools.lru_cache(maxsize=4)
def _loaded(path: str) -> Tokenizer:
    return load_tokenizer(path)


class ShownText:
    """The text of one continuation as far as it may be shown, which ends before a stop string.

    What may be the beginning of one is held back until the next tokens decide. A tokenizer may
    write a token in another way at the beginning of a text, so the `prompt` is decoded, too.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], prompt: Sequence[int] = ()) -> None:
        self._decode, self._stop, self._held = codec.decoder(), tuple(stop), ""
        self.is_stopped = False
        for token in prompt:
            self._decode(token)

    def add(self, token: int | None) -> str:
        """What a token (None: the end) adds to what is shown."""
        if not self._stop:
            return self._decode(token)
        self._held += self._decode(token)
        starts = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        keep = min(starts) if starts else len(self._held)
        self.is_stopped = bool(starts)
        if not starts and token is not None:
            keep -= max((_overlap(self._held, stop) for stop in self._stop), default=0)
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop string."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in sizes if text.endswith(stop[:n])), 0)


def _shown(characters: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in characters)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"
