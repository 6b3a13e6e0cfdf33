"""Meshes, layouts and `sbp` blocks written from their syntax, wherever that came from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from meshdsl.ir.types import Dim
from meshdsl.named.declarations import Declarations, sized_integer
from meshdsl.named.sizes import How, how_of, made
from meshdsl.named.written_expressions import DIM_MARKS, Unwritable, amount
from meshdsl.named.written_lines import INDENT, WIDTH
from meshdsl.syntax import ast


def written_declarations(declarations: Declarations) -> Iterator[str]:
    """One text for all meshes, one for all layouts, one for all `sbp` blocks, where there are any.

    Raises:
        Unwritable: the language cannot write what the size of an axis is made by.
    """
    sizes = {name: dim.size for name, dim in declarations.dims.items()}
    tables = (
        [_mesh(node, sizes) for node in declarations.meshes.values()],
        [_layout(node) for node in declarations.layouts.values()],
        [_sbp(node) for node in declarations.sbps.values()],
    )
    return ("\n".join(texts) for texts in tables if texts)


def size_text(size: int) -> str:
    """A size as a declaration says it: arithmetic of whole numbers.

    Raises:
        Unwritable: it is made by something else, such as a division with a remainder.
    """
    text = amount(_arithmetic(size)).text
    return text.replace(DIM_MARKS[0], "").replace(DIM_MARKS[1], "")


def _arithmetic(size: int | float) -> int | float:
    """A size made by `+ - * / ^` alone, where `/` leaves nothing over: Python's `//` may be one."""
    how = how_of(size)
    if isinstance(size, int) and (how is None or how.operator == "size"):
        return size
    operator, operands = _operation(size)
    if operator == "floor":
        operator, operands = _operation(operands[0])
        is_whole = operator == "div" and operands[0] % operands[1] == 0
        operator = operator if is_whole else "floor"
    if operator not in _ARITHMETIC:
        message = f"a size is made by whole numbers, dims and `+ - * / ^`, and {size} is not"
        raise Unwritable(message, "make it of the dims by these, or write the number out")
    return made(size, operator, *map(_arithmetic, operands))


_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "neg")


def _operation(number: int | float) -> tuple[str, list[int | float]]:
    """The operator that makes a number, and its operands; of one that is written out, none."""
    how = how_of(number) or How("", ())
    return how.operator, [o for o in how.operands if not isinstance(o, Dim)]


def _mesh(node: ast.Mesh, sizes: Mapping[str, int]) -> str:
    axes = [f"{a.name.text}: {size_text(sized_integer(a.size, sizes))}" for a in node.axes]
    profile = f" on {node.profile.text}" if node.profile else ""
    return _braces(f"mesh {node.name.text} =", axes, profile)


def _layout(node: ast.Layout) -> str:
    base = f" extends {node.base.text}" if node.base else ""
    return _braces(f"layout {node.name.text}{base}", [_rule(r) for r in node.rules])


def _rule(rule: ast.Rule) -> str:
    selector = f"{_path(rule.selector)}: " if rule.selector else ""
    axes = _group([a.text for a in rule.axes]) or "none"
    return f"{selector}{rule.dim.text} -> {axes}{' keep' if rule.keep else ''}"


def _sbp(node: ast.Sbp) -> str:
    return _braces(f"sbp {node.name.text}", [_sbp_entry(e) for e in node.entries])


def _sbp_entry(entry: ast.SbpEntry) -> str:
    use = f" at {_path(entry.at)}" if entry.at else ""
    components = ", ".join(map(_component, entry.components))
    return f"{_path(entry.tensor)}{use}: ({components})"


def _component(node: ast.Expr) -> str:
    """`B`, `P`, `S(0)`, `P(max)`."""
    match node:
        case ast.Ref():
            return node.name.text
        case ast.Number():
            return str(node.value)
        case ast.Call():
            return f"{node.function.text}({', '.join(map(_component, node.args))})"
    raise AssertionError(f"no component of a placement: {node}")


def _path(names: Sequence[ast.Name]) -> str:
    return ".".join(n.text for n in names)


def _group(names: Sequence[str]) -> str:
    return f"({', '.join(names)})" if len(names) > 1 else "".join(names)


def _braces(head: str, entries: Sequence[str], tail: str = "") -> str:
    """A block on one line, or one entry per line where that is too long."""
    line = f"{head} {{ {', '.join(entries)} }}{tail}" if entries else f"{head} {{}}{tail}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{head} {{", *(INDENT + entry for entry in entries), f"}}{tail}"])
