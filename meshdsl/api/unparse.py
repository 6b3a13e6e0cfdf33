"""From the record of a trace to the syntax tree of the program.

Unnamed tensors are written inline if they are read once and in the order of evaluation; else they
get a variable that names nothing (`ast.Name.known`). A variable has the name of its tensor
wherever that is free: two tensors of one name may both be live. Each call becomes a `def`; calls
that differ in nothing but dims share it.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from meshdsl.api.recorded import (
    Block,
    Declared,
    Item,
    Minimized,
    Read,
    Recomputed,
    RecordedCall,
    RecordedResult,
    RecordedVariable,
    Repeated,
    Updated,
    has_params,
    reads_of,
)
from meshdsl.diagnostics import Diagnostic, Related, Span, fail
from meshdsl.ir.types import DTYPES, Dim, DType
from meshdsl.named.declarations import RESERVED_TENSORS
from meshdsl.named.expressions import OperandRef
from meshdsl.named.size_formulas import How, dims_of, how_of, operators_of
from meshdsl.ops.opdef import load_all, lookup
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.tokens import is_name

DEEPEST = 10
"""The depth of nested expressions; deeper ones get a variable."""

STEM = "t"
"""The stem of variables that name nothing."""

Number = int | float


@dataclass(frozen=True, slots=True)
class Shared:
    """The disagreements of calls of one `def`: dims, as in the first one, and types of tensors.

    Where they disagree about types, it takes tensors with any dims (`is_open`).
    """

    dims: frozenset[str] = frozenset()
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class _Definition:
    """The `def` of a call, and its variant with tensors of any dims if it declares none."""

    function: ast.FunctionDecl
    open: ast.FunctionDecl


class SourceWriter:
    """The `def`s of one program, and the reasons why a number of it cannot be written.

    `sizes` are the dims whose sizes are used as numbers; `called` the operators called by name.
    `shared` is how calls of one `def` were found to disagree. Where that has `grown`, everything
    must be written again.
    """

    def __init__(
        self, sizes: frozenset[str], called: frozenset[str], shared: Mapping[str, Shared]
    ) -> None:
        self.sizes, self.called, self.shared = sizes, called, dict(shared)
        self.grown = False
        self.functions: dict[str, _Definition] = {}
        self.unsayable: list[Diagnostic] = []

    def program(
        self,
        name: ast.Name,
        inputs: Sequence[tuple[ast.TensorParam, RecordedVariable]],
        block: Block,
        returned: Sequence[tuple[str | None, ast.Expr]],
    ) -> ast.ProgramDecl:
        """The program, whose `def`s are then in `functions`."""
        scope = _BodyWriter(self, None, block, [e for _, e in returned])
        for node, variable in inputs:
            scope.put(variable, node.name.text)
        scope.items(block)
        scope.outputs(returned, name.span)
        return ast.ProgramDecl(name, tuple(n for n, _ in inputs), tuple(scope.out), name.span)

    def function(
        self, call: RecordedCall, number: int, counts: Counter[str]
    ) -> tuple[str, tuple[ast.Name, ...]]:
        """Write the `def` of a call; returns its name and dims for the call.

        It is the `number`-th of its name in its caller; `counts` are the calls there of each `def`.
        """
        definition = self._function(call)
        again = call.label if number == 1 else f"{call.label}_{number}"
        wanted = [call.label] * (counts[call.label] + 1 == number)
        wanted += [again] * (counts[again] == 0)
        others = (f"{again}_{n}" for n in itertools.count(2))
        free = (n for n in itertools.chain(wanted, others) if self._is_free(n, definition))
        name = next(free)
        counts[name] += 1
        if name not in wanted and has_params(call.block):
            message = f"two functions, or one and an operator, are both called `{again}`"
            self.refuse(message, "give one of them another name", call.span)
        first_definition = self.functions.setdefault(name, definition)
        pairs = zip(self._dims(definition), self._dims(first_definition), strict=True)
        return name, tuple(new for new, old in pairs if old.text in self._shared(name).dims)

    def _shared(self, name: str) -> Shared:
        return self.shared.get(name, Shared())

    def _is_free(self, name: str, made: _Definition) -> bool:
        """Whether a `def` may have this `name`: it is unused, or that of one equal up to dims."""
        if name in self.called:
            return False
        existing = self.functions.get(name, made)
        pairs = list(itertools.zip_longest(self._dims(made), self._dims(existing)))
        names = {new.text: old.text for new, old in pairs if new and old}
        if len(names) < len(pairs) or existing.open != self._on(made.open, names):
            return False
        others = frozenset(old for new, old in names.items() if new != old)
        before = self._shared(name)
        is_open = before.is_open or existing.function != self._on(made.function, names)
        self.shared[name] = Shared(before.dims | others, is_open)
        self.grown = self.grown or self.shared[name] != before
        return True

    def _dims(self, made: _Definition) -> list[ast.Name]:
        """The dims of a `def`, each once, in order of appearance."""
        by_name: dict[str, ast.Name] = {}

        def note(name: ast.Name) -> ast.Name:
            return by_name.setdefault(name.text, name) and name

        _with_dims(made.open, note, self.sizes)
        return list(by_name.values())

    def _on(self, made: ast.FunctionDecl, names: Mapping[str, str]) -> ast.FunctionDecl:
        """A `def` with its dims renamed."""

        def of(dim: ast.Name) -> ast.Name:
            return replace(dim, text=names.get(dim.text, dim.text))

        renamed = _with_dims(made, of, self.sizes)
        assert isinstance(renamed, ast.FunctionDecl), "it stays a `def`"
        return renamed

    def refuse(self, message: str, help: str, span: Span) -> None:
        """Note a number that text cannot express."""
        self.unsayable.append(Diagnostic("MD0821", message, span, help=help))

    def _function(self, call: RecordedCall) -> _Definition:
        escapes = (Read(ast.Name("_", v.span), v.span, 0, v) for v in call.escapes)
        returned = (*call.returned, *escapes)
        scope = _BodyWriter(self, call, call.block, returned)
        params = [replace(a.node, name=scope.param(a.inside, a.node.name)) for a in call.arguments]
        for variable in call.free:
            name = scope.param(variable, ast.Name(variable.label or STEM, variable.span))
            params.append(_open(ast.TensorParam(name, (), None, None, variable.span)))
        scope.items(call.block)
        result = scope.returned(call, returned)
        name = ast.Name(call.label, call.place)
        definition = ast.FunctionDecl(name, (), tuple(params), result, tuple(scope.out), call.place)
        is_open = [*(a.open for a in call.arguments), *(False for _ in call.free)]
        paired = zip(params, is_open, strict=True)
        return _Definition(
            definition, replace(definition, params=tuple(_open(p) if o else p for p, o in paired))
        )

    def defined(self) -> tuple[ast.FunctionDecl, ...]:
        """All `def`s, callees first."""
        return tuple(self._defined(name, made) for name, made in self.functions.items())

    def _defined(self, text: str, made: _Definition) -> ast.FunctionDecl:
        shared, dims = self._shared(text), self._dims(made)
        function = made.open if shared.is_open else made.function
        name = _known(text, function.name.text, function.name.span)
        return replace(function, name=name, dims=tuple(d for d in dims if d.text in shared.dims))

    # --- numbers -----------------------------------------------------------------------------

    def number(self, node: ast.Number, taken: Iterable[str] = ()) -> ast.Expr:
        """The expression of a number; one that text cannot express stays a literal and is refused.

        `taken` are names of tensors, which shadow dims of the same name.
        """
        reason, help = self._reason(node.value, taken)
        if not reason:
            return _amount(node.value, node.span)
        self.refuse(reason, help, node.span)
        return node

    def _reason(self, value: Number, taken: Iterable[str]) -> tuple[str, str]:
        names = list(dict.fromkeys(d.name for d in dims_of(value)))
        if not all(operators_of(value)):
            listed = ", ".join(f"`{n}`" for n in names)
            message = f"the language cannot write what {value!r} is made by of {listed}"
            return message, "make it by other operators, or in fewer steps"
        hidden = next((n for n in names if n in taken), None)
        if hidden is not None:
            message = f"a tensor and the dim whose size makes {value!r} are both called `{hidden}`"
            return message, "give one of them another name"
        if not math.isfinite(value):
            return f"the language has no number {value!r}", "use a finite number"
        return "", ""

    def size(self, name: str, size: int, made: Number | None, span: Span) -> ast.DimDecl:
        """The declaration of a dim; its size is `made` of those of others, if not None."""
        literal = ast.Number(size, span)
        value = literal if made is None else _arithmetic(made, span)
        if value is None:
            signs = "`+ - * / // % ^`"
            message = f"a size is made by whole numbers, dims and {signs}, and {size} is not"
            help = "make it of the dims by these, or write the number out"
            self.refuse(message, help, span)
        return ast.DimDecl(ast.Name(name, span), value or literal, span)


@dataclass(frozen=True, slots=True)
class _PendingExpression:
    """An expression that waits for its only reader, and its depth."""

    variable: RecordedVariable
    node: ast.Expr
    depth: int


class _BodyWriter:
    """The body of a program, or of the `def` of one call: what names mean, statement by statement.

    `out` are the statements so far, `calls` and `counts` those by the names of functions in
    Python and in the text. Positions count the items of the body in order. `outside` are names
    from outside of the enclosing loops, which these would carry if they were assigned.
    """

    def __init__(
        self,
        writer: SourceWriter,
        home: RecordedCall | None,
        block: Block,
        finals: Sequence[ast.Expr],
    ) -> None:
        self.writer, self.home = writer, home
        self.out: list[ast.Statement] = []
        self.names: dict[RecordedVariable, str] = {}
        self.meaning: dict[str, RecordedVariable] = {}
        self.outside: frozenset[str] = frozenset()
        self.pending: list[_PendingExpression] = []
        self.depth = 0
        self.calls: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.uses = _Uses(block, finals)
        self.block = block
        self.used = {*self.uses.labels, *writer.sizes}
        self.hoisted: set[Declared] = set()

    # --- names -------------------------------------------------------------------------------

    def put(self, variable: RecordedVariable, name: str) -> None:
        """Bind `name` to `variable` from here on."""
        self.names[variable], self.meaning[name] = name, variable
        self.used.add(name)

    def param(self, variable: RecordedVariable, wanted: ast.Name) -> ast.Name:
        """The name of a tensor parameter of the `def`."""
        name = self._bind(variable, wanted.text, -1)
        return ast.Name(name, wanted.span)

    def _bind(self, variable: RecordedVariable, wanted: str | None, at: int) -> str:
        """A name for a tensor made at `at`: the `wanted` one if it is free."""
        if wanted is None or not self._is_free(wanted, at, self.uses.last(variable)):
            wanted = self._fresh(wanted or STEM)
        self.put(variable, wanted)
        return wanted

    def _is_free(self, name: str, at: int, last: int) -> bool:
        """Whether a tensor made at `at` and read until `last` may have this name."""
        declared, in_loop = self.uses.params.get(name, (-1, False))
        if at < declared and (in_loop or last >= declared):
            return False
        return name not in self.writer.sizes and self._is_unbound(name, at)

    def _is_unbound(self, name: str, at: int) -> bool:
        """Whether the variable that the name is bound to is dead at `at`."""
        if not _is_speakable(name) or name in self.outside:
            return False
        return name not in self.meaning or self.uses.last(self.meaning[name]) <= at

    def _fresh(self, wanted: str) -> str:
        stem = wanted if _is_speakable(wanted) else STEM
        names = itertools.chain([stem], (f"{stem}_{n}" for n in itertools.count(2)))
        return next(n for n in names if n not in self.used)

    def _target(self, variable: RecordedVariable, at: int) -> ast.Target:
        """A variable on the left of an assignment; it names the tensor only where that is made."""
        is_here = variable.home is self.home
        label = variable.label if is_here else None
        name = self._bind(variable, variable.label, at)
        target_name = _known(name, label or "", variable.span)
        return ast.Target(target_name, variable.dims if is_here else None, variable.span)

    # --- statements --------------------------------------------------------------------------

    def items(self, block: Block) -> None:
        """Write the items of a block."""
        for item in block:
            at = self.uses.at[item]
            match item:
                case RecordedResult():
                    (node,) = self._filled(item.reads())
                    self._yield(item.results, node, at, item.node.span)
                case RecordedCall():
                    self._call(item, at)
                case Declared() if item not in self.hoisted:
                    self._flush()
                    self._param(item.node, item.result, at)
                case Repeated():
                    self._repeat(item, at)
                case Recomputed():
                    self._flush()
                    body = self._inside(item.block)
                    self.out.append(ast.Recompute(body, item.span))
                case Updated():
                    state, value = self._filled(item.reads())
                    self._flush()
                    assert isinstance(state, ast.Ref), "a parameter is read by its name"
                    self.out.append(ast.UpdateStatement(state.name, value, item.span))
                case Minimized():
                    (loss,) = self._filled(item.reads())
                    self._flush()
                    optimizer = self._closed(item.node.optimizer, flags=True)
                    groups = self._closed(item.node.groups, flags=True)
                    self.out.append(ast.Minimize(loss, optimizer, groups, item.node.span))

    def _inside(self, block: Block, then: Any = None) -> tuple[ast.Statement, ...]:
        """The statements of a block inside this one; `then` runs at its end."""
        before, self.out = (self.block, self.out), []
        self.block = block
        self.items(block)
        if then is not None:
            then()
        self._flush()
        statements = tuple(self.out)
        self.block, self.out = before
        return statements

    def _yield(
        self, results: Sequence[RecordedVariable], node: ast.Expr, at: int, span: Span
    ) -> None:
        """Assign the results of an expression, or keep it for its only reader."""
        variable = results[0]
        if len(results) == 1 and (variable.label is None or variable.home is not self.home):
            depth = 1 + self.depth
            if self.uses.is_for_one(variable, self.block) and depth < DEEPEST:
                self.pending.append(_PendingExpression(variable, node, depth))
                return
            if self.uses.last(variable) < 0 and not self._has_calls(node):
                return
        self._flush()
        targets = tuple(self._target(v, at) for v in results)
        self.out.append(ast.Assign(targets, node, span))

    def _has_calls(self, node: ast.Expr) -> bool:
        calls = (n for n in ast.walk(node) if isinstance(n, ast.CallExpr))
        return any(c.function.text in self.writer.functions for c in calls)

    def _call(self, item: RecordedCall, at: int) -> None:
        args = tuple(self._filled(item.reads()))
        self.calls[item.label] += 1
        function, dims = self.writer.function(item, self.calls[item.label], self.counts)
        items = tuple(ast.DimItem(d, d.span) for d in dims)
        name = ast.Name(function, item.span)
        node = ast.CallExpr(name, items or None, args, (), None, item.span)
        nothing = [] if item.results or item.escapes else [RecordedVariable(item.span, self.home)]
        self._yield([*item.results, *item.escapes, *nothing], node, at, item.span)

    def _param(
        self, node: ast.ParamDecl, result: RecordedVariable, at: int, loops: Sequence[ast.Name] = ()
    ) -> None:
        name = node.target.name
        text = name.text
        if not self._is_unbound(text, at):
            message = f"the parameter `{text}` has the name of another tensor that is read later"
            self.writer.refuse(message, "give one of them another name", name.span)
            text = self._fresh(text)
        self.put(result, text)
        around = tuple(ast.DimRef(n, None, n.span) for n in loops)
        dims = (*around, *(node.target.dims or ()))
        target = replace(node.target, name=_known(text, name.text, name.span), dims=dims)
        init = None if node.init is None else self._closed(node.init)
        self.out.append(replace(node, target=target, init=init))

    # --- loops -------------------------------------------------------------------------------

    def _repeat(self, item: Repeated, at: int) -> None:
        inits = self._filled(item.reads())
        self._flush()
        for declared, loops in self.uses.hoisted.get(item, ()):
            self.hoisted.add(declared)
            self._param(declared.node, declared.result, at, loops)
        names = self._carried_names(item, at)
        paired = zip(names, inits, strict=True)
        self._assign_all([(n, v) for n, v in paired if not _is_called(v, n)], item.span)
        before = self.meaning, self.outside
        self.outside |= frozenset(self.meaning).difference(names)
        self.meaning = dict(self.meaning)
        for name, carry in zip(names, item.carries, strict=True):
            self.put(carry.inside, name)
        stacks: list[str] = []
        body = self._inside(item.block, lambda: stacks.extend(self._next(item, names)))
        self.out.append(ast.Repeat(item.dim, body, item.span))
        self.meaning, self.outside = before
        results = [*(c.result for c in item.carries), *(s.result for s in item.stacked)]
        for name, result in zip([*names, *stacks], results, strict=True):
            self.put(result, name)

    def _carried_names(self, item: Repeated, at: int) -> list[str]:
        """The names of carried tensors: those of the body, or of its parameters."""
        names: list[str] = []
        for carry in item.carries:
            variable = carry.next.variable if isinstance(carry.next, Read) else None
            is_made_here = variable is not None and variable in self.uses.made_in(item.block)
            label = variable.label if variable is not None and is_made_here else None
            last = max(self.uses.last(carry.result), self.uses.ends[item])
            wanted = [n for n in (label, carry.name) if n and n not in names]
            free = (n for n in wanted if self._is_free(n, at, last))
            names.append(next(free, "") or self._fresh(carry.name))
            self.used.add(names[-1])
        return names

    def _next(self, item: Repeated, names: list[str]) -> list[str]:
        """Assign the tensors carried to the next iteration; each must be assigned.

        Yields the names of those that are stacked, assigned where they have none that will do.
        """
        ends = self._filled(item.ends())
        nexts, inside = ends[: len(names)], ends[len(names) :]
        self._flush()
        triples = zip(names, nexts, item.carries, strict=True)
        pairs = [
            (n, v)
            for n, v, carry in triples
            if not _is_called(v, n) or self.meaning[n] is carry.inside
        ]
        stacks: list[str] = []
        for stack, value in zip(item.stacked, inside, strict=True):
            name = value.name.text if isinstance(value, ast.Ref) else ""
            is_made_here = self.meaning.get(name) in self.uses.made_in(item.block)
            last = self.uses.last(stack.result)
            free = is_made_here and self._is_free(name, self.uses.ends[item], last)
            if not free or name in {*names, *stacks}:
                name = self._fresh(STEM)
                self.used.add(name)
                pairs.append((name, value))
            stacks.append(name)
        self._assign_all(pairs, item.span)
        return stacks

    def _assign_all(self, pairs: Sequence[tuple[str, ast.Expr]], span: Span) -> None:
        """Assign values to names, simultaneously."""
        texts = [_texts(v) for _, v in pairs]
        for index, (name, _) in enumerate(pairs):
            if any(name in later for later in texts[index + 1 :]):
                copies = [self._copy(v, span) for _, v in pairs]
                pairs = [(n, c) for (n, _), c in zip(pairs, copies, strict=True)]
                break
        for name, value in pairs:
            self.out.append(_nameless(name, value, span))
            self.used.add(name)

    def _copy(
        self, value: ast.Expr, span: Span, dims: tuple[ast.DimRef, ...] | None = None
    ) -> ast.Expr:
        name = self._fresh(STEM)
        self.used.add(name)
        self.out.append(_nameless(name, value, span, dims))
        return ast.Ref(ast.Name(name, span), span)

    # --- results -----------------------------------------------------------------------------

    def returned(
        self, call: RecordedCall, returned: Sequence[ast.Expr]
    ) -> tuple[ast.DimRef, ...] | None:
        """Write the `return` of a `def`; returns the declared dims of its results."""
        values = self._filled(returned) or [ast.Number(0.0, call.place)]
        self._flush()
        count = len(call.returned)
        result = None if call.escapes else call.result
        if result is not call.result:
            copies = [self._copy(v, call.place, call.result) for v in values[:count]]
            values = [*copies, *values[count:]]
        self.out.append(ast.Return(tuple(values), call.place))
        return result

    def outputs(self, returned: Sequence[tuple[str | None, ast.Expr]], span: Span) -> None:
        """Write the `return` of a program: every output is a variable of its name.

        Only an output to be called `out0` or the like may be an expression.
        """
        values = self._filled([e for _, e in returned])
        self._flush()
        names = [n or f"out{i}" for i, (n, _) in enumerate(returned)]
        paired = list(zip(names, values, strict=True))
        wrong = [(n, v) for n, v in paired if not _is_called(v, n)]
        nested = [i for i, v in enumerate(values) if not isinstance(v, ast.Ref)]
        pairs = [pair for pair in wrong if isinstance(pair[1], ast.Ref)]
        read = set[str]().union(*(_texts(values[i]) for i in nested))
        if any(names[i] != f"out{i}" for i in nested) or any(n in read for n, _ in pairs):
            pairs = wrong
        self._assign_all(pairs, span)
        assigned = {n for n, _ in pairs}
        outputs = [ast.Ref(ast.Name(n, v.span), v.span) if n in assigned else v for n, v in paired]
        self.out.append(ast.Return(tuple(outputs), span))

    # --- expressions -------------------------------------------------------------------------

    def _filled(self, nodes: Sequence[ast.Expr]) -> list[ast.Expr]:
        """Expressions with their operands: the last waiting ones if in this order, else by name."""
        reads = [r.variable for node in nodes for r in reads_of(node)]
        waiting = {p.variable for p in self.pending}
        wanted = [v for v in reads if v in waiting]
        start = len(self.pending) - len(wanted)
        if [p.variable for p in self.pending[start:]] != wanted:
            self._flush()
            start = 0
        taken = self.pending[start:]
        del self.pending[start:]
        self.depth = max((p.depth for p in taken), default=0)
        inside = {p.variable: p.node for p in taken}
        return [self._closed(node, inside) for node in nodes]

    def _flush(self) -> None:
        """Assign waiting expressions to variables."""
        waiting, self.pending = self.pending, []
        for item in waiting:
            span = item.variable.span
            name = self._bind(item.variable, None, -1)
            self.out.append(_nameless(name, item.node, span))

    def _closed(
        self,
        node: Any,
        inside: Mapping[RecordedVariable, ast.Expr] | None = None,
        flags: bool = False,
    ) -> Any:
        """A node without values of Python: variables by name, numbers as expressions."""
        match node:
            case Read():
                return (inside or {}).get(node.variable) or self._ref(node)
            case OperandRef():
                assert isinstance(node.operand, DType), "what is given is a tensor or a dtype"
                if node.operand.name in self.meaning:
                    return ast.String(node.operand.name, node.span)
                return ast.Ref(ast.Name(node.operand.name, node.span), node.span)
            case ast.Number(value=bool()) if flags:
                return ast.Ref(ast.Name(str(node.value).lower(), node.span), node.span)
            case ast.Number():
                return self.writer.number(node, self.meaning)
            case ast.ViewExpr(tensor=ast.Ref(name=name)) if type(node.tensor) is ast.Ref:
                if name.text in self.meaning:
                    return ast.CallExpr(name, node.items, (), (), None, node.span)
                return node
            case tuple():
                return tuple(self._closed(n, inside, flags) for n in node)
        if type(node).__module__ != ast.__name__:
            return node
        parts = {f.name: getattr(node, f.name) for f in fields(node)}
        return replace(node, **{n: self._closed(p, inside, flags) for n, p in parts.items()})

    def _ref(self, node: Read) -> ast.Ref:
        if self.meaning.get(self.names.get(node.variable, "")) is not node.variable:
            message = "this tensor exists only inside the `repeat`"
            where = Related(node.variable.span, "made here")
            fail("MD0112", message, node.span, where, help="make it outside of the loop")
        return ast.Ref(ast.Name(self.names[node.variable], node.span), node.span)


class _Uses:
    """The uses of variables in one body, by positions of items.

    `params` are those of the body by name: position, and whether they are in a loop. `hoisted` are
    those that are declared in a loop and read after it: they must be declared before it.
    """

    def __init__(self, block: Block, finals: Sequence[ast.Expr]) -> None:
        self.at: dict[Item, int] = {}
        self.ends: dict[Repeated, int] = {}
        self.params: dict[str, tuple[int, bool]] = {}
        self.labels: set[str] = set()
        self.hoisted: dict[Repeated, list[tuple[Declared, list[ast.Name]]]] = {}
        self._reads: dict[RecordedVariable, list[tuple[int, int]]] = {}
        self._loops: dict[RecordedVariable, tuple[Declared, tuple[Repeated, ...]]] = {}
        self._count = itertools.count()
        self._read_block(block, ())
        for node in finals:
            self._note(node, next(self._count), block, ())

    def last(self, variable: RecordedVariable) -> int:
        """The position of the last use of a variable; -1 if there is none."""
        return max((at for at, _ in self._reads.get(variable, ())), default=-1)

    def is_for_one(self, variable: RecordedVariable, block: Block) -> bool:
        """Whether a variable has a single use, and in this block."""
        found = self._reads.get(variable, ())
        return len(found) == 1 and found[0][1] == id(block)

    def made_in(self, block: Block) -> set[RecordedVariable]:
        """The variables that the items of a block make, except inside loops."""
        variables: set[RecordedVariable] = set()
        for item in block:
            match item:
                case RecordedResult() | RecordedCall():
                    variables.update(item.results)
                case Recomputed():
                    variables |= self.made_in(item.block)
        return variables

    def _read_block(self, block: Block, loops: tuple[Repeated, ...]) -> None:
        for item in block:
            at = self.at[item] = next(self._count)
            for node in item.reads():
                self._note(node, at, block, loops)
            match item:
                case RecordedResult() | RecordedCall():
                    self.labels.update(v.label for v in item.results if v.label)
                case Declared():
                    name = item.node.target.name.text
                    self.params[name] = at, bool(loops)
                    self.labels.add(name)
                    self._loops[item.result] = item, loops
                case Recomputed():
                    self._read_block(item.block, loops)
                case Repeated():
                    self._read_loop(item, loops)

    def _read_loop(self, item: Repeated, loops: tuple[Repeated, ...]) -> None:
        self._read_block(item.block, (*loops, item))
        end = self.ends[item] = next(self._count)
        for node in item.ends():
            self._note(node, end, item.block, (*loops, item))

    def _note(self, node: ast.Expr, at: int, block: Block, loops: tuple[Repeated, ...]) -> None:
        for read in reads_of(node):
            self._reads.setdefault(read.variable, []).append((at, id(block)))
            declared, around = self._loops.get(read.variable, (None, ()))
            left = [loop for loop in around if loop not in loops]
            if declared is not None and left:
                entry = declared, [loop.dim for loop in left]
                entries = self.hoisted.setdefault(left[0], [])
                entries += [entry] * all(d is not declared for d, _ in entries)


# --- dims -----------------------------------------------------------------------------------------


_DIMS: Mapping[type, tuple[str, ...]] = {
    ast.Repeat: ("dim",),
    ast.DimRef: ("dim",),
    ast.DimItem: ("dim",),
    ast.ArrowItem: ("sources", "targets"),
    ast.ByItem: ("dim", "window", "target"),
    ast.PickItem: ("dim",),
    ast.SliceItem: ("dim", "target"),
    ast.CallExpr: ("out",),
}
"""The fields of a node that are dims."""


def _with_dims(node: Any, of: Callable[[ast.Name], ast.Name], sizes: frozenset[str]) -> Any:
    """A node with `of` applied to every dim; `sizes` are the dims used as numbers."""
    if isinstance(node, tuple):
        return tuple(_with_dims(n, of, sizes) for n in node)
    if type(node).__module__ != ast.__name__:
        return node
    if isinstance(node, ast.Ref):
        return replace(node, name=of(node.name)) if node.name.text in sizes else node
    dim_fields = _DIMS.get(type(node), ())
    parts = {f.name: getattr(node, f.name) for f in fields(node)}
    replaced = {
        n: _named(p, of) if n in dim_fields else _with_dims(p, of, sizes) for n, p in parts.items()
    }
    return replace(node, **replaced)


def _open(param: ast.TensorParam) -> ast.TensorParam:
    """A tensor parameter with any dims."""
    rest = ast.DimRef(ast.Name("...", param.span), None, param.span)
    return replace(param, dims=(rest,))


def _named(part: Any, of: Callable[[ast.Name], ast.Name]) -> Any:
    """The dims in a field of a node, renamed by `of`."""
    if isinstance(part, tuple):
        return tuple(map(of, part))
    if isinstance(part, ast.Number):
        return part
    return part if part is None or part.text == "..." else of(part)


# --- names and numbers ---------------------------------------------------------------------------


def _known(text: str, label: str, span: Span) -> ast.Name:
    """The identifier `text` with the given `label`."""
    return ast.Name(text, span, None if text == label else label)


def _nameless(
    name: str, value: ast.Expr, span: Span, dims: tuple[ast.DimRef, ...] | None = None
) -> ast.Assign:
    """An assignment to a variable that does not name its tensor."""
    return ast.Assign((ast.Target(_known(name, "", span), dims, span),), value, span)


def _is_called(node: ast.Expr, name: str) -> bool:
    return isinstance(node, ast.Ref) and node.name.text == name


def _texts(node: ast.Expr) -> set[str]:
    """The variables in an expression."""
    return {n.name.text for n in ast.walk(node) if isinstance(n, ast.Ref)}


def _is_speakable(name: str) -> bool:
    """Whether a variable may have this name: it has no other meaning in the language."""
    if not is_name(name) or name in RESERVED_TENSORS or name in DTYPES:
        return False
    record = load_all().get(name)
    return record is None or record.surface.arity[1] != 0


def _numbers(how: How) -> list[Number]:
    return [o for o in how.operands if not isinstance(o, Dim)]


def _amount(value: Number, span: Span) -> ast.Expr:
    """A number as an expression: a literal, or its formula: `4 * io`, `sqrt(key)`."""
    how = how_of(value)
    if how is None:
        return _literal(value, span)
    if how.operator == "size":
        (dim,) = dims_of(value)
        return ast.Ref(ast.Name(dim.name, span), span)
    return _applied(how.operator, [_amount(o, span) for o in _numbers(how)], span)


def _literal(value: Number, span: Span) -> ast.Expr:
    if math.copysign(1, value) < 0:
        return ast.Unary("-", ast.Number(-value, span), span)
    return ast.Number(int(value) if isinstance(value, bool) else value, span)


def _applied(operator: str, operands: list[ast.Expr], span: Span) -> ast.Expr:
    """An operator on numbers, by its sign if it has one."""
    if operator in ("identity", "square"):
        operands = [*operands, ast.Number(1 if operator == "identity" else 2, span)]
        operator = "pow"
    sign = "^" if operator == "pow" else lookup(operator).infix
    if operator == "neg":
        return ast.Unary("-", operands[0], span)
    if sign is None:
        return ast.CallExpr(ast.Name(operator, span), None, tuple(operands), (), None, span)
    return ast.Binary(sign, operands[0], operands[1], span, span)


_ARITHMETIC = ("add", "sub", "mul", "div", "floordiv", "mod", "pow", "neg")


def _arithmetic(size: Number, span: Span) -> ast.Expr | None:
    """A size by `+ - * / // % ^` alone, if each `/` is exact."""
    how = how_of(size)
    if isinstance(size, int) and (how is None or how.operator == "size"):
        return _amount(size, span)
    if how is None or how.operator not in _ARITHMETIC:
        return None
    parts = [_arithmetic(o, span) for o in _numbers(how)]
    exact_parts = [p for p in parts if p is not None]
    return _applied(how.operator, exact_parts, span) if len(exact_parts) == len(parts) else None
