"""Building a named program: loops, scopes, and the one place where operators are appended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from functools import partial
from typing import Any, NoReturn

from meshdsl.diagnostics import (
    Diagnostic,
    DiagnosticError,
    Diagnostics,
    Fix,
    Poisoned,
    Related,
    Span,
    advice,
    fail,
)
from meshdsl.ir.program import Collected, Origin, Stacked
from meshdsl.ir.rewrite import substitute
from meshdsl.ir.types import DTYPES, LARGEST, Dim, DType, TensorType
from meshdsl.named.call_fixes import NOTHING, WrittenCall, call_fixes, call_help
from meshdsl.named.declarations import Declarations, added_dim
from meshdsl.named.ir import (
    InCalls,
    Init,
    NamedLoop,
    NamedOp,
    NamedProgram,
    Node,
    Pin,
    Value,
    fields_inside,
    walk,
)
from meshdsl.named.size_formulas import as_float, how_of
from meshdsl.ops.opdef import OpError, lookup
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import around
from meshdsl.syntax.enclosing import enclosing

MAX_DIMS = 64
"""The most dims of a tensor in numpy and in torch."""

MAX_ELEMENTS = 2**63
"""Tensors have fewer elements than this."""

NO_FIELDS: Mapping[str, Any] = {}

MAX_OPERATORS = 50_000
"""The most operators: calls are inlined, so that a short text can mean a huge program."""

Operand = Value | int | float | DType | str
"""The value of an expression: a tensor, a number without a dtype yet, a dtype, or a string."""


class ProgramTooLarge(DiagnosticError):
    """The program has grown too large: building stops here."""

    is_last = True


@dataclass(slots=True)
class Frame:
    """A loop being built, or the whole program (`dim` None): its nodes and its slices so far.

    `indices` are the indices of all its iterations, a tensor outside, once one of them is read.
    """

    dim: Dim | None
    body: list[Node] = field(default_factory=list)
    stacked: dict[Value, Value] = field(default_factory=dict)
    indices: Value | None = None


@dataclass(frozen=True, slots=True)
class Stack:
    """A name that a loop over `dim` first assigns, as it is after the loop: all its iterations'.

    `inside` is what it stands for at the end of an iteration, a stack of a loop inside perhaps;
    None where that, or the dim, is wrong. `depth` are the loops around, `span` the place of the
    name. Nothing is stacked before it is read. `again` is the place where a loop that is being
    built, a later one, assigns the name anew.
    """

    name: str
    dim: Dim | None
    inside: Operand | Stack | None
    depth: int
    span: Span
    again: Span | None = None


@dataclass(slots=True)
class Scope:
    """The names of one function body: dims, tensors, and the place of its call.

    A name that failed to get a value maps to None. `stacks` are the names that loops before have
    left, which mean something unless `names` has them. `later` are the names that statements
    further down assign, with their places. `groups` are names of several dims at once: that
    of a definition in the prelude, for an operator over several dims; `...` in a function.
    `wrong_dims` are names of dims whose meaning is not known, which was reported.
    """

    dims: dict[str, Dim]
    names: dict[str, Operand | None]
    declarations: Declarations
    path: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    calls: Counter[str] = field(default_factory=Counter)
    stacks: dict[str, Stack] = field(default_factory=dict)
    later: dict[str, Span] = field(default_factory=dict)
    params: dict[str, Span] = field(default_factory=dict)
    groups: dict[str, tuple[Dim, ...]] = field(default_factory=dict)
    wrong_dims: set[str] = field(default_factory=set)

    @property
    def in_library(self) -> bool:
        """Whether it is the body of a function of the library."""
        return self.declarations.is_library

    def enter(self, function: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The path and the function path of the next call of `function` from here."""
        self.calls[function] += 1
        count = self.calls[function]
        instance = function if count == 1 else f"{function}_{count}"
        return (*self.path, instance), (*self.functions, function)


@dataclass(frozen=True, slots=True)
class PendingParam:
    """A declared parameter whose `fan_in` is not known before its first use is.

    `typed`: the declaration states a dtype.
    """

    value: Value
    init: Init
    typed: bool


class Builder:
    """The program under construction. All operators pass through `emit`.

    `originals` maps copies made for a backward pass to their forward values; `renamed` maps
    each value that was named after others had read it to its named value. The dims `unsized` have
    no known size: what only that makes illegal is not reported. `site` is the place of a program's
    call of a function of the library, where all that it consists of then is.
    """

    def __init__(self, diagnostics: Diagnostics, unsized: frozenset[str] = frozenset()) -> None:
        self.diagnostics = diagnostics
        self.unsized = unsized
        self.frames = [Frame(None)]
        self.params: list[PendingParam] = []
        self.phase = "forward"
        self.site: Span | None = None
        self.block: int | None = None
        self.nameless: set[Value] = set()
        self.originals: dict[Value, Value] = {}
        self.renamed: dict[Value, Value] = {}
        self._depth: dict[Value, int] = {}
        self._born: dict[Value, int] = {}
        self._operators = 0

    # --- values ------------------------------------------------------------------------------

    def value(
        self, type_: TensorType, span: Span, calls: InCalls | None = None, **kw: Any
    ) -> Value:
        """A new value made at the current depth of loops, inside the same calls as `calls`."""
        check_elements(type_, span)
        where = fields_inside(calls) if calls else {}
        result = Value(type_, span, **{**where, **kw})
        self.place(result, len(self.frames) - 1)
        return result

    def adopt(self, program: NamedProgram) -> None:
        """Continue `program` in the current block: its body becomes the nodes built so far."""
        frame = self.frames[-1]
        entered = (*program.inputs, *(p.value for p in program.params))
        for value in (*entered, *(v for node in program.body for v in node.makes)):
            self.place(value, self._depth.get(value, len(self.frames) - 1))
        frame.body.extend(program.body)

    def place(self, value: Value, depth: int) -> None:
        """Record that `value` is made inside `depth` loops."""
        self._depth[value] = depth
        self._born.setdefault(value, len(self._born))

    @contextmanager
    def at(self, depth: int) -> Iterator[None]:
        """Work in the block `depth` loops deep, around the one that is being built."""
        inner = self.frames[depth + 1 :]
        del self.frames[depth + 1 :]
        try:
            yield
        finally:
            self.frames.extend(inner)

    def carried(self, values: Iterable[Value], beyond: Value) -> Value | None:
        """One of `values` carried by a loop that `beyond` is outside of, or None."""
        results = {v for node in self.frames[-1].body for v in node.makes}
        slices = {v for frame in self.frames for v in frame.stacked.values()}
        for value in values:
            depth = self._depth.get(value, 0)
            is_inside = value in results or value in slices or depth >= len(self.frames)
            if not is_inside and depth > self._depth[beyond]:
                return value
        return None

    def current(self, value: Value) -> Value:
        """`value`, or the named value that replaces it."""
        while value in self.renamed:
            value = self.renamed[value]
        return value

    def reach(self, value: Value) -> Value:
        """`value` as the innermost loop reads it: sliced by the loops on the way."""
        value = self.current(value)
        for depth in range(self._depth[value] + 1, len(self.frames)):
            frame = self.frames[depth]
            assert frame.dim is not None
            if value.type.has(frame.dim.name):
                value = self._slice(frame, value, depth)
        return value

    def _slice(self, frame: Frame, outer: Value, depth: int) -> Value:
        if outer not in frame.stacked:
            assert frame.dim is not None
            pins = tuple(p for p in outer.pins if p.dim != frame.dim.name)
            type_ = outer.type.without(frame.dim.name)
            inside = replace(outer, type=type_, pins=pins, declared=outer.positions)
            self.place(inside, depth)
            frame.stacked[outer] = inside
        return frame.stacked[outer]

    def loop_indices(self, span: Span, scope: Scope) -> tuple[Value, ...]:
        """The index of the current iteration of each loop around, from the outermost on."""
        for depth, frame in list(enumerate(self.frames))[1:]:
            if frame.indices is None:
                with self.at(depth - 1):
                    frame.indices = self.emit("iota", (), {"dim": frame.dim}, span, scope)[0]
        return tuple(self.reach(f.indices) for f in self.frames[1:] if f.indices is not None)

    def stacks(self, frame: Frame) -> tuple[Stacked[Value], ...]:
        """The slices that a finished loop takes of tensors from outside."""
        pairs = sorted(frame.stacked.items(), key=lambda pair: self._born[pair[0]])
        return tuple(Stacked(outer, inside) for outer, inside in pairs)

    def stacked(self, stack: Stack, span: Span, scope: Scope) -> Value:
        """All iterations' values of a name that a finished loop has made, read at `span`.

        The dim of the loop is the first.
        """
        with self.at(stack.depth):
            return self._stacked(stack, span, scope)

    def _stacked(self, stack: Stack, span: Span, scope: Scope) -> Value:
        inside, dim = stack.inside, stack.dim
        if isinstance(inside, Stack):
            inside = self._stacked(inside, span, scope)
        if isinstance(inside, int | float):
            inside = self.constant(inside, DTYPES["f32"], stack.span, scope)
        if inside is None or dim is None:
            raise Poisoned
        if not isinstance(inside, Value):
            need_tensor(inside, stack.span)
        inside = self.current(inside)
        if inside.role == "param" and self._depth[inside] == 0:
            return inside  # a parameter has gained the dim
        if inside.type.has(dim.name):
            message = f"`{stack.name}` has the dim `{dim}` of its loop, and would gain another"
            fixes = _renamed_inside(stack, dim.name, scope)
            help = advice(fixes) or f"rename the dim inside the loop: `[{dim} -> other]`"
            where = Related(stack.span, f"`{stack.name}` is {inside.type}")
            fail("MD0122", message, span, where, help=help, fixes=fixes)
        type_ = inside.type.along(dim)
        check_elements(type_, span)
        if self._depth[inside] <= stack.depth:
            return self.emit("broadcast", (inside,), {"dims": type_.dims}, stack.span, scope)[0]
        outer = inside.alike(type=type_, declared=inside.positions)
        body = self.frames[-1].body
        body[:], collection = _collecting(body, inside, outer)
        self.place(collection, stack.depth)
        return collection

    # --- operators ---------------------------------------------------------------------------

    @contextmanager
    def in_phase(self, phase: str) -> Iterator[None]:
        """Emit operators in `phase`, outside of any `recompute` block; empty: as before."""
        before = self.phase, self.block
        if phase:
            self.phase, self.block = phase, None
        try:
            yield
        finally:
            self.phase, self.block = before

    def append(self, node: Node) -> None:
        """Append an existing node, and place its results."""
        self._count(node.span, sum(1 for _ in walk((node,))))
        for value in node.makes:
            self.place(value, len(self.frames) - 1)
        self.frames[-1].body.append(node)

    def emit(
        self,
        name: str,
        ins: tuple[Value, ...],
        attrs: Mapping[str, Any],
        span: Span,
        calls: InCalls | None,
        spans: tuple[Span, ...] = (),
        fields: Mapping[str, Any] = NO_FIELDS,
        origin: Origin | None = None,
        written: WrittenCall = NOTHING,
    ) -> tuple[Value, ...]:
        """Append operator `name`; a call that it refuses becomes a diagnostic at `span`.

        It is inside the same calls as `calls`. `spans` are the places of the operands, to point at
        their types; `fields` go to the results. `written` is the call that a fix may edit.
        An operator of the backward pass has an `origin`.
        """
        if self.site is not None:
            span, spans = self.site, ()
        try:
            types = lookup(name).infer(tuple(v.type for v in ins), attrs)
        except OpError as error:
            if self._is_unsized(ins, attrs):
                raise Poisoned from None
            notes = zip(spans, ins, strict=True) if spans else ()
            related = tuple(Related(s, f"this is {v.type}") for s, v in notes if s != span)
            declared = calls.declarations if isinstance(calls, Scope) else None
            dims = {} if self.site or declared is None else declared.dim_spans
            edited = NOTHING if self.site else written
            fixes = call_fixes(error.ways, spans, [v.type for v in ins], edited, dims, span)
            help = call_help(error, fixes)
            fail(error.code, error.message, span, *related, help=help, fixes=fixes)
        self._count(span)
        outs = tuple(self.value(t, span, calls, **fields) for t in types)
        op = NamedOp(name, ins, outs, tuple(attrs.items()), span, self.phase, self.block, origin)
        self.frames[-1].body.append(op)
        return outs

    def _is_unsized(self, ins: tuple[Value, ...], attrs: Mapping[str, Any]) -> bool:
        """Whether a dim of a call has no known size."""
        dims = {d.name for v in ins for d in v.type.dims}
        waiting = list(attrs.values())
        while waiting and self.unsized:
            item = waiting.pop()
            if isinstance(item, Dim):
                dims.add(item.name)
            elif isinstance(item, tuple):
                waiting += item
        return not self.unsized.isdisjoint(dims)

    def _count(self, span: Span, operators: int = 1) -> None:
        self._operators += operators
        if self._operators > MAX_OPERATORS:
            message = (
                f"the program has more than {MAX_OPERATORS:,} operators once calls are inlined"
            )
            help = "calls of calls multiply; use `repeat` for what is done many times"
            raise ProgramTooLarge(Diagnostic("MD0117", message, span, help=help))

    def constant(
        self,
        number: int | float,
        dtype: DType,
        span: Span,
        calls: InCalls | None,
        origin: Origin | None = None,
    ) -> Value:
        """A literal as a value without dims."""
        check_number(number, dtype, span)
        if dtype.kind == "bool" or (dtype.kind == "int" and isinstance(number, float)):
            kind = "a bool" if dtype.kind == "bool" else f"an {dtype} tensor"
            help = "use a comparison" if dtype.kind == "bool" else _integer_help(number)
            fail("MD0257", f"the number {shown(number)} is combined with {kind}", span, help=help)
        attrs = {"value": as_float(number) if dtype.kind == "float" else number, "dtype": dtype}
        return self.emit("constant", (), attrs, span, calls, origin=origin)[0]

    def assign(
        self, value: Value, name: str, pins: tuple[Pin, ...], span: Span, scope: Scope
    ) -> Value:
        """Give `value` a name: the one just made is renamed, any other gets an identity.

        Those in `nameless`, which are gradients, lose the name they have by themselves.
        """
        body = self.frames[-1].body
        value = self.current(value)
        path = ".".join((*scope.path, name))
        called = partial(replace, name=path, pins=pins, in_library=scope.in_library)
        if value in self.nameless:
            self.nameless.remove(value)
            named = called(value)
            self.place(named, self._depth[value])
            self.renamed[value] = named
            body[:] = substitute(body, {value: named})
            return named
        last = body[-1] if body else None
        fresh = isinstance(last, NamedOp) and value in last.outs and value.name is None
        if not fresh:
            value = self.emit("identity", (value,), {}, span, scope)[0]
            last = body[-1]
        assert isinstance(last, NamedOp)
        named = called(value)
        self.place(named, self._depth[value])
        self.renamed[value] = named
        body[-1] = replace(last, outs=tuple(named if v is value else v for v in last.outs))
        return named


def _collecting(nodes: Sequence[Node], inside: Value, outer: Value) -> tuple[list[Node], Value]:
    """`nodes` with `inside`, which a loop among them makes, collected as `outer`; the collection.

    It is the one there is, if the loop has collected the value before.
    """
    changed, collection = list(nodes), outer
    for index, loop in enumerate(nodes):
        if not isinstance(loop, NamedLoop):
            continue
        inner = {*loop.enters, *(v for node in loop.body for v in node.makes)}
        collected = next((c.outer for c in loop.collected if c.inside is inside), None)
        if collected is not None:
            return changed, collected
        if inside in inner:
            changed[index] = replace(loop, collected=(*loop.collected, Collected(inside, outer)))
            return changed, outer
        body, collection = _collecting(loop.body, inside, outer)
        if collection is not outer or body != list(loop.body):
            changed[index] = replace(loop, body=tuple(body))
            return changed, collection
    return changed, collection


def _integer_help(number: int | float) -> str:
    """The way out where a float meets integers; it may be the quotient of two."""
    how, help = how_of(number), "cast the tensor: `cast(x, f32)`"
    is_quotient = how is not None and how.operator == "div"
    if is_quotient:
        help += "; or write an integer: `/` makes a float of two, `//` rounds down"
    elif float(number).is_integer():
        help += f"; or write an integer, `{int(number)}`"
    return help


def check_number(number: int | float, dtype: DType, span: Span) -> None:
    """Refuse a number that this dtype cannot represent."""
    if dtype.kind == "float":
        fits = abs(number) <= LARGEST[dtype.name]
    else:
        bits = {"i32": 31}.get(dtype.name, 63)
        fits = -(2**bits) <= number < 2**bits
    if not fits:
        wider = {"i32": ", or i64", "f32": ", or f64", "f16": ", or f32"}.get(dtype.name, "")
        help = f"use a smaller number{wider}"
        fail("MD0257", f"the number {shown(number)} does not fit into {dtype}", span, help=help)


def shown(number: int | float) -> str:
    """A number for a message; long ones by their magnitude."""
    if isinstance(number, int) and abs(number) >= 10**24:
        return f"of about {'-' * (number < 0)}2^{abs(number).bit_length()}"
    return str(number)


def _renamed_inside(stack: Stack, dim: str, scope: Scope) -> tuple[Fix, ...]:
    """The fix that renames a dim of what a loop stacks, where the loop assigns it."""
    node, new = enclosing(stack.span, ast.Assign), f"other_{dim}"
    if node is None or len(node.targets) > 1:
        return ()
    line = f"dim {new} = {dim}"
    added = added_dim(line, scope.declarations)
    if added is None or dim not in scope.declarations.dims or new in scope.declarations.dims:
        return ()
    view = around(node.value.span, "(", f")[{dim} -> {new}]", "").edits
    return (Fix(f"write `(…)[{dim} -> {new}]`, with `{line}`", (*view, added), safe=False),)


def check_elements(type_: TensorType, span: Span) -> None:
    """Refuse a tensor that no 64-bit index could address, or of more dims than any engine has."""
    if len(type_.dims) > MAX_DIMS:
        message = f"this tensor has {len(type_.dims)} dims; numpy and torch have at most {MAX_DIMS}"
        help = "merge dims that always go together: `[(a, b) -> c]`"
        fail("MD0262", message, span, help=help)
    if type_.elements >= MAX_ELEMENTS:
        sizes = " × ".join(f"{d.name}={d.size}" for d in type_.dims)
        help = "choose smaller dims: `--set DIM=N`"
        fail("MD0255", f"a tensor of {sizes} has 2^63 elements or more", span, help=help)


def need_tensor(operand: Operand, span: Span) -> NoReturn:
    """Report an operand that should be a tensor and is none."""
    help = "name a tensor, or compute one"
    fail("MD0254", f"a tensor is needed here, and this is {kind_of(operand)}", span, help=help)


def kind_of(operand: Operand) -> str:
    """The kind of an operand, in words."""
    if isinstance(operand, Value):
        return f"a tensor {operand.type}"
    if isinstance(operand, DType):
        return f"the dtype {operand}"
    return "a string" if isinstance(operand, str) else f"the number {operand}"
