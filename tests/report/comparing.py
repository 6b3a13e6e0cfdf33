"""Comparisons for tests, and the lines they are printed as."""

from __future__ import annotations

import functools
from typing import Any

from meshdsl.columns import Column, compile_columns, wishes
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.report.comparison import NOT_RUN, compare, comparison
from meshdsl.report.page import page
from meshdsl.report.terminal import lines
from tests.report.golden import SIZES, layouts, source

POLICIES = ("immediate", "deferred")
NOW = "deferred"
"""The policy in place of the default one here, whatever that is."""


def columns_of(text: Source, chosen: Options, *given: str | None) -> list[Column]:
    named = compile_source(text, chosen, Diagnostics(), "named")
    layouts_, sbps, policies = (*given, None, None, None)[:3]
    asked = wishes(named.declarations, layouts_, sbps, policies, NOW)
    return compile_columns(named, asked)


def of_example(name: str, *given: str | None, **options: Any) -> list[Column]:
    chosen = Options(set_dims=SIZES.get(name, {}), **options)
    return columns_of(source(name), chosen, *given)


def compared(columns: list[Column], text: Source, run: Any = NOT_RUN) -> Any:
    return {**compare(columns, text), "run": run}


@functools.cache
def every_layout(example: str) -> Any:
    """Every layout of an example under two policies."""
    given = (",".join(layouts(example)), None, ",".join(POLICIES))
    return compared(of_example(example, *given), source(example))


def lines_of(facts: Any, text: Source, width: int = 100) -> list[str]:
    return ["".join(t for t, _ in line) for line in lines(comparison(facts, text), width)]


def text_of(facts: Any, text: Source, width: int = 200) -> str:
    return "\n".join(lines_of(facts, text, width))


# --- pages -----------------------------------------------------------------------------------

ATTACK = '</script><img src=x onerror="window.pwned=1"><script>window.pwned=2</script>'
EVIL = Source(
    f"{ATTACK}<!--&.mdsl",
    f"""dim b = 4, d = 8 # {ATTACK}
mesh m = {{ x: 2 }} # {{{{data}}}} <!-- {ATTACK}
layout l {{ b -> x }}
program p(x[b, d]) {{ # {ATTACK} \u202e\x07
  y = sum[b](x) # ]]> {ATTACK}
  return y
}}
""",
)
"""A file whose name and comments do their worst."""


def page_of(text: Source, layouts: str | None = None) -> str:
    """The page of a text, nothing executed."""
    return page(compared(columns_of(text, Options(), layouts), text), text)


def example_page(name: str, layouts: str | None = None) -> str:
    """The page of an example."""
    return page_of(source(name), layouts)
