"""The device program: what every device of the mesh does, on local tensors, in order.

All devices run the same text. A variable is what one device holds of one version of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.diagnostics import Span
from meshdsl.named.ir import Dim, Op, TensorType, Value
from meshdsl.placed import ir as placed
from meshdsl.placed.collectives import Step
from meshdsl.placed.sbp import Mesh, Placement


@dataclass(frozen=True, slots=True, eq=False)
class Var:
    """One local tensor. `name` is a safe Python identifier; compared by identity."""

    name: str
    value: Value
    placement: Placement
    local: TensorType


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """An operator on local tensors.

    `onto` is the operand that the result is written over and has the name of, if there is one.
    """

    op: Op
    ins: tuple[Var, ...]
    outs: tuple[Var, ...]
    flops: int
    onto: int | None = None

    @property
    def span(self) -> Span:
        """The source of the statement."""
        return self.op.span


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """One step of a reshard: a collective, or a slice or zero-fill that stays on the device.

    `payload` is the size of the local input in bytes, `wire` the most that a device sends,
    `cluster` what all send together.
    """

    step: Step
    source: Var
    target: Var
    payload: int
    wire: int
    cluster: int
    span: Span
    why: str
    remedy: str
    phase: str

    @property
    def moves(self) -> tuple[Move, ...]:
        """The moves that it does: itself, as a bucket has several."""
        return (self,)


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Moves of one kind, over the same axes, done by one collective on a flat buffer.

    `payload`, `wire` and `cluster` are those of the buffer.
    """

    moves: tuple[Move, ...]
    payload: int
    wire: int
    cluster: int

    @property
    def step(self) -> Step:
        """What any of the moves does, but for dims and placements."""
        return self.moves[0].step

    @property
    def span(self) -> Span:
        """The source of the first move."""
        return self.moves[0].span

    @property
    def phase(self) -> str:
        """That of the last move: what a bucket waits for."""
        return self.moves[-1].phase


Collective = Move | Bucket


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Issues a collective; `work` is the variable that stands for it while it is under way.

    One issued `ahead` is that of the loop's next trip, and nothing in the last one.
    """

    collective: Collective
    work: str
    ahead: bool = False

    @property
    def span(self) -> Span:
        """The source of the collective."""
        return self.collective.span

    @property
    def phase(self) -> str:
        """That of the collective."""
        return self.collective.phase


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Waits for a collective that was issued before; its targets are there from here on."""

    collective: Collective
    work: str

    @property
    def span(self) -> Span:
        """The source of the collective."""
        return self.collective.span

    @property
    def phase(self) -> str:
        """That of the collective."""
        return self.collective.phase


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """A collective on slices of stacks that is issued one trip ahead, the first before the loop.

    `slices` are pairs of (stack, slice), one per move. In the body stands a `Wait`, and behind it
    the `Start` for the next trip.
    """

    collective: Collective
    work: str
    slices: tuple[tuple[Var, Var], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """A carried variable: `inside` and `result` share a name.

    So does `init` where nobody else reads it, and `next` where it is written over `inside`.
    """

    init: Var
    inside: Var
    next: Var
    result: Var


@dataclass(frozen=True, slots=True, eq=False)
class Collected:
    """All iterations' `inside`. One that only loops read is a list, which nobody has to copy.

    Where each is written over its slice of a stack that is there before, that is `stack`: then
    `outer` has its memory and its name, and nothing is left to be collected.
    """

    inside: Var
    outer: Var
    is_list: bool
    stack: Var | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """`repeat dim`; `index` is the loop variable, `stacked` pairs of (stack, slice)."""

    dim: Dim
    index: str
    carries: tuple[Carry, ...]
    stacked: tuple[tuple[Var, Var], ...]
    body: tuple[Node, ...]
    span: Span
    collected: tuple[Collected, ...] = ()
    reverse: bool = False
    phase: str = "forward"
    ahead: tuple[Ahead, ...] = ()


Node = Compute | Move | Bucket | Start | Wait | Loop


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The program of each device. `outputs` are in the order of `return`.

    `updates` are pairs of a parameter or state and what it becomes. `lists` are the variables that
    hold a list of slices.
    """

    placed: placed.Program
    mesh: Mesh
    inputs: tuple[Var, ...]
    params: tuple[Var, ...]
    body: tuple[Node, ...]
    outputs: tuple[tuple[str, Var], ...]
    coordinates: dict[str, str]
    states: tuple[Var, ...] = ()
    updates: tuple[tuple[Var, Var], ...] = ()
    lists: frozenset[Var] = frozenset()


def walk(nodes: tuple[Node, ...], trips: int = 1) -> Iterator[tuple[Compute | Collective, int]]:
    """Every operator and collective in order, with how often it runs.

    A collective that is issued ahead counts where it is waited for.
    """
    for node in nodes:
        match node:
            case Loop():
                yield from walk(node.body, trips * node.dim.size)
            case Wait():
                yield node.collective, trips
            case Compute() | Move() | Bucket():
                yield node, trips


def every(nodes: tuple[Node, ...]) -> Iterator[Node]:
    """Every node in order, loops before what is in them."""
    for node in nodes:
        yield node
        if isinstance(node, Loop):
            yield from every(node.body)
