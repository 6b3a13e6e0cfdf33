"""Runs the parser over a file and carries on after each error, so that one pass finds all.

Panic mode over an LALR parser: at an error the unfinished statement, entry or declaration comes off
the parser's stack, the word `BROKEN` takes its place, and what is left of it is skipped. Line ends
inside ( ) and [ ] are dropped here, not before: only here is it known that a bracket was forgotten.
"""

from __future__ import annotations

import bisect
from dataclasses import field

from meshdsl.diagnostics import MAX_ERRORS, Diagnostic, Source
from meshdsl.grammar import load
from meshdsl.grammar.parser import END, Parse, Part, Token, Tree, UnexpectedToken
from meshdsl.records import dataclass
from meshdsl.syntax.tokens import (
    CLOSERS,
    DECLARATIONS,
    FOREIGN_STARTS,
    FOREIGN_WORDS,
    OPENERS,
    OPERATORS,
    STATEMENTS,
)

_OPENS_BLOCK = frozenset({"DEF", "PROGRAM", "REPEAT", "RECOMPUTE"})
_OPENS_ENTRIES = frozenset(
    {"MESH", "LAYOUT", "SBP", "SCHEDULE", "WEIGHTS", "EXPECT", "DIM", "MINIMIZE"}
)


def parse_tree(source: Source, tokens: list[Token]) -> tuple[Tree, list[Diagnostic]]:
    """The parse tree of the words, with `broken` for parts in error, and the errors."""
    tables = load().tables
    run = _Recovery(source, tokens, Parse(tables, [tables.start]))
    at = 0
    while at < len(tokens) and len(run.errors) < MAX_ERRORS:
        at = run.step(at)
    tree = run.finish()
    if len(run.errors) == MAX_ERRORS:
        message = f"the parser stops after {MAX_ERRORS} errors; there may be more"
        help = "mend these first, then check again"
        run.errors.append(Diagnostic("MD0016", message, run.errors[-1].span, "note", help=help))
    return tree, run.errors


@dataclass(slots=True, eq=False)
class _Recovery:
    """One parse: the parser's state, the brackets open now, and the errors so far."""

    source: Source
    tokens: list[Token]
    parser: Parse
    errors: list[Diagnostic] = field(default_factory=list)
    opened: list[Token] = field(default_factory=list)

    def step(self, at: int) -> int:
        """Parse the word at index `at`; the index of the word to go on with."""
        token = self.tokens[at]
        if token.type == "_NL" and self.opened and self.opened[-1].type != "LBRACE":
            return at + 1
        word = token
        if token.type == "NAME" and str(token) in FOREIGN_STARTS:
            word = self.foreign_start(at) or token
        try:
            self.parser.feed(word)
        except UnexpectedToken:
            other = self.foreign_word(at)
            if other is None:
                return self.recover(at)
            self.parser.feed(other)
        if token.type in OPENERS:
            self.opened.append(token)
        elif token.type in CLOSERS:
            self.opened.pop()
        return at + 1

    def foreign_start(self, at: int) -> Token | None:
        """The name at index `at` as a word that begins a statement of other languages."""
        token = self.tokens[at]
        follows = FOREIGN_STARTS.get(str(token))
        if follows is None or token.type != "NAME" or at + 1 == len(self.tokens):
            return None
        starts = self.begins_line(at) or self.tokens[at - 1].type == "LBRACE"
        if not starts or self.tokens[at + 1].type not in follows:
            return None
        return self.accepted(token, str(token).upper())

    def foreign_word(self, at: int) -> Token | None:
        """A word that is not expected as one that other languages have there, or None."""
        token, following = self.tokens[at], self.tokens[at + 1 : at + 2]
        if token.type == "NAME" and str(token) in FOREIGN_WORDS:
            return self.accepted(token, str(token).upper())
        called = bool(self.opened) and self.opened[-1].type == "LPAR"
        if token.type == "DIM" and called and any(word.type == "EQUAL" for word in following):
            return self.accepted(token, "NAME")  # `sum(x, dim=1)`
        return None

    def accepted(self, token: Token, kind: str) -> Token | None:
        """The word as one of another kind, where the parser takes that."""
        return token.as_kind(kind) if self.parser.takes(kind) else None

    def finish(self) -> Tree:
        """Close all open brackets at the end of the file; the tree."""
        if self.opened and len(self.errors) < MAX_ERRORS:
            self.report(len(self.tokens), self.tokens[-1])
        if any(token.type == "LBRACE" for token in self.opened):
            self.close_blocks(len(self.source.text))
        elif not self.parser.takes(END.type):
            self.break_off()
            self.feed("_NL")
        self.parser.feed(END)
        tree = self.parser.parts[0]
        assert isinstance(tree, Tree)
        return tree

    def recover(self, at: int) -> int:
        """Report the word at index `at` and put `BROKEN` for the construct that it is part of."""
        token = self.tokens[at]
        if self.is_missing_brace(at):
            self.report(at, token)
            self.close_blocks(token.start_pos or 0)
            return at
        head = self.head_of_broken(at)
        self.report(at, self.tokens[head])
        self.break_off()
        return self.skip(head, at)

    def report(self, at: int, head: Token) -> None:
        """Add the error for the word at index `at` (past the end: for the end of the file)."""
        from meshdsl.syntax.complaints import Situation, complaint

        at_end = at == len(self.tokens)
        before = self.tokens[at - 1] if at else None
        second = at > 1 and before is not None and before.type == "_NL"
        self.errors.append(
            complaint(
                Situation(
                    source=self.source,
                    token=None if at_end else self.tokens[at],
                    before=self.tokens[at - 2] if second else before,
                    begins_line=self.begins_line(at),
                    following=self.tokens[at + 1 : at + 3],
                    expected=self.parser.accepts(),
                    opened=tuple(self.opened),
                    head=head,
                    block=self.block(),
                )
            )
        )

    def block(self) -> str | None:
        """The kind of the declaration whose braces are open, or `MINIMIZE` for those of groups."""
        if not self.opened or self.opened[0].type != "LBRACE":
            return None
        braces = [word for word in self.opened if word.type == "LBRACE"]
        if len(braces) > 1 and self.before(braces[-1], STATEMENTS) == "MINIMIZE":
            return "MINIMIZE"
        return self.before(braces[0], DECLARATIONS)

    def before(self, token: Token, kinds: frozenset[str]) -> str | None:
        """The last of some kinds of words before one."""
        start = token.start_pos or 0
        end = bisect.bisect_left(self.tokens, start, key=lambda word: word.start_pos or 0)
        words = reversed(self.tokens[:end])
        return next((word.type for word in words if word.type in kinds), None)

    # --- the parser's stack ------------------------------------------------------------------

    def feed(self, kind: str, at: int | None = None) -> None:
        """Feed a made-up word of no width, at an offset where a node is to end with it."""
        self.parser.feed(Token(kind, "", at, at))

    def head_of_broken(self, at: int) -> int:
        """Index of the first word of the unfinished statement, entry or declaration."""
        start = self.tokens[at].start_pos
        parser, closed = self.parser, 0
        values = [*reversed(parser.parts), None]  # the state below all has none
        for state, value in zip(reversed(parser.states), values, strict=True):
            if "BROKEN" in parser.tables.actions[state] and not closed:
                break
            start = _start(value, start)
            closed = _closed(closed, value)
        return bisect.bisect_left(self.tokens, start or 0, key=lambda word: word.start_pos or 0)

    def break_off(self) -> None:
        """Take the unfinished part off the stack and put `BROKEN` there.

        A block that was closed already comes off whole: nothing more can be inside it.
        """
        parser, closed = self.parser, 0
        while closed or "BROKEN" not in parser.choices():
            parser.states.pop()
            closed = _closed(closed, parser.parts.pop())
        words = [part for part in parser.parts if isinstance(part, Token)]
        self.opened = [word for word in words if word.type == "LBRACE"]
        self.feed("BROKEN")

    def close_blocks(self, at: int) -> None:
        """Pretend that every brace is closed at an offset and the declaration ended."""
        for opened in self.opened:
            if opened.type == "LBRACE":
                if not self.parser.takes("RBRACE"):
                    self.break_off()
                self.feed("RBRACE", at)
        self.feed("_NL")
        self.opened.clear()

    # --- skipping --------------------------------------------------------------------------------

    def is_missing_brace(self, at: int) -> bool:
        """Whether a declaration begins here while a block is open, out where the block began."""
        token = self.tokens[at]
        braces = [word for word in self.opened if word.type == "LBRACE"]
        if not braces or token.type not in DECLARATIONS or not self.begins_line(at):
            return False
        line, _ = self.source.position(braces[0].start_pos or 0)
        text = self.source.line(line)
        return self.column(token) <= len(text) - len(text.lstrip()) + 1

    def skip(self, head: int, at: int) -> int:
        """Index of the word to go on with after the broken part that begins at `head`.

        The word is a line end, a comma between entries, the closing brace of the block around, or
        the brace of a block whose statements are worth reading.
        """
        column = self.column(self.tokens[head])
        nested: list[Token] = []
        for index in range(head, len(self.tokens)):
            word = self.tokens[index]
            if index >= at and (not nested or word.type in ("LBRACE", "RBRACE")):
                if self.ends_broken(index, head, nested):
                    return index
            if nested and index >= at and self.is_new_start(index, column):
                return index - 1
            _follow(nested, word)
        return len(self.tokens) - 1

    def ends_broken(self, index: int, head: int, nested: list[Token]) -> bool:
        """Whether the broken part ends before this word."""
        word = self.tokens[index]
        braces = [bracket for bracket in nested if bracket.type == "LBRACE"]
        if braces:
            return False
        if word.type == "LBRACE":
            return self.has_statements(head, index)
        if word.type == "RBRACE":
            return bool(self.opened)
        if word.type == "_NL" and self.runs_on(index, head):
            return False
        if word.type == "_NL":
            return bool(self.opened) or self.next_is_declaration(index)
        return word.type == "COMMA" and self.parser.takes("COMMA")

    def runs_on(self, line_end: int, head: int) -> bool:
        """Whether a line ends after an operator and the next one, further in, continues it."""
        if not 0 < line_end < len(self.tokens) - 1:
            return False
        before, after = self.tokens[line_end - 1], self.tokens[line_end + 1]
        fresh = after.type in STATEMENTS | DECLARATIONS | CLOSERS
        further_in = self.column(after) > self.column(self.tokens[head])
        return before.type in OPERATORS and not fresh and further_in

    def has_statements(self, head: int, brace: int) -> bool:
        """Whether the brace at index `brace` opens statements, judged by the words before it."""
        kind = self.tokens[head].type
        words = {word.type for word in self.tokens[head:brace]}
        if kind in _OPENS_ENTRIES or "EQUAL" in words:
            return kind in _OPENS_BLOCK
        return kind in _OPENS_BLOCK or bool(self.opened) or "LPAR" in words

    def next_is_declaration(self, line_end: int) -> bool:
        """Whether the next line begins at the margin, or with a declaration further in."""
        if line_end + 1 >= len(self.tokens):
            return True
        word = self.tokens[line_end + 1]
        return word.type in DECLARATIONS or (self.column(word) == 1 and word.type != "RBRACE")

    def is_new_start(self, index: int, column: int) -> bool:
        """Whether a line that begins here cannot belong to a statement that began in `column`."""
        word = self.tokens[index]
        if not self.begins_line(index) or word.type in CLOSERS:
            return False
        return word.type in DECLARATIONS | STATEMENTS or self.column(word) <= column

    def begins_line(self, index: int) -> bool:
        """Whether the word at this index is the first of its line."""
        return index == 0 or self.tokens[index - 1].type == "_NL"

    def column(self, token: Token) -> int:
        """The column of a word, from 1."""
        return self.source.position(token.start_pos or 0)[1]


def _closed(closed: int, part: Part) -> int:
    """The number of blocks left half removed, once `part` comes off the stack."""
    kind = part.type if isinstance(part, Token) else ""
    return closed + 1 if kind == "RBRACE" else max(0, closed - (kind == "LBRACE"))


def _start(part: Part, otherwise: int | None) -> int | None:
    """The start of a tree or word on the stack; `otherwise` for an empty tree."""
    return otherwise if part is None or part.start_pos is None else part.start_pos


def _follow(nested: list[Token], word: Token) -> None:
    """Keep track of open brackets, forgiving ones that do not match; braces trump the others."""
    if word.type == "LBRACE":
        nested[:] = [bracket for bracket in nested if bracket.type == "LBRACE"]
    if word.type in OPENERS:
        nested.append(word)
    elif word.type in CLOSERS:
        matching = [i for i, bracket in enumerate(nested) if OPENERS[bracket.type] == word.type]
        if matching:
            del nested[matching[-1] :]
