"""Renderings that are programs of another system, which cannot hold every placement.

`held` is what the other system holds of each tensor. That is our placement wherever it can be;
where an operator there does not carry a partial value on, the value is reduced first, and where a
placement cannot be said at all, the nearest that can is held. Such lines are marked.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, NoReturn

from meshdsl.backends.peers.call import PeerCall
from meshdsl.backends.peers.walk import Walk, picked
from meshdsl.backends.torch.format import quoted
from meshdsl.device.ir import Collected, Compute, Loop, Move, Var
from meshdsl.device.names import Names
from meshdsl.diagnostics import fail
from meshdsl.ir.program import Carry
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.placed import ir as placed
from meshdsl.placed.rows import Row
from meshdsl.placed.sbp import B, Component, Mesh, Partial, Placement, Split, placement

MARK = "NOT AS OURS"
"""Stands in the note of every line where the other system holds something else than we do."""

Outcome = Literal["keeps", "reduces", "whole"]
"""What an operator there makes of a row: just that; the result, but reduced; or neither, so that
the operands have to be whole along the axis."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What an operator's operands become, what it yields there, and what is made of that.

    `lost` are the axes along which the other system does not do what ours does.
    """

    needs: tuple[Placement, ...]
    yields: tuple[Placement, ...]
    settles: tuple[Placement, ...]
    lost: tuple[str, ...]


class Peer(Walk):
    """A rendering that runs; a subclass knows what its system can hold and how it says so.

    `fills` tells whether a whole value can be made partial there; `stack` is the function that
    makes one tensor of a list; `notation` is what this one is called on the command line. After
    `text()`, `held_by_name` says what every variable of the text holds.
    """

    fills = True
    stack = "stack"
    notation = ""
    transpose = "permute"

    def __init__(self, source: placed.Program) -> None:
        super().__init__(source)
        self.fresh = Names(self.taken | self.program_names())
        self.held: dict[Var, Placement] = {}
        self.renamed: dict[Var, str] = {}
        self.carries: dict[Carry[Var], Placement] = {}
        self.lists: dict[Collected, str] = {}
        self.held_by_name: dict[str, tuple[TensorType, Placement, Placement]] = {}

    # --- what the other system can do ------------------------------------------------------------

    @abstractmethod
    def outcome(self, node: Compute, row: Row) -> Outcome:
        """What its operator makes of operands that stand so along one axis."""

    @abstractmethod
    def holds(self, p: Placement) -> Placement:
        """The nearest placement that it has a word for; `p` itself as a rule."""

    @abstractmethod
    def operator(self, node: Compute, args: tuple[str, ...], plan: Plan) -> str:
        """The text of an operator on operands placed as planned."""

    @abstractmethod
    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """The text that brings a value, written `text`, from one placement to another."""

    @abstractmethod
    def as_printed(self, type_: TensorType, p: Placement) -> str:
        """How the system itself prints a placement."""

    @abstractmethod
    def entered(self, text: str, var: Var, p: Placement) -> str:
        """The text that distributes a whole tensor, written `text`; `p` is not partial."""

    @abstractmethod
    def constant(self, var: Var) -> str:
        """A literal as a tensor that every device has."""

    @property
    def marked(self) -> tuple[str, ...]:
        """The variables that hold something else than ours do."""
        return tuple(n for n, (_, p, ours) in self.held_by_name.items() if p != ours)

    # --- statements ------------------------------------------------------------------------------

    def entry(self, var: Var, kind: str) -> None:
        """An input or a parameter; a partial one is given whole, and made partial here."""
        key = var.value.label if kind == "inputs" else var.value.name or ""
        p = self.holds(var.placement)
        split = Placement(p.splits)
        text = self.entered(f"{kind}[{quoted(key)}]", var, split)
        self.assign(var, text if p == split else self.resharded(text, var, split, p), p)

    def ref(self, var: Var) -> str:
        """The text of a value: the literal of a constant, or the name it last got."""
        return self.constants.get(var, self.renamed.get(var, var.name))

    def assign(self, var: Var, text: str, p: Placement, note: str = "", name: str = "") -> None:
        """`name = text`, held as `p`; marked where that is not our placement."""
        self.held[var] = p
        name = name or var.name
        if name != var.name:
            self.renamed[var] = name
        self.held_by_name[name] = (var.value.type, p, var.placement)
        typed = self.typed(var)
        if p != var.placement:
            held, ours = (q.show(var.value.type) for q in (p, var.placement))
            typed = f"{MARK}: held as {held}, ours {ours}"
        self.out.statement(f"{name} = {text}", "; ".join(filter(None, (typed, note))))

    def at(self, var: Var) -> Placement:
        """What is held of a value; constants are whole."""
        return Placement() if var in self.constants else self.held[var]

    def brought(self, var: Var, to: Placement) -> str:
        """The text of a value brought to a placement; constants become tensors."""
        text = self.constant(var) if var in self.constants else self.ref(var)
        before = self.at(var)
        return text if before == to else self.resharded(text, var, before, to)

    def stacked(self, stack: Var, inside: Var, index: str) -> None:
        """A slice of a stack is held as the stack is."""
        (dim,) = (d for d in stack.value.type.names if not inside.value.type.has(d))
        text = picked(self.ref(stack), stack, inside, index)
        self.assign(inside, text, self.at(stack).without_dim(dim))

    def compute(self, node: Compute) -> None:
        """An operator, after what has to become of its operands."""
        if len(node.outs) != 1 or lookup(node.name).overwrites:
            self.refuse(node)
        plan = self.plan(node)
        pairs = zip(node.ins, plan.needs, strict=True)
        args = tuple(self._operand(v, need, node) for v, need in pairs)
        text = self.operator(node, args, plan)
        out, yields, settles = node.outs[0], plan.yields[0], plan.settles[0]
        self.assign(out, text, yields)
        if yields != settles:
            self.assign(out, self.brought(out, settles), settles)

    def _operand(self, var: Var, need: Placement, node: Compute) -> str:
        """The text of an operand placed as needed; what is reduced once is so for later readers."""
        before = self.at(var)
        if before == need:
            return self.ref(var)
        name = self.fresh.fresh(f"{var.name}_for_{node.name}")
        known = self.renamed.get(var)
        self.assign(var, self.brought(var, need), need, f"`{node.name}` takes it so", name)
        if before.splits != need.splits:
            self.held[var] = before
            self.renamed[var] = known or var.name
        return name

    def move(self, node: Move) -> None:
        """One step of a reshard, as far as it is still to be done."""
        before, source = self.at(node.source), node.source
        after = self._moved(before, node)
        ours = (before, after) == (source.placement, node.target.placement)
        note = self.sent(node) if ours else ""
        self.assign(node.target, self.brought(source, after), after, note)

    def _moved(self, before: Placement, node: Move) -> Placement:
        """What is held after a step; what has been reduced there stays so."""
        old, new = node.source.placement, node.target.placement
        filled = set(new.partial) - set(old.partial) if self.fills else set()
        kept = tuple(a for a in new.partial if a in before.partial or a in filled)
        return self.holds(placement(self.mesh, dict(new.splits), kept, new.op))

    # --- loops -----------------------------------------------------------------------------------

    def loop(self, node: Loop) -> None:
        """A `repeat`; what is carried is held in one way all along."""
        for carry in node.carries:
            p = self._carried(carry)
            self.carries[carry] = p
            if carry.inside.name == carry.init.name and self.at(carry.init) == p:
                self.held[carry.inside] = p
            else:
                self.assign(carry.inside, self.brought(carry.init, p), p)
        # What a trip reduces for itself is as it was for whoever comes after the loop.
        renamed, held = dict(self.renamed), dict(self.held)
        super().trips(node)
        self.renamed = renamed
        self.held |= held | {c.result: self.carries[c] for c in node.carries}
        for made in node.collected:
            order = "[::-1]" if node.reverse else ""
            text = f"{self.stack}({self.lists[made]}{order})"
            self.assign(made.outer, text, self._collected(made))

    def begun(self, made: Collected) -> None:
        """The list that becomes one tensor after the loop."""
        self.lists[made] = self.fresh.fresh(f"{made.outer.name}_list")
        self.out.statement(f"{self.lists[made]} = []")

    def filled(self, made: Collected, index: str) -> None:
        """One more in the list; none is partial there."""
        part = self.brought(made.inside, self._collected(made))
        self.out.statement(f"{self.lists[made]}.append({part})")

    def _collected(self, made: Collected) -> Placement:
        return placement(self.mesh, dict(self.holds(made.inside.placement).splits))

    def next_text(self, carry: Carry[Var]) -> str:
        """What the next trip begins with, held as what the first began with."""
        return self.brought(carry.next, self.carries[carry])

    def _carried(self, carry: Carry[Var]) -> Placement:
        p = self.holds(carry.inside.placement)
        return p if self.fills else placement(self.mesh, dict(p.splits))

    # --- plans -----------------------------------------------------------------------------------

    def plan(self, node: Compute) -> Plan:
        """Our placements where they can be kept; whole along the axes where they cannot."""
        needs = [self.at(v) for v in node.ins]
        yields = [v.placement for v in node.outs]
        lost = []
        for axis in (a for a, size in self.mesh.axes if size > 1):
            outcome = self._outcome(node, axis)
            if outcome == "keeps":
                continue
            lost.append(axis)
            yields = [without(self.mesh, p, axis) for p in yields]
            if outcome == "whole":
                needs = [without(self.mesh, p, axis) for p in needs]
        yields = [self.holds(p) for p in yields]
        settles = [self._settled(v, p) for v, p in zip(node.outs, yields, strict=True)]
        return Plan(tuple(needs), tuple(yields), tuple(settles), tuple(lost))

    def _outcome(self, node: Compute, axis: str) -> Outcome:
        ins: list[Component] = [v.placement.component(axis) for v in node.ins]
        outs: list[Component] = [v.placement.component(axis) for v in node.outs]
        if all(c == B for c in (*ins, *outs)):
            return "keeps"
        held = [self.at(v).component(axis) for v in node.ins]
        if held != ins:  # something was reduced before, so the others have to be as well
            return "whole"
        return self.outcome(node, Row(tuple(ins), tuple(outs)))

    def _settled(self, var: Var, p: Placement) -> Placement:
        """The splits that we hold, on whatever the operator yields there."""
        return self.holds(placement(self.mesh, dict(var.placement.splits), p.partial, p.op))

    # --- calls -----------------------------------------------------------------------------------

    def call(self, node: Compute, args: tuple[str, ...], where: str) -> PeerCall:
        """The call on whole tensors, for a table of texts."""
        return PeerCall(
            args,
            tuple(v in self.constants for v in node.ins),
            tuple(v.value.type for v in node.ins),
            tuple(v.value.type for v in node.outs),
            dict(node.attrs),
            self.transpose,
            where,
        )

    def refuse(self, node: Compute) -> NoReturn:
        """MD0910: the notation has no text for an operator."""
        message = f"`{node.name}` cannot be written as {self.notation} yet"
        help = "`meshdsl compile` writes it as torch"
        if self.source.updates:
            help += "; without `--step`, gradients and update are left out"
        fail("MD0910", message, node.span, help=help)

    def bottom(self) -> None:
        """The outputs by name."""
        items = [f"{quoted(name)}: {self.ref(var)}" for name, var in self.program.outputs]
        self.out.statement(f"return {{{', '.join(items)}}}")


def without(mesh: Mesh, p: Placement, axis: str) -> Placement:
    """`p`, but whole along `axis`."""
    splits = {d: tuple(a for a in axes if a != axis) for d, axes in p.splits}
    return placement(mesh, splits, tuple(a for a in p.partial if a != axis), p.op)


def in_mesh_order(mesh: Mesh, p: Placement) -> Placement:
    """`p` with the axes of each dim in the order of the mesh."""
    return replace(p, splits=tuple((d, mesh.sorted(axes)) for d, axes in p.splits))


def only_sums(p: Placement) -> Placement:
    """`p` with maxima, minima and products reduced."""
    return p if p.op in (None, "sum") else Placement(p.splits)


def partial_ops(row: Row) -> set[str]:
    """The ops of the partial operands of a row."""
    return {c.op for c in row.ins if isinstance(c, Partial)}


def becomes_partial(row: Row) -> bool:
    """Whether splitting a loop makes the result partial."""
    return not partial_ops(row) and any(isinstance(c, Partial) for c in row.outs)


def is_split(row: Row) -> bool:
    """Whether the result is split."""
    return any(isinstance(c, Split) for c in row.outs)
