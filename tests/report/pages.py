"""Pages to look at in tests: a plain one, and one whose file does its worst."""

from __future__ import annotations

from typing import Any

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Options, compile_source
from meshdsl.report.columns import compile_columns, wishes
from meshdsl.report.compare import compare
from meshdsl.report.compare_html import page
from meshdsl.report.measure import NOT_RUN
from tests.report.golden import source

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


def compared(text: Source, layouts: str | None = None, run: Any = NOT_RUN) -> dict[str, Any]:
    """The comparison of a text, not run."""
    chosen = Options()
    named = compile_source(text, chosen, Diagnostics(), "named")
    asked = wishes(named["declarations"], layouts, None, None, "deferred")
    return {**compare(compile_columns(named, asked, chosen), text), "run": run}


def page_of(text: Source, layouts: str | None = None) -> str:
    """The page of a text."""
    return page(compared(text, layouts), text)


def example_page(name: str, layouts: str | None = None) -> str:
    """The page of an example."""
    return page_of(source(name), layouts)
