"""Arithmetic with 0 and 1 that is left out: x * 1, x / 1, x + 0, x - 0 are x, and x * 0 is 0.

So are, in a training step, `stop_gradient`, whose gradients are there, and a cast to the same
dtype, now that `compute` has set the dtypes.

That is how a number switches a term of a function off: one of the text, or an argument of the call,
but none made of the sizes of dims. A product with 0 is 0 whatever x is: it is not computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.ir.program import every
from meshdsl.ir.rewrite import Visitor, substitute
from meshdsl.named.attention_fusion import Spoken, is_spoken_of, noted
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, kept
from meshdsl.named.size_formulas import how_of

NEUTRAL = {
    "mul": ((0, 1.0), (1, 1.0)),
    "div": ((1, 1.0),),
    "add": ((0, 0.0), (1, 0.0)),
    "sub": ((1, 0.0),),
}
"""By operator, the operands that may be left out, and the numbers that they are then."""

OF_STEPS = ("stop_gradient", "cast")
"""Operators that may be left out of a step, if they change no dtype."""


def fold_identities(
    program: NamedProgram, spoken: Spoken | None = (), is_step: bool = False
) -> NamedProgram:
    """Replace arithmetic with neutral numbers by the other operand, products with 0 by zeros.

    Zeros that have a pin, or that a file speaks of (`spoken`; None: all that have a name), are read
    as they were.

    In a training step (`is_step`) the operators `OF_STEPS` are their operand, too. Nowhere else: a
    program may be differentiated, also one that assigns values. For the same reason, products with
    0 stay in a program that is to be trained until it is a step, unless their factor is a
    `stop_gradient`: the loss depends on their factors, and its gradients by these are 0.
    """
    reasons = ("constant", *(OF_STEPS if is_step else ()))
    for node in every(program.body):
        if isinstance(node, NamedOp) and node.name in reasons:
            if dict(node.attrs).get("value", 0.0) in (0.0, 1.0):
                folding = _Folding(program, spoken, is_step)
                body = tuple(folding.block(program.body))
                body = substitute(body, folding.same)
                return noted(replace(program, body=body), folding.unspoken, folding.kept)
    return program


class _Folding(Visitor):
    """One walk in order: the numbers that values are, and the values that others stand for.

    A value that has a name or a pin, or that is handed on, stays one of its own: an identity.
    """

    def __init__(self, program: NamedProgram, spoken: Spoken | None, is_step: bool) -> None:
        self.spoken = spoken
        self.unspoken: set[str] = set()
        self.kept: set[str] = set()
        self.numbers: dict[Value, float] = {}
        self.same: dict[Value, Value] = {}
        self.stopped: set[Value] = set()
        self.handed_on = set(kept(program))
        self.is_step = is_step
        self.folds_products = is_step or program.goal is None

    def block(self, nodes: tuple[Node, ...]) -> Iterator[Node]:
        """The nodes of a block."""
        return (new for node in nodes if (new := self.visit(node)) is not None)

    def loop(self, loop: NamedLoop) -> NamedLoop:
        """The next loop, with its own operators folded."""
        self.handed_on.update(loop.ends)
        return replace(loop, body=tuple(self.block(loop.body)))

    def op(self, op: NamedOp) -> NamedOp | None:
        """The next operator, or what it is; None where its operand replaces it."""
        if op.name == "constant":
            self._note(op.out, op.attr("value"))
        if op.name == "stop_gradient":
            self.stopped.add(op.out)
        if op.kind is not None or len(op.outs) != 1 or op.out.role != "activation":
            return op
        by_zero = op.name == "mul" and 0.0 in [self.numbers.get(v) for v in op.ins]
        if by_zero and (self.folds_products or not self.stopped.isdisjoint(op.ins)):
            self._note_zeros(op.out)
            attrs = (("dims", op.out.type.dims), ("dtype", op.out.type.dtype))
            return replace(op, name="zeros", ins=(), attrs=attrs)
        operand = self._left(op)
        if operand is None:
            return op
        stays = op.out.name is not None or op.out.pins or op.out in self.handed_on
        if stays or operand.role != "activation":
            return replace(op, name="identity", ins=(operand,), attrs=())
        self.same[op.out] = self.same.get(operand, operand)
        return None

    def _note(self, value: Value, number: object) -> None:
        """Note a float of the text; one made of sizes may be another number tomorrow."""
        if isinstance(number, float) and how_of(number) is None:
            self.numbers[value] = number

    def _note_zeros(self, value: Value) -> None:
        """Note a tensor of zeros, unless it is to be read."""
        if value.pins or (value.name is not None and self.spoken is None):
            return
        if self.spoken is not None and is_spoken_of(value, self.spoken):
            self.kept.add(value.label)
            return
        self.numbers[value] = 0.0
        self.unspoken.update([value.label] if value.name is not None else [])

    def _left(self, op: NamedOp) -> Value | None:
        """The operand that the result is, if the other one is neutral."""
        if op.name in OF_STEPS and self.is_step and op.ins[0].type == op.out.type:
            return op.ins[0]
        for index, number in NEUTRAL.get(op.name, ()):
            other = op.ins[1 - index]
            if self.numbers.get(op.ins[index]) == number and other.type == op.out.type:
                return other
        return None
