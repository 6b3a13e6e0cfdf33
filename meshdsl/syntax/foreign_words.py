"""The table of what other languages and libraries write (`foreign.toml`), read once."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any


@functools.cache
def table() -> Mapping[str, Any]:
    """The whole table."""
    import tomllib
    from importlib.resources import files

    content: Mapping[str, Any] = tomllib.loads(
        (files("meshdsl") / "foreign.toml").read_text(encoding="utf-8")
    )
    return content


def characters() -> Mapping[str, str]:
    """The way out for each character that the language does not have."""
    found: Mapping[str, str] = table()["characters"]
    return found


def ways_out() -> Mapping[str, str]:
    """The way out for each word that no one expression means here."""
    return {w: row["help"] for row in table()["row"] if "help" in row for w in row["words"]}


def statements() -> Mapping[str, str]:
    """The way out for each word that begins a statement elsewhere, and none here."""
    found: Mapping[str, str] = table()["statements"]
    return found
