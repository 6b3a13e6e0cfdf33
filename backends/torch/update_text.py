"""The text of updates: one call for a list of parameters, each with its gradient and states.

Parameters and states are given by name. Where an update reads them as they are given, its lists
are made of the names: a state that nothing else reads has no variable.
"""

from __future__ import annotations

from collections.abc import Iterator

from meshdsl.backends.torch.block_text import BlockText
from meshdsl.backends.torch.line_breaks import MANY, quoted
from meshdsl.backends.torch.text_state import TextState
from meshdsl.device.ir import Compute, DeviceProgram, Var, only_on
from meshdsl.device.liveness import is_constant, overwrites, uses
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import makes_of
from meshdsl.ir.types import LARGE
from meshdsl.ops.opdef import lookup
from meshdsl.ops.torch_expressions import aligned
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class UpdateLists:
    """The operands of an update of several parameters, by the parameter's name where it has one.

    `keys` are, by operand, what follows the name of the parameter in the name of what is given;
    None where some operand is another tensor than one that is given.
    """

    names: tuple[str, ...]
    keys: tuple[tuple[str, str] | None, ...]


def operands(node: Compute) -> list[tuple[Var, ...]]:
    """The operands of each parameter of an update."""
    each = lookup(node.name).each
    count = len(overwrites(node)) // len(lookup(node.name).overwrites)
    return [node.ins[n * each : (n + 1) * each] for n in range(count)]


class UpdateText:
    """Writes updates of several parameters."""

    def __init__(self, state: TextState, blocks: BlockText) -> None:
        self.state, self.blocks, self.out = state, blocks, state.out
        program = state.program
        nodes = (node for node in every(program.body) if isinstance(node, Compute))
        self._numbers = {n.out: n.attr("value") for n in nodes if is_constant(n)}
        self.given = {v: "params" for v in program.params} | {v: "states" for v in program.states}
        self.of = {s.value: s.of for s in program.placed.named.states}
        self.words: tuple[str, str] | None = None
        self.lists: dict[Compute, UpdateLists] = {}
        # The states that are only read by name.
        self.by_name: frozenset[Var] = frozenset()
        # By update, those that one stage does alone and that are written as a part of it.
        self.parts: dict[Compute, tuple[Compute, ...]] = {}
        if program.updates:
            self.lists.update(self._lists(program))
            if program.placed.pipe is not None:
                self.parts.update(self._parts(program))
            self.by_name = frozenset(self._by_name(program))
        self.joined = {part for parts in self.parts.values() for part in parts}
        # The updates by the gradients that they read.
        self.updates = {tuple(row[1] for row in operands(n)): n for n in self.lists}
        self.gathered: Compute | None = None

    def _lists(self, program: DeviceProgram) -> Iterator[tuple[Compute, UpdateLists]]:
        for node in every(program.body):
            if not isinstance(node, Compute) or lookup(node.name).each < 2:
                continue
            count, lists = len(operands(node)), self._list_of(node)
            if count < 2 or len({*lists.names}) < count:
                continue
            if count >= MANY or any(key and key[0] == "states" for key in lists.keys):
                yield node, lists

    def _parts(self, program: DeviceProgram) -> Iterator[tuple[Compute, tuple[Compute, ...]]]:
        """The updates in whose lists one stage has more, each with the updates of these.

        They follow it, read what is there before it, and differ in nothing but their tensors.
        """
        places = {node: at for at, node in enumerate(program.body)}
        made_at = {v: at for node, at in places.items() for v in makes_of(node)}
        alone = [n for n in places if isinstance(n, Compute) and only_on(n) is not None]
        for node in [n for n in self.lists if n in places and only_on(n) is None]:
            parts = [n for n in alone if places[n] > places[node] and self._is_part(n, node)]
            parts = [n for n in parts if max(made_at.get(v, -1) for v in n.ins) < places[node]]
            if parts:
                yield node, tuple(parts)
                self.lists.update((part, self._list_of(part)) for part in parts)

    def _is_part(self, part: Compute, of: Compute) -> bool:
        """Whether an update may be in the lists of another, which copies no gradients for it."""
        record = lookup(of.name)
        if part.name != of.name or part.attrs != of.attrs:
            return False
        each, count = record.each, len(record.overwrites)
        scalars = [self._numbers.get(v, v) for v in of.ins[len(of.outs) // count * each :]]
        part_scalars = [self._numbers.get(v, v) for v in part.ins[len(part.outs) // count * each :]]
        alike = [v.local.dtype for v in part.ins[:each]] == [v.local.dtype for v in of.ins[:each]]
        by_name = self._list_of(part).keys == self.lists[of].keys
        named = by_name and all(self.lists[of].keys[:1] + self.lists[of].keys[2:])
        copied = self._copies(part) or self._copies(of)
        return alike and named and scalars == part_scalars and not copied

    def _copies(self, node: Compute) -> bool:
        """Whether an update copies gradients."""
        numbers = {i: self._numbers[v] for i, v in enumerate(node.ins) if v in self._numbers}
        scratch = lookup(node.name).scratch
        return scratch is not None and bool(scratch(node.local, numbers))

    def _list_of(self, node: Compute) -> UpdateLists:
        """The operands of an update by name."""
        each = operands(node)
        names = tuple(name for name in map(self._name, each) if name is not None)
        if len(names) < len(each):
            return UpdateLists((), ())
        return UpdateLists(names, tuple(self._key(names, col) for col in zip(*each, strict=True)))

    def _name(self, row: tuple[Var, ...]) -> str | None:
        """The name of the parameter that operands belong to."""
        for var in row:
            value = self.of.get(var.value, var.value) if var in self.given else None
            if value is not None and value.name:
                return value.name
        return None

    def _key(self, names: tuple[str, ...], column: tuple[Var, ...]) -> tuple[str, str] | None:
        """The table and the end of the name of what is given, where it is so for all parameters."""
        tables = {self.given.get(v, "") for v in column}
        words = [v.value.name or "" for v in column]
        ends = {word.removeprefix(name) for word, name in zip(words, names, strict=True)}
        if len(tables) > 1 or len(ends) > 1 or "" in tables:
            return None
        table, end = tables.pop(), ends.pop()
        return (table, end) if words == [f"{name}{end}" for name in names] else None

    def _by_name(self, program: DeviceProgram) -> Iterator[Var]:
        reads, updated = uses(program), dict(program.updates)
        outputs = {v for _, v in program.outputs}
        for node, lists in self.lists.items():
            written = dict(zip((node.ins[i] for i in overwrites(node)), node.outs, strict=True))
            for row in operands(node):
                for var, key in zip(row, lists.keys, strict=True):
                    new = written.get(var)
                    if key is None or new is None or updated.get(var) is not new:
                        continue
                    if reads[var] == reads[new] == 1 and new not in outputs:
                        yield var

    # --- the text --------------------------------------------------------------------------------

    def texts(self, node: Compute, rows: list[tuple[Var, ...]]) -> tuple[str, ...]:
        """The list of each operand of the parameters; what they are made of is written before.

        `rows` are the operands of each.
        """
        lists = self.lists.get(node)
        if lists is None:
            return tuple(self._list(column, rows) for column in zip(*rows, strict=True))
        grads, name = self._names()
        self._gather(node, rows)
        for part in self.parts.get(node, ()):
            self._add(part, grads)
        if any(row[1].local.bytes >= LARGE for row in rows):
            self.state.helpers = [grads]
        texts = []
        for index, (column, key) in enumerate(
            zip(zip(*rows, strict=True), lists.keys, strict=True)
        ):
            if index == 1:
                texts.append(f"list({grads}.values())")
            elif key is None:
                texts.append(self._list(column, rows))
            else:
                table, end = key
                text = f'f"{{{name}}}{end}"' if end else name
                texts.append(f"[{table}[{text}] for {name} in {grads}]")
        return tuple(texts)

    def summed(self, node: Compute) -> str:
        """The list of the tensors whose squares are added up: gradients by name, if they are so."""
        of = self.updates.get(node.ins)
        if of is None:
            return f"[{', '.join(map(self.state.name, node.ins))}]"
        self._gather(of, operands(of))
        return f"{self._names()[0]}.values()"

    def _gather(self, node: Compute, rows: list[tuple[Var, ...]]) -> None:
        """Write the gradients that an update reads, by name, unless the last ones are those."""
        if self.gathered is node:
            return
        self.gathered = node
        pairs = zip(self.lists[node].names, rows, strict=True)
        items = ", ".join(f"{quoted(n)}: {self._text(row[1], row)}" for n, row in pairs)
        self.out.assign((self._names()[0],), f"{{{items}}}")

    def _add(self, part: Compute, grads: str) -> None:
        """Write the gradients that one stage has more."""
        assert self.blocks.pipe is not None
        stage = self.blocks.coordinate(self.blocks.pipe.axis)
        with self.out.under(f"if {stage} == {only_on(part)}:"):
            for name, row in zip(self.lists[part].names, operands(part), strict=True):
                self.out.statement(f"{grads}[{quoted(name)}] = {self._text(row[1], row)}")

    def _names(self) -> tuple[str, str]:
        """The variable of gradients by name, and that of a name: each update has them anew."""
        variables = self.state.variables
        self.words = self.words or (variables.names.fresh("grads"), variables.names.fresh("name"))
        return self.words

    def _list(self, column: tuple[Var, ...], rows: list[tuple[Var, ...]]) -> str:
        return f"[{', '.join(self._text(v, row) for v, row in zip(column, rows, strict=True))}]"

    def _text(self, var: Var, row: tuple[Var, ...]) -> str:
        """An operand, aligned with its parameter."""
        if var in self.state.constants:
            return self.state.tensor(var)
        return aligned(self.state.name(var), var.local.names, row[0].local.names)
