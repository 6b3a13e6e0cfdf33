"""Names of an emitted text: what the emitter has to hold to, whatever the program.

Every name is bound before it is read, on every way through a function; none that a function binds
has a meaning in the module; each was allocated or is reserved. A violation is our mistake, hence an
assert that names the line and its statement.

The ways through a text follow from tests of a device's coordinates and of a pass's stage: a device
that begins a micro-batch under `if p == 0:` ends it so, too. So a text is followed once for each
of their values that tests tell apart (definite assignment, as in the Java Language Specification,
chapter 16, with these tests decided).
"""

from __future__ import annotations

import ast
import builtins
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from meshdsl.records import dataclass

BUILTINS = frozenset(dir(builtins))
NEVER_EMPTY = frozenset({"chunks"})
"""Functions of the runtime whose loops have an iteration at least."""

Values = Mapping[str, int]
"""The values that coordinates and stages have on one way through a text."""

Tests = dict[str, set[int]]
"""The numbers that each coordinate, and the stage of a pass, is compared with."""

COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: int.__eq__,
    ast.NotEq: int.__ne__,
    ast.Lt: int.__lt__,
    ast.LtE: int.__le__,
    ast.Gt: int.__gt__,
    ast.GtE: int.__ge__,
}


@dataclass(frozen=True, slots=True)
class ComparedValues:
    """The values that tests are about: of coordinates by their sizes, of `stage` by `held`.

    Device number `home=k` has passes of the stages `held[k]` alone.
    """

    sizes: Mapping[str, int]
    home: str = ""
    stage: str = ""
    held: tuple[tuple[int, ...], ...] = ()

    def values(self, name: str, tests: Tests, around: Values) -> Iterable[int]:
        """The values of a name that tests tell apart, in the function of a device `around`."""
        if name == self.stage:
            return self.held[around[self.home]]
        if name == self.home and self.stage in tests:
            return range(self.sizes[name])
        near = {number + d for number in tests[name] for d in (-1, 0, 1)}
        return sorted(near.intersection(range(self.sizes[name])))


def check_bindings(
    lines: list[str],
    first: int,
    module: Collection[str],
    devices: ComparedValues,
    reserved: Collection[str],
) -> None:
    """Check the functions of a text, whose lines begin at number `first` of it.

    `module` are the names that the rest of the text defines, `reserved` all names that the emitter
    has allocated or keeps.
    """
    tree = ast.parse("\n".join(lines))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    names = BUILTINS.union(module, (node.name for node in functions))
    text = _CheckedText(lines, first, names, frozenset(module), reserved, devices)
    for function in functions:
        scope = _FunctionScope(function, text, None)
        for values in text.ways(scope.tests, scope.local & devices.sizes.keys(), {}):
            scope.follow(values)


@dataclass(frozen=True, slots=True)
class _CheckedText:
    """The lines of a text, and what is known of its names."""

    lines: list[str]
    first: int
    known: frozenset[str]
    module: frozenset[str]
    reserved: Collection[str]
    devices: ComparedValues

    def at(self, node: ast.stmt) -> str:
        """A statement in a message."""
        text = self.lines[node.lineno - 1].strip()
        return f"line {self.first + node.lineno - 1} of the text, `{text}`"

    def ways(self, tests: Tests, local: Collection[str], around: Values) -> Iterator[Values]:
        """The values of local names that tests of a function tell apart."""
        names = [name for name in tests if name in local]
        each = [self.devices.values(name, tests, around) for name in names]
        for values in itertools.product(*each):
            yield dict(zip(names, values, strict=True))

    def check_bound(self, node: ast.stmt, names: Iterable[str]) -> None:
        """Check that names may be bound: that each is a variable's, and none of the module."""
        for name in names:
            assert name not in self.module, f"{self.at(node)} binds `{name}`, a name of the module"
            is_allocated = name == "_" or name in self.reserved
            assert is_allocated, f"{self.at(node)} binds `{name}`, which is not allocated"


# --- what a statement reads ----------------------------------------------------------------------

Test = tuple[str, type[ast.cmpop], int]
"""The comparison of a name with a number."""


def _test(node: ast.expr) -> Test | None:
    """The comparison `name op number`, if a test is one."""
    match node:
        case ast.Compare(
            left=ast.Name(id=name), ops=[op], comparators=[ast.Constant(value=int(n))]
        ):
            return name, type(op), n
    return None


class _StatementReads:
    """The names that a statement reads; some only on one side of a test."""

    def __init__(self, parts: Iterable[ast.AST]) -> None:
        self.names: set[str] = set()
        self.choices: list[tuple[Test | None, _StatementReads, _StatementReads]] = []
        self.own: set[str] = set()
        todo = [*parts]
        while todo:
            part = todo.pop()
            if isinstance(part, ast.Name):
                if isinstance(part.ctx, ast.Load):
                    self.names.add(part.id)
            elif not isinstance(part, ast.Constant):
                todo += self._inside(part)
        self.names -= self.own

    def _inside(self, part: ast.AST) -> Iterable[ast.AST]:
        """What is read in an expression; the commonest kinds have no iteration over their fields.

        Names that comprehensions and lambdas bind are their own.
        """
        match part:
            case ast.Attribute():
                return (part.value,)
            case ast.Call():
                return (part.func, *part.args, *(keyword.value for keyword in part.keywords))
            case ast.BinOp():
                return part.left, part.right
            case ast.Subscript():
                return part.value, part.slice
            case ast.IfExp():
                sides = _StatementReads([part.body]), _StatementReads([part.orelse])
                self.choices.append((_test(part.test), *sides))
                return (part.test,)
            case ast.comprehension():
                self.own.update(_targets(part.target))
            case ast.arg():
                self.own.add(part.arg)
        return ast.iter_child_nodes(part)

    def under(self, values: Values) -> set[str]:
        """The names that are read where coordinates and stages have some values."""
        names = self.names
        for test, *sides in self.choices:
            holds = _holds(test, values)
            chosen = sides if holds is None else sides[:1] if holds else sides[1:]
            names = names.union(*(side.under(values) for side in chosen))
        return names

    @property
    def tests(self) -> Iterator[Test]:
        """The tests of its choices."""
        for test, *sides in self.choices:
            yield from () if test is None else (test,)
            yield from (inner for side in sides for inner in side.tests)


def _holds(test: Test | None, values: Values) -> bool | None:
    """Whether a test holds where names have some values; None where it is of another."""
    if test is None or test[0] not in values:
        return None
    return COMPARED[test[1]](values[test[0]], test[2])


def _reads(node: ast.stmt) -> _StatementReads:
    """What a statement itself reads, without the statements in it."""
    match node:
        case ast.FunctionDef() | ast.Nonlocal():
            return _StatementReads(())
        case ast.If():
            return _StatementReads((node.test,))
        case ast.For():
            return _StatementReads((node.iter,))
        case ast.AugAssign():
            reads = _StatementReads((node.target, node.value))
            reads.names.update(_targets(node.target))
            return reads
    return _StatementReads((node,))


def _binds(node: ast.stmt) -> tuple[str, ...]:
    """The names that a statement itself binds."""
    match node:
        case ast.Assign():
            return tuple(name for target in node.targets for name in _targets(target))
        case ast.AugAssign() | ast.For():
            return tuple(_targets(node.target))
        case ast.FunctionDef():
            return (node.name,)
        case ast.If() | ast.Expr() | ast.Return() | ast.Delete() | ast.Pass() | ast.Nonlocal():
            return ()
    raise AssertionError(f"a {type(node).__name__} in an emitted text")


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name):
        yield target.id
    elif isinstance(target, ast.Tuple):
        yield from (name for item in target.elts for name in _targets(item))


def _own_statements(nodes: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements with those that they contain, without those of nested functions."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If | ast.For):
            yield from _own_statements((*node.body, *node.orelse))


def _has_iteration(node: ast.expr) -> bool:
    """Whether a loop has an iteration at least: over a range of a number, or a runtime function."""
    match node:
        case ast.Call(func=ast.Name(id="reversed"), args=[inner]):
            return _has_iteration(inner)
        case ast.Call(func=ast.Name(id="range"), args=[ast.Constant(value=int(n))]):
            return n > 0
        case ast.Call(func=ast.Name(id=name)):
            return name in NEVER_EMPTY
    return False


# --- what is bound where -------------------------------------------------------------------------


class _FunctionScope:
    """One function: which of its names are bound where."""

    def __init__(
        self, function: ast.FunctionDef, text: _CheckedText, outer: _FunctionScope | None
    ) -> None:
        self.function, self.text, self.outer = function, text, outer
        statements = [*_own_statements(function.body)]
        self.params = {argument.arg for argument in function.args.args}
        text.check_bound(function, self.params)
        self.binds = {node: _binds(node) for node in statements}
        for node, names in self.binds.items():
            text.check_bound(node, names)
        self.reads = {node: _reads(node) for node in statements}
        away = {
            name for node in statements if isinstance(node, ast.Nonlocal) for name in node.names
        }
        self.local = self.params.union(*self.binds.values()) - away
        functions = [node for node in statements if isinstance(node, ast.FunctionDef)]
        self.inner = {node.name: _FunctionScope(node, text, self) for node in functions}
        self.tests = self._tests(statements)
        # What the functions around have to have bound at a call, by the values of their names.
        self.required: dict[tuple[tuple[str, int], ...], dict[str, ast.stmt]] = {}
        self.values: Values = {}
        self.free: dict[str, ast.stmt] = {}
        # The nested functions that are defined by now: before it, a name may be an argument's.
        self.defined: set[str] = set()

    def _tests(self, own: list[ast.stmt]) -> Tests:
        """The numbers that coordinates and stages are compared with, in what is nested, too."""
        devices, tests = self.text.devices, Tests()
        names = {*devices.sizes, devices.stage}
        conditions = (_test(node.test) for node in own if isinstance(node, ast.If))
        inner = (test for reads in self.reads.values() if reads.choices for test in reads.tests)
        for test in (*conditions, *inner):
            if test is not None and test[0] in names:
                tests.setdefault(test[0], set()).add(test[2])
        for scope in self.inner.values():
            for name, numbers in scope.tests.items():
                tests.setdefault(name, set()).update(numbers)
        if devices.stage in tests:  # which stages there are is a matter of the device
            tests.setdefault(devices.home, set())
        return tests

    def follow(self, values: Values) -> dict[str, ast.stmt]:
        """Check one way through the function; the names from around it that it reads, and where."""
        self.values, self.free, self.defined = values, {}, set()
        self.block(self.function.body, frozenset(self.params))
        return self.free

    def needs(self, values: Values) -> dict[str, ast.stmt]:
        """The names from around a nested function that it reads, on all ways of its own."""
        outside = {n: v for n, v in values.items() if n in self.tests and n not in self.local}
        key = tuple(sorted(outside.items()))
        if key not in self.required:
            needed: dict[str, ast.stmt] = {}
            for inner_values in self.text.ways(self.tests, self.params, outside):
                needed |= self.follow({**outside, **inner_values})
            self.required[key] = needed
        return self.required[key]

    # --- statements ------------------------------------------------------------------------------

    def block(self, nodes: list[ast.stmt], bound: frozenset[str]) -> frozenset[str] | None:
        """The names that are bound behind statements; None where these return."""
        for node in nodes:
            after = self.statement(node, bound)
            if after is None:
                return None
            bound = after
        return bound

    def statement(self, node: ast.stmt, bound: frozenset[str]) -> frozenset[str] | None:
        """The names that are bound behind a statement, which reads only such."""
        self.read(node, self.reads[node].under(self.values), bound)
        match node:
            case ast.Return():
                return None
            case ast.If():
                return self._branches(node, bound)
            case ast.For():
                return self._loop(node, bound)
            case ast.FunctionDef():
                self.defined.add(node.name)
            case ast.Delete():
                gone = {target.id for target in node.targets if isinstance(target, ast.Name)}
                self.read(node, gone, bound)
                return bound - gone
        names = self.binds[node]
        return bound if bound.issuperset(names) else bound.union(names)

    def read(self, node: ast.stmt, names: Iterable[str], bound: frozenset[str]) -> None:
        """Check that what a statement reads is bound; a nested function with what it reads."""
        for name in names:
            if name in bound and name not in self.defined:
                continue
            if name in self.local:
                assert name in bound, f"{self.text.at(node)} reads `{name}`, which may be unbound"
            elif self.outer is not None and self.outer.has(name):
                self.free.setdefault(name, node)
            else:
                is_defined = name in self.text.known
                assert is_defined, f"{self.text.at(node)} reads `{name}`, which nothing defines"
            if name in self.defined:
                for inner, place in self.inner[name].needs(self.values).items():
                    self.read(place, (inner,), bound)

    def has(self, name: str) -> bool:
        """Whether a name is one of this function or of those around it."""
        return name in self.local or (self.outer is not None and self.outer.has(name))

    def _branches(self, node: ast.If, bound: frozenset[str]) -> frozenset[str] | None:
        holds = _holds(_test(node.test), self.values)
        if holds is not None:
            return self.block(node.body if holds else node.orelse, bound)
        ends = [self.block(branch, bound) for branch in (node.body, node.orelse)]
        bound_after = [end for end in ends if end is not None]
        return frozenset.intersection(*bound_after) if bound_after else None

    def _loop(self, node: ast.For, bound: frozenset[str]) -> frozenset[str]:
        """A loop, of which another iteration may begin with what one has deleted."""
        inside = bound.union(self.binds[node])
        end = self.block(node.body, inside)
        again = inside if end is None else inside & end
        if again != inside:
            self.block(node.body, again)
        return end if end is not None and _has_iteration(node.iter) else bound & again
