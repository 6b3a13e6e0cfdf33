"""Renderings that are programs of another system, which cannot hold every placement.

`held` is what the other system holds of each tensor. That is our placement wherever it can be;
where an operator there does not carry a partial value on, the value is reduced first, and where a
placement cannot be said at all, the nearest that can is held. Such lines are marked.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from meshdsl.backends.format_text import quoted
from meshdsl.backends.render_walk import Walk, picked
from meshdsl.device.ir import Compute, Loop, Move, Var
from meshdsl.device.names import Names
from meshdsl.placed import ir as placed
from meshdsl.placed.sbp import B, Mesh, Partial, Placement, Split, placement
from meshdsl.placed.signatures import Row

MARK = "not ours"
"""Begins the note of every line where the other system holds something else than we do."""


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

    `fills` tells whether a whole value can be made partial there.
    """

    fills = True

    def __init__(self, source: placed.Program) -> None:
        super().__init__(source)
        self.fresh = Names(self.taken | frozenset(_names(self)))
        self.held: dict[Var, Placement] = {}
        self.renamed: dict[Var, str] = {}

    # --- what the other system can do ------------------------------------------------------------

    @abstractmethod
    def keeps(self, node: Compute, row: Row) -> bool:
        """Whether its operator takes such operands along one axis to such a result, as they are."""

    @abstractmethod
    def holds(self, var: Var, p: Placement) -> Placement:
        """The nearest placement that it has a word for; `p` itself as a rule."""

    @abstractmethod
    def operator(self, node: Compute, args: tuple[str, ...], plan: Plan) -> str:
        """The text of an operator on operands placed as planned."""

    @abstractmethod
    def reshard(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """The text that brings a value, written `text`, from one placement to another."""

    @abstractmethod
    def constant(self, var: Var) -> str:
        """A literal as a tensor that every device has."""

    # --- statements ------------------------------------------------------------------------------

    def ref(self, var: Var) -> str:
        """The text of a value: the literal of a constant, or the name it last got."""
        return self.constants.get(var, self.renamed.get(var, var.name))

    def enter(self, var: Var, text: str) -> None:
        """An input, a parameter or a slice: held as we hold it, as far as that can be said."""
        self.held[var] = self.holds(var, var.placement)
        self.out.statement(f"{var.name} = {text}", self.note(var))

    def note(self, var: Var, why: str = "") -> str:
        """The type with our placement, and what is held instead."""
        same = self.held[var] == var.placement
        text = self.typed(var)
        if same and not why:
            return text
        held = "" if same else f"; held as {self.held[var].show(var.value.type)}"
        return f"{text}; {MARK}: {why or 'no word for it'}{held}"

    def stacked(self, stack: Var, inside: Var, index: str) -> None:
        (dim,) = (d for d in stack.value.type.names if not inside.value.type.has(d))
        self.held[inside] = self.held[stack].without_dim(dim)
        text = picked(stack, inside, index).replace(stack.name, self.ref(stack), 1)
        self.out.statement(f"{inside.name} = {text}", self.note(inside))

    def compute(self, node: Compute) -> None:
        plan = self.plan(node)
        why = f"`{node.op.name}` does not keep it along {', '.join(plan.lost)}" if plan.lost else ""
        args = tuple(self.brought(v, n, why) for v, n in zip(node.ins, plan.needs, strict=True))
        text = self.operator(node, args, plan)
        for var, yielded in zip(node.outs, plan.yields, strict=True):
            self.held[var] = yielded
        self.out.statement(f"{', '.join(v.name for v in node.outs)} = {text}", self.said(node, why))
        for var, yielded, target in zip(node.outs, plan.yields, plan.settles, strict=True):
            if yielded != target:
                self.held[var] = target
                settled = self.reshard(var.name, var, yielded, target)
                self.out.statement(f"{var.name} = {settled}", self.note(var))

    def said(self, node: Compute, why: str) -> str:
        """The note behind an operator."""
        return self.note(node.outs[0], why if self.held[node.outs[0]] != node.outs[0].placement
                         else "")

    def brought(self, var: Var, need: Placement, why: str) -> str:
        """The text of an operand placed as needed; a statement brings it there if it is not."""
        if var in self.constants or self.held[var] == need:
            return self.ref(var)
        text = self.reshard(self.ref(var), var, self.held[var], need)
        name = self.fresh.fresh(f"{var.name}_here")
        self.held[var], self.renamed[var] = need, name
        self.out.statement(f"{name} = {text}", self.note(var, why))
        return name

    def move(self, node: Move) -> None:
        source, target = node.source, node.target
        if source in self.constants:
            before = Placement()
            text = self.constant(source)
        else:
            before, text = self.held[source], self.ref(source)
        after = self.moved(before, node)
        self.held[target] = after
        if after != before:
            text = self.reshard(text, source, before, after)
        same = (before, after) == (source.placement, target.placement)
        note = self.sent(node)
        self.out.statement(
            f"{target.name} = {text}",
            f"{self.typed(target)}; {note}" if same else f"{self.note(target, 'reduced before')}",
        )

    def moved(self, before: Placement, node: Move) -> Placement:
        """What is held after a step of ours."""
        after = node.target.placement
        kept = tuple(a for a in after.partial if self.fills or a in before.partial)
        return self.holds(node.target, placement(self.mesh, dict(after.splits), kept, after.op))

    # --- loops -----------------------------------------------------------------------------------

    def loop(self, node: Loop) -> None:
        """A `repeat`; what is carried is held in one way all along."""
        held = [self._carried(c.init, c.inside) for c in node.carries]
        for carry, p in zip(node.carries, held, strict=True):
            if carry.inside.name != carry.init.name:
                text = self.ref(carry.init)
                if carry.init in self.constants:
                    text = self.constant(carry.init)
                    self.held[carry.init] = Placement()
                if self.held[carry.init] != p:
                    text = self.reshard(text, carry.init, self.held[carry.init], p)
                self.held[carry.inside] = p
                self.out.statement(f"{carry.inside.name} = {text}", self.note(carry.inside))
            self.held[carry.inside] = p
        self._trips(node, held)

    def _trips(self, node: Loop, held: list[Placement]) -> None:
        outside = dict(self.renamed)
        self.out.add(f"for {node.index} in range({node.dim.size}):")
        self.out.depth += 1
        for stack, inside in node.stacked:
            self.stacked(stack, inside, node.index)
        self.nodes(node.body)
        self._next(node, held)
        self.out.depth -= 1
        self.renamed = {v: n for v, n in self.renamed.items() if outside.get(v) == n}
        for carry, p in zip(node.carries, held, strict=True):
            self.held[carry.result] = p
        self.unshown()

    def _next(self, node: Loop, held: list[Placement]) -> None:
        """What the next trip begins with; all at once, since one may be another's old value."""
        pairs = []
        for carry, p in zip(node.carries, held, strict=True):
            text = self.ref(carry.next)
            if carry.next in self.constants:
                text = self.constant(carry.next)
            elif self.held[carry.next] != p:
                text = self.reshard(text, carry.next, self.held[carry.next], p)
            if text != carry.inside.name:
                pairs.append((carry.inside.name, text))
        if pairs:
            names, values = zip(*pairs, strict=True)
            self.out.statement(f"{', '.join(names)} = {', '.join(values)}")
        elif not node.body and not node.stacked:
            self.out.add("pass")

    def _carried(self, init: Var, inside: Var) -> Placement:
        p = self.holds(inside, inside.placement)
        return p if self.fills or not p.partial else placement(self.mesh, dict(p.splits))

    # --- plans -----------------------------------------------------------------------------------

    def plan(self, node: Compute) -> Plan:
        """Our placements where they can be kept; whole along the axes where they cannot."""
        needs = [self._held(v) for v in node.ins]
        yields = [v.placement for v in node.outs]
        lost = []
        for axis, size in self.mesh.axes:
            if size == 1 or self._is_kept(node, axis):
                continue
            lost.append(axis)
            needs = [without(self.mesh, p, axis) for p in needs]
            yields = [without(self.mesh, p, axis) for p in yields]
        yields = [self.holds(v, p) for v, p in zip(node.outs, yields, strict=True)]
        settles = [self._settled(v, p) for v, p in zip(node.outs, yields, strict=True)]
        return Plan(tuple(needs), tuple(yields), tuple(settles), tuple(lost))

    def _held(self, var: Var) -> Placement:
        return Placement() if var in self.constants else self.held[var]

    def _is_kept(self, node: Compute, axis: str) -> bool:
        ins = tuple(v.placement.component(axis) for v in node.ins)
        row = Row(ins, tuple(v.placement.component(axis) for v in node.outs))
        if row.ins == (B,) * len(ins) and row.outs == (B,) * len(row.outs):
            return True
        if any(isinstance(c, Partial) for c in ins) and self._reduced(node, axis):
            return False
        return self.keeps(node, row)

    def _reduced(self, node: Compute, axis: str) -> bool:
        """Whether an operand that is partial with us has been reduced there."""
        return any(
            axis in v.placement.partial and axis not in self._held(v).partial for v in node.ins
        )

    def _settled(self, var: Var, p: Placement) -> Placement:
        """The splits that we hold, on whatever the operator yields there."""
        return self.holds(var, placement(self.mesh, dict(var.placement.splits), p.partial, p.op))


def without(mesh: Mesh, p: Placement, axis: str) -> Placement:
    """`p`, but whole along `axis`."""
    splits = {d: tuple(a for a in axes if a != axis) for d, axes in p.splits}
    return placement(mesh, splits, tuple(a for a in p.partial if a != axis), p.op)


def in_mesh_order(mesh: Mesh, p: Placement) -> Placement:
    """`p` with the axes of each dim in the order of the mesh."""
    splits = {d: mesh.sorted(axes) for d, axes in p.splits}
    return placement(mesh, splits, p.partial, p.op)


def row_kinds(row: Row) -> Iterator[str]:
    """The ops of the partial operands of a row."""
    for c in row.ins:
        if isinstance(c, Partial):
            yield c.op


def gives_partial(row: Row) -> bool:
    """Whether splitting a loop makes the result partial."""
    return any(isinstance(c, Split) for c in row.ins) and any(
        isinstance(c, Partial) for c in row.outs
    )


def returned(walk: Walk) -> str:
    """`{"loss": loss, "y": y}`."""
    items = [f"{quoted(name)}: {walk.ref(var)}" for name, var in walk.program.outputs]
    return f"{{{', '.join(items)}}}"


def _names(walk: Walk) -> list[str]:
    """Every identifier that lowering has given out."""
    from meshdsl.backends.torch_text import _names as given

    return given(walk.program)
