"""The line of a magic: its words, read as the command line reads them."""

from __future__ import annotations

import argparse
import shlex
from typing import Any, NoReturn

from meshdsl.diagnostics import Source, Span, did_you_mean, fail
from meshdsl.pipeline import DEFAULT_POLICY
from meshdsl.placed.reshard import MESSAGE_BYTES

VERBS = {
    "explain": "what each line holds and sends, and why",
    "compare": "the program under several layouts, side by side",
    "run": "run it and compare with the reference",
    "code": "the torch program that every device runs",
    "collectives": "what is sent, drawn on the mesh",
    "memory": "what a device holds, as bars",
    "tensor": "who holds what of a tensor",
    "mesh": "a mesh with its devices",
    "show": "what the cells have defined",
    "reset": "forget all of it",
}
"""What `%mdsl` can be followed by, and what it does."""


class _Words(argparse.ArgumentParser):
    """A parser that raises a diagnostic, and leaves neither the cell nor the kernel."""

    line = ""

    @property
    def place(self) -> Span:
        """All of the line."""
        return Span(Source("the line of the magic", self.line), 0, len(self.line))

    def error(self, message: str) -> NoReturn:
        help = f"{self.prog} takes {', '.join(sorted(self._option_string_actions))}"
        fail("MD0604", message, self.place, help=help)


def read_line(line: str) -> argparse.Namespace:
    """`explain mlp --layout hybrid` as `verb`, `name` and options. Raises MD0604."""
    parser = _parser("%mdsl")
    parser.add_argument("verb", metavar="VERB")
    parser.add_argument("name", nargs="?", help="program, mesh or tensor")
    parser.add_argument("--program")
    _add_columns(parser)
    _add_running(parser)
    found = _read(parser, line)
    if found.verb not in VERBS:
        help = did_you_mean(found.verb, list(VERBS)) or f"there are {', '.join(VERBS)}"
        fail("MD0604", f"`%mdsl {found.verb}` is none of its commands", parser.place, help=help)
    return found


def read_cell(line: str) -> argparse.Namespace:
    """What stands behind `%%mdsl`. Raises MD0604."""
    parser = _parser("%%mdsl")
    parser.add_argument("--as", dest="name", metavar="NAME")
    parser.add_argument("--quiet", "-q", action="store_true")
    return _read(parser, line)


def _parser(prog: str) -> _Words:
    parser = _Words(prog=prog, add_help=False, allow_abbrev=False)
    for option in ("mesh", "layout", "sbp", "dtype"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--reduce")
    parser.add_argument("--message-bytes", type=int, default=MESSAGE_BYTES, metavar="N")
    parser.add_argument("--set", nargs="+", dest="settings", metavar="DIM=N")
    parser.add_argument("--strict", action="store_true")
    return parser


def _add_columns(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layouts")
    parser.add_argument("--run", action="store_true")


def _add_running(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", default="local")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verify", action="store_true")


def _read(parser: _Words, line: str) -> argparse.Namespace:
    parser.line = f"{parser.prog} {line}".rstrip()
    try:
        words = shlex.split(line)
    except ValueError as error:
        parser.error(str(error))
    return parser.parse_args(words)


def chosen(given: argparse.Namespace, several: bool = False) -> Any:
    """The options of the pipeline; with `several`, layouts and policies are left to columns."""
    from meshdsl.cli.common import options

    layout, sbp, reduce = given.layout, given.sbp, given.reduce or DEFAULT_POLICY
    if several:
        layout = sbp = None
        reduce = DEFAULT_POLICY
    mesh, dtype = given.mesh, given.dtype
    about = (given.settings, dtype, given.strict, given.message_bytes)
    return options(None, mesh, layout, sbp, reduce, *about)
