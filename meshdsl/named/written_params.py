"""Where the parameters of a named program are declared when it is written as `.mdsl`.

Their order is that of declaration, across calls. What a parameter's first use sums over counts for
its initial values; where simplification has changed that use, the text says it another way.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from meshdsl.ir.types import Dim
from meshdsl.named.builder import PendingParam
from meshdsl.named.ir import Loop, Node, Op, Param, Program, Value
from meshdsl.named.params import finish_params
from meshdsl.named.written_uses import (
    Loops,
    ScaledSum,
    free,
    instances,
    loops_around,
    scope_of,
    shared,
    slices,
    with_scaled_sums,
)

PRODUCT = "product"
"""Stands for an einsum that is written as the sum of a product."""


class Params:
    """The parameters, each declared once, in order; `next` counts those that have been."""

    def __init__(self, program: Program) -> None:
        self.params = program.params
        self.numbers = {p.value: i for i, p in enumerate(self.params)}
        self.next = 0
        self.slices = slices(program.body)
        self.loops = loops_around(program)
        self.with_operators = instances(program.body)
        self.products = frozenset(_products(program))
        self.wrong_fans = frozenset(
            wanted.value
            for wanted, now in zip(self.params, _fans(program, self.products), strict=True)
            if (wanted.fan_in, wanted.fan_out) != (now.fan_in, now.fan_out)
        )

    def home(self, param: Param, loops: Loops) -> Loops:
        """The loops a parameter is best declared in: those whose dims it begins with.

        One that nobody reads may stand in any, such as `loops`.
        """
        around = self.loops.get(param.value, loops)
        pinned = {p.dim for p in param.value.pins}
        dims = param.value.type.dims
        free_dims = itertools.takewhile(lambda d: d.name not in pinned, dims)
        pairs = zip(free_dims, around, strict=False)
        found = tuple(p[1] for p in itertools.takewhile(lambda p: p[0] == p[1].dim, pairs))
        while found and param.value in self.wrong_fans and _sees_more(param, dims[len(found) :]):
            found = found[:-1]
        return found

    def take(self, path: tuple[str, ...], loops: Loops, limit: int) -> Iterator[Param]:
        """The next parameters, as long as they are to be declared in this call, in these loops.

        One that would stand better further inside is declared now if it is in the way of one that
        must be: a later one, up to number `limit`, of the same call.
        """
        while self.next < len(self.params):
            param = self.params[self.next]
            home = self.home(param, loops)
            if param.value.path != path or shared(home, loops) != loops:
                return
            rest = [p for p in self.params[self.next + 1 : limit + 1] if p.value.path == path]
            if home != loops and not any(self.home(p, loops) == loops for p in rest):
                return
            self.next += 1
            yield param

    def call_of_nothing(self, path: tuple[str, ...], loops: Loops) -> tuple[str, ...] | None:
        """The path of a call from here that has the next parameter and no operator."""
        if self.next == len(self.params):
            return None
        param = self.params[self.next]
        inner = param.value.path
        is_inside = len(inner) > len(path) and inner[: len(path)] == path
        called = inner[: len(path) + 1]
        is_here = is_inside and shared(self.home(param, loops), loops) == loops
        return called if is_here and called not in self.with_operators else None

    def limit(self, nodes: Sequence[Node]) -> int:
        """The number of the last parameter that the nodes read; -1 for none."""
        found = (self.numbers.get(self.whole(v), -1) for v in free(nodes))
        return max(found, default=-1)

    def whole(self, value: Value) -> Value:
        """What a loop takes this slice of, outside of all loops; any other value as it is."""
        while value in self.slices:
            value = self.slices[value]
        return value

    def function_of(self, path: tuple[str, ...]) -> str:
        """The name of the `def` of the call with this path, which has parameters."""
        return self.inside(path)[0].functions[len(path) - 1]

    def inside(self, path: tuple[str, ...]) -> list[Value]:
        """The parameters of a call and of the calls inside it."""
        return [p.value for p in self.params if p.value.path[: len(path)] == path]


# --- fan_in ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadUse:
    """A use of a parameter that nobody reads: inside which loops, and what it sums, if anything."""

    loops: tuple[Dim, ...]
    summed: tuple[Dim, ...]


def dead_use(param: Param, loops: int) -> DeadUse:
    """What makes a parameter's fans as they are, written behind it where it gains `loops` dims."""
    dims = param.value.type.dims[loops:]
    seen = param.fan_in * param.fan_out
    sliced = next((s for s in _subsets(dims) if _size(dims) == seen * _size(s)), ())
    own = tuple(d for d in dims if d not in sliced)
    found = (s for s in _subsets(own) if param.fan_in > 1 and _size(s) == param.fan_in)
    return DeadUse(sliced, next(found, ()))


def _sees_more(param: Param, dims: tuple[Dim, ...]) -> bool:
    """Whether the first use of a parameter saw more of it than has these dims."""
    return param.fan_in * param.fan_out > _size(dims)


def _subsets(dims: tuple[Dim, ...]) -> Iterator[tuple[Dim, ...]]:
    """All subsets of dims, the small ones first."""
    for count in range(len(dims) + 1):
        yield from itertools.combinations(dims, count)


def _size(dims: Sequence[Dim]) -> int:
    return math.prod(d.size for d in dims)


def _products(program: Program) -> Iterator[Op]:
    """Einsums that were sums of products when the fans of a parameter were counted."""
    plain = _fans(program, frozenset())
    wrong = {
        p.value
        for p, now in zip(program.params, plain, strict=True)
        if p.fan_in == 1 and now.fan_in > 1
    }
    for op in _first_einsums(program.body, {v: v for v in wrong}, set()):
        if op.attr("dims") == _product_dims(op):
            yield op


def _product_dims(op: Op) -> tuple[object, ...]:
    dims = dict.fromkeys(d for v in op.ins for d in v.type.dims)
    return tuple(d for d in dims if op.out.type.has(d.name))


def _first_einsums(
    nodes: Sequence[Node], known: dict[Value, Value], seen: set[Value]
) -> Iterator[Op]:
    """Einsums that are the first to read one of the values that `known` maps to a parameter."""
    known = dict(known)
    for node in nodes:
        if isinstance(node, Loop):
            slices = {s.inside: known[s.outer] for s in node.stacked if s.outer in known}
            yield from _first_einsums(node.body, known | slices, seen)
            continue
        for value in node.ins:
            param = known.get(value)
            if param is None or param in seen:
                continue
            if node.name in ("rename", "transpose", "cast", "identity"):
                known[node.out] = param
                continue
            seen.add(param)
            if node.name == "einsum" and len(node.ins) > 1:
                yield node


def _fans(program: Program, products: frozenset[Op]) -> tuple[Param, ...]:
    """The parameters with the fans that the written text gives them."""
    body = _as_read(program.body, products)
    return finish_params(tuple(PendingParam(p.value, p.init) for p in program.params), body)


def _as_read(nodes: Sequence[Node], products: frozenset[Op]) -> tuple[Node, ...]:
    """The nodes as they are when the text is read, before it is simplified."""
    found: list[Node] = []
    for item in with_scaled_sums(nodes):
        if isinstance(item, Loop):
            found.append(replace(item, body=_as_read(item.body, products)))
        elif isinstance(item, ScaledSum):
            found += [replace(item.einsum, name=PRODUCT), *item.factors]
        elif item in products:
            found.append(replace(item, name=PRODUCT))
        elif item.name == "transpose" and not is_target(item):
            found.append(replace(item, name="einsum"))
        else:
            found.append(item)
    return tuple(found)


def is_target(op: Op) -> bool:
    """Whether a transpose is written as the dims of an assignment: `y[b, a] = x`."""
    reorders = op.name == "transpose" and op.ins[0].type.dims != op.out.type.dims
    return reorders and op.out.name is not None and scope_of(op.out) == op.out.path
