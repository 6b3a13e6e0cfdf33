"""One text as it grows, on every device alike: by one token after the other."""

from __future__ import annotations

from collections.abc import Sequence

from meshdsl.backends.generate.task import END_TOKEN, LENGTH, STOP, Task
from meshdsl.backends.generate.text_codec import ShownText
from meshdsl.backends.runtime.values import Array

Grown = tuple[tuple[int, ...], str]
"""New tokens, and what they add to what is shown."""


class Continuation:
    """A text that grows token by token; it fills one row of a batch.

    `read` tokens were read by the programs so far. `sources` are the rows, of its own, whose states
    its rows go on with.
    """

    def __init__(self, task: Task, number: int) -> None:
        self.task, self.number, self.width = task, number, 1
        self.tokens = list(task.prompts[number])
        self.most = len(self.tokens) + task.steps[number]
        self.read = 0
        self.end: str | None = None
        self.sources: Sequence[int] = (0,)
        self._shown = ShownText(task.codec, task.stop, self.tokens)

    @property
    def length(self) -> int:
        """How many tokens there are to read."""
        return len(self.tokens)

    def token(self, row: int, index: int) -> int:
        """A token of one of its rows."""
        return self.tokens[index]

    def extend(self, logits: Array) -> Grown:
        """Choose the next token, of the logits `[rows, vocabulary]` after the last one."""
        token = self.task.sampling.next(logits[0], self.length - 1, self.number)
        self.tokens.append(token)
        shown = ""
        if token in self.task.end_tokens:
            self.end = END_TOKEN
        else:
            shown = self._shown.add(token)
            if self._shown.is_stopped:
                self.end = STOP
            elif self.length == self.most:
                self.end = LENGTH
        if self.end in (END_TOKEN, LENGTH):
            shown += self._shown.add(None)
        return (token,), shown
