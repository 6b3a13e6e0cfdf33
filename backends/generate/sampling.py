"""How the next token is chosen of the logits: the likeliest, or one that is drawn.

Drawing takes the logits over the temperature, then of these the `top_k` largest, then of the
probabilities that remain the fewest likeliest whose sum is at least `top_p`. Of equals the lower
token comes first.
"""

from __future__ import annotations

import numpy as np

from meshdsl.backends.runtime.values import Array, Spec, drawn_part
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen: at `temperature` 0 the likeliest, which draws nothing.

    `top_k` None and `top_p` 1 leave no token out.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def next(self, logits: Array, position: int, text: int = 0) -> int:
        """The token after `position` of a text, of the logits over the vocabulary.

        One is drawn by adding Gumbel noise (Maddison et al. 2014), which is of the seed, the number
        of the text and the position: the same under every layout and on every engine.
        """
        if not self.temperature:
            return int(logits.argmax())
        scores = np.asarray(logits, dtype=np.float64)
        size = len(scores)
        spec = Spec("f64", {"known": size}, {}, ("uniform", 0.0, 1.0))
        name = f"token {position}" + (f" of text {text}" if text else "")
        chance = drawn_part(spec, name, self.seed, (slice(0, size),))
        with np.errstate(divide="ignore", over="ignore"):
            scores = (scores - scores.max()) / self.temperature
            scores = self.kept(scores) - np.log(-np.log(chance))
        return int(np.argmax(scores))

    def kept(self, scores: Array) -> Array:
        """The scores of the tokens that may be drawn, minus infinity for all others."""
        if self.top_k is None and self.top_p >= 1.0:
            return scores
        order = np.argsort(-scores, kind="stable")[: self.top_k]
        if self.top_p < 1.0:
            likely = np.exp(scores[order] - scores[order[0]])
            before = np.cumsum(likely) - likely
            order = order[before < self.top_p * likely.sum()]
        possible = np.full_like(scores, -np.inf)
        possible[order] = scores[order]
        return possible
