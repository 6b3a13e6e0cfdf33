"""Operators of the named program as expressions of the language: infix, views, calls.

Names of dims stand between marks (`marked`) until it is known whether they are parameters of a
`def`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from meshdsl.ir.types import Dim, DType, TensorType
from meshdsl.named.expressions import NEUTRAL
from meshdsl.named.ir import Op, Value
from meshdsl.named.sizes import dims_of, how_of, size_of
from meshdsl.ops.moving import sources_by_name
from meshdsl.ops.opdef import OpDef, lookup

OR, AND, NOT, COMPARE, SUM, PRODUCT, NEGATION, POWER, ATOM = range(9)
"""How tightly an expression binds, loosest first: the levels of the grammar."""

_LEVELS = {"or": OR, "and": AND, "+": SUM, "-": SUM, "*": PRODUCT, "/": PRODUCT, "^": POWER}

DIM_MARKS = "\ue000", "\ue001"
"""Around the name of a dim."""

HEAD_MARKS = "\ue002", "\ue003"
"""Around the number of a call, in place of the name of its `def` and its brackets."""


class Unwritable(Exception):
    """A program that no text of the language means: why, and the way out."""

    def __init__(self, reason: str, help: str) -> None:
        super().__init__(reason)
        self.help = help


@dataclass(frozen=True, slots=True)
class Written:
    """An expression as text, and how tightly it binds.

    Of a view, `base` is what stands before the bracket and `items` what stands in it; `renames`
    says that the last item renames.
    """

    text: str
    level: int = ATOM
    base: str = ""
    items: tuple[str, ...] = ()
    renames: bool = False

    def at(self, level: int) -> str:
        """The text for a place that takes what binds at least as tightly as `level`."""
        return self.text if self.level >= level else f"({self.text})"


def marked(dim: Dim) -> str:
    """The name of a dim, between marks."""
    return dim.name.join(DIM_MARKS)


def listed_dims(dims: Sequence[Dim]) -> str:
    """The names of several dims, between marks, with commas."""
    return ", ".join(map(marked, dims))


def pinned(value: Value, dims: Sequence[Dim]) -> str:
    """Dims in brackets, with the axes that `@` fixes."""
    pins = {p.dim: p.axes for p in value.pins}
    return ", ".join(marked(d) + (_axes(pins[d.name]) if d.name in pins else "") for d in dims)


def _axes(axes: tuple[str, ...]) -> str:
    if len(axes) == 1:
        return f"@{axes[0]}"
    return f"@({', '.join(axes)})" if axes else "@none"


# --- constants -------------------------------------------------------------------------------


def number(value: int | float) -> str:
    """A number as one would write it: digits, or the shorter form with an exponent."""
    text = repr(value)
    if isinstance(value, int):
        return text
    mantissa, _, exponent = f"{value:e}".partition("e")
    short = f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return short if float(short) == value and len(short) + 3 < len(text) else text


def literal(op: Op) -> Written:
    """A `constant` as its number."""
    return amount(op.attr("value"))


def amount(value: int | float) -> Written:
    """A number, or what it is made of: `4 * io`, `sqrt(key)`.

    Raises:
        Unwritable: the language does not have what it is made by.
    """
    how = how_of(value)
    if how is None:
        return Written(number(value), NEGATION if value < 0 else ATOM)
    if how.operator == "size":
        (dim,) = (d for d in how.operands if isinstance(d, Dim))
        return Written(marked(dim))
    if not how.operator:
        names = ", ".join(f"`{d}`" for d in dict.fromkeys(dims_of(value)))
        message = f"the language cannot write what {number(value)} is made by of {names}"
        raise Unwritable(message, "make it by other operators, or in fewer steps")
    operands = [amount(o) for o in how.operands if not isinstance(o, Dim)]
    return _pointwise_text(how.operator, operands)


def literal_dtype(name: str, ins: Sequence[TensorType | None]) -> str:
    """The dtype that numbers among the operands of `name` take; None stands for a number."""
    candidates = ins[1:] if name == "where" else ins
    return next((t.dtype.name for t in candidates if t is not None), "f32")


# --- operators -------------------------------------------------------------------------------


def expression(op: Op, operands: Sequence[Written], numbers: Sequence[bool]) -> Written:
    """The expression that means `op`; `numbers` says which operands are literals.

    What the reader of the language would fold, drop or specialise is written so that it does not.
    """
    if op.name in _VIEWS:
        item, renames = _VIEWS[op.name](op, operands)
        return _viewed(operands[0], item, renames)
    if op.name == "transpose":
        return Written(f"einsum({operands[0].text} -> [{listed_dims(op.attr('dims'))}])")
    opdef = lookup(op.name)
    if opdef.surface.items == "none" and not opdef.surface.options:
        return _pointwise(op, operands, numbers)
    return Written(_call(op, opdef, operands))


def _pointwise(op: Op, operands: Sequence[Written], numbers: Sequence[bool]) -> Written:
    if all(numbers) and lookup(op.name).fold is not None:
        first = Written(f"cast({operands[0].text}, {op.out.type.dtype})")
        return _pointwise(op, (first, *operands[1:]), (False,) * len(operands))
    if op.name == "pow" and not _is_power(operands[1], numbers[1]):
        return Written(f"pow({operands[0].text}, {operands[1].text})")
    return _pointwise_text(op.name, operands)


def _pointwise_text(name: str, operands: Sequence[Written]) -> Written:
    """A pointwise operator: its sign between its operands, or a call."""
    if name in ("identity", "square"):
        return Written(f"{operands[0].at(ATOM)}^{1 if name == 'identity' else 2}", POWER)
    if name == "neg":
        return Written(f"-{operands[0].at(POWER)}", NEGATION)
    if name == "logical_not":
        return Written(f"not {operands[0].at(NOT)}", NOT)
    if name == "pow":
        return Written(f"{operands[0].at(ATOM)}^{operands[1].at(NEGATION)}", POWER)
    sign = lookup(name).infix
    if sign is not None:
        return _infix(sign, operands)
    return Written(f"{name}({', '.join(o.text for o in operands)})")


def _is_power(exponent: Written, is_number: bool) -> bool:
    """Whether `^` means a power: no square or root, and nothing that it evaluates twice."""
    if is_number:
        return _literal_value(exponent) not in (2, 0.5, 1)
    return exponent.text.isidentifier()


def _literal_value(written: Written) -> float | None:
    """The value of a number that is written out; None where it is made of sizes."""
    return None if DIM_MARKS[0] in written.text else float(written.text)


def _infix(sign: str, operands: Sequence[Written]) -> Written:
    left, right = operands
    level = _LEVELS.get(sign, COMPARE)
    low = SUM if level == COMPARE else level
    return Written(f"{left.at(low)} {sign} {right.at(low if level == COMPARE else low + 1)}", level)


# --- sums of products ------------------------------------------------------------------------


def product_sum(
    einsum: Op, terms: Sequence[Written], numbers: Sequence[Written], places: Sequence[int]
) -> Written:
    """`sum[…](x * y * 2.0)`; each number stands behind the factor that `places` counts."""
    chain = terms[0]
    for index, term in enumerate(terms):
        chain = _product(chain, term) if index else chain
        for place, factor in zip(places, numbers, strict=True):
            if place == index:
                chain = _scaled(chain, factor)
    dims = dict.fromkeys(d for v in einsum.ins for d in v.type.dims)
    gone = [d for d in dims if not einsum.out.type.has(d.name)]
    items = "" if len(gone) == len(dims) else f"[{listed_dims(gone)}]"
    return Written(f"sum{items}({chain.text})")


def places_of_numbers(
    tensors: Sequence[Value], numbers: Sequence[Value], stack: Sequence[Value]
) -> list[int]:
    """Behind which factor of a product each number is evaluated, given what waits in order."""
    waiting = [v for v in stack if v in tensors]
    found = []
    for constant in numbers:
        at = stack.index(constant) if constant in stack else len(stack)
        later = [v for v in waiting if stack.index(v) > at]
        found.append(max(tensors.index(later[0]) - 1, 0) if later else len(tensors) - 1)
    return found


def _product(left: Written, right: Written) -> Written:
    return Written(f"{left.at(PRODUCT)} * {right.at(PRODUCT + 1)}", PRODUCT)


def _scaled(x: Written, factor: Written) -> Written:
    """`x` times a number, which stands first where the language would drop it behind."""
    neutral = ("mul", _literal_value(factor)) in NEUTRAL
    return _product(factor, x) if neutral else _product(x, factor)


# --- calls -----------------------------------------------------------------------------------


def _call(op: Op, opdef: OpDef, operands: Sequence[Written]) -> str:
    attrs, kind = dict(op.attrs), opdef.surface.items
    arguments = [o.text for o in operands]
    for name, default in opdef.surface.options:
        value = _option(attrs[name])
        if default is ... or default is None:
            arguments.append(value)
        elif attrs[name] != default or how_of(attrs[name]) is not None:
            arguments.append(f"{name}={value}")
    inside = ", ".join(arguments)
    if kind == "out":
        return f"{op.name}({inside} -> [{listed_dims(attrs['dims'])}])"
    items = _items(op, kind, attrs)
    is_maker = kind == "dim" and not inside
    return f"{op.name}{items}" if is_maker else f"{op.name}{items}({inside})"


def _items(op: Op, kind: str, attrs: dict[str, Any]) -> str:
    if kind == "none":
        return ""
    if kind == "arrow":
        return f"[{_dim_group(attrs['source'])} -> {_dim_group(attrs['target'])}]"
    if kind == "dim":
        return f"[{marked(attrs['dim'])}]"
    if kind == "join":
        return f"[{_joined(op, attrs['sources'])}{marked(attrs['target'])}]"
    if kind == "dims?" and attrs["dims"] == op.ins[0].type.dims:
        return ""
    return f"[{listed_dims(attrs['dims'])}]"


def _joined(op: Op, sources: tuple[Dim, ...]) -> str:
    """`(a, b) -> `, where names alone do not say what is joined."""
    if sources_by_name([v.type for v in op.ins]) == sources:
        return ""
    return f"{_dim_group(sources if len(set(sources)) > 1 else sources[:1])} -> "


def _option(value: Any) -> str:
    if isinstance(value, DType):
        return value.name
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return amount(value).text


def _dim_group(dims: Sequence[Dim]) -> str:
    return marked(dims[0]) if len(dims) == 1 else f"({listed_dims(dims)})"


# --- views -----------------------------------------------------------------------------------


def _viewed(base: Written, item: str, renames: bool) -> Written:
    """One more item: in the same bracket, but for two renames, which would become one."""
    if base.items and not (renames and base.renames):
        stem, items = base.base, (*base.items, item)
    else:
        stem, items = base.at(ATOM), (item,)
    return Written(f"{stem}[{', '.join(items)}]", ATOM, stem, items, renames)


def _rename_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    del operands
    return ", ".join(f"{marked(old)} -> {marked(new)}" for old, new in op.attr("pairs")), True


def _split_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    del operands
    return f"{marked(op.attr('dim'))} -> ({listed_dims(op.attr('into'))})", False


def _merge_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    del operands
    return f"({listed_dims(op.attr('dims'))}) -> {marked(op.attr('into'))}", False


def _pick_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    del operands
    return f"{marked(op.attr('dim'))} = {amount(op.attr('index')).text}", False


def _slice_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    del operands
    dim, how = op.attr("dim"), how_of(op.attr("stop"))
    stop = "" if how == how_of(size_of(dim)) else amount(op.attr("stop")).text
    return (
        f"{marked(dim)} = {amount(op.attr('start')).text}:{stop} -> {marked(op.attr('target'))}",
        False,
    )


def _gather_item(op: Op, operands: Sequence[Written]) -> tuple[str, bool]:
    return f"{marked(op.attr('dim'))} = {operands[1].text}", False


_VIEWS: dict[str, Callable[[Op, Sequence[Written]], tuple[str, bool]]] = {
    "rename": _rename_item,
    "split": _split_item,
    "merge": _merge_item,
    "pick": _pick_item,
    "slice": _slice_item,
    "gather": _gather_item,
}
