"""Common subexpression elimination: equal operators on the same operands are merged.

After expansion a backward pass recomputes results of its forward pass: the maximum and the sum
of a softmax over a split dim, each behind a collective. No large tensor is kept longer for it: one
phase reads of another only results smaller than the operands, or than which nothing as large has
been made since, and none of a `recompute` block. A backward loop reads what it has slices of
anyway: if these are an operator's operands and its result, it is not done again. What is computed
of numbers is a number.
(Value numbering, Alpern, Wegman and Zadeck 1988.)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeVar

from meshdsl.ir.program import Stacked
from meshdsl.ir.rewrite import Visitor, defined, substitute
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.named.origins import with_kept_origins
from meshdsl.named.simplify import drop_unused
from meshdsl.named.size_formulas import made
from meshdsl.ops.opdef import lookup
from meshdsl.records import dataclass

N = TypeVar("N", NamedOp, NamedLoop)

Alike = Callable[[NamedOp, NamedOp], bool]
"""Whether a layout constrains two operators alike."""

SAME_NUMBERS = ("identity", "stop_gradient")
"""Operators whose result is their operand: gradients have been taken before anything is merged."""


def cse(program: NamedProgram, alike: Alike, only_light: bool = False) -> NamedProgram:
    """The program with equal operators of a block merged; itself where there are none.

    A value that has a name or a pin, or is returned, stored, carried or collected, stays one of its
    own: an identity. Operators are merged only if they are `alike`; with `only_light`, one phase
    reads of another only small results.
    """
    if not _has_equals(program):
        return program
    block = Merging.of(program, alike)
    block.only_light = only_light
    body = block.nodes(program.body)
    if not block.merged:
        return program
    # What nothing reads any more may have been read by what was merged.
    return with_kept_origins(program, drop_unused(replace(program, body=body)))


@functools.lru_cache(maxsize=64)
def _has_equals(program: NamedProgram) -> bool:
    """Whether any operators of a block are equal: of a program that many layouts are tried for."""
    block = Merging.of(program, lambda one, other: False)
    block.nodes(program.body)
    return block.equals


@dataclass(slots=True)
class Merging(Visitor):
    """One block of nodes, as far as it has been seen.

    numbers: values that are equal have one number; a value without one is equal only to itself.
    same:    the removed values, and their replacements.
    gone:    these, and those of loops before, which origins alone may name.
    done:    the remaining operators, with a number, by what they compute.
    shared:  values made in one phase and read in another.
    equals:  whether any operators are equal, merged or not.
    literals: the values that are numbers.
    recent:  the last values, each with its elements: less than those before it. Beside the last of
             a size nothing as large has been made since.
    earlier: those before the last operator.
    only_light: whether what is recent counts no more than other values.
    collects: by stack, the loop that collected it, and its values.
    computed: the slices of those stacks in this block whose operators are known.
    """

    alike: Alike
    kept: set[Value]
    numbers: dict[Value, Any] = field(default_factory=dict)
    same: dict[Value, Value] = field(default_factory=dict)
    gone: dict[Value, Value] = field(default_factory=dict)
    done: dict[Any, tuple[int, list[NamedOp]]] = field(default_factory=dict)
    shared: set[Value] = field(default_factory=set)
    merged: int = 0
    equals: bool = False
    literals: dict[Value, Any] = field(default_factory=dict)
    recent: dict[Value, int] = field(default_factory=dict)
    earlier: dict[Value, int] = field(default_factory=dict)
    only_light: bool = False
    collects: dict[Value, tuple[NamedLoop, Value]] = field(default_factory=dict)
    computed: set[Value] = field(default_factory=set)

    @classmethod
    def of(cls, program: NamedProgram, alike: Alike) -> Merging:
        """The block of a program, before its first node."""
        kept = {o.value for o in program.outputs} | {u.new for u in program.updates}
        return cls(alike, kept | ({*program.goal.losses} if program.goal else set()))

    def inside(self, loop: NamedLoop) -> Merging:
        """The block of a loop, before its first node."""
        kept = {c.next for c in loop.carries} | {c.inside for c in loop.collected}
        numbers = dict(self.literals)
        return Merging(self.alike, kept, literals=numbers, only_light=self.only_light)

    def copy(self) -> Merging:
        """The same block, to go on with in another way."""
        return replace(
            self,
            numbers=dict(self.numbers),
            same=dict(self.same),
            gone=dict(self.gone),
            done={key: (number, [*before]) for key, (number, before) in self.done.items()},
            shared=set(self.shared),
            literals=dict(self.literals),
            recent=dict(self.recent),
            earlier=dict(self.earlier),
            collects=dict(self.collects),
            computed=set(self.computed),
        )

    def now(self, node: N) -> N:
        """A node that reads what stands for what has been removed."""
        return substitute([node], self.same, origins=self.gone)[0]

    def leave(self, loop: Merging) -> None:
        """Continue behind a loop."""
        self.merged += loop.merged
        self.equals |= loop.equals
        self.gone.update(loop.gone)
        self.recent.clear()

    def nodes(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The block with its equal operators merged."""
        merged = map(self.visit, nodes)
        return tuple([node for node in merged if node is not None])

    def loop(self, loop: NamedLoop) -> NamedLoop:
        """The next loop, with its own operators merged."""
        loop = self.now(loop)
        inner = self.inside(loop)
        inner.numbers_carried(loop)
        stacked = inner.slices(loop.stacked)
        inner.computed_before(replace(loop, stacked=stacked), self.collects)
        body = inner.nodes(loop.body)
        self.leave(inner)
        loop = self.without_equal_stacks(replace(loop, body=body, stacked=stacked))
        self.collects.update((c.outer, (loop, c.inside)) for c in loop.collected)
        return loop

    def computed_before(
        self, loop: NamedLoop, collects: Mapping[Value, tuple[NamedLoop, Value]]
    ) -> None:
        """Note what an earlier loop has computed of values, where this one has slices of both.

        So a backward pass reads what it has of the forward pass, and computes none of it again.
        """
        slice_of_stack = {item.outer: item.inside for item in loop.stacked}
        # By earlier loop and its value, the slice that this loop has of it.
        results: dict[NamedLoop, dict[Value, Value]] = {}
        for stack, slice_ in slice_of_stack.items():
            if stack in collects:
                earlier, value = collects[stack]
                results.setdefault(earlier, {})[value] = slice_
        for earlier, slices in results.items():
            if earlier.dim != loop.dim:
                continue
            shared = (s for s in earlier.stacked if s.outer in slice_of_stack)
            slice_of = {s.inside: slice_of_stack[s.outer] for s in shared} | slices
            inside = {v for node in (earlier, *earlier.body) for v in defined(node)}
            lacking = inside - slice_of.keys()
            for op in earlier.body:
                if isinstance(op, NamedOp) and lacking.isdisjoint(op.ins):
                    self._note_computed(op, slice_of, slices)

    def _note_computed(
        self, op: NamedOp, slice_of: Mapping[Value, Value], slices: Mapping[Value, Value]
    ) -> None:
        """Note an operator of another loop if its result is one of the `slices` of this one."""
        is_merged = op.kind is None and op.block is None and not lookup(op.name).overwrites
        if not is_merged or len(op.outs) > 1 or op.out not in slices:
            return
        op = replace(op, ins=tuple(slice_of.get(v, v) for v in op.ins), outs=(slices[op.out],))
        number, before = self._equal(op)
        before.append(op)
        self.numbers[op.out] = number
        self.computed.add(op.out)

    def numbers_carried(self, loop: NamedLoop) -> None:
        """Let a loop read numbers that it carries unchanged as what they are.

        The gradient of a sum over iterations is carried so.
        """
        for carry in loop.carries:
            if carry.next is carry.inside and carry.init in self.literals:
                self.same[carry.inside] = carry.init
                self.merged += 1
                self.equals = True

    def slices(self, stacked: tuple[Stacked[Value], ...]) -> tuple[Stacked[Value], ...]:
        """The slices that a loop takes, of each stack one: of those that became one, too."""
        first: dict[Value, Stacked[Value]] = {}
        for item in stacked:
            before = first.setdefault(item.outer, item)
            if before is not item and not self._stays(item.inside):
                self.same[item.inside] = self.gone[item.inside] = before.inside
        return tuple(item for item in stacked if item.inside not in self.same)

    def without_equal_stacks(self, loop: NamedLoop) -> NamedLoop:
        """A loop that collects no two stacks of one value, unless the second is to stay."""
        copies = {n.outs[0]: n.ins[0] for n in loop.body if isinstance(n, NamedOp) and _is_copy(n)}
        first: dict[Value, Value] = {}
        for item in loop.collected:
            of = copies.get(item.inside, item.inside)
            before = first.setdefault(of, item.outer)
            if before is not item.outer and not self._stays(item.outer):
                self.merged += 1
                self.same[item.outer] = self.gone[item.outer] = before
        collected = tuple(c for c in loop.collected if c.outer not in self.same)
        return replace(loop, collected=collected)

    def op(self, op: NamedOp) -> NamedOp | None:
        """The next operator, an identity of an equal one, or None where that one replaces it."""
        op = self.now(op)
        if op.ins and all(v in self.literals for v in op.ins):
            op = _folded(op, [self.literals[v] for v in op.ins])
        if op.name == "constant":
            self.literals[op.out] = op.attr("value")
        merges = op.kind is None and len(op.outs) == 1 and not lookup(op.name).overwrites
        number, before = self._equal(op) if merges else (None, [])
        self.earlier = self.recent
        if not before:
            size = max(v.type.elements for v in op.outs)
            self.recent = {v: n for v, n in self.recent.items() if n > size}
            self.recent[op.outs[-1]] = size
        if not merges:
            return op
        self.equals |= bool(before)
        self.numbers[op.out] = number
        first = next((b for b in before if self._may_stand_for(b, op)), None)
        if first is None:
            before.append(op)
            return op
        self.shared.update([first.out] if first.phase != op.phase else [])
        stays = self._stays(op.out)
        if stays and op.name == "identity":
            return op
        self.merged += 1
        if not stays:
            self.same[op.out] = self.gone[op.out] = first.out
            return None
        return replace(op, name="identity", ins=(first.out,), attrs=())

    def _stays(self, value: Value) -> bool:
        """Whether a value stays one of its own, whatever it is equal to."""
        return value.name is not None or bool(value.pins) or value in self.kept

    def rewrite(self) -> None:
        """Note that the last operator is rewritten: its result is not made by one operator."""
        self.recent = self.earlier

    def forget(self, op: NamedOp) -> None:
        """Let nothing be merged with an operator that has been left out."""
        _, before = self._equal(op)
        if op in before:
            before.remove(op)

    def drop(self, values: Iterable[Value], other: Value) -> None:
        """Note values that have been left out since nothing reads them: origins name `other`."""
        self.gone.update(dict.fromkeys(values, self.same.get(other, other)))

    def _equal(self, op: NamedOp) -> tuple[Any, list[NamedOp]]:
        """The number of the result, and the operators that have computed the same."""
        ins = tuple(self.numbers.get(v, v) for v in op.ins)
        key = (op.name, ins, op.attrs, op.out.type, op.out.role)
        number, before = self.done.setdefault(key, (len(self.done), []))
        # Those that are never merged are as many as there are numbers in a text: none is kept.
        before = before if _may_be_merged(op) else []
        return ins[0] if op.name in SAME_NUMBERS else number, before

    def _may_stand_for(self, first: NamedOp, again: NamedOp) -> bool:
        """Whether the result of `first` may be read in place of that of `again`."""
        if first.phase != again.phase and first.out not in self.computed:
            is_recent = first.out in self.recent and not self.only_light
            is_there = is_recent or self._is_light(again)
            if first.block is not None or not is_there:
                return False
        return self.alike(first, again)

    def _is_light(self, op: NamedOp) -> bool:
        """Whether the result is smaller than some operand, or as small as the shared values."""
        most = max((v.type.elements for v in op.ins), default=0)
        shared = all(v in self.shared or not v.type.dims for v in op.ins)
        return op.out.type.elements < most or (shared and op.out.type.elements == most)


def _folded(op: NamedOp, operands: Sequence[int | float]) -> NamedOp:
    """The number that an operator of numbers yields, if it is one that a text may have."""
    fold = lookup(op.name).fold
    if fold is None or op.out.type.dtype.kind != "float" or op.out.name is not None:
        return op
    try:
        number = made(float(fold(*operands)), op.name, *operands)
    except (ArithmeticError, TypeError, ValueError):
        return op
    if not math.isfinite(number):
        return op
    attrs = (("value", number), ("dtype", op.out.type.dtype))
    return replace(op, name="constant", ins=(), attrs=attrs)


def _is_copy(op: NamedOp) -> bool:
    """Whether the result is the operand, under a name that nothing asks for."""
    return op.name == "identity" and op.out.name is None and not op.out.pins


def _may_be_merged(op: NamedOp) -> bool:
    """Whether another operator may stand for one: never for a number, or what is no activation.

    Of tensors that have no operands only indices are: others are written into, or random.
    """
    computed = bool(op.ins) or lookup(op.name).below is not None
    return computed and op.out.role == "activation"
