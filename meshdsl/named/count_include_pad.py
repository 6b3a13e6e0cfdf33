"""`avg_pool(…, pad_counts=0)`: the mean of the elements that a window has, without its padding.

It is the mean with padding over the share of elements in the window, which follows from indices:
nothing is sent for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from meshdsl.diagnostics import fail
from meshdsl.named.emit import Emit
from meshdsl.named.ir import Value
from meshdsl.ops.sliding import Slide, slides
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Elements:
    """What is emitted at one call."""

    emit: Emit

    def mean(self, pooled: Value, attrs: Mapping[str, Any], pad_counts: Any) -> Value:
        """`pooled`, a mean over whole windows, as the mean over their elements.

        Raises MD0213 where `pad_counts` is not 0, MD0221 where a window is padding alone.
        """
        if pad_counts != 0:
            message = f"`pad_counts` of `avg_pool` is 0 or 1, not {pad_counts}"
            fail("MD0213", message, self.emit.span, help="write `pad_counts=0`, or leave it out")
        padded = [s for s in slides(attrs, attrs["size"]) if _is_padded(s)]
        for slide in padded:
            last = (slide.coarse.size - 1) * slide.stride - slide.before
            if slide.before >= slide.size or last >= slide.fine.size:
                message = f"a window along `{slide.fine}` is padding alone, which has no mean"
                fail("MD0221", message, self.emit.span, help="pad by less than the window")
        shares = [self._share(slide, pooled) for slide in padded]
        return reduce(lambda a, b: self.emit("div", a, b), shares, pooled)

    def _share(self, slide: Slide, pooled: Value) -> Value:
        """The part of each window along a dim that are elements."""
        position = self.emit("iota", dim=slide.coarse)
        first = self.emit("sub", self.emit("mul", position, slide.stride), slide.before)
        end = self.emit("minimum", self.emit("add", first, slide.size), slide.fine.size)
        count = self.emit("sub", end, self.emit("maximum", first, 0))
        count = self.emit("cast", count, dtype=pooled.type.dtype)
        return self.emit("div", count, slide.size)


def _is_padded(slide: Slide) -> bool:
    return slide.before > 0 or slide.covered(slide.coarse.size) > slide.fine.size + slide.before
