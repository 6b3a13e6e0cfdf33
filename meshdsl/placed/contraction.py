"""The order of an einsum of many operands, from opt_einsum, with costs that count the layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from meshdsl.ir.types import TensorType
from meshdsl.named.ir import NamedOp, Value, fields_inside
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.records import dataclass

FLOPS_PER_BYTE = 64
"""The cost of sending a byte, in FLOPs: about the balance of a core and its network."""


MOST_EXACT = 8
"""The most operands for which the order of an einsum is searched exhaustively; above, greedily."""


def pairwise(op: NamedOp, placed: tuple[Placement, ...], mesh: Mesh) -> tuple[NamedOp, ...]:
    """`op` as einsums of one or two operands in the cheapest order; the last yields its output.

    A contraction costs its FLOPs on local sizes, and the all_reduce of its result when it sums
    split dims. The search is opt_einsum's dynamic programming (Pfeifer et al. 2014), outer products
    included; beyond `MOST_EXACT` operands, which it takes 3^n steps for, its greedy one.
    """
    ways = {d: mesh.size(*axes) for p in placed for d, axes in p.splits}
    operands = list(op.ins)
    contractions: list[NamedOp] = []
    steps = order(op, ways)
    for number, step in enumerate(steps):
        ins = tuple(operands[i] for i in sorted(step))
        operands = [v for i, v in enumerate(operands) if i not in step]
        out = op.out if number == len(steps) - 1 else _between(op, ins, operands)
        dims = (("dims", out.type.dims),)
        contractions.append(replace(op, ins=ins, outs=(out,), attrs=dims))
        operands.append(out)
    return tuple(contractions)


def _between(op: NamedOp, ins: tuple[Value, ...], rest: list[Value]) -> Value:
    """The result of contracting operands early, with every dim that is needed later."""
    needed = {d for v in (*rest, op.out) for d in v.type.names}
    dims = dict.fromkeys(d for v in ins for d in v.type.dims if d.name in needed)
    type_ = TensorType(tuple(dims), op.out.type.dtype)
    return Value(type_, op.span, **fields_inside(op.out))


def order(op: NamedOp, ways: Mapping[str, int]) -> Sequence[tuple[int, ...]]:
    """Positions per step; the operands of a step are removed and its result appended."""
    from opt_einsum.paths import DynamicProgramming, greedy

    # Small integers, not names: their sets iterate in the same order in every process.
    names = list(dict.fromkeys(d for v in op.ins for d in v.type.names))
    inputs = [frozenset(names.index(d) for d in v.type.names) for v in op.ins]
    output = frozenset(names.index(d) for d in op.out.type.names)
    sizes = {d.name: d.size for v in op.ins for d in v.type.dims}
    local = {i: -(-sizes[d] // ways.get(d, 1)) for i, d in enumerate(names)}
    if len(inputs) > MOST_EXACT:
        growth = _Growth(tuple(ways.get(d, 1) for d in names))
        path: Sequence[tuple[int, ...]] = greedy(inputs, output, local, cost_fn=growth)
        return path
    # opt_einsum renumbers the dims in the order in which it meets them.
    met = list(dict.fromkeys(itertools.chain(*inputs, output)))
    cost = _Cost([ways.get(names[i], 1) for i in met], op.out.type.dtype.bytes)
    optimizer: Any = DynamicProgramming(minimize=cost, search_outer=True)
    steps: Sequence[tuple[int, ...]] = optimizer(inputs, output, local)
    return steps


@dataclass(frozen=True, slots=True)
class _Growth:
    """The greedy search's objective: elements of the result less those of its operands.

    An all_reduce of the result counts with the elements it sends.
    """

    ways: tuple[int, ...]

    def __call__(
        self,
        result: int,
        one: int,
        other: int,
        dims: frozenset[int],
        dims1: frozenset[int],
        dims2: frozenset[int],
    ) -> float:
        n = math.prod(self.ways[d] for d in (dims1 | dims2) - dims)
        return result - one - other + 2 * (n - 1) / n * result


@dataclass(frozen=True, slots=True)
class _Cost:
    """opt_einsum's custom local cost function; `ways` says how often each dim is split."""

    ways: list[int]
    bytes: int

    def __hash__(self) -> int:
        return id(self)

    def __call__(
        self,
        cost1: float,
        cost2: float,
        union: frozenset[int],
        sizes: list[int],
        cost_cap: float,
        s1: int,
        s2: int,
        found: dict[int, Any],
        subgraph: int,
        every: int,
        inputs: list[frozenset[int]],
        shared: frozenset[int],
        memory_limit: int | None,
        contract1: Any,
        contract2: Any,
    ) -> None:
        merged = s1 | s2
        remaining = subgraph & (every ^ merged)
        later = {d for i, dims in enumerate(inputs) if remaining >> i & 1 for d in dims}
        summed = shared - later
        cost = cost1 + cost2 + self._step(union, summed, sizes)
        if cost <= cost_cap and (merged not in found or cost < found[merged][1]):
            found[merged] = (union - summed, cost, (contract1, contract2))

    def _step(self, union: frozenset[int], summed: frozenset[int], sizes: list[int]) -> float:
        flops = 2 * math.prod(sizes[d] for d in union)
        result = math.prod(sizes[d] for d in union - summed) * self.bytes
        n = math.prod(self.ways[d] for d in summed)
        return flops + FLOPS_PER_BYTE * 2 * (n - 1) / n * result
