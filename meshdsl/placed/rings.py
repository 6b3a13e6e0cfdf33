"""`activations: attention = ring`, or `zigzag`: attention over positions that are split.

Without the setting, keys and values are gathered. With it the blocks that queries are split in
stay where they are, and those of keys and values go from device to device
(`named/ring_attention.py`). Forward that sends as many bytes, and a device has one block of each
instead of all. The backward pass sends them again: gathered ones are kept for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NoReturn

from meshdsl.diagnostics import Diagnostic, Fix, Related, advice, fail
from meshdsl.ir.rewrite import rewritten, substitute
from meshdsl.ir.types import Dim
from meshdsl.named.attention_fusion import ATTENTION
from meshdsl.named.balanced_order import Halves, in_balanced_order, with_renamed
from meshdsl.named.expand import in_ring
from meshdsl.named.ir import NamedOp, NamedProgram, Node, Pin, Value, walk
from meshdsl.named.ring_attention import Ring
from meshdsl.ops.attention import operands, parts
from meshdsl.placed.layout import Layout, nearest
from meshdsl.placed.settings import Setting
from meshdsl.records import dataclass
from meshdsl.syntax.edits import inserted, removal

NAME, RING, ZIGZAG = "attention", "ring", "zigzag"
"""The setting, and its values under which keys and values go from device to device."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An attention, or its gradient, under a setting, and the ring that it becomes over `axes`.

    `result` is that of the forward pass.
    """

    op: NamedOp
    result: Value
    setting: Setting
    axes: tuple[str, ...]
    ring: Ring

    @property
    def qkv(self) -> tuple[Value, ...]:
        """The queries, keys and values."""
        return operands(self.op.ins, self.op.name)[:3]


def with_rings(program: NamedProgram, layout: Layout) -> tuple[NamedProgram, Layout]:
    """The program with rings for the attentions that the layout says, and rules for their blocks.

    Raises MD0341 for one that cannot be a ring.
    """
    uses = {use.op: use for use in _uses(program, layout)}
    if not uses:
        return program, layout
    along = with_renamed(program, _along(uses.values()))
    if along:
        counts = {dim: use.ring.parts for dim, use in along.items()}
        balanced = {op for op, use in uses.items() if use.ring.balanced}
        program = in_balanced_order(program, counts, balanced.__contains__)
        uses = {use.op: use for use in _uses(program, layout)}
    pinned = dict(_pinned(program, uses.values()))

    def in_steps(op: NamedOp) -> tuple[Node, ...]:
        use = uses.get(op)
        return (op,) if use is None else in_ring(op, use.ring)

    body = substitute(rewritten(program.body, in_steps), pinned)
    program = program.rebuilt(body, lambda value: pinned.get(value, value))
    return program, _ruled(layout, uses.values(), along)


def _ruled(layout: Layout, uses: Iterable[_Use], along: Mapping[str, _Use]) -> Layout:
    """The layout with rules for the dims that rings and the balanced order have made up."""
    for use in uses:
        layout = layout.also(use.ring.blocks, use.axes, use.op.span)
    for dim, use in along.items():
        for made_up in Halves(Dim(dim, use.ring.seq.size), use.ring.parts).split:
            layout = layout.also(made_up, use.axes, use.op.span)
    return layout


def _pinned(program: NamedProgram, uses: Iterable[_Use]) -> Iterator[tuple[Value, Value]]:
    """Keys and values with the split of the ring, where operators make them, and their gradients.

    A walk that sees the operator that renames positions would leave them whole, and gather them.
    """
    computed = {v for op in walk(program.body) for v in op.outs}
    for use in uses:
        mem = use.ring.mem.name
        for value in (*computed.intersection(use.qkv[1:]), *use.op.outs[1:3]):
            pinned = any(pin.dim == mem for pin in value.pins or value.source.pins)
            if value.type.has(mem) and not pinned:
                pin = Pin(mem, use.axes, use.op.span)
                yield value, replace(value, pins=(*value.pins, pin))


def _along(uses: Iterable[_Use]) -> dict[str, _Use]:
    """By dim, the balanced ring that goes along it. Raises MD0341 where these are split apart."""
    along: dict[str, _Use] = {}
    for use in (u for u in uses if u.ring.balanced):
        for dim in (use.ring.seq, use.ring.mem):
            first = along.setdefault(dim.name, use)
            if first.axes != use.axes:
                why = f"another one has `{dim}` split over {_listed(first.axes)}, and this one over"
                _refuse(use.op, use.result, use.setting, f"{why} {_listed(use.axes)}")
    return along


def without_effect(
    program: NamedProgram, layout: Layout, fused: bool = True
) -> Iterator[Diagnostic]:
    """A note for each setting that no attention of a program follows.

    Unless `fused`, attention is written in primitives: then none does. Raises MD0341, as
    `with_rings` does.
    """
    uses = list(_uses(program, layout))
    _along(uses)
    if layout.mesh.devices == 1:
        return
    followed = {use.setting for use in uses}
    unsplit: dict[Setting, NamedOp] = {}
    for op, setting, _ in _under_settings(program, layout):
        unsplit.setdefault(setting, op)
    for setting in layout.settings:
        if setting.name != NAME or setting.value not in (RING, ZIGZAG) or setting in followed:
            continue
        why, help = "it is for no attention of the program", None
        if not fused:
            why = "attention is written out here, and gathers keys and values"
            help = "the numbers are the same; to see the ring, compile the program"
        elif setting in unsplit:
            why = "no attention that it is for has split queries"
            seq = next(iter(_positions(unsplit[setting])), "seq")
            help = f"or split their positions, as `{seq} -> AXIS` does"
        fixes = (removal(setting.span, "remove the setting"),) if fused else ()
        message = f"`{setting}` changes nothing: {why}"
        told = advice(fixes, help)
        yield Diagnostic("MD0306", message, setting.span, "note", help=told, fixes=fixes)


# --- which attentions are rings --------------------------------------------------------------


def _under_settings(
    program: NamedProgram, layout: Layout
) -> Iterator[tuple[NamedOp, Setting, Value]]:
    """The attentions and gradients that a setting wants as rings, with the forward result."""
    if not any(setting.name == NAME for setting in layout.settings):
        return
    for op in walk(program.body):
        if op.name not in ATTENTION:
            continue
        result: Value = op.outs[0] if op.origin is None else op.origin.of
        setting = layout.setting_for(result, NAME)
        if setting is not None and setting.value in (RING, ZIGZAG):
            yield op, setting, result


def _uses(program: NamedProgram, layout: Layout) -> Iterator[_Use]:
    for op, setting, result in _under_settings(program, layout):
        splits = {d: axes for d, axes in layout.bind(result).splits.items() if axes}
        sizes = {d: layout.mesh.size(*axes) for d, axes in splits.items()}
        ringed = [d for d in _positions(op) if sizes.get(d.name, 1) > 1]
        if len(ringed) > 1:
            names = " and ".join(f"`{d}`" for d in ringed)
            why = f"{names} of its queries are split, and a ring runs along one"
            _refuse(op, result, setting, why)
        for seq in ringed:
            ring = _ring(op, result, setting, seq, sizes[seq.name])
            yield _Use(op, result, setting, splits[seq.name], ring)


def _positions(op: NamedOp) -> list[Dim]:
    """The dims of the queries that a ring may go along: that of the triangle, if there is one."""
    q, *_ = types = tuple(v.type for v in operands(op.ins, op.name))
    query = parts(types, dict(op.attrs)).query
    return list(op.attr("causal")) or [d for d in q.dims if d.name in query]


def _ring(op: NamedOp, result: Value, setting: Setting, seq: Dim, count: int) -> Ring:
    """The ring of `count` devices along `seq`. Raises MD0341."""
    _, mem = op.attr("dims")
    if len(operands(op.ins, op.name)) > 3:
        _refuse(op, result, setting, "it has another mask than the causal one")
    is_causal = bool(op.attr("causal"))
    if is_causal and seq.size != mem.size:
        sizes = f"`{seq}` has {seq.size} positions, and `{mem}` {mem.size}"
        _refuse(op, result, setting, f"{sizes}, which its causal mask compares")
    balanced = setting.value == ZIGZAG and is_causal
    blocks = count * 2 if balanced else count
    for dim in (seq, mem):
        if dim.size % blocks:
            kind = "half blocks" if balanced else "blocks"
            near = " or ".join(map(str, nearest(dim.size, blocks)))
            why = f"`{dim}`, of size {dim.size}, does not divide into {blocks} equal {kind}"
            _refuse(op, result, setting, why, f"or give `{dim}` the size {near}")
    return Ring(seq, mem, count, balanced)


def _listed(axes: tuple[str, ...]) -> str:
    return ", ".join(f"`{axis}`" for axis in axes)


def _refuse(op: NamedOp, result: Value, setting: Setting, why: str, first: str = "") -> NoReturn:
    """Raise MD0341 for an attention that cannot be a ring."""
    names = [*result.functions[-1:], *([result.label] if result.is_nameable else [])]
    apart = [name for name in names if name != setting.selector]
    text = f"{apart[0] if apart else setting.selector}: {NAME} = gather"
    write = Fix.write(setting.span, text, safe=False)
    add = inserted(setting.span.end, f", {text}", setting.span, f"add `{text}`")
    fixes = (add if apart else write,)
    message = f"`{setting}`: ring attention is not possible here: {why}"
    where = Related(op.span, "it is computed here")
    help = advice(fixes, first)
    fail("MD0341", message, setting.span, where, help=help, fixes=fixes)
