"""Buckets: collectives on small tensors that can take place together become one on all of them.

After the gradient buckets of PyTorch's DistributedDataParallel (Li et al. 2020). A reduction waits
for the last of its bucket, at most until the first reader of any of them; parameters are gathered
with the first of theirs that is needed. Large tensors go into buckets only where a loop reduces
them in its iterations, which wait for them an iteration later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial

from meshdsl.device.aliases import shared
from meshdsl.device.ir import Bucket, Compute, DeviceProgram, Move, Node, Var
from meshdsl.device.issue_windows import BlockAccess, IssueWindow
from meshdsl.ir.types import LARGE
from meshdsl.placed.collectives import COLLECTIVES
from meshdsl.placed.placements import Mesh
from meshdsl.records import dataclass

SMALL = LARGE
"""Bytes below which a tensor goes into a bucket.

On two gloo processes four all_reduces in a bucket take a third of the time at 1 KiB, half at 64
KiB, and as long as apart at 1 MiB.
"""

FULL = 25 << 20
"""The most bytes of a bucket, as in DistributedDataParallel: later ones need not wait."""

KINDS = ("all_reduce", "reduce_scatter", "all_gather")

Key = tuple[object, ...]


def in_buckets(program: DeviceProgram) -> DeviceProgram:
    """The program with its small collectives in buckets.

    Without an update only collectives of the backward pass are put together.
    """
    return replace(program, body=_Buckets(program).block(program.body))


@dataclass(slots=True)
class _Open:
    """A bucket that is being filled: positions of its moves, and its window."""

    window: IssueWindow
    late: bool
    moves: list[int] = field(default_factory=list)
    bytes: int = 0

    @property
    def place(self) -> int:
        """The position in the block before which the bucket is placed."""
        return self.window.needed if self.late else self.window.ready + 1


class _Buckets:
    def __init__(self, program: DeviceProgram) -> None:
        self.mesh = program.mesh
        self.trains = bool(program.updates)
        self.owners = shared(program)
        # What the loop around collects.
        self.collected: set[Var] = set()

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        nodes = tuple(n.with_body(partial(self._iteration, n)) for n in nodes)
        buckets = [b for b in self._filled(nodes) if len(b.moves) > 1]
        gone = {i for b in buckets for i in b.moves}
        at: dict[int, list[Node]] = {}
        for opened in buckets:
            moves = tuple(n for i in opened.moves if isinstance(n := nodes[i], Move))
            at.setdefault(opened.place, []).append(bucket(moves, self.mesh))
        return tuple(
            new
            for i in range(len(nodes) + 1)
            for new in (*at.get(i, ()), *(nodes[i : i + 1] if i not in gone else ()))
        )

    def _iteration(self, loop: Node, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of an iteration: what is only collected is waited for in the next one."""
        outside, self.collected = self.collected, {c.inside for c in loop.collected}
        nodes = self.block(nodes)
        self.collected = outside
        return nodes

    def _filled(self, nodes: tuple[Node, ...]) -> Iterator[_Open]:
        """Every bucket of a block, those of one move too."""
        block = BlockAccess(nodes, self.owners)
        opened: dict[Key, _Open] = {}
        for i, window, late in sorted(
            self._candidates(block), key=lambda c: (c[1].needed if c[2] else c[1].ready, c[0])
        ):
            node = nodes[i]
            assert isinstance(node, Move)
            key = _key(node, late)
            size = max(node.source.local.bytes, node.target.local.bytes)
            current = opened.get(key)
            if current is None or not _joins(current, window, size):
                if current is not None:
                    yield current
                current = opened[key] = _Open(window, late)
            current.window = _common(current.window, window)
            current.moves.append(i)
            current.bytes += size
        yield from opened.values()

    def _candidates(self, block: BlockAccess) -> Iterator[tuple[int, IssueWindow, bool]]:
        """Moves that may go into a bucket: their positions, windows, and whether they come late.

        Variables from outside the block are gathered when needed; all others are sent when made.
        """
        for i, node in enumerate(block.nodes):
            if isinstance(node, Move) and self._eligible(node, block):
                gathers = node.step.kind == "all_gather"
                late = gathers and node.source not in block.made
                # Delaying the gather of a result made before the update would only take memory.
                if late or not gathers or node.phase == "update":
                    yield i, self._window(block, i, node), late

    def _window(self, block: BlockAccess, i: int, node: Move) -> IssueWindow:
        """The window of a move; one whose source another move makes stays behind that one."""
        window, maker = block.window(i, node), block.made.get(node.source)
        if maker is not None and isinstance(block.nodes[maker], Move):
            return IssueWindow(i, window.needed)
        return window

    def _eligible(self, node: Move, block: BlockAccess) -> bool:
        small = max(node.source.local.bytes, node.target.local.bytes) < SMALL
        fits = small or self._is_of_iteration(node, block)
        phase = node.phase != "output" and (node.phase != "forward" or self.trains)
        # The blocks of all devices are of one size.
        even = not node.step.is_uneven(node.source.type, self.mesh)
        return node.step.kind in KINDS and fits and phase and even

    def _is_of_iteration(self, node: Move, block: BlockAccess) -> bool:
        """Whether it reduces what an operator makes, and its loop only collects the result."""
        at = block.made.get(node.source)
        computed = at is not None and isinstance(block.nodes[at], Compute)
        return node.step.kind == "all_reduce" and computed and node.target in self.collected


def bucket(moves: tuple[Move, ...], mesh: Mesh) -> Bucket:
    """Several moves of one kind as one, with the bytes of all of them."""
    step, payload = moves[0].step, sum(m.payload for m in moves)
    wire = COLLECTIVES[step.kind].wire(mesh.size(*step.axes), payload)
    return Bucket(moves, payload, wire)


def _key(node: Move, late: bool) -> Key:
    """The properties that moves of one bucket share."""
    step = node.step
    same = (step.kind, step.axes, step.op, node.source.local.dtype, node.source.on)
    return (*same, node.phase) if late else same


def _joins(opened: _Open, window: IssueWindow, size: int) -> bool:
    common = _common(opened.window, window)
    return common.ready < common.needed and opened.bytes + size <= FULL


def _common(one: IssueWindow, other: IssueWindow) -> IssueWindow:
    return IssueWindow(max(one.ready, other.ready), min(one.needed, other.needed))
