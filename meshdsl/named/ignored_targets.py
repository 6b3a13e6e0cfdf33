"""`cross_entropy(…, ignore_index=-100)` in operators of its own: the loss of any target, or 0.

It is used where the classes are split, and for systems that have no such option.
"""

from __future__ import annotations

from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, Value


def counted_loss(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> tuple[Value, ...]:
    """The result of a loss on `ins`, with 0 where the target is ignored."""
    logits, targets = ins
    is_ignored = emit("eq", targets, op.attr("ignore_index"))
    zero = emit("constant", value=0, dtype=targets.type.dtype)
    losses = emit(op.name, logits, emit("where", is_ignored, zero, targets), dim=op.attr("dim"))
    return (emit("where", is_ignored, 0.0, losses),)
