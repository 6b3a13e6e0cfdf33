"""`def`s written back from inlined calls: calls that read the same share one.

A call is written out with its dims between marks. Two calls of one function that differ in nothing
but dims become one `def` with dim parameters; others get a `def` of their own, named like the call
(`attention_2`), which leaves every path as it was.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from meshdsl.ir.types import TensorType
from meshdsl.named.ir import Loop, Node, Program, Value, walk
from meshdsl.named.written_blocks import INDENT, Block
from meshdsl.named.written_expressions import (
    DIM_MARKS,
    HEAD_MARKS,
    Unwritable,
    Written,
    listed_dims,
)
from meshdsl.named.written_loops import carried_name
from meshdsl.named.written_names import Names, is_speakable
from meshdsl.named.written_params import Params
from meshdsl.named.written_uses import (
    AT_THE_END,
    Group,
    Lives,
    blocks_of,
    defined,
    free,
    items,
    scope_of,
    used,
)
from meshdsl.ops.opdef import load_all

if TYPE_CHECKING:
    from collections import Counter

_DIM = re.compile("{}(.*?){}".format(*DIM_MARKS))
_HEAD = re.compile(r"{}(\d+){}".format(*HEAD_MARKS))
_ARGUMENT = re.compile("\ue004(\\d+)\ue005")
_KEYWORD = re.compile("\ue006(\\w+):(\\d+)\ue007")


@dataclass(frozen=True, slots=True)
class Instance:
    """One call: its dims in order of appearance, its arguments, the type of its only result.

    `names` are those of the parameters that the arguments were given as, where that is known.
    """

    dims: tuple[str, ...]
    arguments: tuple[Value, ...]
    names: tuple[str | None, ...]
    result: TensorType | None


@dataclass(slots=True)
class Definition:
    """A `def` in the making. `forced` are names of arguments that its loops assign, by number."""

    name: str
    key: tuple[object, ...]
    lines: list[str]
    header: str
    forced: dict[int, str]
    taken: frozenset[str]
    instances: list[Instance] = field(default_factory=list)


class Writer:
    """What the bodies of one program share: its parameters, its `def`s, and who reads what."""

    def __init__(self, program: Program) -> None:
        self.params = Params(program)
        self.given = {(a.path, a.value): a.name for a in program.arguments}
        self.uses: Counter[Value] = used(program.body)
        self.uses.update(o.value for o in program.outputs)
        self.definitions: dict[str, Definition] = {}
        self.heads: list[tuple[str, tuple[str, ...]]] = []

    # --- calls -------------------------------------------------------------------------------

    def define(self, names: Names, group: Group, made: Definition) -> Definition:
        """The `def` that a call uses: one that reads the same, or `made` under a free name."""
        count = names.calls[group.function]
        again = f"{group.function}_{count + 1}" if count else group.function
        candidates = [group.function] if again == group.path[-1] else []
        candidates += [group.path[-1]] if not names.calls[group.path[-1]] else []
        for name in candidates:
            known = self.definitions.get(name)
            if known is None or known.key == made.key:
                names.calls[name] += 1
                made.name = name
                return self.definitions.setdefault(name, made)
        message = f"two functions are called `{group.path[-1]}`"
        raise Unwritable(message, "give one of them another name")

    def head(self, name: str, dims: tuple[str, ...]) -> str:
        """A mark for `name[dims]`, whose brackets are known when all calls are."""
        self.heads.append((name, dims))
        return str(len(self.heads) - 1).join(HEAD_MARKS)

    # --- text --------------------------------------------------------------------------------

    def finished(self, text: str, dims: Mapping[str, str] | None = None) -> str:
        """The text without marks; `dims` says what dims are called inside a `def`."""
        named = dims or {}
        text = _HEAD.sub(lambda m: self._head(int(m[1])), text)
        text = _KEYWORD.sub(lambda m: self.argument_names(self.definitions[m[1]])[int(m[2])], text)
        return _DIM.sub(lambda m: named.get(m[1], m[1]), text)

    def _head(self, number: int) -> str:
        name, dims = self.heads[number]
        own = [dims[i] for i in self._dim_parameters(self.definitions[name])]
        return name + (f"[{', '.join(d.join(DIM_MARKS) for d in own)}]" if own else "")

    def _dim_parameters(self, made: Definition) -> list[int]:
        """Which dims of a `def` its calls disagree about."""
        columns = zip(*(i.dims for i in made.instances), strict=True)
        return [i for i, column in enumerate(columns) if len(set(column)) > 1]

    def argument_names(self, made: Definition) -> list[str]:
        """Names of arguments: as loops assign them, as in the original, as outside, or letters."""
        taken = {*made.taken, *made.forced.values()}
        first, found = made.instances[0], []
        for number, value in enumerate(first.arguments):
            name = made.forced.get(number)
            if name is None:
                letters = (f"{c}{n}" for n in ("", *range(2, 1000)) for c in "xyzuvw")
                hints = [n for n in (first.names[number], value.name and value.label) if n]
                hints = [n for n in hints if is_speakable(n)]
                name = next(n for n in itertools.chain(hints, letters) if n not in taken)
            taken.add(name)
            found.append(name)
        return found

    def definition_text(self, made: Definition) -> str:
        """A whole `def`."""
        first = made.instances[0].dims
        own = [first[i] for i in self._dim_parameters(made)]
        maps = [dict(zip(i.dims, first, strict=True)) for i in made.instances]
        names = self.argument_names(made)
        arguments = [
            f"{name}{self._argument_dims(made, number, maps, own)}"
            for number, name in enumerate(names)
        ]
        brackets = f"[{', '.join(own)}]" if own else ""
        header = made.header or self._result_dims(made, maps, own, arguments)
        head = f"def {made.name}{brackets}({', '.join(arguments)}){header} {{"
        text = "\n".join([head, *(INDENT + line for line in made.lines), "}"])
        text = _ARGUMENT.sub(lambda m: names[int(m[1])], text)
        return self.finished(text)

    def _argument_dims(
        self, made: Definition, number: int, maps: Sequence[Mapping[str, str]], own: list[str]
    ) -> str:
        types = [i.arguments[number].type for i in made.instances]
        dtypes = {t.dtype.name for t in types} - {"f32"}
        dtype = f": {dtypes.pop()}" if len({t.dtype for t in types}) == len(dtypes) == 1 else ""
        found = [_mapped(t, m, own) for t, m in zip(types, maps, strict=True)]
        if all(f == found[0] for f in found) and None not in found[0]:
            return f"[{', '.join(d for d in found[0] if d)}]{dtype}"
        shared = [d for d in found[0] if d and all(d in f for f in found)]
        return f"[{', '.join(['...', *shared])}]{dtype}"

    def _result_dims(
        self,
        made: Definition,
        maps: Sequence[Mapping[str, str]],
        own: list[str],
        arguments: list[str],
    ) -> str:
        results = [i.result for i in made.instances]
        if any("..." in a for a in arguments):
            return ""
        found = [_mapped(t, m, own) for t, m in zip(results, maps, strict=True) if t is not None]
        same = len(found) == len(results) and all(f == found[0] for f in found)
        if not same or None in found[0]:
            return ""
        return f" -> [{', '.join(d for d in found[0] if d)}]"


def _mapped(type_: TensorType, names: Mapping[str, str], own: list[str]) -> list[str | None]:
    """The dims of a type as they are called inside the `def`; None where that is ambiguous."""
    return [names.get(n, None if n in own else n) for n in type_.names]


# --- one call --------------------------------------------------------------------------------


def call(block: Block, group: Group, values: Sequence[Value]) -> Written:
    """The text of a call at the end of `block` that yields `values`; its `def` is put down."""
    writer = block.writer
    own = set(writer.params.inside(group.path))
    arguments = tuple(v for v in free(group.nodes) if writer.params.whole(v) not in own)
    made, forced = _body(block, group, arguments, values)
    dims = tuple(dict.fromkeys(_DIM.findall(_flat(writer, made))))
    made.key = _key(writer, made, forced)
    definition = writer.define(block.names, group, made)
    result = values[0].type if len(values) == 1 else None
    names = tuple(writer.given.get((group.path, v)) for v in arguments)
    definition.instances.append(Instance(dims, arguments, names, result))
    return Written(writer.head(definition.name, dims) + _arguments(block, definition, arguments))


def _arguments(block: Block, made: Definition, arguments: tuple[Value, ...]) -> str:
    """The arguments of a call, by keyword where they are evaluated in another order."""
    waiting = [p.value for p in block.stack if p.value in arguments and not p.constant]
    in_order = waiting == [v for v in arguments if v in waiting]
    order = arguments
    if not in_order:
        order = (*waiting, *(v for v in arguments if v not in waiting))
    texts = [w.text for w in block.operands(order)]
    if not in_order:
        numbers = [arguments.index(v) for v in order]
        marks = [f"\ue006{made.name}:{n}\ue007" for n in numbers]
        texts = [f"{mark}={text}" for mark, text in zip(marks, texts, strict=True)]
    return f"({', '.join(texts)})"


def _body(
    block: Block, group: Group, arguments: tuple[Value, ...], values: Sequence[Value]
) -> tuple[Definition, dict[int, str]]:
    names = _names(group, values)
    forced = _forced(group, names, arguments)
    for number, value in enumerate(arguments):
        if number in forced:
            names.put(value, forced[number])
        else:
            names.text[value] = Written(f"\ue004{number}\ue005")
    blocks = blocks_of(group.nodes)
    enclosing = next(iter(blocks)) if len(blocks) == 1 else block.block
    # A call that nobody reads returns something all the same.
    dead = [*block.writer.params.inside(group.path), *(v for n in group.nodes for v in n.makes)]
    finals = list(values) or dead[-1:]
    inner = Block(
        block.writer,
        names,
        group.nodes,
        finals,
        loops=block.loops,
        block=enclosing,
        transposes=len(values) == 1,
    )
    inner.write()
    returned = [w.text for w in inner.operands(inner.finals)]
    inner.flush()
    transposed = inner.finals != finals
    header = f" -> [{listed_dims(values[0].type.dims)}]" if transposed else ""
    lines = [*inner.lines(), f"return {', '.join(returned)}"]
    taken = frozenset({*names.used, *names.labels} - set(forced.values()))
    return Definition("", (), lines, header, forced, taken), forced


def _names(group: Group, values: Sequence[Value]) -> Names:
    lives = Lives()
    lives.read(group.nodes)
    lives.last.update(dict.fromkeys(values, AT_THE_END))
    return Names(group.path, lives, labels_of(group.nodes, group.path))


def labels_of(nodes: Sequence[Node], path: tuple[str, ...]) -> frozenset[str]:
    """The names that values of a body have in it."""
    values = defined(nodes)
    return frozenset(v.label for v in values if v.name and scope_of(v) == path)


def _forced(group: Group, names: Names, arguments: tuple[Value, ...]) -> dict[int, str]:
    """The arguments that a loop of this body carries on, and the names it assigns to do so."""
    found: dict[int, str] = {}
    loops = [i for i in items(group.nodes, group.path) if isinstance(i, Loop)]
    for loop in loops:
        for carry in loop.carries:
            name = carried_name(carry, loop, names)
            if carry.init in arguments and name not in found.values():
                found.setdefault(arguments.index(carry.init), name)
    return found


def _flat(writer: Writer, made: Definition) -> str:
    """The text of a `def`, with all dims of the calls inside it."""
    text = "\n".join([made.header, *made.lines])
    return _HEAD.sub(lambda m: _head_text(*writer.heads[int(m[1])]), text)


def _head_text(name: str, dims: tuple[str, ...]) -> str:
    return f"{name}[{' '.join(d.join(DIM_MARKS) for d in dims)}]"


def _key(writer: Writer, made: Definition, forced: dict[int, str]) -> tuple[object, ...]:
    """Equal for calls that differ in nothing but which dims they name."""
    numbers: dict[str, int] = {}
    text = _DIM.sub(lambda m: f"<{numbers.setdefault(m[1], len(numbers))}>", _flat(writer, made))
    return text, tuple(sorted(forced.items()))


def check_names(writer: Writer, program: Program) -> None:
    """Refuse a `def` that would stand before an operator the program also uses.

    Raises:
        Unwritable: there is one.
    """
    operators = {op.name for op in walk(program.body)} & set(load_all())
    both = sorted(operators & set(writer.definitions))
    if both:
        message = f"a function and an operator are both called `{both[0]}`"
        raise Unwritable(message, "give the function another name")
