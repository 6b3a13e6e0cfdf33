"""What is stored in another memory: the updates that read and write it in chunks, and the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from meshdsl.device.ir import (
    Bucket,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Var,
    Wait,
    walk,
)
from meshdsl.ir.program import every, loops
from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.records import dataclass

CHUNK = 1 << 22
"""The most bytes of each state that are in memory at once: few, and many enough to read at once.

A multiple of what a processor's vectors hold, so that a kernel rounds each element as in one go.
"""


@dataclass(frozen=True, slots=True, eq=False)
class OffloadedUpdate:
    """An update that takes its states from elsewhere, chunk by chunk, and puts them back.

    `states` are the operands that lie there. `cast` is what makes the parameter of its copy in a
    wider dtype, where that copy is among them: it is done chunk by chunk, too, and `written` is the
    parameter where that is stored elsewhere. The gradient may be `turned`: its elements lie in
    memory in another order than those of the states.
    """

    update: Compute
    states: tuple[int, ...]
    cast: Compute | None = None
    turned: bool = False
    written: Var | None = None

    @property
    def is_away(self) -> bool:
        """Whether nothing of the parameter is in memory: it is a state here, or `written`."""
        return self.written is not None or (0 in self.states and self.cast is None)

    def scratch(self, sig: Signature, numbers: Mapping[int, Any]) -> int:
        """Bytes that a chunk takes while it is worked on; `sig` are the types on a device."""
        chunk = _of_a_chunk(sig)
        buffers = sum(chunk.ins[i].bytes for i in self.states)
        if self.written is not None:
            buffers += chunk.ins[0].elements * self.written.local.dtype.bytes
        # A kernel wants it in order; where it is not overwritten, its copies are.
        in_chunks = chunk.ins[0].elements < sig.ins[0].elements or sig.attrs.get("donated")
        copied = chunk.ins[1].bytes if self.turned and in_chunks else 0
        count = lookup(self.update.name).scratch
        return buffers + copied + (count(chunk, numbers) if count else 0)

    @property
    def tier(self) -> str:
        """Where the states are."""
        return self.update.ins[self.states[0]].away

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams that are busy while chunks are moved, in turn."""
        return tuple(f"{way} {self.tier}" for way in ("from", "to"))

    @property
    def moved(self) -> tuple[Var, ...]:
        """What is read and what is written: once each."""
        written = () if self.written is None else (self.written,)
        return (*(self.update.ins[i] for i in self.states), *self.new, *written)

    @property
    def new(self) -> tuple[Var, ...]:
        """The new values of the states, in their order."""
        over = lookup(self.update.name).overwrites
        return tuple(self.update.outs[over.index(i)] for i in self.states)


def streamed(program: DeviceProgram) -> Mapping[Compute, OffloadedUpdate]:
    """The updates that take states from elsewhere."""
    away = program.away.keys()
    if not away:
        return {}
    nodes = [node for node in every(program.body) if isinstance(node, Compute)]
    reading = [node for node in nodes if not away.isdisjoint(node.ins)]
    casts = {node.ins[0]: node for node in nodes if lookup(node.name).converts}
    old_of = {new: old for old, new in program.updates if old.away}
    moved = {m.target: m for node in every(program.body) for m in _moves(node)}
    updates = {}
    for node in reading:
        states = tuple(i for i, v in enumerate(node.ins) if v in away)
        cast = casts.get(node.outs[0]) if 0 in states else None
        is_param = node.ins[0].value.role == "param"
        cast_of = f"the parameter of {node.ins[0].name} is not cast from it"
        assert cast or is_param or 0 not in states, cast_of
        written = None if cast is None else old_of.get(cast.outs[0])
        updates[node] = OffloadedUpdate(node, states, cast, _is_turned(node, moved), written)
    return updates


def _moves(node: Node) -> tuple[Move, ...]:
    if isinstance(node, Wait):
        return node.collective.moves
    return node.moves if isinstance(node, Move | Bucket) else ()


def _is_turned(node: Compute, moved: Mapping[Var, Move]) -> bool:
    """Whether the gradient lies otherwise, as where it is cut by another dim than its first."""
    param, grad = node.ins[:2]
    names, move = grad.local.names, moved.get(grad)
    if move is None or move.step.kind not in ("reduce_scatter", "slice"):
        return names != param.local.names
    return names != param.local.names or move.step.dim != names[0]


def _of_a_chunk(sig: Signature) -> Signature:
    """The types of an update for a chunk of its tensors."""
    dim = Dim("chunk", min(sig.ins[0].elements, CHUNK // sig.ins[0].dtype.bytes))

    def part(type_: TensorType) -> TensorType:
        return replace(type_, dims=(dim,)) if type_.dims else type_

    ins, outs = (tuple(map(part, types)) for types in (sig.ins, sig.outs))
    return Signature(ins, outs, sig.attrs)


def transfers(program: DeviceProgram) -> Iterator[tuple[Move, int]]:
    """What is moved between the memory of the device and another, and how often in a step."""
    for node, times in walk(program.body):
        if isinstance(node, Move) and node.step.tier:
            yield node, times


def tiers(program: DeviceProgram) -> tuple[str, ...]:
    """The memories beside that of the device in which something is stored."""
    used = [*program.away.values(), *(move.step.tier for move, _ in transfers(program))]
    return tuple(dict.fromkeys(used))


def traffic(
    sizes: Callable[[Iterable[Var]], int], program: DeviceProgram, tier: str
) -> dict[str, int]:
    """Bytes that a device has in another memory, and those that it reads and writes in a step.

    `sizes` are the bytes of variables on the device.
    """
    updates = [update for update in streamed(program).values() if update.tier == tier]
    moved = {"load": 0, "store": 0}
    for move, times in transfers(program):
        if move.step.tier == tier:
            moved[move.step.kind] += times * sizes((move.source,))
    activations = sum(
        loop.repeats * sizes((c.inside,))
        for loop in loops(program.body, DeviceLoop)
        for c in {c.inside: c for c in loop.collected}.values()
        if c.inside.away == tier
    )
    read = sum(sizes(u.update.ins[i] for i in u.states) for u in updates)
    written = sum(sizes(u.new) for u in updates)
    written += sum(sizes((u.written,)) for u in updates if u.written is not None)
    return {
        "bytes": sizes(v for v, where in program.away.items() if where == tier) + activations,
        "params": sizes(v for v in program.params if v.away == tier),
        "activations": activations,
        "read": moved["load"] + read,
        "written": moved["store"] + written,
        "chunk": CHUNK if updates else 0,
    }
