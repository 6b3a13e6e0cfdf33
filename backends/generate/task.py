"""What is to be generated, as plain data: the prompts, how tokens are chosen, when a text ends."""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.backends.generate.contract import Contract
from meshdsl.backends.generate.sampling import Sampling
from meshdsl.backends.generate.text_codec import TextCodec
from meshdsl.records import dataclass

END_TOKEN, STOP, LENGTH = "end token", "stop string", "length"
"""Why a text ends."""


@dataclass(frozen=True, slots=True)
class Task:
    """A run of the programs that generate; `params` is a file of their parameters.

    Each text continues one of `prompts` by at most its number of `steps`, up to one of `end_tokens`
    or a `stop` string. Of the logits the first `known` belong to tokens. With several `beams` texts
    are searched for, by their log-probability over their length to the power `length_penalty`.
    """

    contract: Contract
    prompts: tuple[tuple[int, ...], ...]
    steps: tuple[int, ...]
    known: int
    params: str
    codec: TextCodec
    sampling: Sampling = Sampling()
    end_tokens: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    beams: int = 1
    length_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Tokens that a text (its number) has got, and what they add to what is shown of it.

    `end` says why it ends, if it does. `seconds` are those since the first prompt was begun.
    """

    text: int
    tokens: tuple[int, ...]
    shown: str
    end: str | None
    seconds: float


Tell = Callable[[TextPiece], None]
"""Is called with every piece, in order."""
