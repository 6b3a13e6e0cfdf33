"""The placed program: the named program with a placement per tensor, and every reshard explicit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any

from meshdsl.diagnostics import Span
from meshdsl.ir import program as ir
from meshdsl.ir.types import DType, TensorType
from meshdsl.named import ir as names
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.layout import SplitCause
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.placements import Mesh, Placement
from meshdsl.placed.reshard import Route
from meshdsl.placed.settings import Setting
from meshdsl.placed.strategies import flops
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """One version of a value: the same numbers in one placement. Compared by identity."""

    value: names.Value
    placement: Placement

    @property
    def type(self) -> TensorType:
        """The type of the whole."""
        return self.value.type

    def local(self, mesh: Mesh) -> TensorType:
        """The type of the local block of one device."""
        return self.placement.local(self.value.type, mesh)


Words = Callable[[], tuple[str, ...]]
"""The clauses that say why something is sent: the cause, who needs it, and what else there is.

They are found when they are first read: that needs the next best route, and most placed programs
are never shown.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Reshard(ir.Leaf):
    """`source` into `target` along `route`.

    `span` is the place that requires it. `phase` is that of the cause: `forward`, `backward`,
    `update`. With a `dtype` the route is taken in that one, and its bytes are of that: the tensor
    is cast to it before, and back behind.
    """

    source: PlacedTensor
    target: PlacedTensor
    route: Route
    span: Span
    words: Words
    phase: str = "forward"
    dtype: DType | None = None

    @property
    def sent_type(self) -> TensorType:
        """The type of the whole in which it is sent."""
        type_ = self.source.type
        return type_ if self.dtype is None else replace(type_, dtype=self.dtype)

    @property
    def reads(self) -> tuple[PlacedTensor, ...]:
        """The version that is read."""
        return (self.source,)

    @property
    def makes(self) -> tuple[PlacedTensor, ...]:
        """The version that is made."""
        return (self.target,)

    def with_values(self, of: Callable[[PlacedTensor], PlacedTensor], **fields: Any) -> Reshard:
        """The reshard of the version that `of` gives for its source, into that for its target."""
        return replace(self, source=of(self.source), target=of(self.target), **fields)


@dataclass(frozen=True, slots=True, eq=False)
class Apply(ir.Op[PlacedTensor]):
    """An operator on placed tensors; each device applies it to its local blocks."""

    @classmethod
    def of(
        cls, op: names.NamedOp, ins: tuple[PlacedTensor, ...], outs: tuple[PlacedTensor, ...]
    ) -> Apply:
        """An operator of the named program on placed tensors."""
        tags = op.phase, op.block, op.origin, op.kind
        return cls(op.name, ins, outs, op.attrs, op.span, *tags)

    @property
    def named(self) -> names.NamedOp:
        """The operator of the named program."""
        ins, outs = (tuple(t.value for t in ts) for ts in (self.ins, self.outs))
        tags = self.phase, self.block, self.origin, self.kind
        return names.NamedOp(self.name, ins, outs, self.attrs, self.span, *tags)

    def local(self, mesh: Mesh) -> Signature:
        """The types of the local blocks of one device, and the attributes."""
        ins, outs = (tuple(t.local(mesh) for t in ts) for ts in (self.ins, self.outs))
        return Signature(ins, outs, dict(self.attrs))

    def flops(self, mesh: Mesh) -> int:
        """Floating-point operations of one device."""
        return flops(lookup(self.name), self.local(mesh))


@dataclass(frozen=True, slots=True, eq=False)
class PlacedLoop(ir.Loop[PlacedTensor, "Node"]):
    """A `repeat` on placed tensors; the four versions of a carry have one placement."""


Node = Apply | Reshard | PlacedLoop


@dataclass(frozen=True, slots=True, eq=False)
class Parameter:
    """A parameter as it is stored."""

    param: names.Param
    tensor: PlacedTensor


@dataclass(frozen=True, slots=True)
class PlanProvenance:
    """Provenance of the plan under `optimal`.

    `message_bytes` is the price of a collective beside its bytes; `least`: nothing else in the
    space that was `searched` costs less. Where it is `timed`, time was counted instead of bytes.
    """

    message_bytes: int
    searched: str
    least: bool = False
    timed: bool = False

    @property
    def proven(self) -> bool:
        """Whether no other plan of the same layout costs less."""
        return self.least and self.searched == EVERY

    @property
    def claim(self) -> str:
        """What is proven, of what: the rules of the layout are given, and hold in every plan."""
        less = "takes less time" if self.timed else "sends less"
        maybe = "take less time" if self.timed else "send less"
        if self.proven:
            return f"No plan of this layout {less}"
        if self.least:
            return f"No plan of this layout {less}, of those searched"
        return f"Unproven: some plan of this layout may {maybe}"


EVERY = "splits along every dim"
"""The description of the widest space searched."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedProgram:
    """A whole placed program.

    `tensors` are all values in the version they settle in, in order of definition; `causes` has,
    per value, the rule behind each split dim. `states` are an optimizer's as stored; `updates`
    pairs of a stored value and its new value, placed alike. `plan` is set under `optimal`, `pipe`
    where a loop is on the stages of a pipeline; `bounded` where, on many axes, not every
    combination and route was looked at for some operator. `gathered_again` are the settings by
    which the backward pass gathers again what the forward pass had (`gather_again.py`). `kept` has
    the memories that loops store activations in for the backward pass (`offload.py`).
    """

    named: names.NamedProgram
    mesh: Mesh
    layout: str
    policy: str
    inputs: tuple[PlacedTensor, ...]
    params: tuple[Parameter, ...]
    body: tuple[Node, ...]
    outputs: tuple[tuple[str, PlacedTensor], ...]
    tensors: tuple[PlacedTensor, ...]
    causes: dict[names.Value, dict[str, SplitCause]]
    states: tuple[PlacedTensor, ...] = ()
    updates: tuple[tuple[PlacedTensor, PlacedTensor], ...] = ()
    plan: PlanProvenance | None = None
    pipe: Piped | None = None
    bounded: bool = False
    gathered_again: tuple[Setting, ...] = ()
    kept: Mapping[names.Value, str] = field(default_factory=dict)

    def blocks(self, type_: TensorType, p: Placement) -> dict[str, list[list[int]]]:
        """What lies where of the dim of a pipeline's loop, if a tensor has it (`Spec.blocks`).

        And of a batch whose parts are batches apart: each device has its share of every one.
        """
        pipe = self.pipe
        if pipe is None:
            return {}
        by_dim = {}
        if type_.has(pipe.dim):
            by_dim[pipe.dim] = pipe.blocks(type_.size(pipe.dim), p.axes_of(pipe.dim), self.mesh)
        if pipe.use is not None and pipe.use.apart is not None:
            dim, count, _ = pipe.use.apart
            ways = self.mesh.size(*p.axes_of(dim))
            if ways > 1 and count * self._batch(dim) == type_.size(dim):
                by_dim[dim] = [_shares(type_.size(dim), count, ways)]
        return {dim: blocks for dim, blocks in by_dim.items() if blocks}

    def _batch(self, dim: str) -> int:
        """The size of a dim of the inputs."""
        return next(v.type.size(dim) for v in self.named.inputs if v.type.has(dim))

    @property
    def away(self) -> Mapping[PlacedTensor, str]:
        """The parameters and states that lie elsewhere between steps, and where."""
        params = {p.tensor: p.param.away for p in self.params if p.param.away}
        away = {s.value: s.away for s in self.named.states if s.away}
        return params | {t: away[t.value] for t in self.states if t.value in away}

    @property
    def rewritten(self) -> names.NamedProgram:
        """The named program with the operators rewritten by placement: expanded, in pairs."""
        return replace(self.named, body=_named_nodes(self.body))


def _shares(size: int, count: int, ways: int) -> list[int]:
    """The indices of a dim of `count` equal batches, device by device: a share of each batch."""
    batch, share = size // count, size // count // ways
    starts = (m * batch + d * share for d in range(ways) for m in range(count))
    return [i for start in starts for i in range(start, start + share)]


def _named_nodes(nodes: tuple[Node, ...]) -> tuple[names.Node, ...]:
    named_nodes: list[names.Node] = []
    for node in nodes:
        if isinstance(node, PlacedLoop):
            named_nodes.append(_named_loop(node))
        elif isinstance(node, Apply):
            named_nodes.append(node.named)
    return tuple(named_nodes)


def _named_loop(node: PlacedLoop) -> names.NamedLoop:
    carries = (
        ir.Carry(c.init.value, c.inside.value, c.next.value, c.result.value) for c in node.carries
    )
    stacked = (ir.Stacked(s.outer.value, s.inside.value) for s in node.stacked)
    collected = (ir.Collected(c.inside.value, c.outer.value) for c in node.collected)
    tags = node.phase, node.block, node.origin
    about = (node.span, tuple(collected), node.reverse, *tags)
    body = _named_nodes(node.body)
    return names.NamedLoop(node.dim, tuple(carries), tuple(stacked), body, *about)


def reduced_in(program: PlacedProgram) -> frozenset[str]:
    """The dtypes that tensors are reduced in which have another one."""
    moves = (node for node, _ in walk(program.body) if isinstance(node, Reshard))
    return frozenset(node.dtype.name for node in moves if node.dtype is not None)


def walk(nodes: tuple[Node, ...]) -> Iterator[tuple[Apply | Reshard, int]]:
    """Every operator and reshard in order, with how often it runs."""
    for node, trips in ir.counted(nodes):
        if isinstance(node, Apply | Reshard):
            yield node, trips


def bytes_of(nodes: Iterable[Node]) -> int:
    """The bytes that nodes send, in all iterations."""
    return sum(n.route.wire_bytes * k for n, k in walk(tuple(nodes)) if isinstance(n, Reshard))
