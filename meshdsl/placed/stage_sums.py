"""Gradients with terms of all stages and terms of one end: each kind leaves the passes by itself.

A tensor outside of the loop that has the loop's dim is read by every stage for its own iterations,
and what is made of all of it is read on the first one. Of its gradient each stage then has its own
terms, and the first stage, whose backward pass is the last, has the others. Stages are never at one
micro-batch together, so these are added once the passes are done: each kind is a sum over all
micro-batches, and both leave the loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce

from meshdsl.ir import program as ir
from meshdsl.ir.program import Carry
from meshdsl.ir.rewrite import reads_of
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value
from meshdsl.ops.opdef import lookup
from meshdsl.placed.pipelined import Piped
from meshdsl.records import dataclass

STAGES, END = "stages", "end"
"""Where a term is: on every stage its own part, or on the first or the last stage all of it."""


def terms_apart(program: NamedProgram, pipe: Piped) -> NamedProgram:
    """The program in which gradients of both kinds are added once the passes are done."""
    if not pipe.dim:
        return program
    if pipe.cut is None:
        return replace(program, body=tuple(_accumulated(program.body, pipe)))
    passes = tuple(n for n in program.body if n.phase != "update")
    update = tuple(n for n in program.body if n.phase == "update")
    terms = _Terms(passes, pipe)
    read = {v for n in update for v in reads_of(n)} | {o.value for o in program.outputs}
    sums = [two for v in read if (two := terms.apart(v)) is not None]
    if not sums:
        return program
    joined = [replace(two.joined, phase="update") for two in sums]
    return replace(program, body=(*terms.without(sums), *joined, *update))


def _accumulated(nodes: Iterable[Node], pipe: Piped) -> Iterable[Node]:
    """The nodes; a loop over batches has two sums of a gradient that has terms of both kinds."""
    nodes = tuple(nodes)
    zeros = {n.out: n for n in nodes if isinstance(n, NamedOp) and n.name == "zeros"}
    for node in nodes:
        if isinstance(node, NamedLoop) and node.dim.name == pipe.micro:
            yield from _with_sums(node, pipe, zeros)
        else:
            yield node


def _with_sums(loop: NamedLoop, pipe: Piped, zeros: Mapping[Value, NamedOp]) -> Iterable[Node]:
    terms = _Terms(loop.body, pipe)
    carries: list[Carry[Value]] = []
    sums, added, ends = list[_Apart](), list[NamedOp](), list[NamedOp]()
    for carry in loop.carries:
        total = terms.maker.get(carry.next)
        begun = zeros.get(carry.init)
        two = None
        if begun is not None and total is not None and _adds(total, carry.inside):
            two = terms.apart(total.ins[1])
        if two is None or total is None or begun is None:
            carries.append(carry)
            continue
        sums.append(replace(two, gone=(*two.gone, total)))
        for part in (two.stages, two.end):
            every = (carry.init, carry.inside, carry.next, carry.result)
            init, inside, next_, result = (replace(v, type=part.type) for v in every)
            attrs = (("dims", part.type.dims), ("dtype", part.type.dtype))
            yield replace(begun, outs=(init,), attrs=attrs)
            added.append(replace(total, ins=(inside, part), outs=(next_,)))
            carries.append(Carry(init, inside, next_, result))
        results = tuple(c.result for c in carries[-2:])
        ends.append(replace(total, ins=results, outs=(carry.result,)))
    body = (*terms.without(sums), *added) if sums else loop.body
    yield replace(loop, carries=tuple(carries), body=body)
    yield from ends


def _adds(op: NamedOp, inside: Value) -> bool:
    """Whether an operator adds something to what a loop carries."""
    return op.name == "add" and op.ins[0] is inside and op.ins[1] is not inside


@dataclass(frozen=True, slots=True)
class _Apart:
    """A value as the sum of two: the operators that make them, and `joined`, which adds them.

    `gone` are the operators that were there for it.
    """

    stages: Value
    end: Value
    made: tuple[NamedOp, ...]
    joined: NamedOp
    gone: tuple[NamedOp, ...]


class _Terms:
    """The terms of the sums that the nodes of a micro-batch make."""

    def __init__(self, nodes: Sequence[Node], pipe: Piped) -> None:
        self.nodes, self.dim = nodes, pipe.dim
        self.maker = {v: n for n in nodes if isinstance(n, NamedOp) for v in n.outs}
        self.uses = ir.uses(nodes)
        self.home: dict[Value, str] = {}
        for node in nodes:
            if isinstance(node, NamedLoop) and pipe.cuts(node):
                self.home.update((c.result, END) for c in node.carries)
                self.home.update((c.outer, STAGES) for c in node.collected)
                continue
            read = {self.home[v] for v in reads_of(node) if v in self.home}
            if read:
                self.home.update((v, END if END in read else STAGES) for v in node.makes)

    def apart(self, value: Value) -> _Apart | None:
        """A value as the sum of the terms of stages and of those of an end; None of one kind.

        What reads it in a pass would need both at once: then it stays as it is.
        """
        cast = self.maker.get(value)
        cast = cast if cast is not None and cast.name == "cast" else None
        total = cast.ins[0] if cast is not None else value
        if self.uses[total] > 1 or self.uses[value] > 1:
            return None
        terms, gone = self._flat(total)
        kinds = {kind: [v for v in terms if self._kind(v) == kind] for kind in (STAGES, END)}
        homes = {self.home.get(v) for v in terms}
        if value.role == "activation" or STAGES not in homes or not kinds[END]:
            return None
        # Blocks of the iterations and what is alike on all stages are added where they are.
        if END not in homes and any(v.type.has(self.dim) for v in terms):
            return None
        additions: list[NamedOp] = []
        one, other = (self._sum(kinds[k], value, gone[0], cast, additions) for k in (STAGES, END))
        joined = replace(gone[0], ins=(one, other), outs=(value,))
        every = (*gone, *((cast,) if cast is not None else ()))
        return _Apart(one, other, tuple(additions), joined, every)

    def without(self, sums: Sequence[_Apart]) -> tuple[Node, ...]:
        """The nodes that make two values in place of each sum."""
        gone = {op for two in sums for op in two.gone}
        remaining = tuple(n for n in self.nodes if n not in gone)
        return (*remaining, *(op for two in sums for op in two.made))

    def _kind(self, value: Value) -> str:
        """The kind of a term; what can be made anywhere is made where its elements are."""
        return self.home.get(value, STAGES if value.type.has(self.dim) else END)

    def _flat(self, value: Value) -> tuple[list[Value], list[NamedOp]]:
        """The terms of a value, and the operators that add them."""
        op = self.maker.get(value)
        if op is None or op.name != "add" or op.phase != "backward" or self.uses[value] > 1:
            return [value], []
        terms, gone = list[Value](), [op]
        for each in op.ins:
            more, inner = self._flat(each)
            terms += more
            gone += inner
        return terms, gone

    def _sum(
        self,
        terms: list[Value],
        whole: Value,
        add: NamedOp,
        cast: NamedOp | None,
        made: list[NamedOp],
    ) -> Value:
        """The sum of some terms of a value, in its dtype."""

        def added(one: Value, other: Value) -> Value:
            (type_,) = lookup("add").infer((one.type, other.type), {})
            made.append(replace(add, ins=(one, other), outs=(replace(whole, type=type_),)))
            return made[-1].out

        total = reduce(added, terms)
        if cast is not None:
            type_ = replace(total.type, dtype=whole.type.dtype)
            made.append(replace(cast, ins=(total,), outs=(replace(whole, type=type_),)))
            total = made[-1].out
        return total
