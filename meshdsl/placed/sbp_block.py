"""`sbp` blocks: positional annotations per tensor, one component per mesh axis, in mesh order."""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.diagnostics import DiagnosticError, Fix, Related, Source, Span, advice, fail
from meshdsl.named.declarations import Declarations, unknown
from meshdsl.named.ir import Value
from meshdsl.named.selectors import TENSOR, selects
from meshdsl.ops.opdef import ReduceOp
from meshdsl.placed.layout import uneven
from meshdsl.placed.placements import Mesh, Placement, placement
from meshdsl.records import dataclass
from meshdsl.syntax import ast

OPS: tuple[ReduceOp, ...] = ("sum", "max", "min", "prod")


@dataclass(frozen=True, slots=True)
class Annotation:
    """The placement that an entry of a block gives a tensor."""

    placement: Placement
    entry: ast.SbpEntry


@dataclass(frozen=True, slots=True)
class Annotations:
    """A resolved block. Entries with `at` bind a tensor only as an operand of that one."""

    name: str
    mesh: Mesh
    entries: tuple[ast.SbpEntry, ...]

    def of(self, value: Value) -> Annotation | None:
        """The annotation of a tensor, wherever it is read. Raises MD0308 or MD0310."""
        return self._first(value, (e for e in self.entries if not e.at))

    def at(self, value: Value, reader: Value | None) -> Annotation | None:
        """The annotation of a tensor where it is read on the way to `reader`."""
        if reader is None:
            return None
        return self._first(value, (e for e in self.entries if e.at and means(e.at, reader)))

    def _first(self, value: Value, entries: Iterable[ast.SbpEntry]) -> Annotation | None:
        for entry in entries:
            if means(entry.tensor, value):
                return Annotation(self._placement(value, entry), entry)
        return None

    def _placement(self, value: Value, entry: ast.SbpEntry) -> Placement:
        if len(entry.components) != len(self.mesh.axes):
            count = len(entry.components)
            entries = "1 entry" if count == 1 else f"{count} entries"
            listed = ", ".join(self.mesh.names) or "(none)"
            message = f"`{value.label}` has {entries}, and the mesh has the axes {listed}"
            help = "write one per mesh axis, in mesh order: `S(i)`, `B`, `P` or `P(max)`"
            fail("MD0308", message, entry.span, help=help)
        splits: dict[str, tuple[str, ...]] = {}
        partial: dict[str, ReduceOp] = {}
        for axis, component in zip(self.mesh.names, entry.components, strict=True):
            self._component(value, axis, component, splits, partial)
        if len(set(partial.values())) > 1:
            help = "a sum of maxima is not a maximum of sums; write the same one for both axes"
            fail(
                "MD0308",
                "a tensor has one kind of partial value, on all axes",
                entry.span,
                help=help,
            )
        for dim, axes in splits.items():
            for diagnostic in uneven(dim, value.type.size(dim), axes, self.mesh, entry.span):
                if diagnostic.severity == "error":
                    raise DiagnosticError(diagnostic)
        return placement(self.mesh, splits, tuple(partial), next(iter(partial.values()), None))

    def _component(
        self,
        value: Value,
        axis: str,
        node: ast.Expr,
        splits: dict[str, tuple[str, ...]],
        partial: dict[str, ReduceOp],
    ) -> None:
        match node:
            case ast.Ref(name=ast.Name(text="B")):
                return
            case ast.Ref(name=ast.Name(text="P")):
                partial[axis] = "sum"
                return
            case ast.CallExpr(function=ast.Name(text="P"), args=(ast.Ref(name=name),)):
                op = next((op for op in OPS if op == name.text), None)
                if op is not None:
                    partial[axis] = op
                    return
            case ast.CallExpr(
                function=ast.Name(text="S"), args=(ast.Number(value=int() as index),)
            ):
                dim = self._dim(value, index, node.span)
                # A slice may lack it.
                if value.type.has(dim):
                    splits[dim] = (*splits.get(dim, ()), axis)
                return
        check_component(node)

    def _dim(self, value: Value, index: int, span: Span) -> str:
        """The dim at a position of the tensor as the program declares it."""
        names = value.positions
        if index >= len(names):
            where = Related(value.span, f"it is {value.type.dtype}[{', '.join(names)}]")
            dims = ", ".join(f"S({i}) is `{d}`" for i, d in enumerate(names)) or "it has no dims"
            fixes = (Fix.write(span, f"S({len(names) - 1})", safe=False),) if names else ()
            message = f"`{value.label}` has no dim {index}"
            fail("MD0308", message, span, where, help=advice(fixes, dims), fixes=fixes)
        return names[index]


def check_component(node: ast.Expr) -> None:
    """Raise MD0308 for what is no component of a placement, whatever its tensor."""
    match node:
        case ast.Ref(name=ast.Name(text="B" | "P")):
            return
        case ast.CallExpr(function=ast.Name(text="P"), args=(ast.Ref(name=name),)) if (
            name.text in OPS
        ):
            return
        case ast.CallExpr(function=ast.Name(text="S"), args=(ast.Number(value=int()),)):
            return
    fixes = (Fix.write(node.span, "B", safe=False),)
    help = advice(fixes, "or `S(i)`, `P`, `P(max)`, `P(min)` or `P(prod)`")
    fail("MD0308", "this is no `sbp` entry", node.span, help=help, fixes=fixes)


def means(path: tuple[ast.Name, ...], value: Value) -> bool:
    """Whether a dotted path names a tensor."""
    return selects(tuple(n.text for n in path), value) == TENSOR


def resolve_sbp(declarations: Declarations, name: str, mesh: Mesh) -> Annotations:
    """The block called `name`. Raises a diagnostic when there is none, or it repeats an entry."""
    if name not in declarations.sbps:
        wrong = ast.Name(name, Span(Source("--sbp", name), 0, len(name)))
        raise DiagnosticError(unknown("MD0108", "sbp block", wrong, list(declarations.sbps)))
    seen: dict[tuple[tuple[str, ...], ...], ast.SbpEntry] = {}
    for entry in declarations.sbps[name].entries:
        key = tuple(tuple(n.text for n in path) for path in (entry.tensor, entry.at))
        old = seen.setdefault(key, entry)
        if old is not entry:
            where = Related(old.span, "the other annotation")
            label = ".".join(key[0])
            fail("MD0303", f"`{label}` is annotated twice", entry.span, where, help="keep one")
    return Annotations(name, mesh, declarations.sbps[name].entries)
