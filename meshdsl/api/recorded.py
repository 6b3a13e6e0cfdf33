"""The record of a trace: statements on variables, in blocks.

A `RecordedVariable` is a tensor of Python. Its name in the syntax tree is determined when the
trace is complete and all its uses are known (`unparse.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import field

from meshdsl.diagnostics import Span
from meshdsl.named.expressions import OperandRef
from meshdsl.records import dataclass
from meshdsl.syntax import ast


@dataclass(slots=True, eq=False)
class RecordedVariable:
    """A tensor of Python: its given name, its declared dims, and where it is made.

    `home` is the call of a function whose body makes it, None for the program itself.
    """

    span: Span
    home: RecordedCall | None
    label: str | None = None
    dims: tuple[ast.DimRef, ...] | None = None

    def is_made_in(self, call: RecordedCall | None) -> bool:
        """Whether it is made in a call, or in the program for None, rather than passed in."""
        given = () if call is None else (a.inside for a in call.arguments)
        return self.home is call and all(v is not self for v in given)


@dataclass(frozen=True, slots=True)
class Read(OperandRef):
    """A use of a variable in an expression; `operand` is its value there."""

    variable: RecordedVariable


@dataclass(frozen=True, slots=True, eq=False)
class RecordedResult:
    """An expression and its results."""

    node: ast.Expr
    results: tuple[RecordedVariable, ...]

    def reads(self) -> tuple[ast.Expr, ...]:
        """The expressions that read variables, in order of evaluation."""
        return (self.node,)


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """A parameter."""

    node: ast.ParamDecl
    result: RecordedVariable

    def reads(self) -> tuple[ast.Expr, ...]:
        """None: an initialiser is made of numbers."""
        return ()


@dataclass(frozen=True, slots=True, eq=False)
class Carried:
    """A tensor that a loop carries; `name` is its name in the Python body.

    `init` enters the first iteration as `inside`, `next` the next one; `result` is the last.
    """

    name: str
    init: ast.Expr
    inside: RecordedVariable
    next: ast.Expr
    result: RecordedVariable


@dataclass(frozen=True, slots=True, eq=False)
class RecordedStack:
    """A tensor that every iteration of a loop makes: one of them, and all."""

    inside: ast.Expr
    result: RecordedVariable


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A loop."""

    dim: ast.Name
    carries: tuple[Carried, ...]
    stacked: tuple[RecordedStack, ...]
    block: Block
    span: Span

    def reads(self) -> tuple[ast.Expr, ...]:
        """The tensors that enter the first iteration."""
        return tuple(c.init for c in self.carries)

    def ends(self) -> tuple[ast.Expr, ...]:
        """What is read at the end of an iteration: the next values of carries, and stacked ones."""
        return (*(c.next for c in self.carries), *(s.inside for s in self.stacked))


@dataclass(frozen=True, slots=True, eq=False)
class Recomputed:
    """A block whose values are rematerialised in the backward pass."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Updated:
    """The value of a parameter in the next step."""

    state: Read
    value: ast.Expr
    span: Span

    def reads(self) -> tuple[ast.Expr, ...]:
        """The parameter, which has its name until then, and the value."""
        return (self.state, self.value)


@dataclass(frozen=True, slots=True)
class Argument:
    """A tensor passed to a function: as its parameter, as read inside, and in the caller.

    `open` is true where the function does not declare the dims.
    """

    node: ast.TensorParam
    inside: RecordedVariable
    given: ast.Expr
    open: bool


@dataclass(slots=True, eq=False)
class RecordedCall:
    """A call of a function in its `caller` (None: the program).

    `span` is that of the call, `place` that of the definition. `free` are variables from outside
    that it reads without taking them, `escapes` are those made inside and read outside. `result`
    are the declared dims of the result.
    """

    label: str
    caller: RecordedCall | None
    span: Span
    place: Span
    arguments: list[Argument] = field(default_factory=list)
    block: Block = field(default_factory=list)
    result: tuple[ast.DimRef, ...] | None = None
    returned: tuple[ast.Expr, ...] = ()
    results: tuple[RecordedVariable, ...] = ()
    free: dict[RecordedVariable, Read] = field(default_factory=dict)
    escapes: dict[RecordedVariable, None] = field(default_factory=dict)

    def reads(self) -> tuple[ast.Expr, ...]:
        """Its arguments and its free variables."""
        return (*(a.given for a in self.arguments), *self.free.values())


Item = RecordedResult | Declared | Repeated | Recomputed | Updated | Minimized | RecordedCall
Block = list[Item]


def has_params(block: Block) -> bool:
    """Whether a block declares a parameter, in its calls too: their names make that of it."""
    return any(isinstance(i, Declared) or has_params(getattr(i, "block", [])) for i in block)


def note_read(read: Read, reader: RecordedCall | None) -> None:
    """Record a use in all calls between the variable's definition and its reader."""
    inner, outer = _around(reader), _around(read.variable.home)
    shared = sum(one is other for one, other in zip(inner, outer, strict=False))
    for call in inner[shared:]:
        call.free.setdefault(read.variable, read)
    for call in outer[shared:]:
        call.escapes.setdefault(read.variable)


def _around(call: RecordedCall | None) -> list[RecordedCall]:
    """A call and those that it is nested in, outermost first."""
    calls: list[RecordedCall] = []
    while call is not None:
        calls.append(call)
        call = call.caller
    return calls[::-1]


def reads_of(node: ast.Expr) -> Iterator[Read]:
    """The uses of variables in an expression, in order of evaluation."""
    return (n for n in ast.walk(node) if isinstance(n, Read))
