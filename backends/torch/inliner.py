"""Pasting: the support functions that an emitted program uses, as text, with all they refer to.

The modules of `backends/runtime` are read and parsed, never imported. Text for the type checker and
the maintainers is left out: annotations of functions, and all but the first line of docstrings.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources
import re
from collections.abc import Iterable, Iterator

from meshdsl.backends.torch.line_breaks import INDENT, statement
from meshdsl.records import dataclass

PROVIDED = ("numpy", "torch", "torch.distributed")
"""The imports of every emitted program (as `np`, `torch` and `dist`)."""

SUPPORT = "meshdsl.backends.runtime"


@dataclass(frozen=True, slots=True)
class Definition:
    """One function, class or constant of the support library.

    `order` sorts definitions by module, then line. `uses` are the definitions it refers to, `first`
    those that must precede it (of its bases, decorators, annotations), `imports` the import lines
    it needs from the standard library.
    """

    name: str
    order: tuple[str, int]
    text: str
    uses: frozenset[str]
    first: frozenset[str]
    imports: frozenset[str]


@dataclass(frozen=True, slots=True)
class Pasted:
    """Definitions to paste, by name and as text, and the import lines they need."""

    names: tuple[str, ...]
    texts: tuple[str, ...]
    imports: tuple[str, ...]


def paste(
    names: set[str] | frozenset[str], without: set[str] | frozenset[str] = frozenset()
) -> Pasted:
    """The named definitions of the support library and all that they refer to, in a fixed order.

    `without` names definitions that the program already has.
    """
    available = library()
    missing = sorted(set(names) - defined())
    assert not missing, f"the support library has no {', '.join(missing)}"
    wanted: set[str] = set()
    todo = set(names) - without
    while todo:
        wanted |= todo
        todo = {used for name in todo for used in available[name].uses} - wanted - without
    definitions: dict[str, Definition] = {}
    for name in sorted(wanted, key=lambda n: available[n].order):
        _add(name, available, wanted, definitions)
    imports = {line for definition in definitions.values() for line in definition.imports}
    texts = tuple(definition.text for definition in definitions.values())
    return Pasted(tuple(definitions), texts, merge_imports(imports))


def _add(
    name: str, known: dict[str, Definition], wanted: set[str], found: dict[str, Definition]
) -> None:
    for earlier in sorted(known[name].first & wanted, key=lambda n: known[n].order):
        _add(earlier, known, wanted, found)
    found.setdefault(name, known[name])


def merge_imports(lines: set[str]) -> tuple[str, ...]:
    """Import lines as a formatter orders them: plain imports, then one `from` line per module."""
    plain = sorted(line for line in lines if line.startswith("import "))
    members: dict[str, set[str]] = {}
    for line in lines - set(plain):
        module, _, member = line.removeprefix("from ").partition(" import ")
        members.setdefault(module, set()).add(member)
    by_module = (
        f"from {module} import {', '.join(sorted(names, key=_member_order))}"
        for module, names in sorted(members.items())
    )
    return (*plain, *by_module)


def _member_order(name: str) -> tuple[bool, bool, str]:
    """Constants, then classes, then the rest, as isort orders what is imported from a module."""
    return not name.isupper(), not name[:1].isupper(), name


@functools.cache
def _texts() -> tuple[tuple[str, str], ...]:
    """The modules of the support library: their names and texts."""
    folder = importlib.resources.files(SUPPORT)
    files = (entry for entry in folder.iterdir() if entry.name.endswith(".py"))
    return tuple(sorted((f.name, f.read_text("utf-8")) for f in files if f.name != "__init__.py"))


def slim(text: str) -> str:
    """A module less the annotations in functions and the further lines of docstrings."""
    lines = text.splitlines()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    functions = (n for n in nodes if isinstance(n, ast.FunctionDef))
    for variable in {n for f in functions for n in ast.walk(f) if isinstance(n, ast.AnnAssign)}:
        line, annotation = lines[variable.lineno - 1], variable.annotation
        name = line[: variable.target.end_col_offset]
        lines[variable.lineno - 1] = name + line[annotation.end_col_offset :]
    for node in sorted(nodes, key=lambda n: -n.lineno):
        first = node.body[0]
        if _is_docstring(node.body, 0) and first.lineno != first.end_lineno:
            lines[first.lineno - 1 : first.end_lineno] = [f'{lines[first.lineno - 1]}"""']
        if isinstance(node, ast.FunctionDef):
            lines[node.lineno - 1 : first.lineno - 1] = _signature(node)
    text = "\n".join(line.split("  # type: ignore")[0] for line in lines)
    return text.replace(f"{INDENT * 2}import torch\n\n", "")


def _signature(node: ast.FunctionDef) -> list[str]:
    """The lines from `def` to the colon, without annotations."""
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return statement(f"def {node.name}({ast.unparse(node.args)}):", node.col_offset // len(INDENT))


_DEFINITION = re.compile(r"^(?:(?:def|class) (\w+)|(\w+)(?:: [^=\n]+)? = )", re.MULTILINE)
_IMPORT = re.compile(
    r"^(?:import [\w.]+(?: as \w+)?|from \S+ import (?:\([^)]*\)|[^(\n]+))$", re.MULTILINE
)


@functools.cache
def defined() -> frozenset[str]:
    """The names that the support library defines, found by how the lines begin.

    A report asks for them too, which needs nothing else of the library: it is not parsed for that.
    """
    return frozenset(_defining_modules())


@functools.cache
def _defining_modules() -> dict[str, tuple[str, str]]:
    """The module that defines each name, and its text."""
    modules: dict[str, tuple[str, str]] = {}
    for module in _texts():
        new = ["".join(pair) for pair in _DEFINITION.findall(module[1])]
        twice = modules.keys() & new
        assert not twice, f"{module[0]} defines {', '.join(sorted(twice))} again"
        modules |= dict.fromkeys(new, module)
    return modules


@functools.cache
def imported() -> frozenset[str]:
    """The names that a text may import for the support library, found as those it defines."""
    lines = [line for _, text in _texts() for line in _IMPORT.findall(text)]
    return frozenset(name for name, line in _imported(ast.parse("\n".join(lines))) if line)


def bound_names(text: str) -> Iterator[str]:
    """The names that imports, definitions and assignments of a module bind."""
    tree = ast.parse(text)
    for node in tree.body:
        yield from _defined(node)
    yield from (name for name, _ in _imported(tree))


class SupportDefinitions(dict[str, Definition]):
    """Definitions of the support library by name.

    A module is parsed at the first access to one of its definitions. Programs need few modules, and
    parsing all takes longer than compiling a small program.
    """

    def __missing__(self, name: str) -> Definition:
        module, text = _defining_modules()[name]
        slimmed = slim(text)
        definitions = _definitions(module, slimmed, ast.parse(slimmed), defined())
        self.update((definition.name, definition) for definition in definitions)
        return self[name]


library = functools.cache(SupportDefinitions)
"""The definitions that this process has parsed."""


def _definitions(
    module: str, text: str, tree: ast.Module, names: frozenset[str]
) -> Iterator[Definition]:
    lines = text.splitlines()
    imports = dict(_imported(tree))
    for position, node in enumerate(tree.body):
        for name in _defined(node):
            referred = _referred(node)
            yield Definition(
                name,
                (module, node.lineno),
                _text(lines, tree.body, position),
                frozenset(referred & names - {name}),
                frozenset(_loaded(_eager(node)) & names - {name}),
                frozenset(imports[n] for n in referred if imports.get(n)),
            )


def _loaded(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _referred(node: ast.stmt) -> set[str]:
    """Names from outside that a definition reads: those it does not itself bind as variables."""
    nodes = list(ast.walk(node))
    bound = {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    local = bound if isinstance(node, ast.FunctionDef) else set()
    return (_loaded(nodes) - local) | _loaded(_eager(node))


def _eager(node: ast.AST) -> Iterator[ast.AST]:
    """The parts evaluated at the definition: all but bodies of functions."""
    yield node
    body = node.body if isinstance(node, ast.FunctionDef) else []
    for child in ast.iter_child_nodes(node):
        if child not in body:
            yield from _eager(child)


def _defined(node: ast.stmt) -> tuple[str, ...]:
    """The name a top-level statement defines; none for imports and docstrings."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return (node.name,)
    if isinstance(node, ast.Assign):
        assert len(node.targets) == 1, "one name per assignment"
        assert isinstance(node.targets[0], ast.Name), "only names are assigned"
        return (node.targets[0].id,)
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return ()


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Imported names and the import line of each; empty for what is pasted or always there."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.partition(".")[0]
                is_provided = alias.name in PROVIDED
                line = f"import {alias.name}" + (f" as {bound}" if alias.asname else "")
                yield bound, "" if is_provided else line
        elif isinstance(node, ast.ImportFrom):
            is_pasted = str(node.module).startswith(SUPPORT) or node.module == "__future__"
            for alias in node.names:
                yield alias.asname or alias.name, _from_line(node, alias) if not is_pasted else ""


def _from_line(node: ast.ImportFrom, alias: ast.alias) -> str:
    renamed = f" as {alias.asname}" if alias.asname else ""
    return f"from {node.module} import {alias.name}{renamed}"


def _text(lines: list[str], body: list[ast.stmt], position: int) -> str:
    """The source of one statement, with the comments above it and a docstring below a constant."""
    node = body[position]
    decorators = node.decorator_list if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
    first = min([node.lineno, *(d.lineno for d in decorators)])
    while first > 1 and lines[first - 2].startswith("#"):
        first -= 1
    last = node
    if _is_docstring(body, position + 1) and isinstance(node, ast.Assign | ast.AnnAssign):
        last = body[position + 1]
    return "\n".join(lines[first - 1 : last.end_lineno])


def _is_docstring(body: list[ast.stmt], position: int) -> bool:
    node = body[position] if position < len(body) else None
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
