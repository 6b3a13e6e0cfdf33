"""Completion: what may stand at the cursor, by the words before it; and the form of a call."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

from lsprotocol import types as lsp

from meshdsl.diagnostics import Source
from meshdsl.editor.call_forms import NONE_ADDED, form
from meshdsl.editor.facts import DocumentFacts
from meshdsl.editor.hovers import head
from meshdsl.ir.types import DTYPES
from meshdsl.lexer import vocabulary
from meshdsl.named.declarations import RESERVED_TENSORS
from meshdsl.named.from_syntax import INITS
from meshdsl.named.optimizers import CALLS, COMMON, OPTIMIZERS, SCHEDULES
from meshdsl.named.packages import names as packages
from meshdsl.named.param_groups import ALL, WORDS
from meshdsl.ops.opdef import OpDef, load_all
from meshdsl.placed.expect import FIGURES, KINDS
from meshdsl.placed.layout_schedules import VALUES
from meshdsl.placed.place import POLICIES
from meshdsl.placed.settings import settings_for
from meshdsl.records import dataclass
from meshdsl.schedule.declared import HEAD
from meshdsl.schedule.registry import schedules
from meshdsl.schedule.table import WEIGHTS
from meshdsl.syntax import ast
from meshdsl.syntax.symbols import ACTIVATIONS, INIT, TENSORS, Kind, Symbol
from meshdsl.syntax.tokens import CLOSERS, OPENERS, lex

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Token

WINDOW = 4000
"""Characters before the cursor that are read for the brackets around it."""

_HEAD = re.compile(
    r"^(use(?=[ \t]+(?:\w|$))|dim|mesh|layout|sbp|schedule(?=[ \t]+\w)|weights(?=[ \t]+\w)|def"
    r"|program|expect)\b",
    re.MULTILINE,
)


_IN_LINE = frozenset({"use", "dim", "layout", "expect", "mesh"})
"""The declarations that go on outside of brackets."""


@dataclass(slots=True)
class OpenBracket:
    """An open bracket: the word before it, and the words in it since the last comma or line end."""

    kind: str
    before: str
    words: list[Token] = field(default_factory=list)
    commas: int = 0

    def has(self, kind: str) -> bool:
        """Whether such a word came since the last comma or line end."""
        return any(word.type == kind for word in self.words)


@dataclass(frozen=True, slots=True)
class Cursor:
    """The cursor: the first word of its declaration, the open brackets, the word before it.

    `begun` is the part of a name before the cursor.
    """

    head: str
    brackets: list[OpenBracket]
    last: str
    said: str
    begun: str

    @property
    def inside(self) -> OpenBracket:
        """The innermost bracket; one of no kind outside."""
        return self.brackets[-1] if self.brackets else OpenBracket("", "")

    @property
    def optimizer(self) -> str:
        """The optimizer in the braces of whose groups the cursor is; empty elsewhere."""
        around = self.brackets[-2].words if len(self.brackets) > 1 else []
        kinds = [word.type for word in around]
        if self.inside.kind != "LBRACE" or "MINIMIZE" not in kinds or "WITH" not in kinds[:-1]:
            return ""
        return str(around[kinds.index("WITH") + 1])

    @property
    def pinned(self) -> bool:
        """Whether mesh axes are written here: behind `@` or `over`, or in the brackets there."""
        around = self.inside.kind == "LPAR" and self.inside.before in ("@", "over")
        return self.last in ("PIN", "OVER") or around


def place_at(text: str, offset: int) -> Cursor | None:
    """The place of the cursor; None in a comment, or in a string that is no key of weights."""
    heads = list(_HEAD.finditer(text, 0, offset))
    start = max(heads[-1].start() if heads else 0, text.rfind("\n", 0, max(offset - WINDOW, 0)) + 1)
    words = lex(Source("", text[start:offset]))
    last = words[-1] if words else None
    touches = last is not None and last.end_pos == offset - start
    head = heads[-1][1] if heads else ""
    closed = {"COMMENT", "STRING", "BAD_STRING", "NUMBER"}
    if head == "weights":
        closed.discard("BAD_STRING")
    if last is not None and touches and last.type in closed:
        return None
    begun = str(last) if last is not None and touches and re.match(r'[\w"]', str(last)) else ""
    words = words[:-1] if begun else words
    brackets = _open(words)
    before = words[-1] if words else None
    return Cursor(
        head,
        brackets,
        before.type if before is not None else "_NL",
        str(before) if before is not None else "",
        begun,
    )


def _open(words: list[Token]) -> list[OpenBracket]:
    """The brackets that are open behind the words; around them, one for the declaration."""
    brackets = [OpenBracket("", "")]
    before = ""
    for word in words:
        if word.type in OPENERS:
            brackets[-1].words.append(word)
            brackets.append(OpenBracket(word.type, before))
        elif word.type in CLOSERS:
            if len(brackets) > 1:
                closed = brackets.pop()
                # `softmax[d](`: the call is that of the word before the dims.
                before = closed.before if word.type == "RSQB" else str(word)
                continue
        elif word.type == "COMMA" or (word.type == "_NL" and brackets[-1].kind in ("LBRACE", "")):
            brackets[-1].words.clear()
            brackets[-1].commas += word.type == "COMMA"
        elif word.type not in ("_NL", "COMMENT"):
            brackets[-1].words.append(word)
        before = str(word)
    return brackets


# --- what may stand there --------------------------------------------------------------------


def complete(known: DocumentFacts, text: str, offset: int) -> Iterator[lsp.CompletionItem]:
    """The names and words that may stand at an offset of a text; `known` may be of an older one."""
    place = place_at(text, offset)
    if place is None or place.begun.startswith('"'):
        return
    offered = _Offer(known, offset)
    if place.pinned:
        yield from offered.axes()
    elif place.last == "DOT":
        yield from offered.symbols(*TENSORS)
    elif len(place.brackets) == 1 and place.head not in _IN_LINE:
        yield from offered.top(place)
    else:
        yield from _IN.get(place.head, _Offer.top)(offered, place)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What is offered at an offset."""

    known: DocumentFacts
    offset: int

    # --- by declaration ----------------------------------------------------------------------

    def top(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """Outside of all brackets: words that begin a declaration."""
        if place.last == "_NL":
            yield from _words(sorted(vocabulary().declarations))

    def in_use(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """The packages of operators that are installed."""
        if place.said == "use":
            for name in packages():
                yield lsp.CompletionItem(
                    name, kind=_ITEMS["package"], detail="package of operators"
                )
        else:
            yield from self.top(place)

    def in_dim(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        if place.inside.has("EQUAL"):
            yield from self.symbols("dim")
        else:
            yield from self.top(place)

    def in_mesh(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        if place.inside.kind == "LBRACE" and place.last == "COLON":
            yield from self.symbols("dim")
        elif not place.inside.kind:
            yield from self.top(place)

    def in_layout(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        inside = place.inside
        arrow = any(bracket.has("ARROW") for bracket in place.brackets)
        if place.brackets[0].has("WITH"):
            yield from self._scheduled(place)
        elif not inside.kind:
            if place.last == "EXTENDS":
                yield from self.symbols("layout")
            elif place.last in ("NAME", "RBRACE"):
                yield from _words(["extends" if place.last == "NAME" else "with"])
            else:
                yield from self.top(place)
        elif arrow and place.last in ("ARROW", "COMMA", "LPAR"):
            yield from self.axes()
        elif arrow:
            yield from _words(["keep"])
        elif inside.has("COLON"):
            yield from self._setting(place)
        else:
            yield from self.symbols("dim")
            roles = (*RESERVED_TENSORS, ACTIVATIONS)
            yield from _words(roles, lsp.CompletionItemKind.Property)
            yield from self.selectors()

    def _setting(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """Behind the selector of a layout: the settings that it may have, or the values of one."""
        words = [str(word) for word in place.inside.words]
        selector, after_colon = words[words.index(":") - 1], words[words.index(":") + 1 :]
        settings = settings_for(selector)
        if place.last == "COLON":
            yield from self.symbols("dim")
            yield from _words(settings, lsp.CompletionItemKind.Property)
        elif place.last == "EQUAL":
            yield from _words(settings.get(after_colon[0], ()), lsp.CompletionItemKind.EnumMember)

    def _scheduled(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """Behind the `with` of a layout."""
        inside = place.inside
        if place.last == "WITH":
            yield from self.symbols("schedule")
            yield from _calls(schedules(), lsp.CompletionItemKind.Function)
        elif inside.kind == "LSQB":
            yield from self.symbols("dim")
        elif inside.kind == "LPAR" and place.last == "EQUAL":
            yield from _words(
                VALUES.get(str(inside.words[0]), ()), lsp.CompletionItemKind.EnumMember
            )
        elif inside.kind == "LPAR":
            record = schedules().get(inside.before)
            yield from _named((*(record.options if record else ()), *VALUES), inside.before)
            yield from self.symbols("dim")

    def in_schedule(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """In the head of a schedule."""
        if place.inside.kind == "LPAR" and place.last == "EQUAL":
            yield from _words(WEIGHTS if place.inside.words[0] == "weights" else ())
        elif place.inside.kind == "LPAR":
            yield from _named(HEAD, "a schedule")

    def in_sbp(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        if place.inside.has("COLON") or place.inside.kind == "LPAR":
            yield from _words(["S", "B", "P"], lsp.CompletionItemKind.EnumMember)
        else:
            yield from self.selectors()

    def in_weights(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """Parameters, the dims of their tensors, and the words between."""
        if any(bracket.kind == "LSQB" for bracket in place.brackets):
            yield from self.symbols("dim")
        elif place.inside.kind and place.last in ("COLON", "OR"):
            yield from _words([INIT], lsp.CompletionItemKind.EnumMember)
            yield from self._params()
        elif place.inside.has("COLON"):
            yield from _words(["or"])
        elif place.inside.kind:
            yield from self._params()
            yield from _words(["ignore", "under"])

    def _params(self) -> Iterator[lsp.CompletionItem]:
        """The parameters of all programs, by the names that entries call them."""
        names = (p.value.name for n in self.known.analysis.written.values() if n for p in n.params)
        for name in dict.fromkeys(map(str, names)):
            yield lsp.CompletionItem(name, kind=_ITEMS["param"], detail="param")

    def in_expect(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        if place.inside.kind == "LSQB" or place.inside.has("COLON"):
            yield from self.symbols("dim")
        elif place.inside.kind:
            yield from _words([*KINDS, *FIGURES], lsp.CompletionItemKind.EnumMember)
            yield from self.selectors()
        elif place.last == "EXPECT":
            yield from self.symbols("layout", "sbp")
        elif place.last == "ON":
            yield from self.symbols("mesh")
        elif place.last == "WITH":
            yield from _words(POLICIES, lsp.CompletionItemKind.EnumMember)
        elif place.last == "NAME":
            yield from self._of_expect(place)
        else:
            yield from self.top(place)

    def _of_expect(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """After a name in the head of `expect`: a program, or the words that may follow."""
        kinds = [word.type for word in place.inside.words]
        if len(kinds) == 3:
            yield from self.symbols("program")
        else:
            yield from _words([*(["for"] if len(kinds) == 2 else []), "on", "with"])

    # --- in a body ---------------------------------------------------------------------------

    def in_body(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """In the head or the body of a `def` or a program."""
        inside = place.inside
        if place.optimizer:
            yield from self._groups(place)
        elif place.last == "COLON" and not any(b.kind == "LSQB" for b in place.brackets):
            yield from _words(DTYPES, lsp.CompletionItemKind.TypeParameter)
        elif inside.kind == "LSQB" or (inside.kind == "LPAR" and self._of_dims(place)):
            yield from self.symbols("dim")
            if inside.has("EQUAL"):
                yield from self.symbols(*TENSORS)
        elif place.last == "REPEAT":
            yield from self.symbols("dim")
        elif place.last == "WITH":
            yield from _calls(OPTIMIZERS, lsp.CompletionItemKind.Class)
            yield from self.selectors("function")
        elif inside.kind == "LPAR" and inside.before in {*OPTIMIZERS, *CALLS}:
            yield from self._options(place)
        elif inside.kind == "LBRACE" and inside.has("PARAM") and inside.has("EQUAL"):
            yield from _calls(INITS, lsp.CompletionItemKind.Function)
        elif not (inside.kind == "LBRACE" and place.last == "PARAM"):
            yield from self._expression(place)

    def _of_dims(self, place: Cursor) -> bool:
        """Whether a `(` stands among dims, as in `[model -> (heads, key)]`."""
        outer = place.brackets[-2] if len(place.brackets) > 1 else place.inside
        return outer.kind == "LSQB" and not outer.has("EQUAL")

    def _groups(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        """In the braces of `minimize`: parameters, or what is said of them."""
        options = (o for o in OPTIMIZERS.get(place.optimizer, {}) if o not in COMMON)
        if place.last == "EQUAL":
            yield from _calls(SCHEDULES, lsp.CompletionItemKind.Function)
        elif place.last == "COLON":
            yield from _words(WORDS, lsp.CompletionItemKind.EnumMember)
            yield from _words(options, lsp.CompletionItemKind.Property)
            yield from _calls(OPTIMIZERS, lsp.CompletionItemKind.Class)
        else:
            yield from _words([ALL], lsp.CompletionItemKind.Property)
            yield from self.selectors("param", "function")

    def _options(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        name = place.inside.before
        yield from _named({**OPTIMIZERS, **CALLS}[name], name)
        if name in OPTIMIZERS:
            yield from _calls(CALLS, lsp.CompletionItemKind.Function)

    def _expression(self, place: Cursor) -> Iterator[lsp.CompletionItem]:
        if place.last in ("_NL", "LBRACE"):
            yield from _words(sorted(vocabulary().statements))
        yield from self.symbols(*TENSORS, "function")
        yield from self.symbols("dim")
        yield from _calls(sorted(vocabulary().operators), lsp.CompletionItemKind.Function)
        added = self.known.declarations.operators
        yield from _calls(sorted(added), lsp.CompletionItemKind.Function, added)
        called = place.inside.before if place.inside.kind == "LPAR" else ""
        record = load_all().get(called) or added.get(called)
        options = record.surface.options if record else ()
        yield from _named((option for option, _ in options), place.inside.before)

    # --- names -------------------------------------------------------------------------------

    def symbols(self, *kinds: Kind) -> Iterator[lsp.CompletionItem]:
        """The symbols of some kinds that can be used at the offset."""
        for symbol in self.known.symbols.visible(self.offset):
            if symbol.kind in kinds:
                yield self._item(symbol)

    def selectors(self, *kinds: Kind) -> Iterator[lsp.CompletionItem]:
        """Whatever a rule may select, of these kinds: tensors, functions with all their tensors."""
        kinds = kinds or (*TENSORS, "function")
        offered: dict[str, lsp.CompletionItem] = {}
        for symbol in self.known.symbols.every:
            if symbol.definitions and symbol.kind in kinds:
                offered.setdefault(symbol.name, self._item(symbol))
        yield from offered.values()

    def axes(self) -> Iterator[lsp.CompletionItem]:
        """The axes of all meshes, and `none`."""
        yield from self.symbols("axis")
        yield from _words(["none"], lsp.CompletionItemKind.EnumMember)

    def _item(self, symbol: Symbol) -> lsp.CompletionItem:
        detail: str = symbol.kind
        node = symbol.nodes[0]
        if symbol.kind == "dim" and symbol.name in self.known.declarations.dims:
            detail = f"dim {self.known.declarations.dims[symbol.name].size}"
        elif isinstance(node, ast.FunctionDecl):
            detail = head(node)
        return lsp.CompletionItem(symbol.name, kind=_ITEMS[symbol.kind], detail=detail)


_IN = {
    "use": _Offer.in_use,
    "dim": _Offer.in_dim,
    "mesh": _Offer.in_mesh,
    "layout": _Offer.in_layout,
    "sbp": _Offer.in_sbp,
    "schedule": _Offer.in_schedule,
    "weights": _Offer.in_weights,
    "expect": _Offer.in_expect,
    "def": _Offer.in_body,
    "program": _Offer.in_body,
}

_ITEMS = {
    "package": lsp.CompletionItemKind.Module,
    "dim": lsp.CompletionItemKind.Constant,
    "mesh": lsp.CompletionItemKind.Struct,
    "axis": lsp.CompletionItemKind.EnumMember,
    "layout": lsp.CompletionItemKind.Struct,
    "sbp": lsp.CompletionItemKind.Struct,
    "schedule": lsp.CompletionItemKind.Struct,
    "weights": lsp.CompletionItemKind.Struct,
    "function": lsp.CompletionItemKind.Function,
    "program": lsp.CompletionItemKind.Module,
    "input": lsp.CompletionItemKind.Variable,
    "argument": lsp.CompletionItemKind.Variable,
    "param": lsp.CompletionItemKind.Field,
    "tensor": lsp.CompletionItemKind.Variable,
    "operator": lsp.CompletionItemKind.Function,
}


def _words(
    words: Iterable[str], kind: lsp.CompletionItemKind = lsp.CompletionItemKind.Keyword
) -> Iterator[lsp.CompletionItem]:
    for word in words:
        yield lsp.CompletionItem(word, kind=kind)


def _named(options: Iterable[str], of: str) -> Iterator[lsp.CompletionItem]:
    for option in options:
        kind, detail = lsp.CompletionItemKind.Property, f"option of {of}"
        yield lsp.CompletionItem(f"{option}=", kind=kind, detail=detail)


def _calls(
    names: Iterable[str],
    kind: lsp.CompletionItemKind,
    added: Mapping[str, OpDef] = NONE_ADDED,
) -> Iterator[lsp.CompletionItem]:
    for name in names:
        if name not in added or form(name, added):
            yield lsp.CompletionItem(name, kind=kind, detail=form(name, added))


# --- the form of a call ----------------------------------------------------------------------


def signature(known: DocumentFacts, text: str, offset: int) -> lsp.SignatureHelp | None:
    """The form of the innermost call around an offset, and which argument stands there."""
    place = place_at(text, offset)
    for bracket in reversed(place.brackets if place is not None else []):
        shown = _form(known, bracket.before) if bracket.kind == "LPAR" else None
        if shown is not None:
            inner = shown[shown.index("(") + 1 : shown.rindex(")")] if "(" in shown else ""
            names = [part.strip() for part in inner.partition(" -> ")[0].split(",") if part.strip()]
            active = max(min(bracket.commas, len(names) - 1), 0)
            parts = [lsp.ParameterInformation(name) for name in names]
            information = lsp.SignatureInformation(shown, parameters=parts, active_parameter=active)
            return lsp.SignatureHelp([information], active_signature=0, active_parameter=active)
    return None


def _form(known: DocumentFacts, name: str) -> str | None:
    function = known.declarations.functions.get(name)
    added = known.declarations.operators
    return head(function).removeprefix("def ") if function is not None else form(name, added)
