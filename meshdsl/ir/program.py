"""The program, whatever its stage: operators and loops over values.

`V` is the value of a stage: a tensor of the named program, one with a placement, a variable of
one device. `N` are the nodes of a stage: its operators, whatever else it has, and its loops. Nodes
and values are compared by identity; programs are in SSA form: each value is made once, before it
is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from meshdsl.diagnostics import Span
from meshdsl.ir.types import Dim

V = TypeVar("V")
N = TypeVar("N", bound="Node")


class Node(Protocol):
    """One statement of a program: its operands, its results and its source.

    `phase` is `forward`, `backward` or `update`.
    """

    @property
    def reads(self) -> tuple[Any, ...]:
        """The operands; of a loop, its initial values and stacks, without the reads of its body."""

    @property
    def makes(self) -> tuple[Any, ...]:
        """The values that it defines."""

    @property
    def span(self) -> Span:
        """The source of the node."""

    @property
    def phase(self) -> str:
        """The part of a training step to which it belongs."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The operator of the program for which the backward pass has one.

    of:      its result, a value of the named program at every stage, or a value whose gradient is
             added up. A pass that removes it names another instead (`named/origins.py`).
    is_copy: the operator rematerialises it, rather than being part of its gradient.
    """

    of: Any
    is_copy: bool = False

    def on(self, new: Callable[[Any], Any]) -> Origin:
        """The same origin, where `new` gives the values that stand for others."""
        return replace(self, of=new(self.of))


@dataclass(frozen=True, slots=True, eq=False)
class Op(Generic[V]):
    """One operator of the registry applied to values; `attrs` are known at compile time.

    `block` numbers the `recompute` that it is in, which the backward pass rematerialises. `origin`
    is None of what the program states; every operator of the backward pass has one.
    """

    name: str
    ins: tuple[V, ...]
    outs: tuple[V, ...]
    attrs: tuple[tuple[str, Any], ...]
    span: Span
    phase: str = "forward"
    block: int | None = None
    origin: Origin | None = None

    @property
    def out(self) -> V:
        """The result of an operator that has only one."""
        assert len(self.outs) == 1, f"{self.name} has {len(self.outs)} outputs"
        return self.outs[0]

    def attr(self, name: str) -> Any:
        """The attribute `name`; it must be there."""
        return dict(self.attrs)[name]

    @property
    def reads(self) -> tuple[V, ...]:
        """The operands."""
        return self.ins

    @property
    def makes(self) -> tuple[V, ...]:
        """The results."""
        return self.outs


@dataclass(frozen=True, slots=True, eq=False)
class Carry(Generic[V]):
    """A name assigned inside a loop that existed before: four values of one type.

    `init` enters the first iteration as `inside`; `next` enters the next one; `result` is the last.
    """

    init: V
    inside: V
    next: V
    result: V


@dataclass(frozen=True, slots=True, eq=False)
class Stacked(Generic[V]):
    """A tensor from outside that has the loop's dim, and its slice at the current index inside."""

    outer: V
    inside: V


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Generic[V]):
    """A tensor made in every iteration, and all of them in one that has the loop's dim first."""

    inside: V
    outer: V


@dataclass(frozen=True, slots=True, eq=False)
class Loop(Generic[V, N]):
    """`repeat dim { body }`; values from outside without the dim are read inside as they are.

    A loop of the backward pass is `reverse`: its index runs from the last to the first.
    """

    dim: Dim
    carries: tuple[Carry[V], ...]
    stacked: tuple[Stacked[V], ...]
    body: tuple[N, ...]
    span: Span
    collected: tuple[Collected[V], ...] = ()
    reverse: bool = False
    phase: str = "forward"
    block: int | None = None
    origin: Origin | None = None

    @property
    def reads(self) -> tuple[V, ...]:
        """Stacks, and the initial values of carries; the body reads more."""
        return (*(c.init for c in self.carries), *(s.outer for s in self.stacked))

    @property
    def enters(self) -> tuple[V, ...]:
        """The values that exist at the beginning of an iteration."""
        return (*(c.inside for c in self.carries), *(s.inside for s in self.stacked))

    @property
    def ends(self) -> tuple[V, ...]:
        """The values at the end of an iteration: for the next one, and to be collected."""
        return (*(c.next for c in self.carries), *(c.inside for c in self.collected))

    @property
    def makes(self) -> tuple[V, ...]:
        """The results of the carries after the last iteration, and the collected values."""
        return (*(c.result for c in self.carries), *(c.outer for c in self.collected))


def every(nodes: Iterable[N]) -> Iterator[N]:
    """Every node in program order, a loop before its body."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from every(node.body)


def counted(nodes: Iterable[N], trips: int = 1) -> Iterator[tuple[N, int]]:
    """Every node in program order, a loop before its body, with the number of times it runs."""
    for node in nodes:
        yield node, trips
        if isinstance(node, Loop):
            yield from counted(node.body, trips * node.dim.size)


def uses(nodes: Iterable[Any]) -> Counter[Any]:
    """The number of times that each value is read by nodes, carried on or collected."""
    counts: Counter[Any] = Counter()
    for node in every(nodes):
        counts.update(node.reads)
        if isinstance(node, Loop):
            counts.update(node.ends)
    return counts


def substitute(nodes: Iterable[N], new: Mapping[Any, Any]) -> tuple[N, ...]:
    """`nodes` with every mention of a value in `new` replaced, in definitions and origins too."""
    return tuple([_with(node, new) for node in nodes] if new else nodes)


def with_origins(nodes: Iterable[N], new: Mapping[Any, Any]) -> tuple[N, ...]:
    """`nodes` with the values that origins name replaced, and nothing else."""
    return tuple([_with_origin(node, new) for node in nodes] if new else nodes)


def _with_origin(node: Any, new: Mapping[Any, Any]) -> Any:
    if node.origin is not None and node.origin.of in new:
        node = replace(node, origin=node.origin.on(new.__getitem__))
    if isinstance(node, Loop):
        body = with_origins(node.body, new)
        node = node if body == node.body else replace(node, body=body)
    return node


def _with(node: Any, new: Mapping[Any, Any]) -> Any:
    def of(value: Any) -> Any:
        return new.get(value, value)

    if node.origin is not None and node.origin.of in new:
        node = replace(node, origin=node.origin.on(of))
    if isinstance(node, Loop):
        return replace(
            node,
            carries=tuple(
                Carry(of(c.init), of(c.inside), of(c.next), of(c.result)) for c in node.carries
            ),
            stacked=tuple(Stacked(of(s.outer), of(s.inside)) for s in node.stacked),
            collected=tuple(Collected(of(c.inside), of(c.outer)) for c in node.collected),
            body=substitute(node.body, new),
        )
    if new.keys().isdisjoint((*node.ins, *node.outs)):
        return node
    return replace(node, ins=tuple(map(of, node.ins)), outs=tuple(map(of, node.outs)))
