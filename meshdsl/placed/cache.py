"""The cache of plans: one that `explain` has searched is found by `compare`, `run` and `train`.

The key of a problem is the hash of all that a search depends on: operators, types and demands by
number, mesh, price, and versions of meshdsl and of the solver. A plan is used only where it is
legal for the program; otherwise the search is repeated. That there is none is cached, too: of a
large program it takes long to find out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, Literal, TypeAlias, TypeVar

from meshdsl.disk_cache import read, write
from meshdsl.named import ir as named
from meshdsl.named.ir import NamedOp, Value
from meshdsl.ops.opdef import ADDED, Reads, ReduceOp
from meshdsl.placed.optimal import PlacementPlan
from meshdsl.placed.placements import Placement, Window, placement
from meshdsl.placed.request import Request
from meshdsl.placed.reshard import Price
from meshdsl.placed.sharding_rules import call_of
from meshdsl.placed.solver import SOLVER
from meshdsl.placed.strategies import Choice, flops, is_legal
from meshdsl.records import dataclass
from meshdsl.version import __version__

FORMAT = 7
KIND = "plans"
"""The folder of cached plans."""

Held: TypeAlias = tuple[int, int, int, int, bool, float | Literal["wrap"] | None]
"""The fields of `Reads`."""
Written: TypeAlias = tuple[
    list[tuple[str, list[str]]], list[str], ReduceOp | None, list[tuple[str, int, Held, int]]
]
"""A placement: its splits, what is partial, the operation, the windows."""
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class WrittenPlan:
    """A plan as it is kept: operators in order, values by number."""

    decisions: list[tuple[list[Written], list[Written], list[Written]]]
    carries: list[tuple[int, Written]]
    versions: list[tuple[int, list[Written]]]
    cost: int
    least: bool
    searched: str


@dataclass(frozen=True, slots=True)
class WrittenAnswer:
    """The plan of a problem as it is cached; None where a search ends without one."""

    plan: WrittenPlan | None


class CachedProblem:
    """A search with its values and operators numbered, so that it can be compared with others."""

    def __init__(self, request: Request, price: Price) -> None:
        self.request, self.price = request, price
        self.program, self.mesh = request.program, request.mesh
        self.ops: tuple[NamedOp, ...] = tuple(named.walk(self.program.body))
        self.numbers: dict[Value, int] = {}
        self.loops: list[named.NamedLoop] = []
        self.key = hashlib.sha256(json.dumps([*self._described()]).encode()).hexdigest()
        self.values = list(self.numbers)
        self.answer = read(KIND, self.key, WrittenAnswer)

    @property
    def has_no_plan(self) -> bool:
        """Whether a search has ended without a plan before."""
        return self.answer is not None and self.answer.plan is None

    def load(self) -> PlacementPlan | None:
        """The cached plan of this problem; None without one."""
        written = None if self.answer is None else self.answer.plan
        try:
            return None if written is None else self._plan(written)
        except (ValueError, KeyError):
            return None

    def store(self, plan: PlacementPlan | None) -> None:
        """Store a plan in the cache, or that there is none."""
        write(KIND, self.key, {"plan": None if plan is None else self._written(plan)})

    # --- the problem -------------------------------------------------------------------------

    def _described(self) -> Iterator[Any]:
        """All that the search depends on, as JSON."""
        price = self.price
        mesh = [self.mesh.axes, self.mesh.cut, self.request.one_stage is not None]
        yield [FORMAT, __version__, SOLVER, *mesh, price.message, price.scatter]
        if price.clock is not None:
            yield price.clock.key
        yield sorted(self.request.known)
        stored = (*self.program.inputs, *(p.value for p in self.program.params))
        stored += tuple(s.value for s in self.program.states)
        yield [self._value(v) for v in stored]
        yield [self._node(node) for node in self.program.body]
        outputs = [o.value for o in self.program.outputs]
        yield [[self._value(v), (p := self.request.output(v)) and _json(p)] for v in outputs]
        yield [[self._value(u.old), self._value(u.new)] for u in self.program.updates]

    def _value(self, value: Value) -> Any:
        """The number of a value; at its first occurrence its type and the demands on it."""
        if value in self.numbers:
            return self.numbers[value]
        self.numbers[value] = len(self.numbers)
        asks = self.request
        dims = [(d.name, d.size) for d in value.type.dims]
        flags = [asks.is_settled(value), asks.is_known(value), asks.waits(value), value.role]
        about = [asks.may_split(value), sorted(asks.asked(value).own), _json(asks.ruled(value))]
        return [dims, value.type.dtype.name, flags, about]

    def _node(self, node: named.Node) -> Any:
        if isinstance(node, NamedOp):
            ins = [self._value(v) for v in node.ins]
            pins = [p and _json(p) for p in self.request.pins(node)]
            read = [_json(self.request.read(v, node)) for v in node.ins]
            outs = [[self._value(v), self.request.layout.summed(v, node)] for v in node.outs]
            added = [_of_package(node)] if node.name in ADDED else []
            return [node.kind or node.name, repr(node.attrs), ins, pins, read, outs, *added]
        self.loops.append(node)
        before = [[self._value(c.init), self._value(c.inside)] for c in node.carries]
        stacked = [[self._value(s.outer), self._value(s.inside)] for s in node.stacked]
        body = [self._node(inner) for inner in node.body]
        after = [[self._value(c.next), self._value(c.result)] for c in node.carries]
        collected = [[self._value(c.inside), self._value(c.outer)] for c in node.collected]
        return [node.dim.name, node.dim.size, before, stacked, body, after, collected]

    # --- its plan ----------------------------------------------------------------------------

    def _written(self, plan: PlacementPlan) -> dict[str, Any]:
        choices = (plan.choices[op] for op in self.ops)
        return {
            "decisions": [[_all(d.needs), _all(d.yields), _all(d.targets)] for d in choices],
            "carries": [[self.numbers[v], _json(p)] for v, p in plan.carried.items()],
            "versions": [[self.numbers[v], _all(ps)] for v, ps in plan.sent.items() if ps],
            "cost": plan.cost,
            "least": plan.least,
            "searched": plan.searched,
        }

    def _plan(self, written: WrittenPlan) -> PlacementPlan | None:
        """The cached plan; None where it does not fit the program.

        Raises ValueError and KeyError for what can be in no plan of it.
        """
        choices = {}
        for op, (needs, yields, targets) in zip(self.ops, written.decisions, strict=True):
            choice = Choice(
                self._placements(op.ins, needs),
                self._placements(op.outs, yields),
                self._placements(op.outs, targets),
            )
            if not is_legal(call_of(op), choice.needs, choice.yields, self.mesh):
                return None
            choices[op] = choice
        carried = {}
        for number, placed in written.carries:
            value = _at(self.values, number)
            carried[value] = self._placement(value, placed)
        sent = {}
        for number, each in written.versions:
            value = _at(self.values, number)
            sent[value] = self._placements((value,) * len(each), each)
        if not 0 <= written.cost:
            return None
        ending = (written.cost, written.least, written.searched)
        return PlacementPlan(choices, carried, sent, self.price, *ending)

    def _placements(
        self, values: tuple[Value, ...], written: list[Written]
    ) -> tuple[Placement, ...]:
        return tuple(self._placement(v, p) for v, p in zip(values, written, strict=True))

    def _placement(self, value: Value, written: Written) -> Placement:
        """The placement of a value. Raises ValueError for one that the tensor cannot have."""
        splits, partial, op, windows = written
        axes = [axis for _, over in splits for axis in over] + partial
        dims = [dim for dim, _ in splits]
        are_known = set(axes) <= set(self.mesh.every) and all(map(value.type.has, dims))
        if not are_known or len(set(axes)) < len(axes) or len(set(dims)) < len(dims):
            raise ValueError(f"no placement of {value.type}")
        if (op is None) != (not partial):
            raise ValueError(f"partial over {partial} by {op}")
        result = placement(self.mesh, {d: tuple(axes) for d, axes in splits}, tuple(partial), op)
        held = tuple(Window(dim, size, Reads(*reads), loop) for dim, size, reads, loop in windows)
        split = {dim: value.type.size(dim) for dim, _ in result.splits}
        if not all(split.get(w.dim) == w.size and w.reads.div > 0 for w in held):
            raise ValueError(f"no windows of {value.type}")
        return replace(result, windows=held)


def _of_package(node: NamedOp) -> list[str | int]:
    """What a search reads of the record of a package's operator, which may change."""
    call, record = call_of(node), ADDED[node.name]
    return [repr(record.factors(call.signature)), flops(record, call.signature)]


def _at(values: Sequence[Item], number: int) -> Item:
    """The value of a number. Raises ValueError where there is none."""
    if not 0 <= number < len(values):
        raise ValueError(f"there is no value {number}")
    return values[number]


def _json(p: Placement) -> list[Any]:
    windows = [[w.dim, w.size, astuple(w.reads), w.loop] for w in p.windows]
    return [p.splits, p.partial, p.op, windows]


def _all(placements: Iterable[Placement]) -> list[Any]:
    return [_json(p) for p in placements]
