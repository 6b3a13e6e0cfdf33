"""Beam search: of a text the likeliest beginnings grow side by side, each in a row of the batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from meshdsl.backends.generate.continuation import Continuation, Grown
from meshdsl.backends.generate.task import END_TOKEN, LENGTH, STOP, Task
from meshdsl.backends.generate.text_codec import ShownText
from meshdsl.backends.runtime.values import Array


class _Ended(NamedTuple):
    """A text that has ended, with its score among texts, the best of which is the largest."""

    score: float
    tokens: tuple[int, ...]
    end: str


class BeamSearch(Continuation):
    """A text of `task.beams` beams, which is known when it has ended.

    The candidates are the beams with one more token, the likeliest first. Those that end count if
    they are among the first `width`; of the others the first `width` are the next beams. The search
    is over when `width` texts have ended that no beam, at its length, has a better score than.
    """

    def __init__(self, task: Task, number: int) -> None:
        super().__init__(task, number)
        self.width = task.beams
        self._beams = [tuple(self.tokens)] * self.width
        # All rows begin with the same text, which counts once.
        self._likelihoods = np.array([0.0] + [-np.inf] * (self.width - 1))
        self._ended: list[_Ended] = []

    @property
    def length(self) -> int:
        """How many tokens there are to read."""
        return len(self.tokens) if self.end is not None else len(self._beams[0])

    def token(self, row: int, index: int) -> int:
        """A token of one of its beams."""
        return self.tokens[index] if self.end is not None else self._beams[row][index]

    def extend(self, logits: Array) -> Grown:
        """Go on with the likeliest candidates; all new tokens once the search is over."""
        likelihoods = self._likelihoods[:, None] + _log_softmax(logits)
        beams: list[tuple[int, ...]] = []
        sources: list[int] = []
        beam_likelihoods: list[float] = []
        for rank, at in enumerate(np.argsort(-likelihoods, axis=None, kind="stable")):
            source, token = divmod(int(at), logits.shape[1])
            tokens, likelihood = (*self._beams[source], token), float(likelihoods[source, token])
            end = self._end_of(tokens)
            if end is None:
                beams.append(tokens)
                sources.append(source)
                beam_likelihoods.append(likelihood)
            elif rank < self.width and np.isfinite(likelihood):
                self._ended.append(_Ended(self._score(likelihood, tokens), tokens, end))
            if len(beams) == self.width or (rank >= self.width and not beams):
                break
        self._ended = sorted(self._ended, key=lambda ended: -ended.score)[: self.width]
        if not beams or self._is_over(beam_likelihoods[0], beams[0]):
            return self._result()
        missing = self.width - len(beams)
        self._beams = beams + beams[:1] * missing
        self.sources = sources + sources[:1] * missing
        self._likelihoods = np.array(beam_likelihoods + [-np.inf] * missing)
        return (), ""

    def _score(self, likelihood: float, tokens: tuple[int, ...]) -> float:
        """The order of texts: by their log-probability, over their length with the penalty.

        It is made of logarithms, since the power may be too large for a float.
        """
        count = len(tokens) - len(self.task.prompts[self.number])
        size = math.log(-likelihood) if likelihood else -math.inf
        return self.task.length_penalty * math.log(count) - size

    def _end_of(self, tokens: tuple[int, ...]) -> str | None:
        """Why a candidate ends, if it does."""
        if tokens[-1] in self.task.end_tokens:
            return END_TOKEN
        if self.task.stop and self._shown_of(tokens)[1]:
            return STOP
        return LENGTH if len(tokens) == self.most else None

    def _shown_of(self, tokens: tuple[int, ...]) -> tuple[str, bool]:
        """What is shown of a text, and whether it has a stop string."""
        count = len(self.task.prompts[self.number])
        shown = ShownText(self.task.codec, self.task.stop, tokens[:count])
        pieces = []
        for token in tokens[count:]:
            pieces.append(shown.add(token))
            if shown.is_stopped:
                return "".join(pieces), True
        return "".join((*pieces, shown.add(None))), shown.is_stopped

    def _is_over(self, likelihood: float, tokens: tuple[int, ...]) -> bool:
        full = len(self._ended) == self.width
        return full and self._ended[-1].score >= self._score(likelihood, tokens)

    def _result(self) -> Grown:
        best = self._ended[0]
        count = len(self.tokens)
        self.tokens, self.end = list(best.tokens), best.end
        shown = best.tokens[: len(best.tokens) - (best.end == END_TOKEN)]
        return best.tokens[count:], self._shown_of(shown)[0]


def _log_softmax(logits: Array) -> Array:
    scores = np.asarray(logits, np.float64)
    shifted = scores - scores.max(-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
