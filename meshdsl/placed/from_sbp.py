"""From the named program and an `sbp` block to the placed program."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Related, fail
from meshdsl.ir import program as ir
from meshdsl.named import ir as named
from meshdsl.named.ir import Op, Value
from meshdsl.placed import why
from meshdsl.placed.choose import Choice, Chooser, Want, call_of, legal_rows
from meshdsl.placed.from_named import Placer
from meshdsl.placed.ir import Tensor
from meshdsl.placed.layout import Layout
from meshdsl.placed.sbp import Partial, Placement, placement
from meshdsl.placed.sbp_block import Annotations


class AnnotatedPlacer(Placer):
    """The same walk, bound by annotations: a tensor is just so, or inferred where none names it.

    Inputs and parameters that no annotation names are whole.
    """

    def __init__(self, program: named.Program, annotations: Annotations, policy: str) -> None:
        super().__init__(program, Layout(annotations.name, (), annotations.mesh), policy)
        self.annotations = annotations
        self.readers = _readers(program.body)

    def alike(self, first: Op, second: Op) -> bool:
        """Whether annotations say the same; those for one reader tell all operators apart."""
        if any(entry.at for entry in self.annotations.entries):
            return False
        return super().alike(first, second)

    def annotated(self, value: Value) -> Placement | None:
        """What the block says of a tensor, if it names it."""
        found = self.annotations.of(value)
        return None if found is None else found[0]

    def _demanded(self, value: Value) -> Placement:
        return self.annotated(value) or super()._demanded(value)

    def _wanted(self, value: Value) -> Placement:
        found = self.annotations.of(value)
        if found is None:
            return super()._wanted(value)
        placed, entry = found
        self.causes[value] = {d: (entry.span.text, entry.span) for d, _ in placed.splits}
        return placed

    def _computed(self, value: Value) -> Placement:
        return self._whole(self._wanted(value))

    def _whole(self, placed: Placement) -> Placement:
        return placement(self.mesh, dict(placed.splits))

    def _stored(self, value: Value) -> Tensor:
        return self._entering(value)

    def _entering(self, value: Value) -> Tensor:
        """Devices are given whole blocks; where they are to be partial, all but one drop them."""
        wanted = self._wanted(value)
        entered = self._enter(value, self._whole(wanted), 0)
        if wanted.partial:
            self.state.partial_why[value] = ("the `sbp` block says so",)
            ask = why.Ask("rule", "", value.span)
            self.state.versions[value] = [self._version(value, wanted, ask)]
        return entered

    def _want(self, value: Value) -> Want:
        if self.annotations.of(value) is not None:
            wanted = self._wanted(value)
            return Want(self._whole(wanted) if value in self.returned else wanted, "exact")
        ruled = self.layout.bind(value)
        if ruled.causes:
            return Want(self._wanted(value))
        self.causes[value] = {}
        return Want(placement(self.mesh, {}), "free")

    def _chooser(self, op: Op, wants: tuple[Want, ...]) -> Chooser:
        for value, want in zip(op.outs, wants, strict=True):
            self._check_yields(op, value, want)
        if not op.ins:
            # What is made from nothing is made whole: to split it later costs nothing.
            wants = tuple(Want(w.placement, "exact") if w.kind == "free" else w for w in wants)
        pins = self.pins(op)
        chooser = super()._chooser(op, wants)
        return replace(chooser, pins=pins) if any(pins) else chooser

    def _choose(self, op: Op, chooser: Chooser) -> Choice:
        if not chooser.candidates():
            self._illegal(op, chooser.pins, self.readers.get(op))
        return super()._choose(op, chooser)

    def pins(self, op: Op) -> tuple[Placement | None, ...]:
        """What the block says of each operand where `op` reads it."""
        reader = self.readers.get(op)
        return tuple(self._pin(v, reader) for v in op.ins)

    def _check_yields(self, op: Op, value: Value, want: Want) -> None:
        """MD0309 where a result is to be partial and no row of the operator yields that.

        What is made from nothing may begin a sum in parts: all but one device hold zeros.
        """
        found = self.annotations.of(value)
        if found is None or want.kind != "exact" or not op.ins:
            return
        legal = legal_rows(call_of(op))
        wanted = Partial(want.placement.op) if want.placement.op else None
        # What has no operands is the same on every device: one keeps it, the others drop it.
        if wanted is not None and op.ins and all(wanted not in row.outs for row in legal):
            axis = want.placement.partial[0]
            fail(
                "MD0309",
                f"`{op.name}` cannot yield `{value.label}` as {wanted} over mesh axis `{axis}`",
                found[1].span,
                Related(op.span, "it is computed here"),
                help=f"its legal rows: {'; '.join(map(str, legal))}",
            )

    def _pin(self, value: Value, reader: Value | None) -> Placement | None:
        found = self.annotations.at(value, reader)
        return found[0] if found else None

    def _illegal(
        self, op: Op, pins: tuple[Placement | None, ...], reader: Value | None
    ) -> NoReturn:
        """MD0309: the operator, the axis, and the rows there are."""
        value = next(v for v, p in zip(op.ins, pins, strict=True) if p is not None)
        found = self.annotations.at(value, reader)
        assert found is not None
        legal = legal_rows(call_of(op))
        for axis in self.mesh.names:
            parts = tuple(p.component(axis) if p else None for p in pins)
            fits = [
                r
                for r in legal
                if all(c is None or c == x for c, x in zip(parts, r.ins, strict=True))
            ]
            if not fits:
                break
        asked = ", ".join("?" if c is None else str(c) for c in parts)
        fail(
            "MD0309",
            f"`{op.name}` cannot read its operands as ({asked}) over mesh axis `{axis}`",
            found[1].span,
            Related(op.span, "it is applied here"),
            help=f"its legal rows: {'; '.join(map(str, legal))}",
        )

    def _carried(self, carry: ir.Carry[Value]) -> Placement:
        for value in (carry.inside, carry.next):
            if self.annotations.of(value) is not None:
                return self._wanted(value)
        return self._whole(self._latest(carry.init).placement)

    def _output(self, output: named.Output) -> Tensor:
        ask = why.Ask("output", f"`{output.name}` is returned", output.span)
        return self._version(output.value, self._settled(output.value), ask)

    def _settled(self, value: Value) -> Placement:
        """Where an output lies: as it fell, less what is partial."""
        return self._whole(self.state.settled[value].placement)


def _readers(nodes: tuple[named.Node, ...]) -> dict[Op, Value]:
    """The named tensor that each operator is on the way to, within one statement."""
    found: dict[Op, Value] = {}
    towards: dict[Value, Value] = {}
    for node in reversed(nodes):
        if isinstance(node, named.Loop):
            found.update(_readers(node.body))
            continue
        out = node.outs[0]
        reader = out if out.name else towards.get(out)
        if reader is None:
            continue
        found[node] = reader
        towards.update({v: reader for v in node.ins if v.name is None})
    return found
