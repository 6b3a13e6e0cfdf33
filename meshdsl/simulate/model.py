"""The FLOPs that a program needs, whatever computes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from meshdsl.ir.program import counted
from meshdsl.named.ir import NamedOp, NamedProgram, Node, Value
from meshdsl.ops.opdef import Filled, Operand, Signature, lookup
from meshdsl.ops.zeros import share
from meshdsl.placed.sharding_rules import call_of
from meshdsl.placed.strategies import flops


def model_flops(program: NamedProgram) -> dict[str, int]:
    """FLOPs of a named program on whole tensors by dtype.

    Neither rematerialised operators are counted nor what is computed of zeros, whatever the
    numbers are: a slot of an expert that no token can be in needs none.
    """
    return flops_by_dtype(_model_calls(program))


def _model_calls(program: NamedProgram) -> Iterator[tuple[Signature, int]]:
    needed = _NeededShares()
    needed.walk(program.body)
    for op, trips in counted(program.body):
        if not isinstance(op, NamedOp) or (op.origin is not None and op.origin.is_copy):
            continue
        sig = call_of(op).signature
        yield sig, round(trips * flops(lookup(op.name), sig) * needed.of(op))


class _NeededShares:
    """The part of each operator's work that is not on zeros, by the rules of its operators.

    The gradient of an operator needs no more of its work than the operator itself.
    """

    def __init__(self) -> None:
        self.operands: dict[Value, Operand] = {}
        self.shares: dict[Value, float] = {}

    def of(self, op: NamedOp) -> float:
        """The share of an operator that was walked."""
        own = self.shares[op.outs[0]]
        return own if op.origin is None else min(own, self.shares.get(op.origin.of, 1.0))

    def walk(self, nodes: Iterable[Node]) -> None:
        """Find the facts of all values, in program order."""
        for node in nodes:
            if isinstance(node, NamedOp):
                self._operator(node)
                continue
            for stack in node.stacked:
                outer = self.operands.get(stack.outer, Operand())
                self.operands[stack.inside] = Operand(_without(outer.filled, node.dim.name))
            self.walk(node.body)

    def _operator(self, op: NamedOp) -> None:
        rule, sig = lookup(op.name).zeros, call_of(op).signature
        ins = [self.operands.get(value, Operand()) for value in op.ins]
        number = sig.attrs["value"] if op.name == "constant" else None
        fact = rule(sig, ins) if rule else None
        self.operands[op.outs[0]] = Operand(fact, op.name, number)
        terms = _terms(sig)
        work = rule(terms, ins) if rule else None
        self.shares.update(dict.fromkeys(op.outs, share(work, terms.outs)))


def _terms(sig: Signature) -> Signature:
    """The call with the terms of its sums as its result."""
    dims = dict.fromkeys(d for t in (*sig.outs, *sig.ins) for d in t.dims)
    return replace(sig, outs=(replace(sig.outs[0], dims=tuple(dims)),))


def _without(fact: Filled | None, dim: str) -> Filled | None:
    """The fact of one slice along a dim."""
    if fact is None or dim in fact.dims:
        return None
    return replace(fact, over=fact.over - {dim})


def flops_by_dtype(calls: Iterable[tuple[Signature, int]]) -> dict[str, int]:
    """The FLOPs of calls, summed by the dtype in which they compute: that of operand 0."""
    by_dtype: Counter[str] = Counter()
    for sig, count in calls:
        by_dtype[str((sig.ins or sig.outs)[0].dtype)] += count
    return dict(by_dtype)
