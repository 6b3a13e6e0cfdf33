"""Renames: the edits that give a symbol another name, or the reason why that would change the file.

No rule of scopes is written here a second time: where the new name stands in the text already, the
text after the rename is read again, and every name in it must mean what it meant before.
"""

from __future__ import annotations

import bisect
import re

from meshdsl.diagnostics import Diagnostic, Edit, Related, Source, Span
from meshdsl.syntax import ast
from meshdsl.syntax.edits import apply
from meshdsl.syntax.parse import parse
from meshdsl.syntax.symbols import ROLES, TENSORS, Symbol, Symbols, symbols
from meshdsl.syntax.tokens import MAX_NAME, RESERVED, lex

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def renamed(known: Symbols, symbol: Symbol, new: str) -> tuple[Edit, ...] | Diagnostic:
    """The edits that call a symbol of `known` by a new name, or a refusal (MD0130, MD0131).

    Tensors that one selector names are renamed together: the rule binds all of them.
    """
    source = known.file.span.source
    refusal = _not_a_name(symbol, new) or _out_of_reach(known, symbol)
    if refusal is not None:
        return refusal
    if new == symbol.name:
        return ()
    group = _together(known, symbol)
    by_start = {span.start: span for one in group for span in one.places}
    edits = tuple(Edit(by_start[start], new) for start in sorted(by_start))
    if new not in source.text:  # nothing can be confused with it
        return edits
    after = Source(source.name, apply(source.text, edits))
    if _meanings(after, edits, new) != _meanings(source, (), new):
        return _collision(known, symbol, new)
    return edits


def _together(known: Symbols, symbol: Symbol) -> set[Symbol]:
    """The symbols that share places with this one, or with one that does."""
    group, waiting = {symbol}, [symbol]
    while waiting:
        for span in waiting.pop().places:
            new = set(known.at(span.start)) - group
            group |= new
            waiting += new
    return group


# --- refusals --------------------------------------------------------------------------------


def _not_a_name(symbol: Symbol, new: str) -> Diagnostic | None:
    """A complaint about a word that cannot name this symbol."""
    span = Span(Source("the new name", new), 0, len(new))
    help = "names are made of letters, digits and `_`, and do not begin with a digit"
    if not _NAME.fullmatch(new) or len(new) > MAX_NAME:
        return Diagnostic("MD0131", f"`{new[:MAX_NAME]}` is not a name", span, help=help)
    if new.upper() in RESERVED and new == new.lower():
        help = "choose another name"
        return Diagnostic("MD0131", f"`{new}` is a word of the language", span, help=help)
    selector = symbol.kind in TENSORS and new in ROLES
    if selector or (symbol.kind == "axis" and new == "none"):
        said = "a selector of layouts" if selector else "what a rule says for no axis"
        help = "choose another name"
        return Diagnostic("MD0131", f"`{new}` is {said}", span, help=help)
    return None


def _out_of_reach(known: Symbols, symbol: Symbol) -> Diagnostic | None:
    """A complaint about a symbol with places that are not in the file, or cannot be read."""
    if symbol.kind == "package":
        message = f"`{symbol.name}` is the name of an installed package"
        help = "its `pyproject.toml` says how it is called"
        return Diagnostic("MD0130", message, symbol.places[0], help=help)
    if not symbol.definitions:
        where = symbol.references[0]
        message = f"`{symbol.name}` is not defined in this file"
        return Diagnostic("MD0130", message, where, help="only what the file defines is renamed")
    source = known.file.span.source
    if not parse(source)[1]:
        return None
    read = {node.span.start for node in ast.walk(known.file) if isinstance(node, ast.Name)}
    for word in lex(source):
        if str(word) == symbol.name and word.start_pos not in read:
            assert word.start_pos is not None
            span = Span(source, word.start_pos, word.start_pos + len(word))
            message = f"`{symbol.name}` also stands in a line that cannot be read"
            return Diagnostic("MD0130", message, span, help="mend the line first")
    return None


def _collision(known: Symbols, symbol: Symbol, new: str) -> Diagnostic:
    """The refusal of a name that would make something mean something else."""
    others = [other for other in known.every if other.name == new]
    related = tuple(Related(o.places[0], f"`{new}` stands here") for o in others if o.places)
    message = f"`{symbol.name}` cannot be called `{new}`: other names would change their meaning"
    help = "choose a name that the file does not use"
    return Diagnostic("MD0130", message, symbol.places[0], related=related[:3], help=help)


# --- meanings --------------------------------------------------------------------------------

Meanings = tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, int]]]
"""Symbols, as their kinds and places, and the codes and places of syntax errors."""


def _meanings(source: Source, edits: tuple[Edit, ...], new: str) -> Meanings:
    """The meaning of every name of a text, at the offsets that it had before the edits."""
    file, problems = parse(source)
    moved = _Moved(edits, new)
    meanings = [
        (symbol.kind, tuple(sorted(moved.before(span.start) for span in symbol.places)))
        for symbol in symbols(file).every
    ]
    errors = [(p.code, moved.before(p.span.start)) for p in problems if p.span is not None]
    return sorted(meanings), sorted(errors)


class _Moved:
    """Offsets of an edited text, as they were in the text before."""

    def __init__(self, edits: tuple[Edit, ...], new: str) -> None:
        self.starts: list[int] = []
        grown = 0
        for edit in edits:
            self.starts.append(edit.span.start + grown)
            grown += len(new) - (edit.span.end - edit.span.start)
        self.edits = edits
        self.new = new

    def before(self, offset: int) -> int:
        """The offset in the text before the edits; inside a new name, its start."""
        index = bisect.bisect_right(self.starts, offset) - 1
        if index < 0:
            return offset
        past = offset - self.starts[index] - len(self.new)
        span = self.edits[index].span
        return span.start if past < 0 else span.end + past
