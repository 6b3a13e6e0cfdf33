"""States on disk: which updates read and write them, in chunks, and how many bytes that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from meshdsl.device.ir import Compute, Program, Var
from meshdsl.ir.program import every
from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import Signature, lookup

CHUNK = 1 << 22
"""The most bytes of each state that are in memory at once: few, and many enough to read at once.

A multiple of what a processor's vectors hold, so that a kernel rounds each element as in one go.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Streamed:
    """An update that takes its states from disk, chunk by chunk, and puts them back.

    `states` are the operands that lie there. `cast` is what makes the parameter of its copy in a
    wider dtype, where that copy is among them: it is done chunk by chunk, too.
    """

    update: Compute
    states: tuple[int, ...]
    cast: Compute | None = None

    @property
    def new(self) -> tuple[Var, ...]:
        """The new values of the states, in their order."""
        over = lookup(self.update.name).overwrites
        return tuple(self.update.outs[over.index(i)] for i in self.states)


def streamed(program: Program) -> Mapping[Compute, Streamed]:
    """The updates that take states from disk."""
    away = program.on_disk
    if not away:
        return {}
    nodes = [node for node in every(program.body) if isinstance(node, Compute)]
    reading = [node for node in nodes if not away.isdisjoint(node.ins)]
    casts = {node.ins[0]: node for node in nodes if node.name == "cast"}
    found = {}
    for node in reading:
        states = tuple(i for i, v in enumerate(node.ins) if v in away)
        found[node] = Streamed(node, states, casts.get(node.outs[0]) if 0 in states else None)
    return found


def of_a_chunk(sig: Signature) -> Signature:
    """The types of an update for a chunk of its tensors."""
    dim = Dim("chunk", min(sig.ins[0].elements, CHUNK // sig.ins[0].dtype.bytes))

    def part(type_: TensorType) -> TensorType:
        return replace(type_, dims=(dim,)) if type_.dims else type_

    ins, outs = (tuple(map(part, types)) for types in (sig.ins, sig.outs))
    return Signature(ins, outs, sig.attrs)


def traffic(sizes: Callable[[Iterable[Var]], int], program: Program) -> dict[str, int]:
    """Bytes on the disk of a device, and those that it reads and writes in a step.

    `sizes` are the bytes of variables on the device.
    """
    found = streamed(program).values()
    read = sum(sizes(s.update.ins[i] for i in s.states) for s in found)
    written = sum(sizes(s.new) for s in found)
    return {"bytes": sizes(program.on_disk), "read": read, "written": written, "chunk": CHUNK}
