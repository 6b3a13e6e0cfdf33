"""Renderings that are programs of another system, which does not have every placement.

`held` is the placement of each tensor there: ours wherever possible. Where an operator there does
not accept a partial value, the value is reduced first, and where a placement cannot be expressed at
all, the nearest one is used. Such lines are marked.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, NoReturn

from meshdsl.backends.peers.notation import (
    Notation,
    picked,
    results,
    sent,
    stack_dim,
    typed,
)
from meshdsl.backends.peers.operator_tables import spelling
from meshdsl.backends.peers.peer_call import Library, PeerCall
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, Move, Var
from meshdsl.ir.program import Carry
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.ops.torch_expressions import tuple_text
from meshdsl.option_edits import leave_out, refuse
from meshdsl.placed import ir as placed
from meshdsl.placed.placements import B, Component, Mesh, Partial, Placement, Split, placement
from meshdsl.placed.sharding_rules import Row
from meshdsl.records import dataclass

MARK = "NOT AS OURS"
"""Marks the note of every line whose tensor has another placement there than ours."""

Outcome = Literal["keeps", "reduces", "whole"]
"""The result of a row there: the same; the same, but reduced; or neither, so that the operands
have to be whole along the axis."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """The placements of one call there: of operands, of the result, and where that settles."""

    needs: tuple[Placement, ...]
    yields: Placement
    settles: Placement


class Peer(Notation):
    """A rendering that runs; a subclass has the placements of its system, and their texts.

    notation:  its name on the command line, and its column in the table of spellings.
    head:      the lines of imports.
    arguments: of the function `program`, of which `returns` is the description.
    support:   definitions that the text may call, by name.
    library:   its array library.

    After `text()`, `held_by_name` has for every variable of the text its type, its placement
    there, and ours.
    """

    notation = ""
    arguments = "mesh, inputs, params"
    returns = ""
    support: Mapping[str, str] = {}
    library = Library("torch")

    def __init__(self, source: placed.PlacedProgram) -> None:
        super().__init__(source)
        self.held: dict[Var, Placement] = {}
        self.renamed: dict[Var, str] = {}
        self.carries: dict[Carry[Var], Placement] = {}
        self.lists: dict[DeviceCollected, str] = {}
        self.held_by_name: dict[str, tuple[TensorType, Placement, Placement]] = {}

    # --- the other system ------------------------------------------------------------------------

    @abstractmethod
    def imports(self) -> Iterable[str]:
        """The lines behind the first comment."""

    @abstractmethod
    def holds(self, p: Placement) -> Placement:
        """The nearest placement that the system can express; `p` itself as a rule."""

    @abstractmethod
    def spec(self, var: Var, p: Placement) -> str:
        """The text of a placement."""

    @abstractmethod
    def entered(self, text: str, var: Var, p: Placement) -> str:
        """The text that distributes a whole tensor, written `text`; `p` is not partial."""

    @abstractmethod
    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """The text that reshards a value, written `text`, from one placement to another."""

    @abstractmethod
    def number(self, text: str, var: Var, p: Placement) -> str:
        """The text of a tensor that is computed from literals alone, written `text`."""

    def mesh_lines(self) -> Iterable[str]:
        """The function that makes the mesh, if a mesh is made by one."""
        return ()

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """The result of its operator for operands placed so along one axis."""
        spelled, ops = spelling(node.name, self.notation), partial_ops(row)
        if ops:
            return "keeps" if (spelled.sums if "sum" in ops else spelled.extremes) else "whole"
        return "keeps" if spelled.becomes or not becomes_partial(row) else "whole"

    def operator(self, node: Compute, args: tuple[str, ...], plan: CallPlan) -> str:
        """The text of an operator on operands placed as planned; by default the table's."""
        text = self.call(node, args, plan).write(spelling(node.name, self.notation).text)
        if not text:
            self.refuse(node)
        if node.ins and all(v in self.constants for v in node.ins):
            return self.number(text, node.outs[0], plan.yields)
        return text

    def call(self, node: Compute, args: tuple[str, ...], plan: CallPlan) -> PeerCall:
        """The call on whole tensors, for the table of spellings."""
        out = node.outs[0]
        return PeerCall(
            self.library,
            args,
            {i: self.constant(v) for i, v in enumerate(node.ins) if v in self.constants},
            tuple(v.type for v in node.ins),
            out.type,
            dict(node.attrs),
            self.spec(out, plan.yields),
            plan.needs,
            plan.yields,
        )

    def dtype(self, var: Var) -> str:
        """The text of a dtype."""
        return self.library.dtype(var.type.dtype)

    def constant(self, var: Var) -> str:
        """A literal as a tensor on every device."""
        return self.number(self.constants[var], var, Placement())

    # --- the text --------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole rendering; definitions that the function uses are above it."""
        head, body = super().text().split("\n\n", 1)
        code = "\n".join(line for line in body.split("\n") if not line.lstrip().startswith("#"))
        used = [self.support[n].strip("\n") for n in self.support if re.search(rf"\b{n}\(", code)]
        parts = ["\n".join([head, "", *self.imports()]), *used, "\n".join(self.mesh_lines())]
        return "\n\n\n".join(filter(None, parts)) + "\n\n" + body

    def top(self) -> None:
        """The head of the function."""
        self.out.add()
        self.out.add()
        self.out.add(f"def program({self.arguments}):")
        self.out.depth = 1
        self.out.add(f'"""{self.returns}"""')

    def bottom(self) -> None:
        """The outputs by name, and new states, where there are any, by theirs."""
        groups = [self.program.outputs]
        if self.program.updates:
            groups.append(tuple((old.value.name or "", new) for old, new in self.program.updates))
        texts = (", ".join(f"{quoted(name)}: {self.ref(v)}" for name, v in t) for t in groups)
        self.out.statement("return " + ", ".join(f"{{{text}}}" for text in texts))

    def axes(self) -> tuple[str, str]:
        """The sizes and the names of the mesh axes, as tuples; of one device there is one axis."""
        sizes = tuple_text([n for _, n in self.mesh.axes] or [1])
        return sizes, tuple_text([quoted(a) for a, _ in self.mesh.axes] or ['"one"'])

    # --- statements ------------------------------------------------------------------------------

    def entry(self, var: Var, kind: str) -> None:
        """An input or a parameter; a partial one is given whole, and made partial here."""
        key = var.value.label if kind == "inputs" else var.value.name or ""
        p = self.holds(var.placement)
        split = Placement(p.splits)
        text = self.entered(f"{kind}[{quoted(key)}]", var, split)
        self.assign(var, text if p == split else self.resharded(text, var, split, p), p)

    def ref(self, var: Var) -> str:
        """The text of a value: the literal of a constant, or its latest name."""
        return self.constants.get(var, self.renamed.get(var, var.name))

    def assign(self, var: Var, text: str, p: Placement, note: str = "", name: str = "") -> None:
        """`name = text`, placed as `p`; marked where that is not our placement."""
        self.held[var] = p
        name = name or var.name
        if name != var.name:
            self.renamed[var] = name
        self.held_by_name[name] = (var.type, p, var.placement)
        about = typed(var)
        if p != var.placement:
            held, ours = (q.show(var.type) for q in (p, var.placement))
            about = f"{MARK}: held as {held}, ours {ours}"
        self.out.assign((name,), text, "; ".join(filter(None, (about, note))))

    def at(self, var: Var) -> Placement:
        """The placement of a value there; constants are whole."""
        return Placement() if var in self.constants else self.held[var]

    def brought(self, var: Var, to: Placement) -> str:
        """The text of a value resharded to a placement; constants become tensors."""
        text = self.constant(var) if var in self.constants else self.ref(var)
        before = self.at(var)
        return text if before == to else self.resharded(text, var, before, to)

    def stacked(self, stack: Var, inside: Var, node: DeviceLoop) -> None:
        """A slice of a stack is placed as the stack is."""
        text = picked(self.ref(stack), stack, inside, node.index)
        self.assign(inside, text, self.at(stack).without_dim(stack_dim(stack, inside)))

    def compute(self, node: Compute) -> None:
        """An operator, after the reshards of its operands."""
        record = lookup(node.name)
        if record.overwrites or record.surface.seeded:
            self.refuse(node)
        plan = self.plan(node)
        pairs = zip(node.ins, plan.needs, strict=True)
        args = tuple(self._operand(v, need, node) for v, need in pairs)
        text = self.operator(node, args, plan)
        if len(node.outs) > 1:
            both = self.names.fresh(node.name)
            self.out.assign((both,), text)
            text = both
        for out, one in results(node, text):
            self.assign(out, one, plan.yields)
            if plan.yields != plan.settles:
                self.assign(out, self.brought(out, plan.settles), plan.settles)

    def _operand(self, var: Var, need: Placement, node: Compute) -> str:
        """The text of an operand placed as needed; a reduction of it is shared by later readers."""
        before = self.at(var)
        if before == need:
            return self.ref(var)
        name = self.names.fresh(f"{var.name}_for_{node.name}")
        renamed_before = self.renamed.get(var)
        self.assign(var, self.brought(var, need), need, f"`{node.name}` takes it so", name)
        if before.splits != need.splits:
            self.held[var] = before
            self.renamed[var] = renamed_before or var.name
        return name

    def move(self, node: Move) -> None:
        """One step of a reshard, as far as it is not done yet."""
        before, source = self.at(node.source), node.source
        if node.step.after.windows:
            self.windowed(node)
            return
        after = self._moved(before, node)
        ours = (before, after) == (source.placement, node.target.placement)
        self.assign(node.target, self.brought(source, after), after, sent(node) if ours else "")

    def windowed(self, node: Move) -> None:
        """The dim whole, where our operator reads a window of it: none of them asks for halos."""
        after, window = self.at(node.source), node.step.window
        for axis in node.step.after.axes_of(window.dim):
            after = without(self.mesh, after, axis)
        note = f"whole for a window of `{window.dim}`: ours sends {node.wire:,} B"
        self.assign(node.target, self.brought(node.source, after), after, note)

    def _moved(self, before: Placement, node: Move) -> Placement:
        """The placement after a step; values already reduced there stay so."""
        old, new = node.source.placement, node.target.placement
        partial = tuple(a for a in new.partial if a in before.partial or a not in old.partial)
        return self.holds(placement(self.mesh, dict(new.splits), partial, new.op))

    def refuse(self, node: Compute) -> NoReturn:
        """MD0910: the notation has no text for an operator."""
        why = spelling(node.name, self.notation).why
        if lookup(node.name).surface.seeded:
            why = f"the random numbers of {self.system} are others"
        reason = f": {why}" if why else " yet"
        message = f"`{node.name}` cannot be written as {self.notation}{reason}"
        fixes = []
        if not why and self.source.updates:
            fixes = [leave_out("--step", safe=False)]
        help = "`meshdsl compile` writes it as torch"
        refuse("MD0910", message, fixes, help, span=node.span)

    # --- loops -----------------------------------------------------------------------------------

    def loop(self, node: DeviceLoop) -> None:
        """A `repeat`; a carried value has one placement throughout."""
        self.enter(node)
        # A reduction inside an iteration does not count for readers after the loop.
        renamed, held = dict(self.renamed), dict(self.held)
        self.iterations(node)
        self.renamed = renamed
        self.held |= held | {c.result: self.carries[c] for c in node.carries}
        for item in node.collected:
            order = "[::-1]" if node.reverse else ""
            text = f"{self.library.name}.stack({self.lists[item]}{order})"
            self.assign(item.outer, text, self._collected(item))

    def enter(self, node: DeviceLoop) -> None:
        """The initial values, also those that only need another placement."""
        for carry in node.carries:
            self.carried(carry)

    def carried(self, carry: Carry[Var]) -> None:
        """The initial value of a carried variable, in the placement of the carry."""
        p = self.carries[carry] = self.holds(carry.inside.placement)
        if carry.inside.name == carry.init.name and self.at(carry.init) == p:
            self.held[carry.inside] = p
        else:
            self.assign(carry.inside, self.brought(carry.init, p), p)

    def begun(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """The list that becomes one tensor after the loop."""
        self.lists[made] = self.names.fresh(f"{made.outer.name}_list")
        self.out.assign((self.lists[made],), "[]")

    def filled(self, made: DeviceCollected, node: DeviceLoop) -> None:
        """An item appended to the list; none is partial there."""
        part = self.brought(made.inside, self._collected(made))
        self.out.statement(f"{self.lists[made]}.append({part})")

    def _collected(self, made: DeviceCollected) -> Placement:
        return Placement(self.holds(made.inside.placement).splits)

    def next_text(self, carry: Carry[Var]) -> str:
        """The next value, in the placement of the carry."""
        return self.brought(carry.next, self.carries[carry])

    # --- plans -----------------------------------------------------------------------------------

    def plan(self, node: Compute) -> CallPlan:
        """Our placements where they can be kept; whole along the axes where they cannot."""
        out = node.outs[0]
        assert all(v.placement == out.placement for v in node.outs), node
        needs, yields = [self.at(v) for v in node.ins], out.placement
        for axis in (a for a, size in self.mesh.axes if size > 1):
            outcome = self._outcome(node, axis)
            if outcome != "keeps":
                yields = without(self.mesh, yields, axis)
            if outcome == "whole":
                needs = [without(self.mesh, p, axis) for p in needs]
        yields = self.holds(yields)
        # Our splits, with the partial axes that the operator yields there.
        settled = placement(self.mesh, dict(out.placement.splits), yields.partial, yields.op)
        return CallPlan(tuple(needs), yields, self.holds(settled))

    def _outcome(self, node: Compute, axis: str) -> Outcome:
        ins: list[Component] = [v.placement.component(axis) for v in node.ins]
        outs: list[Component] = [v.placement.component(axis) for v in node.outs]
        if all(c == B for c in (*ins, *outs)):
            return "keeps"
        if [self.at(v).component(axis) for v in node.ins] != ins:
            return "whole"  # an operand was reduced before, so the others have to be as well
        return self.outcome(node, Row(tuple(ins), tuple(outs)))


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
