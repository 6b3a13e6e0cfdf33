"""Messages of syntax errors: the word found, those expected, and the likely slip."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from meshdsl.diagnostics import (
    Diagnostic,
    Edit,
    Fix,
    Related,
    Source,
    Span,
    advice,
    did_you_mean,
    spelled_right,
)
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.edits import inserted, without_line
from meshdsl.syntax.foreign_words import characters, statements, ways_out
from meshdsl.syntax.forms import form_of
from meshdsl.syntax.tokens import (
    DECLARATIONS,
    FOREIGN,
    NAMES_OF_ARGUMENTS,
    OPENERS,
    OPERATORS,
    RESERVED,
    STATEMENTS,
    span_of,
)

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Token

_ENDS_WRONG = OPERATORS | {"NOT"}
_EXPRESSION = frozenset({"NAME", "NUMBER", "STRING", "LPAR", "MINUS", "NOT"})
_KINDS = {
    "NAME": "a name",
    "NUMBER": "a number",
    "STRING": "a string",
    "_NL": "end of line",
    "$END": "end of file",
    "COMPARE": "a comparison",
}
_GROUPS = (
    (_EXPRESSION, "an expression"),
    (_EXPRESSION - {"NOT"}, "an expression"),
    (DECLARATIONS, "a declaration"),
    (STATEMENTS | {"NAME"}, "a statement"),
    (frozenset({"PLUS", "STAR"}), "an operator"),
)
_AFTER_OPERAND = OPERATORS | {"LPAR", "LSQB", "PIN", "DOT"}
_POSITIONS = frozenset({"NUMBER", "STRING", "MINUS", "COLON"})

_PARENTHESES = "put the expression in parentheses to write it over several lines"
_WRITTEN = {
    ";": "",
    "&": "and",
    "|": "or",
    "!": "not ",
    "“": '"',
    "”": '"',
    "×": "*",
    "·": "*",
    "→": "->",
    "←": "=",
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
    "−": "-",
    "–": "-",
    "…": "...",
    "\u00a0": " ",
    "\ufeff": "",
}
"""What to write in place of a character of the table (`foreign.toml`)."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The context in which the parser cannot go on.

    `token` is the word it stumbled over (None: the end of the file), `before` the last word before
    it that is not a line end, `head` the first word of the statement or declaration that it is in,
    `opened` the brackets open there, `expected` the kinds of words that would have been legal,
    `block` the kind of the declaration whose braces are around it.
    """

    source: Source
    token: Token | None
    before: Token | None
    begins_line: bool
    following: list[Token]
    expected: frozenset[str]
    opened: tuple[Token, ...]
    head: Token
    block: str | None = None

    @property
    def kind(self) -> str:
        """The kind of the word found."""
        return "$END" if self.token is None else self.token.type

    @property
    def span(self) -> Span:
        """The word found; the end of the text before it where a line or the file ends too soon."""
        if self.token is not None and self.token.type != "_NL":
            return span_of(self.source, self.token)
        length = len(self.source.text)
        end = 0 if self.before is None else self.before.end_pos or 0
        at = end if self.token is not None and end < length else max(end - 1, 0)
        return Span(self.source, at, min(at + 1, length))

    def related(self, token: Token, message: str) -> Related:
        """A second place for the diagnostic."""
        return Related(span_of(self.source, token), message)


def complaint(at: Situation) -> Diagnostic:
    """The diagnostic for a syntax error: that of the first hint that fits, or the plain one."""
    sign = _only_sign(at) or _missing_sign(at)
    help = advice(sign, _plain_help(at))
    plain = Diagnostic("MD0001", _plain(at), at.span, help=help, fixes=sign)
    diagnostic = next(filter(None, (hint(at) for hint in _HINTS)), plain)
    if diagnostic.help:
        return diagnostic
    in_view = at.opened and at.opened[-1].type == "LSQB" and at.head.type == "NAME" and at.block
    return replace(diagnostic, help=_VIEW if in_view else form_of(at.head.type, at.block))


# --- words -----------------------------------------------------------------------------------


def describe(token: Token | None) -> str:
    """A word as a reader sees it: ``the name `x` ``, ``end of line``, `` `{` ``."""
    if token is None:
        return "end of file"
    if token.type == "_NL":
        return "end of line" if token.end_pos != token.start_pos else "end of file"
    if token.type == "RBRACE" and token.end_pos == token.start_pos:
        return "the end of the rules"  # of a layout on the command line: nobody wrote a brace
    if token.type == "NAME":
        return f"the name `{_short(token)}`"
    return "a string" if token.type == "STRING" else f"`{_short(token)}`"


def expectation(kinds: Iterable[str]) -> str:
    """The expected words, in short: ``an expression, `)` or end of line``."""
    from meshdsl.grammar import spelling

    left, words = set(kinds) - {"BROKEN"} - FOREIGN, []
    left -= NAMES_OF_ARGUMENTS if left >= NAMES_OF_ARGUMENTS else set()
    left -= _POSITIONS if "ELLIPSIS" in left else set()  # in brackets, only read to be refused
    for group, word in _GROUPS:
        if group <= left:
            words.append(word)
            left -= _AFTER_OPERAND if word == "an operator" else group | {"LSQB"}
    fixed = spelling()
    words += sorted(f"`{fixed[kind]}`" for kind in left if kind in fixed)
    words += sorted(_KINDS[kind] for kind in left if kind in _KINDS)
    return _either(words)


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]])) if words else "nothing"


def _plain(at: Situation) -> str:
    return f"expected {expectation(at.expected)}, found {describe(at.token)}"


def _plain_help(at: Situation) -> str | None:
    """A way out where the plain sentence has none."""
    before = at.before.type if at.before else ""
    if at.kind == "SUB_AXIS":
        return _SUB_AXIS
    if (at.kind, before) in _PAIRS:
        return _PAIRS[at.kind, before]
    if before == "COMMA" and at.expected <= {"RPAR"}:
        return "arguments are written before `->`: `f(x, option=1 -> [batch])`"
    if before == "WITH" and at.head.type == "LAYOUT":
        return "a layout names a schedule so: `with one_f_one_b[batch](8)`"
    if before == "EQUAL" and at.head.type == "PARAM":
        return "a parameter begins as `zeros()`, `ones()`, `normal(0.02)` and the like"
    if "NAME" in at.expected or before == "ARROW":
        return _AFTER.get(before)
    needs_optimizer = "WITH" in at.expected and at.head.type == "MINIMIZE"
    return "write `minimize loss with adam(lr=1e-3)`" if needs_optimizer else None


_PAIRS = {
    ("_NL", "EQUAL"): _PARENTHESES,
    ("NAME", "ARROW"): "the dims of a result stand in brackets: `-> [batch, hidden]`",
}
_VIEW = "brackets hold dims: `x[seq = 0]` picks, `x[seq -> mem]` renames"
_AFTER = {"LSQB": _VIEW}
_SUB_AXIS = "a name, a dot and a number are a part of a mesh axis, as in `heads -> tp.2`"


# --- likely slips ----------------------------------------------------------------------------


def _bad_word(at: Situation) -> Diagnostic | None:
    """A word that the language does not have."""
    token = at.token
    if token is None or not token.type.startswith("BAD"):
        return None
    if token.type == "BAD_NAME":
        letters = "names are made of the letters a to z, A to Z, digits and `_`"
        fixes, message = _in_ascii(at, str(token)), f"`{token}` is not an ASCII name"
        return Diagnostic("MD0013", message, at.span, help=advice(fixes, letters), fixes=fixes)
    if token.type == "BAD_NUMBER":
        slip = "write integers as `4096` or `4_096`, floats as `0.5` or `1e-3`"
        if token[0].isdecimal() and token.lstrip("0123456789_").isidentifier():
            slip = "a name cannot begin with a digit; a product is written with `*`"
        fixes = _product(at.span)
        message = f"`{_short(token)}` is not a number"
        return Diagnostic("MD0007", message, at.span, help=advice(fixes, slip), fixes=fixes)
    if token.type == "BAD_STRING":
        fixes = _closed_string(at)
        ends = 'a string ends with `"` on the line it begins on'
        message = "this string is not closed"
        return Diagnostic("MD0009", message, at.span, help=advice(fixes, ends), fixes=fixes)
    return _bad_character(at, str(token))


def _in_ascii(at: Situation, name: str) -> tuple[Fix, ...]:
    """The fix that writes a name without its accents, wherever the file has it."""
    folded = unicodedata.normalize("NFKD", name.replace("ß", "ss"))
    new = folded.encode("ascii", "ignore").decode()
    places = re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", at.source.text)
    if not new.isidentifier() or new in at.source.text:
        return ()
    edits = tuple(Edit(Span(at.source, *place.span()), new) for place in places)
    return (Fix(f"call it `{new}`", edits, safe=False),)


def _product(span: Span) -> tuple[Fix, ...]:
    """The fix that makes a product of a number and the name behind it: `4x`."""
    parts = re.fullmatch(r"([0-9_]+)([A-Za-z_]\w*)", span.text)
    return () if parts is None else (Fix.write(span, f"{parts[1]} * {parts[2]}", safe=False),)


_STRING_ENDS = re.compile(r"[\s)\]},]*(#.*)?$")


def _closed_string(at: Situation) -> tuple[Fix, ...]:
    """The fix that closes a string before the brackets which end its line."""
    ends = _STRING_ENDS.search(at.span.text)
    end = at.span.start + (len(at.span.text) if ends is None else ends.start())
    return (inserted(end, '"', at.span, 'add `"`'),)


def _bad_character(at: Situation, char: str) -> Diagnostic:
    shown = f"`{char}`" if char.isprintable() else f"U+{ord(char):04X}"
    message = f"the character {shown} means nothing here"
    usual = "remove it; other characters stand only in comments and strings"
    fixes, help_ = _written(at.span, char), characters().get(char, usual)
    if fixes:
        help_ = advice(fixes, None if help_.startswith(fixes[0].title) else help_) or help_
    return Diagnostic("MD0002", message, at.span, help=help_, fixes=fixes)


_QUOTED = re.compile(r"['“]([^'\"“”\n]*)['”]")


def _written(span: Span, char: str) -> tuple[Fix, ...]:
    """The fix that writes what a foreign character means: both quotes of a string, `&&` whole."""
    text = span.source.text
    quoted = _QUOTED.match(text, span.start)
    if quoted is not None:
        span, new = Span(span.source, quoted.start(), quoted.end()), f'"{quoted[1]}"'
    elif char not in _WRITTEN:
        return ()
    else:
        new = _WRITTEN[char]
    if char == ";":
        span, new = _line_end(span)
    if char in "&|":
        end = span.end + text.startswith(char, span.end)
        span = Span(span.source, span.start, end)
        before, after = text[: span.start][-1:].isspace(), text[end : end + 1].isspace()
        new = f"{'' if before else ' '}{new}{'' if after else ' '}"
    title = f"write `{new.strip()}`" if new.strip() else _BLANK.get(new, "begin a new line")
    return (Fix(title, (Edit(span, new),)),)


_BLANK = {"": "remove it", " ": "write a space"}


def _line_end(span: Span) -> tuple[Span, str]:
    """What a semicolon means: nothing at the end of its line, else a new line like this one."""
    line, _ = span.source.position(span.start)
    text, end = span.source.line(line), span.source.bounds(line)[1]
    remainder = span.source.text[span.end : end]
    if not remainder.partition("#")[0].strip():
        return span, ""
    blanks = len(remainder) - len(remainder.lstrip())
    margin = text[: len(text) - len(text.lstrip())]
    return Span(span.source, span.start, span.end + blanks), f"\n{margin}"


def _short(text: str) -> str:
    return text if len(text) <= 24 else f"{text[:20]}…"


def _foreign_statement(at: Situation) -> Diagnostic | None:
    """A statement of other languages that has none of this one in its place."""
    if at.token is None or at.kind == "_NL":
        return None
    for word in (at.head, at.before, at.token):
        if word is not None and word.type == "NAME" and str(word) in statements():
            help_ = statements()[str(word)]
            place = span_of(at.source, word)
            return Diagnostic("MD0018", f"there is no `{word}`", place, help=help_)
    return None


def _called_twice(at: Situation) -> Diagnostic | None:
    """`nn.Dropout(0.1)(x)`: a module of other libraries, which is made and then called."""
    if at.kind != "LPAR" or at.before is None or at.before.type != "RPAR":
        return None
    text, depth = at.source.text[: at.before.end_pos], 0
    for start in reversed(range(len(text))):
        depth += (text[start] == ")") - (text[start] == "(")
        if not depth:
            break
    word = re.search(r"\b[A-Z]\w*$", text[:start])
    if word is None:
        return None
    help_ = ways_out().get(word[0], f"functions are called once: `{word[0].lower()}(x)`")
    place = Span(at.source, word.start(), word.end())
    return Diagnostic("MD0125", f"there is no function `{word[0]}`", place, help=help_)


def _reserved(at: Situation) -> Diagnostic | None:
    """`dim dim = 3` or `param = 3`: a reserved word where a name is needed.

    Not behind the `for` of `expect l for on pod`, where only the name of a program can be.
    """
    if at.before is not None and at.before.type == "FOR":
        return None
    if at.kind == "EQUAL" and at.before is not None and at.before.type in RESERVED:
        return _not_a_name(str(at.before), span_of(at.source, at.before))
    if at.kind not in RESERVED or "NAME" not in at.expected or _looks_new(at):
        return None
    return _not_a_name(str(at.token), at.span)


def _not_a_name(word: str, span: Span) -> Diagnostic:
    message, new = f"`{word}` is a reserved word and cannot be a name", f"{word}_"
    fixes = (Fix(f"call it `{new}`", (Edit(span, new),)),)
    return Diagnostic("MD0004", message, span, help=advice(fixes, "or choose another"), fixes=fixes)


def _looks_new(at: Situation) -> bool:
    """Whether a reserved word begins a statement or declaration, and is not used as a name."""
    starts = at.kind in STATEMENTS | DECLARATIONS
    named = any(word.type in ("EQUAL", "LSQB") for word in at.following[:1])
    return starts and at.begins_line and not named


def _unclosed(at: Situation) -> Diagnostic | None:
    """A bracket that is still open where a new line, a block or the end of the file begins."""
    if at.token is None or at.kind in ("RBRACE", "LBRACE") or at.begins_line:
        return _unclosed_bracket(at) or _unclosed_block(at)
    return None


def _unclosed_bracket(at: Situation) -> Diagnostic | None:
    if not at.opened or at.opened[-1].type == "LBRACE":
        return None
    opener, closer = at.opened[-1], _closer(at.opened[-1])
    if at.kind in OPENERS.values() and at.kind != "RBRACE":
        return None
    fixes = _closed(at, closer)
    return Diagnostic(
        "MD0003",
        f"this `{opener}` is not closed",
        span_of(at.source, opener),
        related=(Related(at.span, f"expected `{closer}` before this"),),
        help=advice(fixes, "or the `,` between two arguments"),
        fixes=fixes,
    )


def _closed(at: Situation, closer: str) -> tuple[Fix, ...]:
    """The fix that closes a bracket behind the last word."""
    if at.before is None or at.before.end_pos is None:
        return ()
    span = Span(at.source, at.before.end_pos, at.before.end_pos)
    return (Fix(f"add `{closer}`", (Edit(span, closer),)),)


def _closer(opener: Token) -> str:
    from meshdsl.grammar import spelling

    return spelling()[OPENERS[opener.type]]


def _unclosed_block(at: Situation) -> Diagnostic | None:
    at_margin = at.token is not None and at.kind in DECLARATIONS
    if not at.opened or not (at.token is None or at_margin):
        return None
    if at_margin and _indented(at):
        return Diagnostic(
            "MD0014",
            f"`{at.token}` declares something for the whole file and cannot stand in a block",
            at.span,
            related=(at.related(at.opened[-1], "the block begins here"),),
            help="move the line out of the braces",
        )
    return Diagnostic(
        "MD0003",
        f"this block is not closed before {describe(at.token)}",
        at.span,
        related=(at.related(at.opened[-1], "the block begins here"),),
        fixes=_closed_block(at),
    )


def _closed_block(at: Situation) -> tuple[Fix, ...]:
    """The fix that closes a block on a line of its own behind the last word."""
    if at.before is None or at.before.end_pos is None:
        return ()
    end = at.source.bounds(at.source.position(at.before.end_pos)[0])[1]
    line, _ = at.source.position(at.opened[-1].start_pos or 0)
    text = at.source.line(line)
    margin = text[: len(text) - len(text.lstrip())]
    return (Fix("add `}`", (Edit(Span(at.source, end, end), f"\n{margin}}}"),)),)


def _indented(at: Situation) -> bool:
    line, _ = at.source.position(at.opened[0].start_pos or 0)
    text = at.source.line(line)
    return at.span.column > len(text) - len(text.lstrip()) + 1


def _mismatched(at: Situation) -> Diagnostic | None:
    """A closing bracket of another kind than the one that is open, or with none open."""
    from meshdsl.grammar import spelling

    if at.token is None or at.kind not in OPENERS.values():
        return None
    is_extra = at.kind != "RBRACE" and not at.begins_line
    if not at.opened or (at.opened[-1].type == "LBRACE" and is_extra):
        message = f"this `{at.token}` closes nothing"
        fixes = (Fix("remove it", (Edit(without_line(at.span), ""),)),)
        help_ = advice(fixes, "or open it before")
        return Diagnostic("MD0003", message, at.span, help=help_, fixes=fixes)
    opener = at.opened[-1]
    wanted = OPENERS[opener.type]
    if at.kind == wanted:
        return None
    fixes = (Fix.write(at.span, spelling()[wanted], safe=False),)
    return Diagnostic(
        "MD0003",
        f"`{at.token}` cannot close `{opener}`",
        at.span,
        related=(at.related(opener, f"`{spelling()[wanted]}` is to close this"),),
        help=advice(fixes, "or close the other bracket before"),
        fixes=fixes,
    )


def _broken_line(at: Situation) -> Diagnostic | None:
    """A line that ends after an operator, or begins with one."""
    if at.kind == "_NL" and at.before is not None and at.before.type in _ENDS_WRONG:
        message = f"the line ends after `{at.before}`"
        fixes = _joined(at, at.before, at.following[0] if at.following else None)
        other = _PARENTHESES if "LPAR" in at.expected else "write it on one line"
        return Diagnostic("MD0005", message, at.span, help=_or(fixes, other), fixes=fixes)
    if at.begins_line and at.token is not None and at.kind in OPERATORS and "NAME" in at.expected:
        message = f"a line cannot begin with `{at.token}`"
        fixes = () if at.before is None else _joined(at, at.before, at.token)
        help = _or(fixes, _PARENTHESES)
        return Diagnostic("MD0005", message, at.span, help=help, fixes=fixes)
    return None


def _or(fixes: tuple[Fix, ...], other: str) -> str | None:
    """The help of fixes, with another way out, which is the only one where there are none."""
    return advice(fixes, f"or {other}") if fixes else other


def _joined(at: Situation, before: Token, after: Token | None) -> tuple[Fix, ...]:
    """The fix that puts two lines on one, unless a comment stands between them."""
    start, end = before.end_pos or 0, 0 if after is None else after.start_pos or 0
    is_new = any(word.type == "EQUAL" for word in at.following[:2])
    if after is None or is_new or after.type in RESERVED or at.source.text[start:end].strip():
        return ()
    return (Fix("join the two lines", (Edit(Span(at.source, start, end), " "),)),)


def _chained(at: Situation) -> Diagnostic | None:
    """`a < b < c`."""
    if at.kind != "COMPARE" or "PLUS" not in at.expected or "COMPARE" in at.expected:
        return None
    fixes = _compared_twice(at)
    help_ = None if fixes else "compare twice: `a < b and b < c`"
    message = "comparisons do not chain"
    return Diagnostic("MD0006", message, at.span, help=help_, fixes=fixes)


def _compared_twice(at: Situation) -> tuple[Fix, ...]:
    """The fix that repeats a middle which is one word: `a < b and b < c`."""
    middle = at.before
    before = at.source.text[: 0 if middle is None else middle.start_pos].rstrip()
    if middle is None or middle.type not in ("NAME", "NUMBER") or before[-1:] not in "<>=":
        return ()
    text, title = f" and {middle}", f"compare twice: `{middle} and {middle}`"
    return (inserted(middle.end_pos or 0, text, at.span, title),)


def _equals(at: Situation) -> Diagnostic | None:
    """`=` where a comparison is meant, or the other way round."""
    if at.token == "==" and "EQUAL" in at.expected and "PLUS" not in at.expected:
        why, sign = "`=` gives a value", "="
    elif at.kind == "EQUAL" and "COMPARE" in at.expected:
        why, sign = "`==` compares", "=="
    else:
        return None
    fixes = (Fix.write(at.span, sign),)
    return Diagnostic("MD0001", _plain(at), at.span, help=advice(fixes, why), fixes=fixes)


_SWAPPED = {("COLON", "EQUAL"), ("EQUAL", "COLON"), ("COLON", "ARROW"), ("EQUAL", "ARROW")}
"""Signs that are taken for each other: the one found and the one that alone may stand there."""


def _only_sign(at: Situation) -> tuple[Fix, ...]:
    """The fix where one sign alone may stand: `dim batch: 64`, `mesh m { rows = 2 }`."""
    from meshdsl.grammar import spelling

    wanted = at.expected - {"BROKEN"}
    if at.token is None or len(wanted) != 1:
        return ()
    (kind,) = wanted
    if (at.kind, kind) in _SWAPPED:
        start = at.span.start if at.before is None else at.before.end_pos or 0
        text = ":" if kind == "COLON" else f" {spelling()[kind]}"
        edit = Edit(Span(at.source, start, at.span.end), text)
        return (Fix(f"write `{spelling()[kind]}`", (edit,)),)
    if (at.kind, kind) == ("LBRACE", "EQUAL"):
        return (inserted(at.span.start, "= ", at.span, "write `=`", safe=True),)
    return ()


def _missing_sign(at: Situation) -> tuple[Fix, ...]:
    """The fix that adds the comma of `x[batch io]`, or the brace of a block."""
    if at.before is None or at.token is None:
        return ()
    end, start = at.before.end_pos or 0, at.span.start
    inside = at.opened[-1].type if at.opened else "DIM"  # outside of brackets only dims have commas
    in_list = inside in ("LPAR", "LSQB", "DIM") or at.block == "MESH"
    if in_list and "COMMA" in at.expected and at.kind in ("NAME", "NUMBER"):
        edit = Edit(Span(at.source, end, start), ", ")
        return (Fix(f"write `,` before `{at.token}`", (edit,), safe=False),)
    if "LBRACE" in at.expected and at.kind == "_NL":
        return (inserted(end, " {", at.span, "write `{`"),)
    return ()


def _misplaced(at: Situation) -> Diagnostic | None:
    """A line at the top of the file that begins no declaration."""
    if not at.begins_line or at.token is None or not at.expected >= DECLARATIONS:
        return None
    if at.kind == "NAME" and at.before is not None and at.before.type == "COMMA":
        start = Span(at.source, at.span.start, at.span.start)
        fixes = (Fix(f"write `dim {at.token} …`", (Edit(start, "dim "),)),)
        help_ = advice(fixes, "a new line ends the declaration before it")
        return Diagnostic("MD0001", _declaration_wanted(at), at.span, help=help_, fixes=fixes)
    assigns = at.kind == "NAME" and at.following[:1] and at.following[0].type in ("EQUAL", "LSQB")
    if at.kind in STATEMENTS or assigns:
        help_ = "statements stand inside `program NAME(…) { … }` or `def NAME(…) { … }`"
        return Diagnostic(
            "MD0014", f"a statement outside of a program: {describe(at.token)}", at.span, help=help_
        )
    words = [word.lower() for word in sorted(DECLARATIONS)]
    meant = did_you_mean(str(at.token), words)
    if str(at.token) in words:  # `schedule`, which is a name where none follows
        meant = form_of(str(at.token).upper())
    return Diagnostic(
        "MD0001",
        _declaration_wanted(at),
        at.span,
        help=meant or f"a declaration begins with `{' '.join(ast.KEYWORDS.values())} expect`",
        fixes=() if str(at.token) in words else spelled_right(at.span, str(at.token), words),
    )


def _declaration_wanted(at: Situation) -> str:
    return f"expected a declaration, found {describe(at.token)}"


def _bare_expression(at: Situation) -> Diagnostic | None:
    """`relu(x)` alone on a line."""
    wants = {"EQUAL", "COMMA"} <= at.expected and "PLUS" not in at.expected
    if not wants or not at.opened or at.opened[-1].type != "LBRACE" or at.block == "MINIMIZE":
        return None
    meant: str | None = None
    fixes: tuple[Fix, ...] = ()
    if at.kind == "NAME" and at.before is not None:
        words = [word.lower() for word in sorted(STATEMENTS)]
        meant = did_you_mean(str(at.before), words)
        fixes = spelled_right(span_of(at.source, at.before), str(at.before), words)
    if at.following and at.following[0].type == "EQUAL":
        meant, fixes = f"write the tensor twice: `{at.head} = {at.head} {at.token} …`", ()
    help_ = meant or f"a statement gives its value a name: `y = {at.head}…`"
    return Diagnostic("MD0001", _plain(at), at.span, help=help_, fixes=fixes)


_HINTS: tuple[Callable[[Situation], Diagnostic | None], ...] = (
    _bad_word,
    _foreign_statement,
    _called_twice,
    _reserved,
    _broken_line,
    _unclosed,
    _mismatched,
    _misplaced,
    _chained,
    _equals,
    _bare_expression,
)
