"""The placed program in positional SBP: an entry per mesh axis, `S(i)`, `B`, `P` or `P(max)`.

The notation of OneFlow (Yuan et al. 2021). Where one dim is split over several axes, the first axis
of the mesh is the outermost; another order is written `S(0)/1`, `S(0)/2`, the outermost being 1.
"""

from __future__ import annotations

from meshdsl.backends.peers.notation import (
    Entry,
    Notation,
    call_text,
    entries,
    picked,
    results,
    sent,
)
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, Move, Var
from meshdsl.ir.program import Carry
from meshdsl.ops.opdef import load_all


class _Sbp(Notation):
    taken = frozenset({"boxing", "empty", *load_all()})
    system = "positional SBP, an entry per mesh axis"

    def top(self) -> None:
        self.out.add()

    def entry(self, var: Var, kind: str) -> None:
        self._line(var, "", f"{kind.removesuffix('s')} {_dims(var)}")

    def compute(self, node: Compute) -> None:
        for var, text in results(node, call_text(node, [self.ref(v) for v in node.ins])):
            self._line(var, text, _dims(var))

    def move(self, node: Move) -> None:
        self._line(node.target, f"boxing({self.ref(node.source)})", sent(node))

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        self._line(inside, picked(stack.name, stack, inside, node.index), _dims(inside))

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        self._line(made.outer, "empty()", _dims(made.outer))

    def carried(self, carry: Carry[Var]) -> None:
        self._line(carry.inside, self.ref(carry.init), "carried")

    def _line(self, var: Var, text: str, note: str) -> None:
        shape = ", ".join(map(str, var.type.shape))
        sbp = ", ".join(map(entry_text, entries(var.type, self.mesh, var.placement)))
        head = f"{var.name}: {var.type.dtype}[{shape}] ({sbp})"
        self.out.add(f"{head}{' = ' if text else ''}{text}  # {note}")


def entry_text(entry: Entry) -> str:
    """`S(0)`, `S(0)/2`, `B`, `P`, `P(max)`."""
    if entry.position is not None:
        return f"S({entry.position})" + (f"/{entry.rank}" if entry.rank else "")
    if entry.op is None:
        return "B"
    return "P" if entry.op == "sum" else f"P({entry.op})"


def _dims(var: Var) -> str:
    return f"[{', '.join(var.type.names)}]"
