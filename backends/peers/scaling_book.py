"""The placed program in the notation of "How to Scale Your Model": `h[B_X, F_Y] {U_Z}`.

Dims and mesh axes are single letters, listed at the top. A subscript is the axis that a dim is
split over; `{U_Z}`: the value is not yet reduced over Z. A contraction over K is `*_K`.
"""

from __future__ import annotations

import string
from collections.abc import Iterable

from meshdsl.backends.peers.notation import Notation, call_text, results, stack_dim
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, Move, Var
from meshdsl.ir.program import Carry
from meshdsl.ops.opdef import load_all

UNREDUCED = "U"
AXES = "XYZWVTSR"
COLLECTIVES = {
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "permute": "Permute",
    "halo": "Halo",
    "slice": "Slice",
    "zero_fill": "ZeroFill",
    "window": "Window",
}


class _Book(Notation):
    taken = frozenset({"empty", *COLLECTIVES.values(), *load_all()})
    system = "the notation of the scaling book"

    def top(self) -> None:
        self.axes = dict(zip(self.mesh.names, _axis_letters(), strict=False))
        self.dims = _dim_letters(
            _dim_names(self.variables()), set(self.axes.values()) | {UNREDUCED}
        )
        self.out.comment("axes: " + ", ".join(f"{self.axes[a]}={a}:{n}" for a, n in self.mesh.axes))
        sizes = {d.name: d.size for v in self.variables() for d in v.type.dims}
        self.out.comment("dims: " + ", ".join(f"{self.dims[d]}={d}:{n}" for d, n in sizes.items()))
        self.out.add()

    def entry(self, var: Var, kind: str) -> None:
        self.out.add(f"{self._shown_as(var)}  # {kind.removesuffix('s')}")

    def compute(self, node: Compute) -> None:
        for var, text in results(node, self._operator(node)):
            self.out.add(f"{self._shown_as(var)} = {text}")

    def move(self, node: Move) -> None:
        name = COLLECTIVES[node.step.kind]
        over = "".join(self.axes[a] for a in node.step.axes)
        dim = node.step.to_dim or node.step.dim
        if node.step.kind in ("reduce_scatter", "all_to_all", "slice") and dim:
            over = f"{over},{self.dims[dim]}"
        text = f"{name}_{_subscript(over)}({self._operand(node.source)})"
        note = f"  # {node.wire:,} B sent" if node.step.moves else ""
        self.out.add(f"{self._shown_as(node.target)} = {text}{note}")

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        text = f"{self._shown_as(stack)}[{self.dims[stack_dim(stack, inside)]}={node.index}]"
        self.out.add(f"{self._shown_as(inside)} = {text}")

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        self.out.add(f"{self._shown_as(made.outer)} = empty()")

    def filled(self, made: DeviceCollected, node: DeviceLoop) -> None:
        whole = f"{self._shown_as(made.outer)}[{self.dims[node.dim.name]}={node.index}]"
        self.out.add(f"{whole} = {self._operand(made.inside)}")

    def carried(self, carry: Carry[Var]) -> None:
        self.out.add(f"{self._shown_as(carry.inside)} = {self._operand(carry.init)}")

    # --- pieces ----------------------------------------------------------------------------------

    def _shown_as(self, var: Var) -> str:
        """`h[B_X, F_Y] {U_Z}`."""
        p = var.placement
        names = var.type.names
        dims = ", ".join(self.dims[n] + self._axes_of(p.axes_of(n)) for n in names)
        op = f"{p.op} " if p.op not in (None, "sum") else ""
        tail = f" {{{op}{UNREDUCED}{self._axes_of(p.partial)}}}" if p.partial else ""
        return f"{var.name}[{dims}]{tail}"

    def _axes_of(self, axes: Iterable[str]) -> str:
        letters = "".join(self.axes[a] for a in axes)
        return f"_{_subscript(letters)}" if letters else ""

    def _operand(self, var: Var) -> str:
        return self.constants.get(var, self._shown_as(var))

    def _operator(self, node: Compute) -> str:
        args = [self._operand(v) for v in node.ins]
        if node.name != "einsum" or len(args) != 2:
            return call_text(node, args, self.dims)
        out = node.outs[0].type
        names = dict.fromkeys(n for v in node.ins for n in v.type.names if not out.has(n))
        summed = ",".join(self.dims[n] for n in names)
        return f" *{f'_{_subscript(summed)}' if summed else ''} ".join(args)


def _subscript(text: str) -> str:
    """`X`, or `{XY}` for more than one letter."""
    return text if len(text) == 1 else f"{{{text}}}"


def _dim_names(found: list[Var]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(n for v in found for n in v.type.names))


def _axis_letters() -> list[str]:
    return [*AXES, *(f"X{i}" for i in range(1, 32))]


def _dim_letters(names: tuple[str, ...], taken: set[str]) -> dict[str, str]:
    """A capital for each dim: the first of its own that is free, else any, else a small letter."""
    letters: dict[str, str] = {}
    for name in names:
        in_name = [c.upper() for c in name if c.isalpha()]
        others = [*string.ascii_uppercase, *string.ascii_lowercase]
        free = (c for c in (*in_name, *others) if c not in taken)
        letters[name] = next(free, f"D{len(letters)}")
        taken = taken | {letters[name]}
    return letters
