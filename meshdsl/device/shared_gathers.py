"""Gathers of what a device has already: the copy that is alive serves in place of a second one.

A parameter is gathered once for the forward pass and once for the backward pass, so that no copy of
it is kept between them, and so are activations under `gather = again`. Where the first copy is
still alive when the second gather is issued, as around the loss, nothing would be saved by that.
The first copy then lives for as long as the second one would: no device holds more at any time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from meshdsl.device.aliases import shared
from meshdsl.device.buckets import bucket
from meshdsl.device.ir import (
    Ahead,
    Bucket,
    Collective,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Start,
    Var,
    Wait,
)
from meshdsl.device.liveness import LARGE, overwrites
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import Rebuild, reads_of
from meshdsl.placed.placements import Placement


def with_shared_gathers(program: DeviceProgram) -> DeviceProgram:
    """The program without gathers into a second copy of a variable while the first is alive."""
    sharing = _Sharing(program)
    body = sharing.block(program.body)
    new = sharing.copies
    if not new:
        return program
    return replace(
        program,
        body=_Reading(new).nodes(body),
        outputs=tuple((name, new.get(v, v)) for name, v in program.outputs),
        updates=tuple((old, new.get(v, v)) for old, v in program.updates),
    )


@dataclass(slots=True)
class _Copy:
    """A gathered variable, and the last node of its block that needs it alive.

    A small one is deleted with its block, whether it is read or not (`liveness.LARGE`).
    """

    var: Var
    last: float


Key = tuple[Var, Placement]
"""A variable, and the placement that it is gathered into."""


class _Sharing:
    """`copies` are the variables that are not made any more, with those that serve for them."""

    def __init__(self, program: DeviceProgram) -> None:
        self.mesh = program.mesh
        self.owners = shared(program)
        self.copies: dict[Var, Var] = {}
        # What is written over later on is a copy of nothing else.
        self.changed = {
            self._owner(node.ins[i])
            for node in every(program.body)
            if isinstance(node, Compute)
            for i in overwrites(node)
        }

    def _owner(self, var: Var) -> Var:
        return self.owners.get(var, var)

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """A block, its gathers shared; those of loops in it among themselves."""
        nodes = tuple(node.with_body(self.block) for node in nodes)
        if sum(isinstance(n, Move | Bucket | Start) and _gathers(n) for n in nodes) < 2:
            return nodes
        last = {v: i for i, node in enumerate(nodes) for v in reads_of(node)}
        made: dict[Key, _Copy] = {}
        instead: dict[Collective, Collective | None] = {}
        kept: list[Node] = []
        for i, node in enumerate(nodes):
            new = self._node(node, i, made, last, instead)
            kept += [] if new is None else [new]
            self._note(node if new is None else new, i, made, last)
        return tuple(kept)

    def _node(
        self,
        node: Node,
        at: int,
        made: dict[Key, _Copy],
        last: dict[Var, int],
        instead: dict[Collective, Collective | None],
    ) -> Node | None:
        """A node without the gathers of what is alive; None where it has no others."""
        match node:
            case Start(collective=old, ahead=False) if _gathers(node):
                instead[old] = self._remaining(old, at, made, last)
            case Wait(collective=old) if old in instead:
                pass
            case Move() | Bucket() if _gathers(node):
                return self._remaining(node, at, made, last)
            case _:
                return node
        left = instead[old]
        return left and replace(node, collective=left)

    def _remaining(
        self, node: Collective, at: int, made: dict[Key, _Copy], last: dict[Var, int]
    ) -> Collective | None:
        """The moves of a collective whose results are not there; None where all are."""
        remaining = []
        for move in node.moves:
            copy = made.get(self._key(move))
            if copy is None or copy.last <= at or not self._is_fixed(move.target):
                remaining.append(move)
                continue
            self.copies[move.target] = copy.var
            copy.last = max(copy.last, last.get(move.target, at))
        if len(remaining) == len(node.moves):
            return node
        if len(remaining) < 2:
            return remaining[0] if remaining else None
        return bucket(tuple(remaining), self.mesh)

    def _note(self, node: Node, at: int, made: dict[Key, _Copy], last: dict[Var, int]) -> None:
        """Note what a node has gathered, and forget what is made of something that it changes."""
        if isinstance(node, Wait | Move | Bucket) and _gathers(node):
            moves = _moves(node)
            is_small = sum(m.target.local.bytes for m in moves) < LARGE
            for move in (m for m in moves if self._is_fixed(m.target)):
                end = float("inf") if is_small else last.get(move.target, at)
                made[self._key(move)] = _Copy(move.target, end)
        changed = set(self._changed_by(node))
        for key in [k for k in made if self._owner(k[0]) in changed]:
            del made[key]

    def _changed_by(self, node: Node) -> Iterator[Var]:
        for inner in every((node,)):
            if isinstance(inner, Compute):
                yield from (self._owner(inner.ins[i]) for i in overwrites(inner))

    def _is_fixed(self, var: Var) -> bool:
        return self._owner(var) not in self.changed

    def _key(self, move: Move) -> Key:
        return self.copies.get(move.source, move.source), move.target.placement


class _Reading(Rebuild):
    """Nodes that read other variables; the start and the wait of a collective still name one."""

    def __init__(self, new: Mapping[Var, Var]) -> None:
        super().__init__()
        self.new.update(new)
        self.collectives: dict[Collective, Collective] = {}

    def visit(self, node: Node) -> tuple[Node, ...]:
        """The node, itself where it reads none of them."""
        if self.new.keys().isdisjoint(reads_of(node)):
            return (node,)
        if isinstance(node, Start | Wait):
            return (replace(node, collective=self._collective(node.collective)),)
        if not isinstance(node, DeviceLoop):
            return (node.with_values(self.value),)
        ahead = tuple(
            Ahead(self._collective(a.collective), a.work, tuple(s.on(self.value) for s in a.slices))
            for a in node.ahead
        )
        inside = tuple(new for inner in node.body for new in self.visit(inner))
        return (replace(node.with_values(self.value, body=inside), ahead=ahead),)

    def _collective(self, node: Collective) -> Collective:
        if self.new.keys().isdisjoint(node.reads):
            return node
        return self.collectives.setdefault(node, node.with_values(self.value))


def _moves(node: Node) -> tuple[Move, ...]:
    """The moves that a node does, issues or waits for."""
    if isinstance(node, Start | Wait):
        return node.collective.moves
    return node.moves if isinstance(node, Move | Bucket) else ()


def _gathers(node: Node) -> bool:
    moves = _moves(node)
    return bool(moves) and moves[0].step.kind == "all_gather"
