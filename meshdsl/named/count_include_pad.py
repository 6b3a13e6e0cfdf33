"""`avg_pool(…, pad_counts=0)`: the mean of the elements that a window has, without its padding.

It is the mean with padding over the share of elements in the window, which follows from indices:
nothing is sent for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

from meshdsl.diagnostics import Span, fail
from meshdsl.ir.types import I32
from meshdsl.named.builder import Builder, Scope
from meshdsl.named.ir import Value
from meshdsl.ops.sliding import Slide, slides


@dataclass(frozen=True, slots=True)
class Elements:
    """What is emitted at one call; its operators stand at `span`."""

    builder: Builder
    span: Span
    scope: Scope

    def mean(self, pooled: Value, attrs: Mapping[str, Any], pad_counts: Any) -> Value:
        """`pooled`, a mean over whole windows, as the mean over their elements.

        Raises MD0213 where `pad_counts` is not 0, MD0221 where a window is padding alone.
        """
        if pad_counts != 0:
            message = f"`pad_counts` of `avg_pool` is 0 or 1, not {pad_counts}"
            fail("MD0213", message, self.span, help="write `pad_counts=0`, or leave it out")
        padded = [s for s in slides(attrs, attrs["size"]) if _is_padded(s)]
        for slide in padded:
            last = (slide.coarse.size - 1) * slide.stride - slide.before
            if slide.before >= slide.size or last >= slide.fine.size:
                message = f"a window along `{slide.fine}` is padding alone, which has no mean"
                fail("MD0221", message, self.span, help="pad by less than the window")
        shares = [self._share(slide, pooled) for slide in padded]
        return reduce(lambda a, b: self._emit("div", a, b), shares, pooled)

    def _share(self, slide: Slide, pooled: Value) -> Value:
        """The part of each window along a dim that are elements."""
        position = self._emit("iota", dim=slide.coarse)
        first = self._emit("sub", self._emit("mul", position, slide.stride), slide.before)
        end = self._emit("minimum", self._emit("add", first, slide.size), slide.fine.size)
        count = self._emit("sub", end, self._emit("maximum", first, 0))
        count = self._emit("cast", count, dtype=pooled.type.dtype)
        return self._emit("div", count, slide.size)

    def _emit(self, name: str, *operands: Value | int, **attrs: Any) -> Value:
        """An operator; numbers take the dtype of the first operand."""
        dtype = operands[0].type.dtype if operands and isinstance(operands[0], Value) else I32
        ins = tuple(
            x if isinstance(x, Value) else self.builder.constant(x, dtype, self.span, self.scope)
            for x in operands
        )
        return self.builder.emit(name, ins, attrs, self.span, self.scope)[0]


def _is_padded(slide: Slide) -> bool:
    return slide.before > 0 or slide.covered(slide.coarse.size) > slide.fine.size + slide.before
