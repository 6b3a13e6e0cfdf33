"""What the page's Python has done before its memory is kept (`snapshot.mjs`)."""

from __future__ import annotations

import gc
import importlib
import re
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from meshdsl.grammar.parser import Parser


LATER = (
    "meshdsl.placed.optimal",
    "meshdsl.placed.zero_one",
    "meshdsl.play.layout_search",
    "meshdsl.play.side_by_side",
)
"""What a first answer without a solver does not import."""


def prepared(program: str) -> Iterator[None]:
    """Import the package and answer for a program; what is left to do while the page is idle.

    Libraries of C are not in the memory that is kept. So msgspec is not imported: the parser is
    made of the grammar, not of tables in the cache. Nor is the solver: the plan is not the best.
    """
    sys.modules["msgspec"] = None  # type: ignore[assignment]
    import meshdsl.grammar

    kept, meshdsl.grammar.parser_of = meshdsl.grammar.parser_of, _parser_of
    meshdsl.grammar.load()
    meshdsl.grammar.parser_of = kept
    for name in LATER:
        importlib.import_module(name)
    from meshdsl.diagnostics import Diagnostics, Source
    from meshdsl.pipeline import Compilation, Options
    from meshdsl.play.answer import answer, runs_of, views
    from meshdsl.play.browser_worker import warming

    runs_of({"text": program})  # which reads the library functions
    text = program.partition("\nexpect")[0]  # what is expected needs a plan
    options = Options(reduce="deferred", cache=False)
    compilation = Compilation(Source("program.mdsl", text), options, Diagnostics())
    assert answer(compilation)["result"]
    assert views(compilation)["views"]
    del sys.modules["msgspec"]
    gc.collect()
    return warming(program)


def _parser_of(text: str) -> Parser:
    """The parser of a grammar, whose tables are plain objects."""
    from meshdsl.grammar.build import tables
    from meshdsl.grammar.parser import Parser

    found = tables(text)
    fields = ("name", "tree", "size", "taken", "is_transparent")
    rules = [SimpleNamespace(**dict(zip(fields, rule, strict=True))) for rule in found["rules"]]
    plain = cast("Any", SimpleNamespace(**found | {"rules": rules}))
    return Parser(plain, re.compile(plain.pattern))
