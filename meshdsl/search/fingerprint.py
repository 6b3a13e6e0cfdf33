"""For which version of a program a layout was searched: eight hex digits behind the layout's head.

They stand in the comment that `search --write` leaves: `# meshdsl search mlp --mesh …: proven best
by bytes; program 3f9a2b1c`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping

from meshdsl.diagnostics import Diagnostic, Source, Span
from meshdsl.named.ir import NamedProgram
from meshdsl.named.printer import print_program

_STAMP = re.compile(
    r"^layout (?P<layout>\w+)[^\n#]*# meshdsl search (?P<program>\w+) "
    r"[^\n]*; program (?P<stamp>[0-9a-f]{8})$",
    re.MULTILINE,
)


def stamp(program: NamedProgram) -> str:
    """The same for programs of the same operators and sizes, wherever their lines stand."""
    lines = print_program(program).splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:8]


def outdated(source: Source, programs: Mapping[str, NamedProgram | None]) -> Iterator[Diagnostic]:
    """A note (MD0649) for each layout that was searched for another version of its program."""
    for match in _STAMP.finditer(source.text):
        program = programs.get(match["program"])
        if program is None or stamp(program) == match["stamp"]:
            continue
        message = (
            f"the layout `{match['layout']}` was searched for another version of "
            f"`{match['program']}`"
        )
        help = f"search again with `--write {match['layout']} --force`, or remove the comment"
        span = Span(source, match.start("layout"), match.end("layout"))
        yield Diagnostic("MD0649", message, span, severity="note", help=help)
