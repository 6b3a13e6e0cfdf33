"""Attention between its three statements and one operator: found there, and taken apart again.

`fuse_attention` makes `attention` of a softmax of scaled, perhaps masked products that is summed
with values. `attention_parts` is the definition in primitives, for `key` or `mem` split: a maximum,
then two sums that are ready at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import field, replace

from meshdsl.diagnostics import Source
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import in_blocks, makers, rewritten_block
from meshdsl.ir.types import Dim
from meshdsl.named.declarations import Declarations
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, NamedProgram, Node, Value, uses_of
from meshdsl.ops.attention import MASKED, is_last, parts
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse_layout

ATTENTION = ("attention", "attention_lse", "attention_grad")

# --- three statements are one operator ---------------------------------------------------------


Spoken = Collection[tuple[str, str]]
"""The tensors that a file speaks of: the name, and a dim that one must have; empty for any."""


def is_spoken_of(value: Value, spoken: Spoken) -> bool:
    """Whether a file speaks of a tensor."""
    return any((value.label, dim) in spoken for dim in ("", *value.type.names))


def noted(program: NamedProgram, unspoken: Set[str], kept: Set[str]) -> NamedProgram:
    """`program`, with the names that a pass has left out or kept by what a file speaks of."""
    left_out, stay = program.unspoken | unspoken, program.kept_spoken | kept
    return replace(program, unspoken=left_out, kept_spoken=stay)


def fuse_attention(program: NamedProgram, spoken: Spoken = ()) -> NamedProgram:
    """`program` with `attention` for a softmax of products that only a sum with values reads.

    Scores and probabilities are not stored then: those that are read elsewhere, are pinned or that
    are `spoken` of, by a layout, stay. The mask `iota[seq] >= iota[mem]` becomes an attribute.
    """
    for node in every(program.body):
        if isinstance(node, NamedOp) and node.name in ("softmax", "attention"):
            fusing = _Fusing(uses_of(program), frozenset(spoken), makers(every(program.body)))
            body = in_blocks(program.body, fusing.block)
            return noted(replace(program, body=body), fusing.unspoken, fusing.kept)
    return program


@dataclass(frozen=True, slots=True)
class _Fusing:
    """`made` has the operator that makes each value, `here` those of one block.

    `unspoken` are the names of what nobody would miss, `kept` of what is spoken of: with others
    spoken of or not, the same is fused.
    """

    uses: Counter[Value]
    spoken: frozenset[tuple[str, str]]
    made: Mapping[Value, NamedOp]
    unspoken: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        here = makers(nodes)
        return rewritten_block(nodes, lambda op: (self.by_position(self.fused(op, here)),))

    def fused(self, op: NamedOp, here: Mapping[Value, NamedOp]) -> NamedOp:
        """The attention that an einsum ends, or the einsum."""
        if op.name != "einsum" or len(op.ins) != 2:
            return op
        for p, v in (op.ins, reversed(op.ins)):
            softmax = self.hidden(p, "softmax", here, op)
            if softmax is None or p is v:
                continue
            mem = softmax.attr("dim")
            attended = self.scored(softmax.ins[0], here, op)
            if attended is None or not v.type.has(mem.name) or op.out.type.has(mem.name):
                continue
            (q, k, *mask), key, scale = attended
            ins = self.ordered(q, k, v, mask, mem)
            if ins is None or not _keeps_all(op.out, p, v, mem):
                continue
            attrs = {"dims": (key, mem), "out": op.out.type.dims, "scale": scale, "causal": ()}
            return replace(op, name="attention", ins=ins, attrs=tuple(attrs.items()))
        return op

    def hidden(
        self, value: Value, name: str, here: Mapping[Value, NamedOp], reader: NamedOp
    ) -> NamedOp | None:
        """The operator `name` that makes a value, if nobody but `reader` would miss that."""
        op = here.get(value)
        if op is None or op.name != name or self.uses[value] != 1 or value.pins:
            return None
        same = (op.phase, op.block) == (reader.phase, reader.block)
        if not same:
            return None
        if is_spoken_of(value, self.spoken):
            self.kept.add(value.label)
            return None
        self.unspoken.add(value.label)
        return op

    def scored(
        self, value: Value, here: Mapping[Value, NamedOp], reader: NamedOp
    ) -> tuple[tuple[Value, ...], Dim, float] | None:
        """The factors of scores and their mask, the dim they are summed over, and the scale."""
        mask: tuple[Value, ...] = ()
        if (where := self.hidden(value, "where", here, reader)) is not None:
            seen, value, hidden = where.ins
            number = _number(hidden, self.made)
            if number is None or not -1e300 < number <= MASKED:
                return None
            mask = (seen,)
        scale = 1.0
        for name in ("div", "mul"):
            scaled = self.hidden(value, name, here, reader)
            factor = None if scaled is None else _factor(scaled, self.made)
            if factor is not None:
                value, scale = factor
        product = self.hidden(value, "einsum", here, reader)
        if product is None or len(product.ins) != 2 or product.ins[0] is product.ins[1]:
            return None
        named = {d.name: d for v in product.ins for d in v.type.dims}
        summed = [d for n, d in named.items() if not product.out.type.has(n)]
        if len(summed) != 1 or not all(v.type.has(summed[0].name) for v in product.ins):
            return None
        return (*product.ins, *mask), summed[0], scale

    def ordered(
        self, q: Value, k: Value, v: Value, mask: list[Value], mem: Dim
    ) -> tuple[Value, ...] | None:
        """The operands of the operator; None where both factors of the scores have `mem`."""
        if q.type.has(mem.name):
            q, k = k, q
        return None if q.type.has(mem.name) or not k.type.has(mem.name) else (q, k, v, *mask)

    def by_position(self, op: NamedOp) -> NamedOp:
        """The operator without its mask where that is `iota[seq] >= iota[mem]`.

        Where it is `iota[mem] <= last`, that number is in its place.
        """
        if op.name != "attention" or len(op.ins) != 4:
            return op
        q, k, v, mask = op.ins
        mem = op.attr("dims")[1]
        compared = self.made.get(mask)
        if compared is None or compared.name not in ("ge", "le"):
            return op
        ins = compared.ins if compared.name == "ge" else compared.ins[::-1]
        above, below = (self.made.get(i) for i in ins)
        if below is None or below.name != "iota" or below.attr("dim") != mem:
            return op
        if is_last(ins[0].type) and _number(ins[0], self.made) is None:
            return replace(op, ins=(q, k, v, ins[0]))
        if above is None or above.name != "iota":
            return op
        seq = above.attr("dim")
        if not q.type.has(seq.name):
            return op
        attrs = {**dict(op.attrs), "causal": (seq,)}
        return replace(op, ins=(q, k, v), attrs=tuple(attrs.items()))


def _number(value: Value, made: Mapping[Value, NamedOp]) -> float | None:
    op = made.get(value)
    return float(op.attr("value")) if op is not None and op.name == "constant" else None


def _factor(op: NamedOp, made: Mapping[Value, NamedOp]) -> tuple[Value, float] | None:
    """The tensor that an operator scales by a number, and that number."""
    left, right = op.ins
    number = _number(right, made)
    if number is None and op.name == "mul":
        left, number = right, _number(left, made)
    if number is None or number == 0:
        return None
    return left, 1 / number if op.name == "div" else number


def _keeps_all(out: Value, p: Value, v: Value, mem: Dim) -> bool:
    """Whether a sum over `mem` alone ends the attention."""
    return {*p.type.names, *v.type.names} - {mem.name} == set(out.type.names)


def spoken_of(declared: Declarations, layout: str | None = None) -> frozenset[tuple[str, str]]:
    """The tensors that a layout, an `sbp` block or an expectation of a file speaks of.

    So does `layout`, where it is not the name of one of the file, but one that is written out.
    A rule speaks of those that have its dim, unless its layout says the same of all tensors.
    """
    layouts = [*declared.layouts.values()]
    if layout is not None and layout not in declared.layouts:
        node, _ = parse_layout(Source("--layout", layout))  # What is wrong is reported elsewhere.
        layouts += [node] if node is not None else []
    paths = [s.selector for layout in layouts for s in layout.settings]
    for block in declared.sbps.values():
        paths += [path for entry in block.entries for path in (entry.tensor, entry.at)]
    for expected in declared.expects:
        paths += [e.tensor for e in expected.entries if isinstance(e, ast.ExpectPlacement)]
    rules = (rule for layout in layouts for rule in _telling(layout, declared))
    told = {(name.text, rule.dim.text) for rule in rules for name in rule.selector}
    return frozenset((*told, *((name.text, "") for path in paths for name in path)))


def _telling(layout: ast.LayoutDecl, declared: Declarations) -> Iterator[ast.RuleDecl]:
    """The rules of a layout and of those that it extends.

    Less those for dims of which all rules say what one says of all tensors.
    """
    chain, extended = {layout.name.text: layout}, layout.base
    while extended is not None and extended.text in declared.layouts.keys() - chain.keys():
        chain[extended.text] = declared.layouts[extended.text]
        extended = chain[extended.text].base
    rules = [rule for each in chain.values() for rule in each.rules]
    for rule in rules:
        alike = [r for r in rules if r.dim.text == rule.dim.text]
        axes = {tuple(axis.text for axis in r.axes) for r in alike}
        if len(axes) > 1 or all(r.selector for r in alike) or any(r.keep for r in alike):
            yield rule


# --- and its definition ------------------------------------------------------------------------


@dataclass(slots=True)
class _AttentionParts:
    """The primitives of one attention, being emitted."""

    op: NamedOp
    emit: Emit

    @property
    def mem(self) -> Dim:
        mem: Dim = self.op.attr("dims")[1]
        return mem

    def hidden(self, q: Value, mask: tuple[Value, ...]) -> tuple[Value, ...]:
        """The mask, if there is one."""
        del q
        for seq in self.op.attr("causal"):
            rows, columns = (self.emit("iota", dim=d) for d in (seq, self.mem))
            return (self.emit("ge", rows, columns),)
        if mask and is_last(mask[0].type):
            return (self.emit("le", self.emit("iota", dim=self.mem), mask[0]),)
        return mask

    def scores(self, q: Value, k: Value, v: Value, mask: tuple[Value, ...]) -> Value:
        """The scores over the rows and `mem`."""
        types = tuple(x.type for x in (q, k, v, *mask))
        rows = parts(types, dict(self.op.attrs)).rows
        named = {d.name: d for x in (q, k) for d in x.type.dims}
        dims = tuple(named[n] for n in (*rows, self.mem.name) if n in named)
        scores = self.emit("einsum", q, k, dims=dims)
        if self.op.attr("scale") != 1:
            scores = self.emit("mul", scores, self.op.attr("scale"))
        return self.emit("where", mask[0], scores, MASKED) if mask else scores


def attention_parts(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> tuple[Value, ...]:
    """The results of an attention or its gradient on `ins`, emitted in primitives."""
    made = _AttentionParts(op, emit)
    return _gradient(made, ins) if op.name == "attention_grad" else _forward(made, ins)


def _forward(made: _AttentionParts, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    q, k, v, *hidden = ins
    mask = made.hidden(q, tuple(hidden))
    scores = made.scores(q, k, v, mask)
    top = made.emit("stop_gradient", made.emit("max", scores, dims=(made.mem,)))
    e = made.emit("exp", made.emit("sub", scores, top))
    out = made.op.attr("out")
    total = made.emit("sum", e, dims=(made.mem,))
    o = made.emit("div", made.emit("einsum", e, v, dims=out), total)
    if made.op.name == "attention":
        return (o,)
    return o, made.emit("add", top, made.emit("log", total))


def _gradient(made: _AttentionParts, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """With p the softmax: dv = p·do, and ds = p * (do·v - do·o), as `softmax_grad`."""
    do, q, k, v, o, lse, *hidden = ins
    mask = made.hidden(q, tuple(hidden))
    scores = made.scores(q, k, v, mask)
    p = made.emit("exp", made.emit("sub", scores, lse))
    if hidden:  # beside -1e9 the logarithm of their number is nothing
        sees = made.emit("gt", lse, MASKED / 2)
        p = made.emit("where", sees, p, 1 / made.mem.size)
    dims = {d.name: d for x in (scores, lse) for d in x.type.dims}
    dp = made.emit("einsum", do, v, dims=tuple(dims.values()))
    along = made.emit("einsum", do, o, dims=lse.type.dims)
    ds = made.emit("mul", p, made.emit("sub", dp, along))
    if mask:
        ds = made.emit("where", mask[0], ds, 0.0)
    if made.op.attr("scale") != 1:
        ds = made.emit("mul", ds, made.op.attr("scale"))
    return (
        made.emit("einsum", ds, k, dims=q.type.dims),
        made.emit("einsum", ds, q, dims=k.type.dims),
        made.emit("einsum", p, do, dims=v.type.dims),
    )
