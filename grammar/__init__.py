"""The grammar of `.mdsl`: its parser and its words.

Lark makes the tables of a parser (`build.py`), which takes longer than most commands. They are kept
in the cache; a process that finds them there does not import lark.
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
    """The parser of `mdsl.lark`, made once per process; its tables are kept for the next one."""
    text = pkgutil.get_data(__name__, "mdsl.lark")
    assert text is not None, "the package has its grammar"
    return parser_of(text.decode())


def parser_of(text: str) -> Parser:
    """The parser of a grammar: of the tables in the cache, if there are any that are sound."""
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


FORMAT = 3
"""The form in which tables are kept."""


@functools.cache
def spelling() -> dict[str, str]:
    """How each fixed word is written, by the name of its terminal: `{"ARROW": "->", …}`."""
    return {**CONTEXTUAL, **load().tables.spelling}


CONTEXTUAL = {"SCHEDULE": "schedule", "WEIGHTS": "weights", "USE": "use"}
"""Words that are names but where a declaration begins with them."""
