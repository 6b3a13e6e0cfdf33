"""`TorchText`: the context in which the torch text of one operator is written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import field

from meshdsl.ir.types import Dim, TensorType
from meshdsl.ops.opdef import Attrs, Intervals
from meshdsl.ops.torch_expressions import aligned, scalar, tuple_text
from meshdsl.records import dataclass

_NUMBERED = re.compile(r"_\d+$")


@dataclass(slots=True)
class TorchText:
    """The argument of a record's `torch` (`ops.opdef.TorchCall`), made anew for every call.

    args:       one per operand: a variable, or a Python literal where it is in `constants`.
    ins, outs:  local types; `global_ins`, `global_outs` the global ones.
    place:      a Python string literal, quotes included.
    offsets:    what writes the global index of the first local element, for each dim in `splits`.
    starts:     what writes the same of a window, by operand and dim.
    parts:      for a dim of the output and one of operand 0, what each device has of these.
    extents:    what writes the local size of each dim whose blocks differ in size.
    empty:      dims of which some devices have nothing; of a window, with its operand.
    fresh:      hint -> a variable name that is not taken.
    checked:    whether operand `index` is known to be indices of `dim`; it is from now on.
    long:       by operand of integers, the variable that has it as i64; `let_long` makes more.
    numbers:    by operand that is one integer, the variable that has it as an int of Python.
    leaves_long: whether the result may be left in i64: only indices are made of it.
    lists:      of an update of several parameters, the list of each operand of theirs.
    whole:      the variable of which operand 0 is a chunk, where it is one.
    used:       collects the names of support functions.
    lines:      collects the statements that `let` writes, which precede the expression.
    helpers:    collects the variables of those statements.
    unpacked:   by the text of several values, the variables that have them; `let_all` makes more.
    """

    args: tuple[str, ...]
    constants: tuple[bool, ...]
    ins: tuple[TensorType, ...]
    outs: tuple[TensorType, ...]
    global_ins: tuple[TensorType, ...]
    global_outs: tuple[TensorType, ...]
    attrs: Attrs
    fresh: Callable[[str], str]
    checked: Callable[[int, str], bool] = lambda index, dim: False
    place: str = "''"
    offsets: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    splits: frozenset[str] = frozenset()
    extents: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    empty: frozenset[str | tuple[int, str]] = frozenset()
    starts: Mapping[tuple[int, str], Callable[[], str]] = field(default_factory=dict)
    parts: Callable[[str, str], tuple[Intervals, ...]] = lambda of_output, of_operand: ()
    long: dict[int, str] = field(default_factory=dict)
    numbers: dict[int, str] = field(default_factory=dict)
    leaves_long: bool = False
    lists: tuple[str, ...] = ()
    whole: str = ""
    used: set[str] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    helpers: list[str] = field(default_factory=list)
    unpacked: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def tensor(self, index: int) -> str:
        """Operand `index` as the text of a tensor; a literal becomes one, too."""
        if not self.constants[index]:
            return self.args[index]
        return scalar(self.args[index], self.ins[index].dtype)

    def is_constant(self, index: int) -> bool:
        """Whether operand `index` is a literal."""
        return self.constants[index]

    def seen(self, index: int, dim: str) -> bool:
        """Whether operand `index` has been checked to be indices of `dim`; from now on, it is."""
        return self.checked(index, dim)

    def size(self, dim: str) -> int:
        """Global size of `dim`."""
        sizes = [t.size(dim) for t in (*self.global_ins, *self.global_outs) if t.has(dim)]
        assert sizes, f"no dim {dim} in the call"
        return sizes[0]

    def is_split(self, dim: str) -> bool:
        """Whether `dim` is split over devices."""
        return dim in self.splits

    def offset(self, dim: str) -> str:
        """Text of the global index of the first local element of `dim`; `0` when it is whole."""
        return self.offsets[dim]() if self.is_split(dim) else "0"

    def is_window(self, index: int, dim: str) -> bool:
        """Whether operand `index` is a window of `dim`, with the fill."""
        return (index, dim) in self.starts

    def start(self, index: int, dim: str) -> str:
        """Text of the global index of the first element of `dim` in operand `index`."""
        return self.starts[index, dim]() if self.is_window(index, dim) else self.offset(dim)

    def extent(self, dim: str) -> str:
        """Text of the local size of `dim`, wherever it occurs."""
        sizes = [t.size(dim) for t in (*self.outs, *self.ins) if t.has(dim)]
        assert sizes, f"no dim {dim} in the call"
        return self.extents[dim]() if dim in self.extents else str(sizes[0])

    def may_be_empty(self, dim: str, index: int | None = None) -> bool:
        """Whether some device has nothing of `dim`; of a window of operand `index`, if given."""
        return (dim if index is None else (index, dim)) in self.empty

    def shape(self, index: int) -> str:
        """Text of the local shape of output `index`, a tuple."""
        return tuple_text([self.extent(name) for name in self.outs[index].names])

    def aligned(self, index: int, dims: tuple[Dim, ...]) -> str:
        """Text of operand `index` that broadcasts against `dims`, in the fewest characters."""
        if self.constants[index]:
            return self.args[index]
        return aligned(self.args[index], self.ins[index].names, tuple(d.name for d in dims))

    @property
    def is_list(self) -> bool:
        """Whether it updates several parameters; `ins` and `args` are those of the first."""
        return bool(self.lists)

    def listed(self, index: int, dims: tuple[Dim, ...]) -> str:
        """The list of operand `index` of each parameter, aligned as by `aligned`."""
        if self.lists:
            return self.lists[index]
        return f"[{self.tensor(index) if self.constants[index] else self.aligned(index, dims)}]"

    def let(self, hint: str, text: str) -> str:
        """Assign `text` to a fresh variable named after `hint`; returns the variable."""
        name = self.fresh(hint)
        self.lines.append(f"{name} = {text}")
        self.helpers.append(name)
        return name

    def let_all(self, hints: tuple[str, ...], text: str) -> tuple[str, ...]:
        """Assign the several values of `text` to variables, fresh unless some have them."""
        if text not in self.unpacked:
            names = self.unpacked[text] = tuple(map(self.fresh, hints))
            self.lines.append(f"{', '.join(names)} = {text}")
            self.helpers += names
        return self.unpacked[text]

    def let_long(self, index: int, text: str) -> str:
        """Assign `text`, operand `index` as i64, to a variable named after it; returns that."""
        name = _NUMBERED.sub("", self.args[index]) if self.args[index].isidentifier() else ""
        self.long[index] = self.let(f"{name}_index".lstrip("_"), text)
        return self.long[index]

    def let_number(self, index: int, text: str) -> str:
        """Assign `text`, operand `index` as an int of Python, to a variable; returns that."""
        self.numbers[index] = self.let("at", text)
        return self.numbers[index]

    def use(self, function: str) -> str:
        """Request a function of the support library; returns the name to call it by."""
        self.used.add(function)
        return function
