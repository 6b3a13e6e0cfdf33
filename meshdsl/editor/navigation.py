"""Where names are: definitions, references, the outline of a file, and new names."""

from __future__ import annotations

from collections.abc import Iterator

from lsprotocol import types as lsp

from meshdsl.diagnostics import Diagnostic, Span
from meshdsl.editor.facts import DocumentFacts
from meshdsl.editor.hovers import defined, head
from meshdsl.editor.locations import location
from meshdsl.editor.text import Text
from meshdsl.named.prelude import prelude
from meshdsl.syntax import ast
from meshdsl.syntax.rename import renamed
from meshdsl.syntax.symbols import TENSORS, Symbol


def definitions(known: DocumentFacts, uri: str, offset: int) -> list[lsp.Location]:
    """Where the name at an offset is defined; of a tensor, the definition that is read here."""
    named = known.symbols.place(offset)
    if named is None:
        return []
    span, meant = named
    spans = [place for symbol in meant for place in _definitions(symbol, span)]
    places = (location(place, uri, known.text) for place in spans)
    return [place for place in places if place is not None]


def _definitions(symbol: Symbol, span: Span) -> tuple[Span, ...]:
    if symbol.kind == "operator":
        function = prelude().functions.get(symbol.name)
        return () if function is None else (function.name.span,)
    if symbol.kind in TENSORS:
        place = defined(symbol, span)
        return () if place is None else (place,)
    return symbol.definitions


def references(known: DocumentFacts, uri: str, offset: int, declared: bool) -> list[lsp.Location]:
    """Every use of the name at an offset, and its definitions if they are wanted."""
    spans = {
        place.start: place
        for symbol in known.symbols.at(offset)
        for place in (symbol.places if declared else symbol.references)
    }
    return [lsp.Location(uri, known.text.range(spans[start])) for start in sorted(spans)]


def highlights(known: DocumentFacts, offset: int) -> Iterator[lsp.DocumentHighlight]:
    """The places of the name at an offset: where it is written, and where it is read."""
    for symbol in known.symbols.at(offset):
        for place in symbol.places:
            wrote = place in symbol.definitions
            kind = lsp.DocumentHighlightKind.Write if wrote else lsp.DocumentHighlightKind.Read
            yield lsp.DocumentHighlight(known.text.range(place), kind)


# --- renaming --------------------------------------------------------------------------------


def renameable(known: DocumentFacts, offset: int) -> Span | None:
    """The name at an offset if the file defines it."""
    place = known.symbols.place(offset)
    if place is None or not any(symbol.definitions for symbol in place[1]):
        return None
    return place[0]


def rename(
    known: DocumentFacts, uri: str, offset: int, new: str
) -> lsp.WorkspaceEdit | Diagnostic | None:
    """The edits that give the name at an offset another one, or why it cannot have that one."""
    meant = [symbol for symbol in known.symbols.at(offset) if symbol.definitions]
    if not meant:
        return None
    edits = renamed(known.symbols, meant[0], new)
    if isinstance(edits, Diagnostic):
        return edits
    changes = [lsp.TextEdit(known.text.range(edit.span), edit.text) for edit in edits]
    return lsp.WorkspaceEdit(changes={uri: changes})


# --- the outline -----------------------------------------------------------------------------

_KINDS = {
    ast.UseDecl: lsp.SymbolKind.Package,
    ast.DimDecl: lsp.SymbolKind.Constant,
    ast.MeshDecl: lsp.SymbolKind.Struct,
    ast.LayoutDecl: lsp.SymbolKind.Object,
    ast.Sbp: lsp.SymbolKind.Object,
    ast.ScheduleDecl: lsp.SymbolKind.Object,
    ast.WeightsDecl: lsp.SymbolKind.Object,
    ast.FunctionDecl: lsp.SymbolKind.Function,
    ast.ProgramDecl: lsp.SymbolKind.Module,
}


def outline(known: DocumentFacts) -> Iterator[lsp.DocumentSymbol]:
    """The declarations of a file, with the tensors of functions and programs in them."""
    for node in known.tree.declarations:
        if isinstance(node, ast.Expect):
            continue
        kind = _KINDS[type(node)]
        detail = head(node) if isinstance(node, ast.FunctionDecl | ast.ProgramDecl) else ""
        children = list(_tensors(known, node)) if detail else []
        yield _symbol(known.text, node.name, node.span, kind, detail, children)


def _tensors(known: DocumentFacts, node: ast.Declaration) -> Iterator[lsp.DocumentSymbol]:
    """The tensors of a body, each where it is first defined."""
    for symbol in known.symbols.every:
        if symbol.inside is node and symbol.kind in TENSORS and symbol.definitions:
            place = symbol.definitions[0]
            name = ast.Name(symbol.name, place)
            is_param = symbol.kind == "param"
            kind = lsp.SymbolKind.Field if is_param else lsp.SymbolKind.Variable
            yield _symbol(known.text, name, place, kind, symbol.kind, [])


def _symbol(
    text: Text,
    name: ast.Name,
    span: Span,
    kind: lsp.SymbolKind,
    detail: str,
    children: list[lsp.DocumentSymbol],
) -> lsp.DocumentSymbol:
    extent, name_range = text.range(span.to(name.span)), text.range(name.span)
    return lsp.DocumentSymbol(name.text, kind, extent, name_range, detail=detail, children=children)
