"""The record of a trace: statements on variables, in blocks.

A `Variable` is a tensor of Python. What it is called in the syntax tree is known when the trace is
over and all that reads it is (`written.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from meshdsl.diagnostics import Span
from meshdsl.named.expressions import Given
from meshdsl.syntax import ast


@dataclass(slots=True, eq=False)
class Variable:
    """A tensor of Python: the name it was given, the dims it was declared with, where it is made.

    `home` is the call of a function whose body makes it, None for the program itself.
    """

    span: Span
    home: Call | None
    label: str | None = None
    dims: tuple[ast.DimRef, ...] | None = None

    def is_made_in(self, call: Call | None) -> bool:
        """Whether a call, or the program for None, makes it: not if it is given."""
        given = () if call is None else (a.inside for a in call.arguments)
        return self.home is call and all(v is not self for v in given)


@dataclass(frozen=True, slots=True)
class Read(Given):
    """A variable where an expression reads it; `operand` is its value there."""

    variable: Variable


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """An expression and what it yields."""

    node: ast.Expr
    results: tuple[Variable, ...]

    def reads(self) -> tuple[ast.Expr, ...]:
        """The expressions that read variables, in order of evaluation."""
        return (self.node,)


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """A parameter."""

    node: ast.Param
    result: Variable

    def reads(self) -> tuple[ast.Expr, ...]:
        """None: an initialiser is made of numbers."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A tensor that a loop carries; `name` is what the Python body calls it.

    `init` enters the first iteration as `inside`, `next` the next one; `result` is the last.
    """

    name: str
    init: ast.Expr
    inside: Variable
    next: ast.Expr
    result: Variable


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A loop."""

    dim: ast.Name
    carries: tuple[Carried, ...]
    block: Block
    span: Span

    def reads(self) -> tuple[ast.Expr, ...]:
        """The tensors that enter the first iteration."""
        return tuple(c.init for c in self.carries)


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """A block whose values are computed again in the backward pass."""

    block: Block
    span: Span

    def reads(self) -> tuple[ast.Expr, ...]:
        """None of its own."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Minimized:
    """The goal of a program."""

    node: ast.Minimize

    def reads(self) -> tuple[ast.Expr, ...]:
        """The loss."""
        return (self.node.value,)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor that a function is given: as the function takes it, inside, and in its caller.

    It is `open` where the function itself does not declare the dims.
    """

    node: ast.TensorParam
    inside: Variable
    given: ast.Expr
    open: bool


@dataclass(slots=True, eq=False)
class Call:
    """A call of a function in its `caller` (None: the program).

    It is at `span`, and the function is defined at `place`. `free` are variables from outside that
    it reads without being given them, `escapes` are variables made inside that are read outside.
    `result` are the dims that it declares to return.
    """

    label: str
    caller: Call | None
    span: Span
    place: Span
    arguments: list[Argument] = field(default_factory=list)
    block: Block = field(default_factory=list)
    result: tuple[ast.DimRef, ...] | None = None
    returned: tuple[ast.Expr, ...] = ()
    results: tuple[Variable, ...] = ()
    free: dict[Variable, Read] = field(default_factory=dict)
    escapes: dict[Variable, None] = field(default_factory=dict)

    def reads(self) -> tuple[ast.Expr, ...]:
        """Its arguments and its free variables."""
        return (*(a.given for a in self.arguments), *self.free.values())


Item = Made | Declared | Repeated | Recomputed | Minimized | Call
Block = list[Item]


def note_read(read: Read, reader: Call | None) -> None:
    """Tell all calls between where a variable is made and where it is read."""
    inner, outer = _around(reader), _around(read.variable.home)
    shared = sum(one is other for one, other in zip(inner, outer, strict=False))
    for call in inner[shared:]:
        call.free.setdefault(read.variable, read)
    for call in outer[shared:]:
        call.escapes.setdefault(read.variable)


def _around(call: Call | None) -> list[Call]:
    """A call and all that it is made in, outermost first."""
    found: list[Call] = []
    while call is not None:
        found.append(call)
        call = call.caller
    return found[::-1]


def reads_of(node: ast.Expr) -> Iterator[Read]:
    """Where an expression reads variables, in order of evaluation."""
    return (n for n in ast.walk(node) if isinstance(n, Read))
