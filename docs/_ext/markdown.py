"""Pieces of Markdown whose content is taken as it is."""

from __future__ import annotations

from collections.abc import Sequence


def fenced(kind: str, text: str) -> str:
    """A fenced block, in a fence that the text does not contain."""
    fence = "```"
    while fence in text:
        fence += "`"
    body = text.rstrip("\n")
    return f"{fence}{kind}\n{body}\n{fence}" if body else f"{fence}{kind}\n{fence}"


def code(text: str) -> str:
    """Text as code in a line, or in a cell of a table."""
    quoted = text.replace("|", "\\|")
    return f"`` {quoted} ``" if "`" in quoted else f"`{quoted}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; what is in its cells is Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
