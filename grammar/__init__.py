"""The grammar of `.mdsl`: its parser and its keywords.

lark generates the tables of the parser (`build.py`), which takes longer than most commands. They
are cached; a process that finds them in the cache does not import lark.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pkgutil
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Parser


@functools.cache
def load() -> Parser:
    """The parser of `mdsl.lark`, once per process; its tables are cached."""
    text = pkgutil.get_data(__name__, "mdsl.lark")
    assert text is not None, "the package has its grammar"
    return parser_of(text.decode())


def parser_of(text: str) -> Parser:
    """The parser of a grammar: by its cached tables, if there are any and they pass the checks."""
    from meshdsl.disk_cache import checked, read, write
    from meshdsl.grammar.parser import Parser
    from meshdsl.grammar.tables import Tables

    key = hashlib.sha256(f"{FORMAT}\n{text}".encode()).hexdigest()
    kept = read("grammar", key, Tables)
    with contextlib.suppress(ValueError, re.error, OverflowError, RecursionError):
        if kept is not None:
            return Parser(kept, kept.compiled())
    from meshdsl.grammar.build import tables

    made = tables(text)
    write("grammar", key, made)
    sound = checked(made, Tables)
    return Parser(sound, sound.compiled())


FORMAT = 4
"""The version of the form in which tables are cached."""


@functools.cache
def spelling() -> dict[str, str]:
    """How each fixed word is written, by the name of its terminal: `{"ARROW": "->", …}`."""
    return {**CONTEXTUAL, **load().tables.spelling}


CONTEXTUAL = {"SCHEDULE": "schedule", "WEIGHTS": "weights", "USE": "use"}
"""Words that are names but where a declaration begins with them."""
