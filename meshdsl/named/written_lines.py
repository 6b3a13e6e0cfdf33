"""Long lines of a text of the language, broken inside their brackets."""

from __future__ import annotations

from collections.abc import Iterator

WIDTH = 100
INDENT = "  "


def wrapped(text: str) -> Iterator[str]:
    """The lines of `text`; of one that is too long, the widest bracket is written over several.

    What stands between its commas gets a line of its own, broken further if it must be.
    """
    for line in text.split("\n"):
        yield from _broken(line) if len(line) > WIDTH else [line]


def _broken(line: str) -> Iterator[str]:
    indent = line[: len(line) - len(line.lstrip())]
    if line.startswith("dim "):
        yield from _filled(line)
        return
    found = _widest(line)
    if found is None:
        yield line
        return
    start, end = found
    yield line[: start + 1]
    parts = list(_parts(line[start + 1 : end]))
    for index, part in enumerate(parts):
        comma = "," if index < len(parts) - 1 else ""
        yield from wrapped(f"{indent}{INDENT}{part}{comma}")
    yield from wrapped(f"{indent}{line[end:]}")


def _filled(line: str) -> Iterator[str]:
    """A long `dim` declaration as several that fill their lines."""
    current = ""
    for entry in line.removeprefix("dim ").split(", "):
        longer = f"{current}, {entry}" if current else f"dim {entry}"
        if len(longer) > WIDTH and current:
            yield current
            longer = f"dim {entry}"
        current = longer
    yield current


def _widest(line: str) -> tuple[int, int] | None:
    """The places of the outermost parentheses that hold the most."""
    pairs: list[tuple[int, int]] = []
    opened: list[int] = []
    for at, char in enumerate(line):
        if char in "([":
            opened.append(at)
        elif char in ")]" and opened:
            start = opened.pop()
            if not opened and char == ")":
                pairs.append((start, at))
    return max(pairs, key=lambda p: p[1] - p[0], default=None)


def _parts(text: str) -> Iterator[str]:
    """What stands between the outermost commas."""
    depth, start = 0, 0
    for at, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()
