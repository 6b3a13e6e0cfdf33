"""The program, whatever its stage: operators and loops over values.

`V` is the value of a stage: a tensor of the named program, one with a placement, a variable of
one device. `N` are the nodes of a stage: its operators, whatever else it has, and its loops. Nodes
and values are compared by identity; programs are in SSA form: each value is made once, before it
is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from meshdsl.diagnostics import Span
from meshdsl.ir.types import Dim
from meshdsl.records import dataclass

V = TypeVar("V")
W = TypeVar("W")
N = TypeVar("N", bound="Node")
L = TypeVar("L", bound="Loop[Any, Any]")


class Node(Protocol):
    """One statement of a program: its operands, its results, its source, and the parts of a loop.

    Of nodes without a body (`Leaf`) these parts are empty, so that few walks need the type of a
    node. An empty `body` does not make a node a leaf: loops may have one.
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

    @property
    def body(self) -> tuple[Any, ...]:
        """The nodes of an iteration."""

    @property
    def enters(self) -> tuple[Any, ...]:
        """The values that exist at the beginning of an iteration."""

    @property
    def ends(self) -> tuple[Any, ...]:
        """The values at the end of an iteration: for the next one, and to be collected."""

    @property
    def carries(self) -> tuple[Any, ...]:
        """What goes from iteration to iteration, as `Carry`."""

    @property
    def stacked(self) -> tuple[Any, ...]:
        """What an iteration has a slice of, as `Stacked`."""

    @property
    def collected(self) -> tuple[Any, ...]:
        """What is collected of every iteration, as `Collected`."""

    @property
    def repeats(self) -> int:
        """The number of iterations; 1 of a node without a body."""

    def with_values(self, of: Callable[[Any], Any], **fields: Any) -> Self:
        """The node on the values that `of` gives for its own, and with other `fields`.

        The body of a loop, and the values that origins name, stay.
        """


class Leaf:
    """A node without a body: an operator, a reshard, a statement of a device."""

    __slots__ = ()
    body: ClassVar[tuple[()]] = ()
    enters: ClassVar[tuple[()]] = ()
    ends: ClassVar[tuple[()]] = ()
    carries: ClassVar[tuple[()]] = ()
    stacked: ClassVar[tuple[()]] = ()
    collected: ClassVar[tuple[()]] = ()
    repeats: ClassVar[int] = 1


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


class OpKind(StrEnum):
    """The role of an operator for which placement has rules of its own.

    LOAD:         a parameter is taken from storage, for uses that have it otherwise.
    STAGE_OUTPUT: a value leaves the stages of a pipeline, each of which has a part of it.
    WORKER_PARTS: the parts that several workers have of a sum become blocks of a dim.
    """

    LOAD = "load"
    STAGE_OUTPUT = "stage_output"
    WORKER_PARTS = "worker_parts"

    @property
    def operator(self) -> str:
        """The operator of the registry that computes one of this kind."""
        return "parts" if self is OpKind.WORKER_PARTS else "identity"


@dataclass(frozen=True, slots=True, eq=False)
class Op(Leaf, Generic[V]):
    """One operator of the registry applied to values; `attrs` are known at compile time.

    `block` numbers the `recompute` that it is in, which the backward pass rematerialises. `origin`
    is None of what the program states; every operator of the backward pass has one. `kind` is None
    where placement has no rules of its own.
    """

    name: str
    ins: tuple[V, ...]
    outs: tuple[V, ...]
    attrs: tuple[tuple[str, Any], ...]
    span: Span
    phase: str = "forward"
    block: int | None = None
    origin: Origin | None = None
    kind: OpKind | None = None

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

    def with_values(self, of: Callable[[V], V], **fields: Any) -> Self:
        """The operator on the values that `of` gives for its own, and with other `fields`."""
        return replace(self, ins=tuple(map(of, self.ins)), outs=tuple(map(of, self.outs)), **fields)


@dataclass(frozen=True, slots=True, eq=False)
class Carry(Generic[V]):
    """A name assigned inside a loop that existed before: four values of one type.

    `init` enters the first iteration as `inside`; `next` enters the next one; `result` is the last.
    """

    init: V
    inside: V
    next: V
    result: V

    def on(self, of: Callable[[V], W]) -> Carry[W]:
        """The carry of the values that `of` gives for its own, of whatever stage they are."""
        return Carry(of(self.init), of(self.inside), of(self.next), of(self.result))


@dataclass(frozen=True, slots=True, eq=False)
class Stacked(Generic[V]):
    """A tensor from outside that has the loop's dim, and its slice at the current index inside."""

    outer: V
    inside: V

    def on(self, of: Callable[[V], W]) -> Stacked[W]:
        """The slice among the values that `of` gives for its own."""
        return Stacked(of(self.outer), of(self.inside))


@dataclass(frozen=True, slots=True, eq=False)
class Collected(Generic[V]):
    """A tensor made in every iteration, and all of them in one that has the loop's dim first."""

    inside: V
    outer: V

    def on(self, of: Callable[[V], W]) -> Collected[W]:
        """The collection among the values that `of` gives for its own."""
        return Collected(of(self.inside), of(self.outer))


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

    @property
    def repeats(self) -> int:
        """The number of iterations."""
        return self.dim.size

    def with_values(self, of: Callable[[V], V], **fields: Any) -> Self:
        """The loop on the values that `of` gives, and with other `fields`; its body stays."""
        return replace(
            self,
            carries=tuple([c.on(of) for c in self.carries]),
            stacked=tuple([s.on(of) for s in self.stacked]),
            collected=tuple([c.on(of) for c in self.collected]),
            **fields,
        )


def kind_of(node: Any) -> OpKind | None:
    """The kind of a node; None of what is no operator."""
    return node.kind if isinstance(node, Op) else None


def every(nodes: Iterable[N]) -> Iterator[N]:
    """Every node in program order, a loop before its body."""
    for node in nodes:
        yield node
        if node.body:
            yield from every(node.body)


def loops(nodes: Iterable[Any], kind: type[L]) -> Iterator[L]:
    """Every loop in program order, those inside loops too; `kind` is the loop of the stage."""
    return (node for node in every(nodes) if isinstance(node, kind))


def block_loops(nodes: Iterable[Any], kind: type[L]) -> Iterator[L]:
    """The loops of a block, without those inside them; `kind` is the loop of the stage."""
    return (node for node in nodes if isinstance(node, kind))


def counted(nodes: Iterable[N], times: int = 1) -> Iterator[tuple[N, int]]:
    """Every node in program order, a loop before its body, with the number of times it runs."""
    for node in nodes:
        yield node, times
        if node.body:
            yield from counted(node.body, times * node.repeats)


def uses(nodes: Iterable[Any]) -> Counter[Any]:
    """The number of times that each value is read by nodes, carried on or collected."""
    return Counter([v for node in every(nodes) for v in (*node.reads, *node.ends)])
