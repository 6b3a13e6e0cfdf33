"""The symbols of a file: everything that has a name, where it is defined and where it is used.

A pure function of the syntax tree, also of the recovered tree of a damaged file: what could not be
parsed has no symbols. The scopes are those of `named/from_syntax.py`; nothing is computed here.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable, Iterator
from dataclasses import field
from typing import Literal

from meshdsl.diagnostics import Span
from meshdsl.records import dataclass
from meshdsl.syntax import ast

Kind = Literal[
    "package",
    "dim",
    "mesh",
    "axis",
    "layout",
    "sbp",
    "schedule",
    "weights",
    "function",
    "program",
    "input",
    "argument",
    "param",
    "tensor",
    "operator",
]
"""The kinds: `argument` is a tensor parameter of a `def`, `tensor` what a statement computes."""

TENSORS: frozenset[Kind] = frozenset({"input", "argument", "param", "tensor"})
"""The kinds that are names of tensors."""

PARAMS: frozenset[Kind] = frozenset({"param"})
"""The kind that `minimize` selects."""

ROLES = ("params", "grads", "state")
"""Selectors of layouts that name no tensor."""

INIT = "init"
"""What an entry of weights says for the initial values of a parameter."""

ACTIVATIONS = "activations"
"""The selector of settings of all values that the forward pass computes.

Tensors and functions may be called so: rules and stages mean these.
"""

_INSTANCE = re.compile(r"(.+)_[0-9]+")


@dataclass(frozen=True, slots=True, eq=False)
class Symbol:
    """One name with one meaning. A tensor that is assigned again is the same symbol.

    `definitions` are the places of the name where it is defined, empty for what is defined outside
    the file (operators, the prelude) or nowhere; `nodes` are the declarations and statements that
    they stand in. `references` are its uses. `region` is where it can be used, `inside` the `def`
    or `program` that it belongs to, None for the whole file.
    """

    kind: Kind
    name: str
    definitions: tuple[Span, ...]
    nodes: tuple[object, ...]
    references: tuple[Span, ...]
    region: Span
    inside: ast.FunctionDecl | ast.ProgramDecl | None

    @property
    def places(self) -> tuple[Span, ...]:
        """Definitions and references."""
        return (*self.definitions, *self.references)


@dataclass(frozen=True, slots=True, eq=False)
class Symbols:
    """The symbols of one file.

    A selector of a layout names every tensor of that name, in whatever `def` or `program`: its
    place belongs to several symbols.
    """

    file: ast.SourceFile
    every: tuple[Symbol, ...]
    _places: tuple[tuple[Span, tuple[Symbol, ...]], ...]

    def place(self, offset: int) -> tuple[Span, tuple[Symbol, ...]] | None:
        """The name at an offset, or right before it, and its symbols; None between names."""
        after = bisect.bisect_right(self._places, offset, key=lambda place: place[0].start)
        if not after or self._places[after - 1][0].end < offset:
            return None
        return self._places[after - 1]

    def at(self, offset: int) -> tuple[Symbol, ...]:
        """The symbols of the name at an offset, or right before it; none between names."""
        place = self.place(offset)
        return () if place is None else place[1]

    def visible(self, offset: int) -> tuple[Symbol, ...]:
        """The symbols that can be used at an offset, less those hidden by narrower ones."""
        visible: dict[tuple[bool, Kind, str], Symbol] = {}
        for symbol in self.every:
            if symbol.definitions and symbol.region.start <= offset <= symbol.region.end:
                is_tensor = symbol.kind in TENSORS
                visible[is_tensor, "tensor" if is_tensor else symbol.kind, symbol.name] = symbol
        return tuple(visible.values())


def symbols(file: ast.SourceFile) -> Symbols:
    """The symbols of a file, the file's own before those of functions and programs."""
    table = _SymbolTable(file.span)
    bodies = [d for d in file.declarations if isinstance(d, ast.FunctionDecl | ast.ProgramDecl)]
    for node in file.declarations:
        _declare(node, table)
    for body in bodies:
        _Body(body, table).read()
    for call, name in table.keywords:
        _keyword(call, name, table)
    for path in table.groups:
        _select(path, table, PARAMS)
    for node in file.declarations:
        _read(node, table)
    every = tuple(entry.symbol() for entry in table.entries)
    return Symbols(file, every, tuple(_places(every)))


def _places(every: tuple[Symbol, ...]) -> Iterator[tuple[Span, tuple[Symbol, ...]]]:
    """Every place of a name with its symbols, in the order of the text."""
    by_start: dict[int, dict[Symbol, Span]] = {}
    for symbol in every:
        for span in symbol.places:
            by_start.setdefault(span.start, {})[symbol] = span
    for start in sorted(by_start):
        yield next(iter(by_start[start].values())), tuple(by_start[start])


# --- tables ----------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Entry:
    """A symbol in the making."""

    kind: Kind
    name: str
    region: Span
    inside: ast.FunctionDecl | ast.ProgramDecl | None = None
    definitions: list[Span] = field(default_factory=list)
    nodes: list[object] = field(default_factory=list)
    references: list[Span] = field(default_factory=list)

    def define(self, name: ast.Name, node: object) -> None:
        self.definitions.append(name.span)
        self.nodes.append(node)

    def symbol(self) -> Symbol:
        # A foreign word (`if`, read as `where`) is no place of the name it is read as.
        references = tuple(span for span in self.references if span.text == self.name)
        lists = tuple(self.definitions), tuple(self.nodes), references
        return Symbol(self.kind, self.name, *lists, self.region, self.inside)


class _SymbolTable:
    """The symbols of the file itself, by kind and name, and all that were made."""

    def __init__(self, whole: Span) -> None:
        self.whole = whole
        self.entries: list[_Entry] = []
        self.known: dict[tuple[Kind, str], _Entry] = {}
        self.keywords: list[tuple[ast.CallExpr, ast.Name]] = []
        self.groups: list[tuple[ast.Name, ...]] = []  # what `minimize` selects

    def new(
        self,
        kind: Kind,
        name: str,
        region: Span | None = None,
        inside: ast.FunctionDecl | ast.ProgramDecl | None = None,
    ) -> _Entry:
        """A new symbol, of the whole file where no region is given."""
        entry = _Entry(kind, name, region or self.whole, inside)
        self.entries.append(entry)
        return entry

    def of(self, kind: Kind, name: str) -> _Entry:
        """The symbol of the file that has this kind and name."""
        if (kind, name) not in self.known:
            self.known[kind, name] = self.new(kind, name)
        return self.known[kind, name]

    def define(self, kind: Kind, name: ast.Name, node: object) -> None:
        """Record a definition in the file."""
        self.of(kind, name.text).define(name, node)

    def use(self, kind: Kind, name: ast.Name | None) -> None:
        """Record a reference to a symbol of the file."""
        if name is not None:
            self.of(kind, name.text).references.append(name.span)

    def has(self, kind: Kind, name: str) -> bool:
        """Whether the file defines it."""
        found = self.known.get((kind, name))
        return found is not None and bool(found.definitions)


_DECLARED: dict[type, Kind] = {
    ast.UseDecl: "package",
    ast.DimDecl: "dim",
    ast.MeshDecl: "mesh",
    ast.LayoutDecl: "layout",
    ast.Sbp: "sbp",
    ast.ScheduleDecl: "schedule",
    ast.WeightsDecl: "weights",
    ast.FunctionDecl: "function",
    ast.ProgramDecl: "program",
}


def _declare(node: ast.Declaration, table: _SymbolTable) -> None:
    if not isinstance(node, ast.Expect):
        table.define(_DECLARED[type(node)], node.name, node)
    if isinstance(node, ast.MeshDecl):
        for axis in node.axes:
            table.define("axis", axis.name, axis)


def _read(node: ast.Declaration, table: _SymbolTable) -> None:
    """Record what declarations of the file mention, except in bodies."""
    match node:
        case ast.DimDecl():
            _sizes(node.value, table)
        case ast.MeshDecl():
            for axis in node.axes:
                _sizes(axis.size, table)
        case ast.LayoutDecl():
            _layout(node, table)
        case ast.Sbp():
            for entry in node.entries:
                _select(entry.tensor, table)
                _select(entry.at, table)
        case ast.WeightsDecl():
            _weights(node, table)
        case ast.Expect():
            _expect(node, table)


def _weights(node: ast.WeightsDecl, table: _SymbolTable) -> None:
    for part in ast.walk(node):
        match part:
            case ast.WeightsEntry():
                for path in part.params:
                    _select(path, table)
            case ast.StoredPath() if [name.text for name in part.path] != [INIT]:
                _select(part.path, table)
            case ast.FileUnit():
                for word in (part.dim, part.size):
                    table.use("dim", word if isinstance(word, ast.Name) else None)
            case ast.FileTensor() | ast.WeightsGroup():
                keys = part.prefixes if isinstance(part, ast.WeightsGroup) else (part.key,)
                for dim in (dim for key in keys for dim in _dims_of_key(key.span)):
                    table.use("dim", dim)


def _dims_of_key(key: Span) -> Iterator[ast.Name]:
    """The dims in the braces of a key, at their places in its text."""
    for match in re.finditer(r"\{[^{}A-Za-z_]*([A-Za-z_]\w*)[^{}]*\}", key.text):
        start, end = (key.start + offset for offset in match.span(1))
        yield ast.Name(match[1], Span(key.source, start, end))


def _layout(node: ast.LayoutDecl, table: _SymbolTable) -> None:
    table.use("layout", node.base)
    for rule in node.rules:
        if rule.selector and rule.selector[0].text not in ROLES:
            _select(rule.selector, table)
        table.use("dim", rule.dim)
        _axes(rule.axes, table)
    for setting in node.settings:
        is_stage = isinstance(setting.value, ast.Number)  # its number on an axis
        of_all = not is_stage and [n.text for n in setting.selector] == [ACTIVATIONS]
        if setting.selector[0].text not in ROLES and not of_all:
            _select(setting.selector, table)
            if is_stage:
                _axes((setting.name,), table)
    if node.schedule is not None:
        _scheduled(node.schedule, table)


def _scheduled(call: ast.CallExpr, table: _SymbolTable) -> None:
    """Record the schedule of a layout, and its dims; the words of its options name nothing."""
    table.use("schedule", call.function)
    for item in call.items or ():
        for name in parts(item)[0]:
            table.use("dim", name)
    for value in call.args:
        _sizes(value, table)


def _sizes(node: ast.Expr, table: _SymbolTable) -> None:
    for part in ast.walk(node):
        if isinstance(part, ast.Ref):
            table.use("dim", part.name)


def _axes(names: Iterable[ast.Name], table: _SymbolTable) -> None:
    for name in names:
        axis = name.text.partition(".")[0]  # a part of an axis, `tp.2`, is a mention of the axis
        span = Span(name.span.source, name.span.start, name.span.start + len(axis))
        table.use("axis", name if axis == name.text else ast.Name(axis, span))


def _expect(node: ast.Expect, table: _SymbolTable) -> None:
    table.use("sbp" if table.has("sbp", node.layout.text) else "layout", node.layout)
    table.use("program", node.program)
    table.use("mesh", node.mesh)
    for entry in node.entries:
        if isinstance(entry, ast.ExpectCount):
            _axes(entry.axes or (), table)
            _sizes(entry.value, table)
            continue
        _select(entry.tensor, table)
        for item in entry.dims:
            table.use("dim", item.dim)
            _axes(item.axes or (), table)


def _keyword(call: ast.CallExpr, name: ast.Name, table: _SymbolTable) -> None:
    """Record the name of an argument in a call of a `def`."""
    if not table.has("function", call.function.text):
        return
    function = table.of("function", call.function.text).nodes[0]
    for entry in table.entries:
        if entry.inside is function and entry.kind == "argument" and entry.name == name.text:
            entry.references.append(name.span)


# --- selectors -------------------------------------------------------------------------------


def _select(
    path: tuple[ast.Name, ...], table: _SymbolTable, kinds: frozenset[Kind] = TENSORS
) -> None:
    """Record what the dotted path of a rule or an entry names, as `named/selectors.py` reads it."""
    if not path:
        return
    if len(path) > 1 and _function(path[-2], table) is None:
        path = path[:-1]  # `w.m` is a state of `w`
    *outer, last = path
    for name in path:
        if (function := _function(name, table)) is not None:
            start = name.span.start  # of `f_2`, the name of the function
            function.references.append(Span(name.span.source, start, start + len(function.name)))
    owner = _function(outer[-1], table) if outer else None
    for tensor in _selected(last.text, owner, table, kinds):
        tensor.references.append(last.span)
    if last.text.startswith("d_") and not any(_selected(last.text, owner, table)):
        span = Span(last.span.source, last.span.start + 2, last.span.end)
        for tensor in _selected(span.text, owner, table):
            tensor.references.append(span)


def _selected(
    name: str, owner: _Entry | None, table: _SymbolTable, kinds: frozenset[Kind] = TENSORS
) -> Iterator[_Entry]:
    """The tensors of a name, of any `def` or of the `owner`.

    An argument that is not assigned has the name that its caller gives it.
    """
    for entry in table.entries:
        if entry.name != name or entry.kind not in kinds or not entry.definitions:
            continue
        is_own = owner is None or any(entry.inside is node for node in owner.nodes)
        if is_own and (entry.kind != "argument" or len(entry.definitions) > 1):
            yield entry


def _function(name: ast.Name, table: _SymbolTable) -> _Entry | None:
    """The function that a part of a selector names, itself or as its second call `f_2`."""
    instance = _INSTANCE.fullmatch(name.text)
    for text in (name.text, instance[1] if instance else ""):
        if table.has("function", text):
            return table.of("function", text)
    return None


# --- bodies ----------------------------------------------------------------------------------


class _Body:
    """Reads one `def` or `program`, statement by statement: a name means what is known so far."""

    def __init__(self, node: ast.FunctionDecl | ast.ProgramDecl, table: _SymbolTable) -> None:
        self.node = node
        self.table = table
        self.dims: dict[str, _Entry] = {}
        self.names: dict[str, _Entry] = {}
        self.stacks: dict[str, _Entry] = {}
        self.nowhere: dict[str, _Entry] = {}

    def read(self) -> None:
        node = self.node
        if isinstance(node, ast.FunctionDecl):
            for dim in node.dims:
                self.dims[dim.text] = self.table.new("dim", dim.text, node.span, node)
                self.dims[dim.text].define(dim, node)
        for param in node.params:
            self.tensor_param(param)
        if isinstance(node, ast.FunctionDecl):
            self.dim_refs(node.result)
        self.statements(node.body, node.span.end)

    def tensor_param(self, node: ast.TensorParam) -> None:
        self.dim_refs(node.dims)
        if node.default is not None:
            self.expression(node.default)
        kind: Kind = "input" if isinstance(self.node, ast.ProgramDecl) else "argument"
        self.define(kind, node.name, node, self.node.span)

    def define(self, kind: Kind, name: ast.Name, node: object, region: Span) -> None:
        if name.text not in self.names:
            self.names[name.text] = self.table.new(kind, name.text, region, self.node)
        self.names[name.text].define(name, node)

    # --- statements --------------------------------------------------------------------------

    def statements(self, nodes: tuple[ast.Statement, ...], end: int) -> None:
        """Read statements in a block that ends at offset `end`."""
        for node in nodes:
            self.statement(node, end)

    def statement(self, node: ast.Statement, end: int) -> None:
        after = Span(node.span.source, node.span.end, end)
        match node:
            case ast.Assign():
                self.expression(node.value)
                for target in node.targets:
                    self.dim_refs(target.dims)
                    self.define("tensor", target.name, node, after)
            case ast.ParamDecl():
                self.dim_refs(node.target.dims)
                for arg in node.init.args if node.init else ():
                    self.expression(arg)
                self.define("param", node.target.name, node, after)
            case ast.Repeat():
                self.dim(node.dim)
                outer, stacks = dict(self.names), dict(self.stacks)
                self.statements(node.body, node.span.end)
                self.leave(outer, stacks, end)
            case ast.Recompute():
                self.statements(node.body, end)
            case _:
                self.reads(node)

    def reads(self, node: ast.UpdateStatement | ast.Return | ast.Minimize) -> None:
        """Read a statement that defines no name."""
        for value in node.values if isinstance(node, ast.Return) else (node.value,):
            self.expression(value)
        if isinstance(node, ast.UpdateStatement):
            self.reference(node.name)
        if isinstance(node, ast.Minimize):
            self.optimizer(node.optimizer)
            for setting in node.groups:
                self.group(setting)

    def optimizer(self, call: ast.CallExpr) -> None:
        """Read the call of an optimizer, which may be a function of the file."""
        if self.is_function(call):
            self.table.use("function", call.function)
            self.table.keywords += ((call, keyword.name) for keyword in call.keywords)
        self.options(call)

    def group(self, setting: ast.GroupSetting | ast.GroupOptimizer) -> None:
        """Read a setting of some parameters; what it selects may be declared further on."""
        paths = (path for path in setting.selectors if path[0].text not in ROLES)
        self.table.groups += (path for path in paths if path not in self.table.groups)
        if isinstance(setting, ast.GroupOptimizer):
            self.optimizer(setting.optimizer)
        elif setting.value is not None:
            self.option(setting.value)

    def options(self, call: ast.CallExpr) -> None:
        """Read the options of an optimizer or a schedule: its words are names of nothing here."""
        for value in (*call.args, *(keyword.value for keyword in call.keywords)):
            self.option(value)

    def option(self, value: ast.Expr) -> None:
        """Read the value of an option."""
        if isinstance(value, ast.CallExpr) and not self.is_function(value):
            self.options(value)
        elif not isinstance(value, ast.Ref) or self.is_known(value.name):
            self.expression(value)

    def is_function(self, call: ast.CallExpr) -> bool:
        return self.table.has("function", call.function.text)

    def is_tensor(self, name: ast.Name) -> bool:
        return name.text in self.names or name.text in self.stacks

    def is_known(self, name: ast.Name) -> bool:
        known = self.is_tensor(name) or name.text in self.dims
        return known or self.table.has("dim", name.text)

    def leave(self, outer: dict[str, _Entry], stacks: dict[str, _Entry], end: int) -> None:
        """The end of a loop: what it has made first can be read until `end`, as stacks."""
        left = {name: entry for name, entry in self.names.items() if name not in outer}
        self.names, self.stacks = outer, {**stacks, **self.stacks, **left}
        for entry in left.values():
            entry.region = Span(entry.region.source, entry.region.start, end)

    # --- names -------------------------------------------------------------------------------

    def dim_refs(self, nodes: tuple[ast.DimRef, ...] | None) -> None:
        for node in nodes or ():
            self.dim(node.dim)
            _axes(node.axes or (), self.table)

    def dim(self, name: ast.Name) -> None:
        if name.text == "...":
            return
        if name.text in self.dims:
            self.dims[name.text].references.append(name.span)
        else:
            self.table.use("dim", name)

    def reference(self, name: ast.Name) -> None:
        """A bare name: a tensor, else the size of a dim."""
        if name.text in self.names:
            self.names[name.text].references.append(name.span)
        elif name.text in self.stacks:
            self.stacks[name.text].references.append(name.span)
        elif self.is_known(name):
            self.dim(name)
        else:
            if name.text not in self.nowhere:
                entry = self.table.new("tensor", name.text, self.node.span, self.node)
                self.nowhere[name.text] = entry
            self.nowhere[name.text].references.append(name.span)

    # --- expressions -------------------------------------------------------------------------

    def expression(self, node: ast.Expr) -> None:
        match node:
            case ast.Ref():
                self.reference(node.name)
            case ast.Unary():
                self.expression(node.operand)
            case ast.Binary():
                self.expression(node.left)
                self.expression(node.right)
            case ast.ViewExpr():
                self.view(node)
            case ast.CallExpr():
                self.call(node)

    def view(self, node: ast.ViewExpr) -> None:
        """A view, or an operator without tensors: `iota[seq]`."""
        head = node.tensor
        plain = all(isinstance(item, ast.DimItem) for item in node.items)
        if isinstance(head, ast.Ref) and plain and not self.is_tensor(head.name):
            self.table.use("operator", head.name)
        else:
            self.expression(head)
        self.items(node.items)

    def call(self, node: ast.CallExpr) -> None:
        self.table.use("function" if self.is_function(node) else "operator", node.function)
        self.items(node.items or ())
        for arg in node.args:
            self.expression(arg)
        for keyword in node.keywords:
            self.expression(keyword.value)
            self.table.keywords.append((node, keyword.name))
        for name in node.out or ():
            self.dim(name)

    def items(self, items: tuple[ast.Item, ...]) -> None:
        for item in items:
            dims, values = parts(item)
            for name in dims:
                self.dim(name)
            for value in values:
                self.expression(value)


def parts(item: ast.Item) -> tuple[tuple[ast.Name, ...], tuple[ast.Expr, ...]]:
    """The dims that an item of a bracket names, and the expressions in it."""
    match item:
        case ast.DimItem():
            return (item.dim,), ()
        case ast.ArrowItem():
            return (*item.sources, *item.targets), ()
        case ast.ByItem():
            named = (item.dim, item.window, item.target)
            return tuple(n for n in named if isinstance(n, ast.Name)), ()
        case ast.PickItem():
            return (item.dim,), (item.index,)
    bounds = tuple(bound for bound in (item.start, item.stop) if bound is not None)
    return (item.dim,) if item.target is None else (item.dim, item.target), bounds
