"""Text to syntax tree: `read_source` takes a file, `parse` makes the tree and finds every error."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from meshdsl.backends.runtime.user_files import read_regular
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Source, Span, advice, fail
from meshdsl.option_edits import path_meant
from meshdsl.syntax import ast

_BOM = b"\xef\xbb\xbf"


STDIN = "-"
"""The path of the standard input."""


def read_source(path: str | Path) -> Source:
    """The text of a file, named as the path was given, its line ends normalised, without a BOM.

    The path `-` is the standard input, named `<stdin>`.

    Raises:
        DiagnosticError: the file cannot be read (MD0010), is not UTF-8 (MD0011) or contains a NUL
            byte (MD0012).
    """
    name = str(path)
    if name == STDIN:
        return _source("<stdin>", _read_stdin())
    try:
        data = read_regular(path)
    except FileNotFoundError:
        fixes = path_meant(name)
        where = Path(path).parent
        missing = "check the path" if where.is_dir() else f"there is no folder `{where}` either"
        fail("MD0010", f"there is no file `{name}`", help=advice(fixes) or missing, fixes=fixes)
    except IsADirectoryError:
        fail("MD0010", f"`{name}` is a folder, not a file", help="name a .mdsl file in it")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        help = "check the path and the permissions"
        fail("MD0010", f"cannot read `{name}`: {reason}", help=help)
    return _source(name, data)


def _read_stdin() -> bytes:
    try:
        if sys.stdin is not None:
            return sys.stdin.buffer.read()
        reason: object = "it is closed"
    except OSError as error:
        reason = error.strerror
    fail("MD0010", f"cannot read the standard input: {reason}", help="name a file, or pipe one in")


def _source(name: str, data: bytes) -> Source:
    return Source(name, _decode(name, data.removeprefix(_BOM), data.startswith(_BOM)))


def _decode(name: str, data: bytes, had_bom: bool) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + had_bom * len(_BOM)
        before = Source(name, _unix(data[: error.start].decode("utf-8")))
        fail(
            "MD0011",
            f"`{name}` is not UTF-8: byte 0x{data[error.start]:02x} at offset {offset}",
            Span(before, len(before.text), len(before.text)),
            help="save the file as UTF-8",
        )
    source, refusal = source_of(name, text)
    if refusal is not None:
        raise DiagnosticError(refusal)
    return source.text


def source_of(name: str, text: str) -> tuple[Source, Diagnostic | None]:
    """A text as a source, its line ends normalised, and the refusal of a NUL byte (MD0012)."""
    source = Source(name, _unix(text))
    at = source.text.find("\0")
    if at < 0:
        return source, None
    message = f"`{name}` holds a NUL byte: it is not a text file"
    help = "check that it is the right file, and save it as UTF-8"
    return source, Diagnostic("MD0012", message, Span(source, at, at + 1), help=help)


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")


@functools.lru_cache(maxsize=8)
def parse(source: Source) -> tuple[ast.SourceFile, tuple[Diagnostic, ...]]:
    """The tree of the parsable parts, and the syntax errors of the whole file in order.

    The tree is complete exactly when there are no errors. Not more than `MAX_ERRORS` errors are
    reported; a note follows when there were as many. The last few texts are cached: one file is
    placed under many layouts.
    """
    from meshdsl.syntax.build import build_file
    from meshdsl.syntax.recover import parse_tree
    from meshdsl.syntax.tokens import beyond_limits, lex, significant

    words = lex(source)
    beyond = beyond_limits(source, words)
    if beyond is not None:
        return ast.SourceFile((), Span(source, 0, len(source.text))), (beyond,)
    tree, errors = parse_tree(source, significant(words))
    file, more = build_file(source, tree)
    return file, tuple(sorted([*errors, *more], key=lambda d: d.span.start if d.span else 0))


def parse_expression(text: str) -> ast.Expr | None:
    """The tree of one expression; None if the text is none."""
    from meshdsl.syntax.build import build_file
    from meshdsl.syntax.recover import parse_tree
    from meshdsl.syntax.tokens import lex, significant

    source = Source("expression", f"program p() {{ return {text} }}")
    tree, errors = parse_tree(source, significant(lex(source)))
    file, more = build_file(source, tree)
    match file.declarations:
        case (ast.ProgramDecl(body=(ast.Return(values=(value,)),)),) if not errors and not more:
            return value
    return None


def parse_scheduled(source: Source) -> tuple[ast.CallExpr | None, tuple[Diagnostic, ...]]:
    """The tree of the schedule of a layout, `one_f_one_b[batch](8)`, or what is wrong with it."""
    from meshdsl.grammar.parser import Token
    from meshdsl.syntax.build import build_file
    from meshdsl.syntax.recover import parse_tree
    from meshdsl.syntax.tokens import beyond_limits, lex, significant

    words = [word for word in lex(source) if word.type != "_NL"]
    if words and words[0].type == "WITH":  # as a layout has it
        words = words[1:]
    beyond = beyond_limits(source, words)
    if beyond is not None:
        return None, (beyond,)
    before = ("LAYOUT", "NAME", "LBRACE", "RBRACE", "WITH")
    head = [Token(kind, kind.lower(), start_pos=0, end_pos=0) for kind in before]
    tree, errors = parse_tree(source, significant([*head, *words]))
    file, more = build_file(source, tree)
    match file.declarations:
        case (ast.LayoutDecl(schedule=ast.CallExpr() as call),) if not errors and not more:
            return call, ()
    return None, (*errors, *more)


def parse_mesh(source: Source) -> tuple[ast.MeshDecl | None, tuple[Diagnostic, ...]]:
    """The tree of a mesh that is written out, or what is wrong with it.

    It is what is printed of one: all of it, or `{ rows: 2, cols: 2 }`, with or without its name.
    """
    from meshdsl.grammar.parser import Token
    from meshdsl.syntax.build import build_file
    from meshdsl.syntax.recover import parse_tree
    from meshdsl.syntax.tokens import beyond_limits, lex, significant

    words = lex(source)
    beyond = beyond_limits(source, words)
    if beyond is not None:
        return None, (beyond,)
    tokens = list(significant(words))
    at = next((i for i, word in enumerate(tokens) if word.type == "LBRACE"), 0)
    kinds, written = ("MESH", "NAME", "EQUAL"), {word.type: word for word in tokens[:at]}
    if tokens and [word.type for word in tokens[:at]] == [
        kind for kind in kinds if kind in written
    ]:
        start = tokens[at].start_pos  # what is missing of `mesh square =`
        head = [written.get(k) or Token(k, "", start_pos=start, end_pos=start) for k in kinds]
        tokens = [*head, *tokens[at:]]
    tree, errors = parse_tree(source, tokens)
    file, more = build_file(source, tree)
    match file.declarations:
        case (ast.MeshDecl() as mesh,) if not errors and not more:
            return mesh, ()
    return None, (*errors, *more)[:1]


def parse_layout(source: Source) -> tuple[ast.LayoutDecl | None, tuple[Diagnostic, ...]]:
    """The tree of a layout that is written out, or what is wrong with it.

    It is what is printed of one: all of it, its rules in braces, or these alone; then `with` and
    the schedule, if it has one.
    """
    from meshdsl.grammar.parser import Token
    from meshdsl.syntax.build import build_file
    from meshdsl.syntax.recover import parse_tree
    from meshdsl.syntax.tokens import beyond_limits, lex, significant

    words = lex(source)
    beyond = beyond_limits(source, words)
    if beyond is not None:
        return None, (beyond,)
    first = next((word.type for word in significant(words)), "")
    if first != "LAYOUT":
        kinds = ("LAYOUT", "NAME", "LBRACE")
        head = [Token(k, "", start_pos=i, end_pos=i) for i, k in enumerate(kinds, -len(kinds))]
        if first == "LBRACE":
            head.pop()
        else:
            at = next((i for i, word in enumerate(words) if word.type == "WITH"), len(words))
            end = words[at].start_pos if at < len(words) else len(source.text)
            close = Token("RBRACE", "}", start_pos=end, end_pos=end)
            words = [*words[:at], close, *words[at:]]
        words = [*head, *words]
    tree, errors = parse_tree(source, significant(words))
    file, more = build_file(source, tree)
    match file.declarations:
        case (ast.LayoutDecl() as layout,) if not errors and not more:
            return layout, ()
    return None, (*errors, *more)[:1]  # what follows may be of words that nobody wrote
