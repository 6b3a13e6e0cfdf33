"""The place of a call in the user's Python, and the name its result is assigned to.

The place is that of the running instruction (PEP 657), so a diagnostic underlines the very
expression. The name of a tensor is the variable it is assigned to: the statement around the
expression is looked up in the syntax tree of the file. Without source text (an interactive prompt,
`exec`) places have a line but no text, and tensors no names.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from types import CodeType, FrameType
from typing import Any, TypeVar, cast

from meshdsl.diagnostics import Source, Span
from meshdsl.records import dataclass

Key = tuple[int | None, ...]
"""First line, last line, first column, last column: lines from 1, columns in bytes from 0."""

Names = str | tuple[str | None, ...] | None
"""The variable that a result is assigned to, or one per result; None if there is none."""

# As Python names the files of the package, which may lie behind a link: no path is resolved.
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_NOT_USERS = (_PACKAGE, contextlib.__file__)
_LIBRARIES = frozenset({"torch", "numpy", "einops", "jax"})
_CELL = re.compile(r"ipykernel_\d+")


@dataclass(frozen=True, slots=True)
class Site:
    """A place in the user's program: its span, the names it is assigned to, its syntax."""

    span: Span
    names: Names = None
    node: ast.AST | None = None
    file: PythonFile | None = None
    frame: FrameType | None = None

    def operands(self) -> list[Span]:
        """The spans of the operands, in order; of a call, those of its arguments."""
        if self.file is None:
            return []
        return [self.file.span(key_of(node)) for node in _operands(self.node)]

    def operand(self, index: int) -> Span:
        """The span of one operand, or of the whole expression where it is not known."""
        found = self.operands()
        return found[index] if index < len(found) else self.span

    def receiver(self) -> Span:
        """The span of the tensor whose method, or whose brackets, these are."""
        node = self.node.func if isinstance(self.node, ast.Call) else self.node
        if self.file is None or not isinstance(node, ast.Attribute | ast.Subscript):
            return self.span
        return self.file.span(key_of(node.value))

    def argument(self, name: str, position: int | None = None) -> Span:
        """The span of an argument given by name, or by its position."""
        node = self._argument(name, position)
        return self.span if node is None or self.file is None else self.file.span(key_of(node))

    def entry(self, key: str, name: str, position: int) -> Span:
        """The span of one entry of an argument that is written as a dict, or of the argument."""
        node = self._argument(name, position)
        for at, value in (
            zip(node.keys, node.values, strict=True) if isinstance(node, ast.Dict) else ()
        ):
            if isinstance(at, ast.Constant) and at.value == key and self.file is not None:
                return self.file.span(key_of(at)).to(self.file.span(key_of(value)))
        return self.argument(name, position)

    def _argument(self, name: str, position: int | None) -> ast.expr | None:
        if not isinstance(self.node, ast.Call):
            return None
        named = [k.value for k in self.node.keywords if k.arg == name]
        if named or position is None or position >= len(self.node.args):
            return named[0] if named else None
        return self.node.args[position]


class PythonFile:
    """One Python file (or cell): its text, and its expressions by place."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.lines = lines
        self.source = Source(name, "".join(lines))
        self.tree = _parsed(self.source.text)
        self.nodes: dict[Key, ast.AST] = {}
        self.names: dict[Key, Names] = {}
        if self.tree is not None:
            self._index(self.tree)

    def _index(self, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.expr | ast.AugAssign):
                for key in _keys(node):
                    self.nodes.setdefault(key, node)
            for value, target in _assignments(node):
                for key in _keys(value):
                    self.names[key] = target

    def span(self, key: Key) -> Span:
        """The span at a place; the whole line if the columns are not known."""
        first, last, start, end = key
        begin = self._offset(first or 1, start or 0)
        if end is None:
            return Span(self.source, begin, begin + len(self.source.line(first or 1)))
        return Span(self.source, begin, self._offset(last or first or 1, end))

    def _offset(self, line: int, column: int) -> int:
        """The offset of a column given in bytes of UTF-8."""
        starts = self.source.starts
        if line > len(starts):
            return len(self.source.text)
        text = self.source.line(line)
        if not text.isascii():
            column = len(text.encode()[:column].decode(errors="ignore"))
        return starts[line - 1] + min(column, len(text))

    def definition(self, code: CodeType) -> ast.FunctionDef | None:
        """The `def` that a function was compiled from."""
        for node in ast.walk(self.tree) if self.tree is not None else ():
            if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                if first == code.co_firstlineno:
                    return node
        return None


def here() -> Site:
    """The site of the user's expression that is being evaluated."""
    frame = user_frame()
    code = frame.f_code
    file = file_of(code, frame)
    key = _positions(code)[frame.f_lasti // 2]
    return Site(file.span(key), file.names.get(key), file.nodes.get(key), file, frame)


def calling() -> Span | None:
    """The span of the user's call; None where an installed package calls, as IPython its magics."""
    file = user_frame().f_code.co_filename
    return None if file.startswith(_installed()) else here().span


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of Python's own library and of packages."""
    paths = sysconfig.get_paths()
    return tuple(paths[kind] + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))


def user_frame() -> FrameType:
    """The innermost frame that is not of this package, nor of a library that calls its tensors."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    assert frame is not None, "called from nowhere"
    return frame


def is_users(frame: FrameType) -> bool:
    """Whether a frame is neither of this package nor of what works on its behalf."""
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return not frame.f_code.co_filename.startswith(_NOT_USERS) and module not in _LIBRARIES


def file_of(code: CodeType, frame: FrameType | None = None) -> PythonFile:
    """The file that code was compiled from; lines without text if it cannot be read."""
    name = code.co_filename
    lines = linecache.getlines(name, frame.f_globals if frame else None)
    if not lines:
        lines = ["\n"] * max(line or 0 for *_, line in code.co_lines())
    file = _FILES.get(name)
    if file is None or (file.lines is not lines and file.lines != lines):
        file = _FILES[name] = PythonFile(_shown(name), lines)
    return file


_FILES: dict[str, PythonFile] = {}
_POSITIONS: dict[int, tuple[CodeType, list[Key]]] = {}


def _positions(code: CodeType) -> list[Key]:
    """The place of every instruction. The code is kept alive, so that its id stays unique."""
    entry = _POSITIONS.get(id(code))
    if entry is None:
        entry = _POSITIONS[id(code)] = (code, list(code.co_positions()))
    return entry[1]


def cell_of(filename: str) -> str | None:
    """The notebook cell of code with this file name: `In[3]`."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    cell = None if shell is None else shell.compile.format_code_name(filename)
    return None if cell is None else str(cell[1])


def _shown(filename: str) -> str:
    """The file's name for users: no folder, and a cell is `In[3]`, as in tracebacks."""
    cell = cell_of(filename)
    if cell is not None:
        return cell
    if _CELL.search(filename):
        return "cell"
    return filename if filename.startswith("<") else os.path.basename(filename)


# --- syntax ----------------------------------------------------------------------------------


def key_of(node: ast.AST) -> Key:
    """The place of a node of the syntax tree."""
    found = (getattr(node, a) for a in ("lineno", "end_lineno", "col_offset", "end_col_offset"))
    return tuple(found)


def _keys(node: ast.AST) -> Iterator[Key]:
    """The places of an expression; Python reports another for a method call over several lines."""
    yield key_of(node)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    func = node.func
    if func.end_lineno is not None and func.lineno != func.end_lineno:
        start = (func.end_col_offset or 0) - len(func.attr)
        yield func.end_lineno, node.end_lineno, start, node.end_col_offset


def _parsed(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _operands(node: ast.AST | None) -> Sequence[ast.expr]:
    match node:
        case ast.BinOp():
            return node.left, node.right
        case ast.AugAssign():
            return node.target, node.value
        case ast.Compare():
            return node.left, *node.comparators
        case ast.UnaryOp():
            return (node.operand,)
        case ast.Subscript():
            return (node.value,)
        case ast.Call():
            return node.args
    return ()


def _assignments(node: ast.AST) -> Iterator[tuple[ast.AST, Names]]:
    """The expressions of a statement whose results are assigned to names."""
    match node:
        case ast.Assign():
            yield from _named(node.value, node.targets[0])
        case ast.AnnAssign(value=ast.expr() as value):
            yield from _named(value, node.target)
        case ast.NamedExpr():
            yield from _named(node.value, node.target)
        case ast.AugAssign(target=ast.Name(id=name)):
            yield node, name


def _named(value: ast.expr, target: ast.expr) -> Iterator[tuple[ast.AST, Names]]:
    match target, value:
        case _, ast.IfExp():
            yield from _named(value.body, target)
            yield from _named(value.orelse, target)
        case ast.Name(id=name), _:
            yield value, name
        case ast.Tuple() | ast.List(), ast.Tuple() | ast.List():
            if len(target.elts) == len(value.elts):
                for each, one in zip(value.elts, target.elts, strict=True):
                    yield from _named(each, one)
        case ast.Tuple() | ast.List(), _:
            yield value, tuple(e.id if isinstance(e, ast.Name) else None for e in target.elts)


Node = TypeVar("Node")


def with_span(node: Node, span: Span) -> Node:
    """A syntax tree with `span` as the place of all its nodes."""
    if isinstance(node, tuple):
        return cast(Node, tuple(with_span(part, span) for part in node))
    if isinstance(node, Span):
        return cast(Node, span)
    if not is_dataclass(node) or isinstance(node, type):
        return node
    changed = {f.name: with_span(getattr(node, f.name), span) for f in fields(node)}
    return cast(Node, replace(cast(Any, node), **changed))
