"""Statements of the language from a run of operators: one body of a function, program or loop.

Operators that have no name and one use are nested back into expressions. The order of evaluation
stays: what waits to be used stands on a stack, as in the machine that evaluates the expression. A
program whose order no expression has (none that was read from a text) gets names for what waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshdsl.named.ir import Init, Loop, Node, Op, Param, Value
from meshdsl.named.written_expressions import (
    HEAD_MARKS,
    Written,
    amount,
    expression,
    listed_dims,
    literal,
    literal_dtype,
    marked,
    pinned,
    places_of_numbers,
    product_sum,
)
from meshdsl.named.written_names import Names
from meshdsl.named.written_params import dead_use, is_target
from meshdsl.named.written_uses import (
    Group,
    Item,
    Loops,
    ScaledSum,
    blocks_of,
    defined,
    free,
    items,
    nodes_of,
    used,
)

if TYPE_CHECKING:
    from meshdsl.named.written_functions import Writer

INDENT = "  "


@dataclass(frozen=True, slots=True, eq=False)
class Pending:
    """An expression that waits to be used. `constant`: a number, which is evaluated last."""

    value: Value
    written: Written
    constant: bool
    blocks: frozenset[int | None]

    @property
    def calls(self) -> bool:
        """Whether a function is called in it, whose parameters come before those declared next."""
        return HEAD_MARKS[0] in self.written.text


@dataclass(frozen=True, slots=True)
class Statement:
    """A statement of one or more lines, and the `recompute` blocks of its operators."""

    lines: tuple[str, ...]
    blocks: frozenset[int | None] = frozenset()


class Block:
    """Writes the statements of one body.

    `finals` are read when all is done. Where `transposes`, the language reorders their dims itself.
    `loops` are the loops around, those around the calls included; `block` is the `recompute`.
    """

    def __init__(
        self,
        writer: Writer,
        names: Names,
        nodes: Sequence[Node],
        finals: Sequence[Value],
        *,
        loops: Loops = (),
        block: int | None = None,
        transposes: bool = False,
    ) -> None:
        self.writer, self.names, self.loops, self.block = writer, names, loops, block
        self.items = items(nodes, names.path)
        self.statements: list[Statement] = []
        self.stack: list[Pending] = []
        self.literals: dict[Value, Written] = {}
        self.skipped: set[Item] = set()
        self.waiting: frozenset[int | None] = frozenset()
        self.implicit = _implicit(nodes, finals, names) if transposes else {}
        self.finals = [self.implicit[v].ins[0] if v in self.implicit else v for v in finals]
        self.uses, self.in_loops = _uses(self.items, self.finals, self.implicit)

    def write(self) -> None:
        """Write all statements; what is returned or carried on may wait on the stack."""
        self._declare(-1)
        for index, item in enumerate(self.items):
            if item not in self.skipped:
                self._declare(self.writer.params.limit(nodes_of(item)))
                self._item(item, self.items[index + 1 :])
                self._declare(-1)

    def lines(self) -> list[str]:
        """The lines of all statements, those of one `recompute` in its braces."""
        found: list[str] = []
        inside: int | None = None
        for statement in self.statements:
            own = _only(statement.blocks, inside)
            own = own if own != self.block else None
            if own != inside:
                found += ["}"] if inside is not None else []
                found += ["recompute {"] if own is not None else []
                inside = own
            pad = INDENT if inside is not None else ""
            found += [pad + line for line in statement.lines]
        return [*found, "}"] if inside is not None else found

    # --- items -------------------------------------------------------------------------------

    def _item(self, item: Item, rest: Sequence[Item]) -> None:
        self.waiting = frozenset(blocks_of(nodes_of(item)))
        if isinstance(item, Group):
            self._group(item, rest)
        elif isinstance(item, Loop):
            self._loop(item)
        elif isinstance(item, ScaledSum):
            self._give(item.factors[-1], self._sum(item.einsum, item.factors))
        elif item.name == "constant":
            self.stack.append(Pending(item.out, literal(item), True, self.waiting))
        elif item.outs[0] not in self.implicit:
            self._op(item)

    def _op(self, op: Op) -> None:
        assert len(op.outs) == 1, f"{op.name} has {len(op.outs)} outputs"
        if op in self.writer.params.products:
            self._give(op, self._sum(op, ()))
            return
        is_copy = op.name == "identity" and self.names.has(op.out) and not self._is_fresh(op)
        numbers = [self._is_number(v) for v in op.ins]
        operands = self.operands(op.ins, op.name)
        if op.name == "transpose" and op.out.type.dtype.kind == "bool":
            # An einsum is of numbers; only an assignment reorders the dims of booleans.
            name = op.out.label if self.names.has(op.out) else "t"
            self._assign(op.out, name, operands[0], self.names.lives.at[op], dims=True)
        elif is_copy or (is_target(op) and self.names.has(op.out)):
            self._give(op, operands[0])
        else:
            self._give(op, expression(op, operands, numbers))

    def _is_fresh(self, op: Op) -> bool:
        """Whether an assignment would name the operand instead of making a copy of it."""
        before = self.names.lives.before.get(op)
        return isinstance(before, Op) and before.outs == op.ins and op.ins[0].name is None

    def _give(self, op: Op, written: Written) -> None:
        """What an operator yields: assigned if it has a name here, else left to be used."""
        self._yield(op.out, written, self.names.lives.at[op], is_target(op))

    def _yield(self, value: Value, written: Written, at: int, dims: bool = False) -> None:
        if self.names.has(value):
            self._assign(value, value.label, written, at, dims)
        elif self.uses[value] == 1 and value not in self.in_loops:
            self.stack.append(Pending(value, written, False, self.waiting))
        else:
            self._assign(value, "t", written, at)

    def _assign(
        self, value: Value, wanted: str, written: Written, at: int, dims: bool = False
    ) -> None:
        self.flush()
        name = self.names.bind(value, wanted, at)
        target = name
        if dims or value.pins:
            target += f"[{pinned(value, value.type.dims)}]"
        self.say(f"{target} = {written.text}")

    def say(self, *lines: str) -> None:
        """Append a statement, in the `recompute` block of the operators that it writes."""
        self.statements.append(Statement(lines, self.waiting))
        self.waiting = frozenset()

    def copied(self, text: str) -> str:
        """A name of its own for what `text` says, before others take the names in it."""
        name = self.names.fresh("t")
        self.names.used.add(name)
        self.say(f"{name} = {text}")
        return name

    # --- what waits --------------------------------------------------------------------------

    def operands(
        self, values: Sequence[Value], name: str = "", numbers_last: bool = True
    ) -> list[Written]:
        """The texts of operands. What waits is taken off the stack if it is on top, in order."""
        waiting = {p.value: p for p in self.stack}
        here = [waiting[v] for v in values if v in waiting]
        order = [p for p in here if not p.constant]
        if numbers_last:
            order += [p for p in here if p.constant]
        elif order == [p for p in self.stack if p in here and not p.constant]:
            order = [p for p in self.stack if p in here]
        self._pop(order)
        known = {p.value: p.written for p in order} | self.literals
        types = [None if self._is_number(v, waiting) else v.type for v in values]
        dtype = literal_dtype(name, types)
        found = []
        for value, type_ in zip(values, types, strict=True):
            written = known.get(value) or self._text(value)
            if type_ is None and name and value.type.dtype.name != dtype:
                written = Written(f"cast({written.text}, {value.type.dtype})")
            found.append(written)
        return found

    def _text(self, value: Value) -> Written:
        """A value that has a name; the slice of one is written like the whole."""
        while value not in self.names.text:
            value = self.writer.params.slices[value]
        return self.names.text[value]

    def _pop(self, wanted: list[Pending]) -> None:
        tail = self.stack[len(self.stack) - len(wanted) :]
        if tail != wanted:
            self.flush()
            return
        del self.stack[len(self.stack) - len(wanted) :]
        self.waiting = self.waiting.union(*(p.blocks for p in wanted))

    def _is_number(self, value: Value, waiting: dict[Value, Pending] | None = None) -> bool:
        pending = waiting if waiting is not None else {p.value: p for p in self.stack}
        return value in self.literals or (value in pending and pending[value].constant)

    def flush(self) -> None:
        """Give names to all that waits; numbers need none."""
        stack, self.stack, waiting = self.stack, [], self.waiting
        for pending in stack:
            if pending.constant:
                self.literals[pending.value] = pending.written
            else:
                self.waiting = pending.blocks
                name = self.names.fresh("t")
                self.names.put(pending.value, name)
                self.say(f"{name} = {pending.written.text}")
        self.waiting = waiting

    def _sum(self, einsum: Op, factors: Sequence[Op]) -> Written:
        """`sum[…](x * y * 2.0)`: each number where it was evaluated."""
        constants = [f.ins[1] for f in factors]
        after = places_of_numbers(einsum.ins, constants, [p.value for p in self.stack])
        texts = self.operands((*einsum.ins, *constants), numbers_last=False)
        count = len(einsum.ins)
        return product_sum(einsum, texts[:count], texts[count:], after)

    # --- parameters --------------------------------------------------------------------------

    def _declare(self, limit: int) -> None:
        """Declare the parameters whose turn it is; calls that have nothing else stand here too."""
        params, path = self.writer.params, self.names.path
        if self.stack and limit < params.next:
            return
        while True:
            taken = list(params.take(path, self.loops, limit))
            called = params.call_of_nothing(path, self.loops)
            if (taken or called) and any(p.calls for p in self.stack):
                self.flush()
            for param in taken:
                self._param(param)
            if called is None:
                return
            self.waiting = frozenset()
            self._group(Group(called, params.function_of(called), ()), ())

    def _param(self, param: Param) -> None:
        value = param.value
        dims = value.type.dims[len(self.loops) :]
        self.names.put(value, value.label)
        dtype = "" if value.type.dtype.name == "f32" else f": {value.type.dtype}"
        lines = [f"param {value.label}[{pinned(value, dims)}]{dtype}{_initialiser(param)}"]
        if value in self.writer.params.wrong_fans:
            lines += self._dead_use(param)
        self.statements.append(Statement(tuple(lines)))

    def _dead_use(self, param: Param) -> list[str]:
        """A use that nobody reads, so that the first one sums what it summed in the original."""
        use = dead_use(param, len(self.loops))
        name = self.names.fresh(f"{param.value.label}_first_use")
        self.names.used.add(name)
        text = param.value.label
        text = f"sum[{listed_dims(use.summed)}]({text})" if use.summed else f"-{text}"
        lines = [f"{name} = {text}"]
        for loop in reversed(use.loops):
            lines = [f"repeat {marked(loop)} {{", *(INDENT + line for line in lines), "}"]
        return lines

    # --- calls and loops ---------------------------------------------------------------------

    def _group(self, group: Group, rest: Sequence[Item]) -> None:
        from meshdsl.named.written_functions import call

        names = self.names
        values = self._results(group)
        copies = [c for c in _copies(rest) if names.has(c.out) and self.uses[c.ins[0]] == 1]
        if len(values) > 1:
            copied = [c.ins[0] for c in copies]
            values.sort(key=lambda v: copied.index(v) if v in copied else -names.has(v))
        written = call(self, group, values)
        at = max((names.lives.at[n] for n in group.nodes), default=0)
        if len(values) == 1:
            self._yield(values[0], written, at)
            return
        self.flush()
        by_value = {c.ins[0]: c for c in copies}
        targets = [self._target(v, by_value.get(v), at) for v in values]
        self.say(f"{', '.join(targets) or names.fresh('unused')} = {written.text}")

    def _results(self, group: Group) -> list[Value]:
        """What a call makes that is read outside of it, or got its name outside."""
        params = self.writer.params
        own: Counter[Value] = Counter()
        for value, count in used(group.nodes).items():
            own[params.whole(value)] += count
        made = (*_in_order(group.nodes), *params.inside(group.path))
        return [v for v in made if self.writer.uses[v] > own[v] or self.names.has(v)]

    def _target(self, value: Value, copy: Op | None, at: int) -> str:
        if copy is None:
            return self.names.bind(value, value.label if self.names.has(value) else "t", at)
        self.skipped.add(copy)
        return self.names.bind(copy.out, copy.out.label, self.names.lives.at[copy])

    def _loop(self, loop: Loop) -> None:
        from meshdsl.named.written_loops import write_loop

        write_loop(self, loop)


def _only(blocks: frozenset[int | None], otherwise: int | None) -> int | None:
    """The one `recompute` block of a statement; `otherwise` for one without operators."""
    if not blocks:
        return otherwise
    return next(iter(blocks)) if len(blocks) == 1 else None


def _initialiser(param: Param) -> str:
    if param.init == Init("normal"):
        return ""
    return f" = {param.init.kind}({', '.join(amount(x).text for x in param.init.args)})"


# --- what a block holds ----------------------------------------------------------------------


def _implicit(nodes: Sequence[Node], finals: Sequence[Value], names: Names) -> dict[Value, Op]:
    """Transposes without a name here that are all that is left to do."""
    made = {n.out: n for n in nodes if isinstance(n, Op) and n.name == "transpose"}
    found = {v: made[v] for v in finals if v in made and not names.has(v)}
    return {v: op for v, op in found.items() if op.ins[0].type.dims != op.out.type.dims}


def _uses(
    found: Sequence[Item], finals: Sequence[Value], implicit: dict[Value, Op]
) -> tuple[Counter[Value], set[Value]]:
    """How often each value is written in a block, and those written inside its loops."""
    uses: Counter[Value] = Counter(finals)
    inside: set[Value] = set()
    for item in found:
        if isinstance(item, Group):
            uses.update(free(item.nodes))
        elif isinstance(item, Loop):
            own = defined((item,))
            uses.update(c.init for c in item.carries)
            inside.update(v for v in used(item.body) if v not in own)
        elif item not in implicit.values():
            uses.update(v for n in nodes_of(item) if isinstance(n, Op) for v in n.ins)
    return uses, inside


def _in_order(nodes: Sequence[Node]) -> list[Value]:
    found: list[Value] = []
    for node in nodes:
        found += node.outs if isinstance(node, Op) else [c.result for c in node.carries]
    return found


def _copies(rest: Sequence[Item]) -> list[Op]:
    """The copies right behind a call: assignments of its results."""
    found: list[Op] = []
    for item in rest:
        if not isinstance(item, Op) or item.name != "identity":
            break
        found.append(item)
    return found
