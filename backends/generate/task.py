"""What is to be generated: the prompt, how many tokens, and how each is chosen."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

import numpy as np

from meshdsl.backends.generate.contract import Contract
from meshdsl.backends.runtime.values import Array, Spec, drawn_part
from meshdsl.diagnostics import counted, fail
from meshdsl.records import dataclass

Tell = Callable[[int], None]
"""Is called with every token, in order."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run of a one-step program; `params` is a file of its parameters.

    Of the logits the first `known` belong to tokens. `temperature` 0 takes the likeliest.
    """

    contract: Contract
    prompt: tuple[int, ...]
    steps: int
    known: int
    params: str
    temperature: float = 0.0
    seed: int = 0

    def next(self, logits: Array, position: int) -> int:
        """The token after `position`, of the logits over the vocabulary.

        One is sampled by adding Gumbel noise (Maddison et al. 2014), which is of the seed and the
        position: the same under every layout and on every engine.
        """
        scores = np.asarray(logits[: self.known], dtype=np.float64)
        if self.temperature:
            spec = Spec("f64", {"known": self.known}, {}, ("uniform", 0.0, 1.0))
            chance = drawn_part(spec, f"token {position}", self.seed, (slice(0, self.known),))
            with np.errstate(divide="ignore"):
                scores = scores / self.temperature - np.log(-np.log(chance))
        return int(np.argmax(scores))


# --- text and tokens ---------------------------------------------------------------------------


class Tokens:
    """The tokens of a text: its bytes, or the numbers of its characters in `vocabulary`."""

    def __init__(self, vocabulary: str | None) -> None:
        self.vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def known(self, words: int) -> int:
        """How many of the program's `words` tokens there are."""
        return min(words, 256 if self.vocabulary is None else len(self.vocabulary))

    def read(self, text: str, words: int) -> tuple[int, ...]:
        """The tokens of a prompt. Raises MD0626 for one that the program does not know."""
        if not text:
            help = "begin the text: `--prompt 'Once'`"
            fail("MD0626", "the prompt is empty, and a token follows from another", help=help)
        if self.vocabulary is None:
            data = text.encode("utf-8", "surrogateescape")
            if max(data) >= words:
                message = f"the prompt has the byte {max(data)}, and the program {words} tokens"
                fail("MD0626", message, help="train with a vocabulary of 256")
            return tuple(data)
        numbers = {char: n for n, char in enumerate(self.vocabulary)}
        for at, char in enumerate(text):
            if char not in numbers:
                message = f"{char!r}, character {at} of the prompt, is not among those trained on"
                fail("MD0626", message, help=f"those are {_shown(self.vocabulary)}")
        return tuple(numbers[char] for char in text)

    def text(self, token: int, final: bool = False) -> str:
        """The text that a token adds; a character of several bytes comes with its last one."""
        if self.vocabulary is not None:
            return self.vocabulary[token]
        return self._decoder.decode(bytes([token]), final)

    def rest(self) -> str:
        """What is left of a character that was begun."""
        return "" if self.vocabulary is not None else self._decoder.decode(b"", True)


def _shown(vocabulary: str) -> str:
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in vocabulary)
    return shown if len(shown) <= 80 else f"{shown[:80]}…"


def task_of(
    contract: Contract, prompt: Sequence[int], steps: int | None, known: int, params: str
) -> Task:
    """A task that fits the program; without `steps`, as many as there is room for, 128 at most.

    Raises MD0625 where there are more tokens than positions.
    """
    room = contract.room
    if steps is None:
        steps = min(128, 128 if room is None else max(1, room + 1 - len(prompt)))
    # The last token is not read again.
    if room is not None and len(prompt) + steps - 1 > room:
        message = f"the prompt has {counted(len(prompt), 'token')}"
        help = f"give a shorter prompt: it has at most {counted(room, 'token')}"
        if len(prompt) <= room:
            message += f", and {counted(steps, 'token')} more are asked for"
            help = f"write `--steps {room + 1 - len(prompt)}` or fewer"
        message += f": the program has room to read {room}"
        fail("MD0625", message, help=help)
    return Task(contract, tuple(prompt), steps, known, params)
