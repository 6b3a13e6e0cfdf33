"""Every diagnostic code that the project reports, with its meaning and the way out.

The records are data: `codes.toml`, beside this file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.resources import files

from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class DiagnosticCode:
    """One stable diagnostic code, for `meshdsl explain MD0301`.

    `meaning` describes in a few sentences when the compiler reports it, `wrong` is a small example
    of it (empty where a text cannot show it), `way_out` is the remedy.
    """

    code: str
    title: str
    meaning: str
    wrong: str
    way_out: str


def _record(code: str, table: Mapping[str, str]) -> DiagnosticCode:
    meaning, way_out = (" ".join(table[key].split()) for key in ("meaning", "way_out"))
    return DiagnosticCode(
        code, table["title"], meaning, table.get("wrong", "").strip("\n"), way_out
    )


_TABLES = tomllib.loads((files("meshdsl") / "codes.toml").read_text(encoding="utf-8"))

SECTIONS: Mapping[str, str] = _TABLES.pop("sections")
"""The title of every section, by the first four characters of its codes."""

CODES: Mapping[str, DiagnosticCode] = {
    code: _record(code, table) for code, table in _TABLES.items()
}
"""Every record by its code."""
