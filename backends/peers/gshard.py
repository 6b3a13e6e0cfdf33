"""The placed program with GShard's annotations: `replicate`, `split`, `mesh_split`, `tile`.

Those of `xla_sharding`, which GShard's paper introduced (Lepikhin et al. 2020; GSPMD, Xu et al.
2021). The sharding as HLO writes it follows each. A partial value has no annotation: it is reduced
at its definition, and the line has a note of it.
"""

from __future__ import annotations

import itertools

from meshdsl.backends.peers.notation import Notation, call_text, picked, results, sent
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, Move, Var
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import load_all
from meshdsl.placed.placements import Mesh, Placement

NAMES = tuple("replicate split mesh_split tile partial_tile mesh arange array empty".split())


class _GShard(Notation):
    taken = frozenset({*NAMES, *load_all()})
    system = "GShard's annotations (xla_sharding)"
    uneven = "GShard pads all to one size"

    def top(self) -> None:
        self.out.comment("a partial value has no annotation: it is reduced where it appears")
        sizes = ", ".join(str(n) for _, n in self.mesh.axes)
        self.out.add()
        self.out.add(f"mesh = arange({self.mesh.devices}).reshape({sizes or 1})")
        self.out.add()

    def entry(self, var: Var, kind: str) -> None:
        self._line(var, var.name, f"{kind.removesuffix('s')} {var.type}")

    def compute(self, node: Compute) -> None:
        text = call_text(node, [self.ref(v) for v in node.ins])
        before = {a for v in node.ins for a in v.placement.partial}
        for var, one in results(node, text):
            p = var.placement
            new = [a for a in p.partial if a not in before]
            note = f"ours: partial {p.op} over {', '.join(p.partial)}" if p.partial else ""
            if new:
                note = f"reduced here: {p.op} over {', '.join(new)}; {note}"
            self._line(var, one, note)

    def move(self, node: Move) -> None:
        before, after = (_whole(v.placement) for v in (node.source, node.target))
        if before == after:
            self.out.add(f"{node.target.name} = {self.ref(node.source)}  # ours: {sent(node)}")
        else:
            self._line(node.target, self.ref(node.source), sent(node))

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        self._line(inside, picked(stack.name, stack, inside, node.index), "")

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        self._line(made.outer, "empty()", str(made.outer.type))

    def _line(self, var: Var, text: str, note: str) -> None:
        p = _whole(var.placement)
        tail = f"; {note}" if note else ""
        said = annotated(text, var.type, p, self.mesh)
        self.out.add(f"{var.name} = {said}  # {hlo(var.type, p, self.mesh)}{tail}")


def _whole(p: Placement) -> Placement:
    """The placement with its partial axes reduced, as far as an annotation can express it."""
    return Placement(p.splits)


def annotated(text: str, type_: TensorType, p: Placement, mesh: Mesh) -> str:
    """`mesh_split(h, mesh, [0, -1])`: the plainest annotation of the placement."""
    if not p.splits:
        return f"replicate({text})"
    names = type_.names
    if len(p.splits) == 1 and p.splits[0][1] == tuple(a for a, n in mesh.axes if n > 1):
        return f"split({text}, {names.index(p.splits[0][0])}, {mesh.devices})"
    if all(len(axes) == 1 for _, axes in p.splits):
        mapping = [mesh.names.index(p.axes_of(n)[0]) if p.axes_of(n) else -1 for n in names]
        return f"mesh_split({text}, mesh, {mapping})"
    shape, order, replicated = tiles(type_, p, mesh)
    word = "partial_tile" if replicated else "tile"
    return f"{word}({text}, array({order}).reshape({', '.join(map(str, shape))}))"


def hlo(type_: TensorType, p: Placement, mesh: Mesh) -> str:
    """`{devices=[2,1,2]0,1,2,3 last_tile_dim_replicate}`."""
    if not p.splits:
        return "{replicated}"
    shape, order, replicated = tiles(type_, p, mesh)
    devices = ",".join(map(str, order))
    tail = " last_tile_dim_replicate" if replicated else ""
    return f"{{devices=[{','.join(map(str, shape))}]{devices}{tail}}}"


def tiles(type_: TensorType, p: Placement, mesh: Mesh) -> tuple[list[int], list[int], bool]:
    """The grid of tiles, the device of each, and whether its last dim counts replicas."""
    names = type_.names
    order = [axis for n in names for axis in p.axes_of(n)]
    unused_axes = [a for a in mesh.names if a not in order]
    shape = [mesh.size(*p.axes_of(n)) for n in names]
    copies = mesh.size(*unused_axes)
    places = itertools.product(*(range(mesh.size(a)) for a in (*order, *unused_axes)))
    ranks = [_rank(dict(zip((*order, *unused_axes), place, strict=True)), mesh) for place in places]
    return [*shape, copies] if copies > 1 else shape, ranks, copies > 1


def _rank(coordinates: dict[str, int], mesh: Mesh) -> int:
    rank = 0
    for axis, size in mesh.axes:
        rank = rank * size + coordinates[axis]
    return rank
