"""The texts of a generation, put together of their pieces."""

from __future__ import annotations

from meshdsl.backends.generate.task import LENGTH, Task, TextPiece
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Generated:
    """One continuation: its prompt, the new tokens, their text as far as it is shown.

    `end` says why it ended: `end token`, `stop string` or `length`. An end token is among `tokens`,
    and neither it nor a stop string in `text`.
    """

    prompt: str
    text: str
    tokens: tuple[int, ...]
    end: str


class Results:
    """Hears the pieces of all texts; `seconds` are those to the last, `first` to the first one."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._pieces: list[list[TextPiece]] = [[] for _ in task.prompts]
        self.first: float | None = None
        self.seconds = 0.0

    def hear(self, piece: TextPiece) -> None:
        """Take in the next piece."""
        self._pieces[piece.text].append(piece)
        self.first = piece.seconds if self.first is None else self.first
        self.seconds = piece.seconds

    @property
    def count(self) -> int:
        """How many tokens there are so far."""
        return sum(len(piece.tokens) for pieces in self._pieces for piece in pieces)

    @property
    def rate(self) -> float:
        """Tokens per second, those of all texts."""
        return self.count / self.seconds if self.seconds else 0.0

    @property
    def texts(self) -> tuple[Generated, ...]:
        """The texts, in the order of the prompts."""
        texts = []
        for prompt, pieces in zip(self._task.prompts, self._pieces, strict=True):
            tokens = tuple(token for piece in pieces for token in piece.tokens)
            text = "".join(piece.shown for piece in pieces)
            end = pieces[-1].end or LENGTH if pieces else LENGTH
            texts.append(Generated(self._task.codec.text(prompt), text, tokens, end))
        return tuple(texts)
