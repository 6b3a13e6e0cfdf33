"""Numbers that Python computes from the sizes of dims: `4 * io`, `key ** -0.5`.

They keep their formula, so that `to_mdsl` can write it. Where Python takes one for a plain number
(`math.sqrt(key)`, `range(heads)`, `if seq > 128`), the formula is lost; the moment is recorded.
"""

from __future__ import annotations

import ast
import itertools
import numbers
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from meshdsl.api.source_location import here
from meshdsl.diagnostics import Diagnostic, Related, Span
from meshdsl.named.size_formulas import made

if TYPE_CHECKING:
    from meshdsl.api.dims import Dim

Number = int | float

_CLOCK = itertools.count()


def tick() -> int:
    """The next value of a counter: later events have larger ones."""
    return next(_CLOCK)


_LAST: dict[Dim, Moment] = {}
"""The last moment at which the size of a dim, or of one equal to it, was taken.

A trace may have an equal one: `typing` caches annotations by equality of arguments.
"""


@dataclass(slots=True)
class Taken:
    """The time and place at which Python first took the size of a dim for a plain number."""

    first: Moment | None = None

    def note(self) -> Moment:
        """Record that it is taken now."""
        now = Moment(here().span, tick())
        self.first = self.first or now
        return now


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the source, and the tick at which it was reached."""

    span: Span
    when: int


class SizeArithmetic:
    """A number made of sizes, in Python expressions.

    To type checkers its arithmetic yields plain numbers: a parameter for one takes a `Size`.
    """

    __slots__ = ()

    def _number(self) -> Number:
        """The number with its formula."""
        raise NotImplementedError

    def _dims(self) -> tuple[Dim, ...]:
        """The dims in its formula."""
        raise NotImplementedError

    def _take(self) -> Number:
        """The plain number; records that it was taken."""
        for dim in self._dims():
            _LAST[dim] = dim._taken.note()
        return _plain(self._number())

    def __int__(self) -> int:
        return int(self._take())

    def __float__(self) -> float:
        return float(self._take())

    def __index__(self) -> int:
        return operator.index(self._take())  # type: ignore[arg-type]

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        import numpy as np

        return np.asarray(self._take(), dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """`numpy_number * size` is arithmetic; any other function of numpy takes plain numbers."""
        name = _UFUNCS.get(ufunc.__name__)
        if name and method == "__call__" and all(number_of(x) is not None for x in inputs):
            return _combined(name, *inputs)
        taken = (x._take() if isinstance(x, SizeArithmetic) else x for x in inputs)
        return getattr(ufunc, method)(*taken, **options)

    def __add__(self, other: Number | SizeArithmetic) -> int:
        return _combined("add", self, other)

    def __radd__(self, other: Number | SizeArithmetic) -> int:
        return _combined("add", other, self)

    def __sub__(self, other: Number | SizeArithmetic) -> int:
        return _combined("sub", self, other)

    def __rsub__(self, other: Number | SizeArithmetic) -> int:
        return _combined("sub", other, self)

    def __mul__(self, other: Number | SizeArithmetic) -> int:
        return _combined("mul", self, other)

    def __rmul__(self, other: Number | SizeArithmetic) -> int:
        return _combined("mul", other, self)

    def __truediv__(self, other: Number | SizeArithmetic) -> float:
        return _combined("div", self, other)

    def __rtruediv__(self, other: Number | SizeArithmetic) -> float:
        return _combined("div", other, self)

    def __pow__(self, other: Number | SizeArithmetic) -> float:
        return _combined("pow", self, other)

    def __rpow__(self, other: Number | SizeArithmetic) -> float:
        return _combined("pow", other, self)

    def __floordiv__(self, other: Number | SizeArithmetic) -> int:
        return _combined("floordiv", self, other)

    def __rfloordiv__(self, other: Number | SizeArithmetic) -> int:
        return _combined("floordiv", other, self)

    def __mod__(self, other: Number | SizeArithmetic) -> int:
        return _combined("mod", self, other)

    def __rmod__(self, other: Number | SizeArithmetic) -> int:
        return _combined("mod", other, self)

    def __neg__(self) -> int:
        value = made(-_plain(self._number()), "neg", self._number())
        return cast(int, Size(value, self._dims()))

    def __pos__(self) -> int:
        return cast(int, Size(self._number(), self._dims()))


class Size(SizeArithmetic):
    """A number made of the sizes of dims, `4 * io`; usable wherever Python wants a number."""

    __slots__ = ("_made_of", "_value")

    def __init__(self, value: Number, made_of: tuple[Dim, ...]) -> None:
        self._value, self._made_of = value, made_of

    def _number(self) -> Number:
        return self._value

    def _dims(self) -> tuple[Dim, ...]:
        return self._made_of

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, spec: str) -> str:
        return format(_plain(self._value), spec)

    def __hash__(self) -> int:
        return hash(self._value)

    def __bool__(self) -> bool:
        return bool(self._take())

    def __eq__(self, other: object) -> Any:
        return _compared(operator.eq, self, other)

    def __lt__(self, other: Any) -> Any:
        return _compared(operator.lt, self, other)

    def __le__(self, other: Any) -> Any:
        return _compared(operator.le, self, other)

    def __gt__(self, other: Any) -> Any:
        return _compared(operator.gt, self, other)

    def __ge__(self, other: Any) -> Any:
        return _compared(operator.ge, self, other)

    def __round__(self, digits: int | None = None) -> Number:
        return round(self._take(), digits)


def number_of(found: Any) -> Number | None:
    """The number that a Python value is, with its formula; None if it is no number."""
    if isinstance(found, SizeArithmetic):
        return found._number()
    if isinstance(found, int | float):
        return found
    if isinstance(found, numbers.Number) and hasattr(found, "item"):
        number: Number = found.item()
        return number
    return None


def computed(found: Any, span: Span) -> Moment | None:
    """The moment at which `found`, given at `span`, may have been computed from taken sizes.

    None for literals, and for numbers that keep their formula.
    """
    if isinstance(found, SizeArithmetic) or number_of(found) is None or _is_written_out(span.text):
        return None
    return Moment(span, tick())


def _is_written_out(text: str) -> bool:
    """Whether a Python expression consists of literals alone: `0.5`, `-1e9`, `64 * 1024`."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        return False
    fine = (ast.Expression, ast.Constant, ast.UnaryOp, ast.BinOp, ast.unaryop, ast.operator)
    return all(isinstance(node, fine) for node in ast.walk(tree))


def _plain(number: Number) -> Number:
    return float(number) if isinstance(number, float) else int(number)


# --- arithmetic ------------------------------------------------------------------------------

_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
}


_UFUNCS = {
    "add": "add",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "power": "pow",
    "floor_divide": "floordiv",
    "remainder": "mod",
}
"""The operators by the numpy functions that Python calls where the left operand is numpy's."""


def _combined(name: str, left: Any, right: Any) -> int:
    """The number made of two, one of them of sizes; NotImplemented leaves it to the other."""
    one, other = number_of(left), number_of(right)
    if one is None or other is None:
        return cast(int, NotImplemented)
    value = _OPERATORS[name](_plain(one), _plain(other))
    dims = {id(d): d for x in (left, right) if isinstance(x, SizeArithmetic) for d in x._dims()}
    return cast(int, Size(made(value, name, one, other), tuple(dims.values())))


def _compared(compare: Callable[[Any, Any], Any], size: Size, other: object) -> Any:
    number = number_of(other)
    if number is None:
        return NotImplemented
    if isinstance(other, SizeArithmetic):
        other._take()
    return compare(size._take(), _plain(number))


# --- what text can express ---------------------------------------------------------------------


def with_makers(known: Mapping[str, Dim]) -> dict[str, Dim]:
    """The dims of a program and those in the formulas of their sizes, by name."""
    dims = dict(known)
    waiting = list(known.values())
    for dim in waiting:
        for other in _makers(dim):
            if dims.setdefault(other.name, other) is other:
                waiting.append(other)
    return dims


def sizes_of(dims: Mapping[str, Dim]) -> dict[str, Number]:
    """The sizes computed from other dims, with formulas; not from dims of the same name."""
    sizes: dict[str, Number] = {}
    for name, dim in dims.items():
        is_known = all(dims[d.name] == d for d in _makers(dim))
        if dim._made_of is not None and is_known and not _leads_back(name, dims):
            sizes[name] = dim._made_of._number()
    return sizes


def _makers(dim: Dim) -> tuple[Dim, ...]:
    """The dims in the formula of a dim's size."""
    return () if dim._made_of is None else dim._made_of._dims()


def _leads_back(name: str, dims: Mapping[str, Dim]) -> bool:
    """Whether the size of a dim depends on its own name: dims were redefined in between."""
    seen, waiting = set[str](), [name]
    for current in waiting:
        others = {d.name for d in _makers(dims[current])}
        waiting += others - seen
        seen |= others
    return name in seen


def unsayable(started: int, numbers: Sequence[Moment], dims: Iterable[Dim]) -> Diagnostic | None:
    """The reason why text cannot express a program traced since `started` at other sizes, if any.

    Python took the size of one of its dims for a plain number during the trace, or before one of
    `numbers` was given, which may be computed from it.
    """
    help = "compute with the dim: `md.sqrt(key)`, `key ** -0.5`, `4 * io`; or write the number out"
    for dim in dims:
        first, last = dim._taken.first, _LAST.get(dim)
        if last is not None and last.when > started:
            message = f"Python takes the size of `{dim}` for a plain number; no text says what for"
            return Diagnostic("MD0821", message, last.span, help=help)
        later = next((n for n in numbers if first and n.when > first.when), None)
        if first is not None and later is not None:
            message = f"this number may be made of the size of `{dim}`, and no text could say how"
            taken = Related(first.span, f"Python takes the size of `{dim}` here")
            return Diagnostic("MD0821", message, later.span, related=(taken,), help=help)
    return None
