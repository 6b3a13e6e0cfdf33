"""Hover: the meaning of the name under the cursor, and what it holds and sends on each device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from lsprotocol import types as lsp

from meshdsl.diagnostics import Diagnostics, Span
from meshdsl.editor.call_forms import form, meaning
from meshdsl.editor.facts import DocumentFacts, Placing
from meshdsl.editor.line_costs import explained, tensors
from meshdsl.ir.program import every
from meshdsl.named.ir import NamedProgram, Value
from meshdsl.named.weights import weight_map
from meshdsl.placed.layout import collect_axes, collect_declared
from meshdsl.report.document import counted, human, mesh_text
from meshdsl.report.explanation_document import type_text
from meshdsl.report.schema import TensorFacts
from meshdsl.schedule.declared import table_of
from meshdsl.syntax import ast
from meshdsl.syntax.symbols import TENSORS, Symbol

MOST = 12
"""Lines of a hover on what a line sends: a bucket of a training step has a hundred."""


def hover(known: DocumentFacts, placing: Placing | None, offset: int) -> lsp.Hover | None:
    """What is known of the name at an offset; None where there is none, or nothing to say."""
    place = known.symbols.place(offset)
    if place is None:
        return None
    span, meant = place
    parts = [part for symbol in meant[:3] for part in _parts(known, placing, symbol, span)]
    if not parts:
        return None
    content = lsp.MarkupContent(lsp.MarkupKind.Markdown, "\n\n".join(dict.fromkeys(parts)))
    return lsp.Hover(content, known.text.range(span))


def _parts(
    known: DocumentFacts, placing: Placing | None, symbol: Symbol, span: Span
) -> Iterator[str]:
    """The paragraphs on one symbol, in Markdown."""
    if symbol.kind in TENSORS:
        yield from _tensor(known, placing, symbol, span)
    elif symbol.kind in ("operator", "schedule") and not symbol.definitions:
        yield from meaning(symbol.name, known.declarations.operators)
    elif symbol.definitions:
        yield from _OTHERS[symbol.kind](known, placing, symbol)


# --- tensors ---------------------------------------------------------------------------------


def _tensor(
    known: DocumentFacts, placing: Placing | None, symbol: Symbol, span: Span
) -> Iterator[str]:
    """Its type, what a device has of it, and what its line sends."""
    place = defined(symbol, span)
    if place is None:
        return
    left = _left(symbol, place, span)
    types = {v.type: None for v in _values(known, place.line, symbol.name, left)}
    for type_ in list(types)[:3]:
        dims = ", ".join(f"{d.name} {d.size}" for d in type_.dims)
        yield code(f"{symbol.name}: {type_.dtype}[{dims}]") + f"\n{human(type_.bytes)} in all"
    if placing is None:
        return
    every = tensors(placing, known.text, place.line, symbol.name, left)
    held = {type_text(t): t for t in every}
    for shown, tensor in list(held.items())[:3]:
        shape = " × ".join(map(str, tensor["local_shape"])) or "one number"
        yield f"Each device has {shape}: `{shown}`{_because(tensor)}"
    sent = explained(placing, known.text, span.line, MOST)
    if sent:
        yield f"Line {span.line} sends:\n" + code(sent, "text")
    if held:
        yield _under(placing)


def defined(symbol: Symbol, span: Span) -> Span | None:
    """The definition that a place of a tensor means: itself, or the last one before it."""
    places = list(zip(symbol.definitions, symbol.nodes, strict=True))
    before = [
        d
        for d, node in places
        if d == span or (isinstance(node, _NODES) and node.span.end <= span.start)
    ]
    return max(before, key=lambda d: d.start) if before else next(iter(symbol.definitions), None)


_NODES = (ast.Assign, ast.ParamDecl, ast.TensorParam)


def _left(symbol: Symbol, place: Span, span: Span) -> tuple[str, ...]:
    """The dims of the loops around a definition that are over where it is read: it is a stack."""
    loops = [n for n in ast.walk(symbol.inside) if isinstance(n, ast.Repeat)]
    around = [n for n in loops if n.span.start <= place.start < n.span.end]
    return tuple(n.dim.text for n in around if not n.span.start <= span.start < n.span.end)


def _values(known: DocumentFacts, line: int, name: str, left: tuple[str, ...]) -> Iterator[Value]:
    """The values that are called so where a line defines them; in a loop, those of an iteration.

    After the loops over the dims `left`, those of all iterations.
    """
    for program in known.analysis.written.values():
        if program is not None:
            values = [v for v in _all(program) if v.label == name and v.span.line == line]
            of_file = [v for v in values if v.span.source is known.text.source]
            inside = [v for v in of_file if v.declared is None or v.declared == v.type.names]
            with_dims = [v for v in of_file if left and set(left) <= set(v.type.names)]
            yield from _fewest_dims(with_dims) or inside or of_file


def _fewest_dims(values: list[Value]) -> list[Value]:
    """Those with the fewest dims."""
    fewest = min((len(v.type.dims) for v in values), default=0)
    return [v for v in values if len(v.type.dims) == fewest]


def _all(program: NamedProgram) -> Iterator[Value]:
    yield from program.inputs
    yield from (param.value for param in program.params)
    for node in every(program.body):
        yield from (s.inside for s in node.stacked)
        yield from node.makes


def _because(tensor: TensorFacts) -> str:
    """The rules that split it."""
    rules = {rule["rule"]: rule.get("line") for rule in tensor["rules"].values() if "line" in rule}
    said = ", ".join(f"`{rule}` (line {line})" for rule, line in rules.items())
    return f", by {said}" if said else ""


def _under(placing: Placing) -> str:
    """The layout, mesh and policy that all this is said of."""
    report = next(iter(placing.reports.values()))
    mesh = mesh_text(report["mesh"]) or "one device"
    proven = "; no plan of this layout sends less" if report["proven"] else ""
    missing = f"; there is no `{placing.missing}` in this file" if placing.missing else ""
    policy = f"reduced `{report['reduce']}`{proven}"
    return f"*Layout `{report['layout']}` on {mesh}, {policy}{missing}.*"


# --- everything else ---------------------------------------------------------------------------


def _dim(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    node = symbol.nodes[0]
    if not isinstance(node, ast.DimDecl):
        yield f"`{symbol.name}`: a dim of `def {symbol.inside.name.text}`" if symbol.inside else ""
        return
    dim = known.declarations.dims.get(symbol.name)
    yield code(f"dim {node.span.text}")
    if dim is not None and not isinstance(node.value, ast.Number):
        yield f"`{symbol.name}` = {dim.size:,}"
    splits = {
        (local, ", ".join(tensor["order"][symbol.name]))
        for report in (placing.reports.values() if placing else ())
        for tensor in report["tensors"]
        for name, local in zip(tensor["dims"], tensor["local_shape"], strict=True)
        if name == symbol.name and name in tensor["order"]
    }
    if placing is not None and splits:
        said = " or ".join(f"{size} over {axes}" for size, axes in sorted(splits))
        yield f"Where it is split, each device has {said}."
        yield _under(placing)


def _mesh(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    node = known.declarations.meshes.get(symbol.name)
    if node is None:
        return
    mesh = collect_axes(node, known.declarations, Diagnostics())
    yield code(f"mesh {symbol.name} = {mesh_text(dict(mesh.axes))}")
    yield f"{counted(mesh.devices, 'device')}"


def _axis(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    for node in known.declarations.meshes.values():
        for axis in node.axes:
            if axis.name.text == symbol.name:
                yield f"axis `{symbol.name}` of mesh `{node.name.text}`: {axis.size.span.text}"


def _layout(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    """Its rules, those that it extends too."""
    node = known.declarations.layouts.get(symbol.name)
    if node is None:
        return
    layout = collect_declared(node, known.declarations, Diagnostics())
    base = f" extends {node.base.text}" if node.base else ""
    used = f" with {layout.schedule.span.text}" if layout.schedule else ""
    lines = [f"  {rule}{' keep' if rule.keep else ''}" for rule in layout.rules]
    lines += [f"  {setting}" for setting in layout.settings]
    lines += [f"  {cut}" for cut in layout.cuts]
    yield code("\n".join([f"layout {symbol.name}{base} {{", *lines, f"}}{used}"]))
    yield from _chosen(placing, symbol.name)


def _schedule(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    """Its table, and what follows from that if it is right."""
    node = symbol.nodes[0]
    yield code(_span(node).text)
    table = (
        Diagnostics().of(partial(table_of, node)) if isinstance(node, ast.ScheduleDecl) else None
    )
    if table is not None:
        peaks = ", ".join(map(str, table.peaks))
        yield f"{counted(table.sends, 'message')}; in flight on each device: {peaks}"


def _weights(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    """The tensors of a model, with their sizes and the parameters that lie in them."""
    node = symbol.nodes[0]
    if not isinstance(node, ast.WeightsDecl):
        return
    tensors: dict[str, list[str]] = {}
    for program in known.analysis.named.values():
        read = program and Diagnostics().of(partial(weight_map, node, program, known.declarations))
        for param in read.params if read else ():
            for place in param.places[:1]:
                sizes = ", ".join(map(str, place.shape))
                names = tensors.setdefault(f"{place.pattern}[{sizes}]", [])
                names += [param.name] if param.name not in names else []
    lines = [f"{tensor}: {', '.join(names)}" for tensor, names in tensors.items()]
    yield code("\n".join(lines), "text")


def _sbp(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    yield code(_span(symbol.nodes[0]).text)
    yield from _chosen(placing, symbol.name)


def _chosen(placing: Placing | None, name: str) -> Iterator[str]:
    if placing is not None and placing.layout == name and placing.reports:
        yield _under(placing)


def _headed(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    """The head of a `def` or a program."""
    node = symbol.nodes[0]
    if isinstance(node, ast.FunctionDecl | ast.ProgramDecl):
        yield code(head(node))


def head(node: ast.FunctionDecl | ast.ProgramDecl) -> str:
    """The text of a `def` or a program up to its body."""
    body = node.body[0].span.start if node.body else node.span.end
    text = node.span.source.text[node.span.start : body]
    return " ".join(text.partition("{")[0].split())


def _package(known: DocumentFacts, placing: Placing | None, symbol: Symbol) -> Iterator[str]:
    """Where a package of operators is, and what each of them is."""
    package = known.declarations.packages.get(symbol.name)
    if package is None:
        return
    yield f"The operators of `{package.home}`; `meshdsl prove {package.name}` tries them."
    for name, record in package.operators.items():
        yield code(form(name, package.operators) or name) + f"\n{record.meaning}"


_OTHERS = {
    "package": _package,
    "dim": _dim,
    "mesh": _mesh,
    "axis": _axis,
    "layout": _layout,
    "sbp": _sbp,
    "schedule": _schedule,
    "weights": _weights,
    "function": _headed,
    "program": _headed,
}


def _span(node: object) -> Span:
    span: Span = getattr(node, "span")  # noqa: B009
    return span


def code(text: str, language: str = "mdsl") -> str:
    """A block of code in Markdown."""
    return f"```{language}\n{text}\n```"


def listed(names: Iterable[str]) -> str:
    """Names in code, with commas."""
    return ", ".join(f"`{name}`" for name in names)
