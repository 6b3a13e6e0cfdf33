"""A placing, shown in the text: bytes over the lines that send, local sizes behind names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lsprotocol import types as lsp

from meshdsl.diagnostics import Span
from meshdsl.editor.facts import DocumentFacts, Placing
from meshdsl.editor.text import Text
from meshdsl.report.document import counted, human, mesh_text
from meshdsl.report.explanation_document import collective_note, type_text
from meshdsl.report.schema import CollectiveFacts, ReportFacts, TensorFacts
from meshdsl.report.terminal import text as as_text
from meshdsl.syntax import ast

CHOOSE, EXPLAIN, LAYOUTS = "meshdsl.chooseLayout", "meshdsl.explainLine", "meshdsl.layouts"
"""Commands: choose the layout of a document, explain what a line of it sends, list its layouts."""


def tensors(
    placing: Placing, now: Text, line: int, name: str, left: tuple[str, ...] = ()
) -> list[TensorFacts]:
    """The tensors that are called so where a line defines them, one for each call of its `def`.

    In a loop it is the part of one iteration; after loops over the dims `left`, the stack.
    """
    then = placing.lines(now).then(line)
    matching = [
        tensor
        for report in placing.reports.values()
        for tensor in report["tensors"]
        if tensor["line"] == then
        and tensor["file"] == placing.text.source.name
        and tensor["name"] is not None
        and tensor["name"].rpartition(".")[2] == name
        and tensor["role"] != "state"
    ]
    if left:
        matching = [t for t in matching if set(left) <= set(t["dims"])]
        fewest = min((len(t["dims"]) for t in matching), default=0)
        return [t for t in matching if len(t["dims"]) == fewest]
    slices = [t for t in matching if t["loop"] is not None and t["loop"]["as"] == "slice"]
    return slices or [t for t in matching if t["loop"] is None] or matching


def sent(placing: Placing, now: Text) -> dict[int, list[tuple[str, CollectiveFacts]]]:
    """The collectives of every line that sends, each with the name of its program."""
    lines, by_line = placing.lines(now), defaultdict(list)
    for name, report in placing.reports.items():
        for collective in report["collectives"]:
            line = lines.now(collective["line"])
            if line is not None and collective["file"] == placing.text.source.name:
                by_line[line].append((name, collective))
    return by_line


def explained(placing: Placing, now: Text, line: int, most: int | None = None) -> str:
    """The collectives of a line with their bytes, reasons and remedies, as text; may be empty.

    Not more than `most` lines.
    """
    named = {t["name"] for report in placing.reports.values() for t in report["tensors"]}
    notes = [collective_note(c, c["tensor"] in named, 0) for _, c in sent(placing, now)[line]]
    lines = as_text(tuple(notes)).rstrip().split("\n")
    more = len(lines) - most if most is not None else 0
    return "\n".join([*lines[:most], f"… {more} more lines"] if more > 0 else lines)


# --- code lenses -----------------------------------------------------------------------------


def lenses(known: DocumentFacts, placing: Placing | None, uri: str) -> Iterator[lsp.CodeLens]:
    """Bytes over lines that send, the cost over programs, the choice over layouts."""
    text = known.text
    if placing is not None:
        for line, collectives in sorted(sent(placing, text).items()):
            span = Span(text.source, *text.source.bounds(line))
            yield _lens(text, span, summed([c for _, c in collectives]), EXPLAIN, uri, line - 1)
    for node in known.tree.declarations:
        match node:
            case ast.ProgramDecl():
                for title in _told(node.name.text, placing):
                    yield _lens(text, node.name.span, title, CHOOSE, uri)
            case ast.LayoutDecl() | ast.Sbp():
                name = node.name.text
                chosen = placing is not None and placing.layout == name
                title = "chosen" if chosen else "choose this layout"
                yield _lens(text, node.name.span, title, CHOOSE, uri, name)


def _lens(text: Text, span: Span, title: str, command: str, *arguments: object) -> lsp.CodeLens:
    return lsp.CodeLens(text.range(span), lsp.Command(title, command, arguments=list(arguments)))


def summed(collectives: list[CollectiveFacts]) -> str:
    """`all_reduce 64 KiB`, `3 all_reduce 1 MiB, all_gather 4 KiB`; the bytes of all iterations."""
    kinds: dict[str, list[CollectiveFacts]] = defaultdict(list)
    for collective in collectives:
        kinds[collective["kind"]].append(collective)
    parts = []
    for kind, of_kind in kinds.items():
        times = sum(c["count"] for c in of_kind)
        size = human(sum(c["wire_bytes"] for c in of_kind))
        parts.append(f"{'' if times == 1 else f'{times} '}{kind} {size}")
    return ", ".join(parts)


def _told(program: str, placing: Placing | None) -> Iterator[str]:
    """The cost of a program, and a layout that was wished for in vain."""
    if placing is not None and program in placing.reports:
        wanting = f" (there is no `{placing.missing}` here)" if placing.missing else ""
        yield f"{cost(placing.reports[program])}{wanting}"


def cost(report: ReportFacts) -> str:
    """`megatron on data:2, tp:2: 8 collectives, 4 MiB sent, 6 MiB held per device`."""
    mesh = mesh_text(report["mesh"]) or "one device"
    total, held = report["totals"], human(report["memory"]["peak"])
    sends = f"{counted(total['collectives'], 'collective')}, {human(total['wire_bytes'])} sent"
    return f"{report['layout']} on {mesh}: {sends}, {held} held per device"


# --- inlay hints -----------------------------------------------------------------------------


def hints(known: DocumentFacts, placing: Placing, wanted: Span) -> Iterator[lsp.InlayHint]:
    """Local sizes behind the names that statements define, within a span."""
    for name, dims in _defined(known.tree):
        if wanted.start <= name.span.start <= wanted.end:
            named_tensors = tensors(placing, known.text, name.span.line, name.text)
            if named_tensors and len({type_text(t) for t in named_tensors}) == 1:
                yield from _hints(known.text, name, dims, named_tensors[0])


def _defined(tree: ast.SourceFile) -> Iterator[tuple[ast.Name, tuple[ast.DimRef, ...] | None]]:
    """The names that statements and programs give to tensors, and the dims written behind them."""
    for node in ast.walk(tree):
        match node:
            case ast.Target():
                yield node.name, node.dims
            case ast.TensorParam():
                yield node.name, node.dims


def _hints(
    text: Text, name: ast.Name, dims: tuple[ast.DimRef, ...] | None, tensor: TensorFacts
) -> Iterator[lsp.InlayHint]:
    """The hints of one name: behind each split dim that is written, or else of all of them."""
    sizes = dict(
        zip(
            tensor["dims"],
            zip(tensor["shape"], tensor["local_shape"], strict=True),
            strict=True,
        )
    )
    tooltip = type_text(tensor)
    if dims is None:
        said = ", ".join(f"{d} {_sizes(*pair)}" for d, pair in sizes.items())
        if said:
            yield _hint(text, name.span, f"[{said}]", tooltip)
        return
    for dim in dims:
        size, local = sizes.get(dim.dim.text, (0, 0))
        if size != local:
            yield _hint(text, dim.span, f" {_sizes(size, local)}", tooltip)


def _sizes(whole: int, local: int) -> str:
    return f"{whole}" if whole == local else f"{whole}→{local}"


def _hint(text: Text, span: Span, label: str, tooltip: str) -> lsp.InlayHint:
    kind = lsp.InlayHintKind.Type
    return lsp.InlayHint(text.position(span.end), label, kind=kind, tooltip=tooltip)
