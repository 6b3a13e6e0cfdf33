"""Content with each of its fields missing, of another type, out of range or hostile."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]

MISSING = object()
OTHERS: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "truth": True,
    "negative": -1,
    "huge": 10**30,
    "large": 1 << 62,
    "fraction": 0.5,
    "nan": float("nan"),
    "text": "7",
    "path": "../../../etc/passwd",
    "absolute": "/etc/passwd",
    "control": "\x1b[2J\x00",
    "list": [],
    "nested": [[[]]],
    "surrogate": "\ud800",
    "table": {},
    "object": {"__type__": "object", "@": 0},
}
"""What stands in place of a field."""


def places(content: Any, at: Path = ()) -> Iterator[Path]:
    """The places of all fields; of the items of a list, or a numbered table, the first alone."""
    if at:
        yield at
    if isinstance(content, dict):
        keys = list(content)
        numbered = all(key.isdigit() for key in keys)
        for key in keys[:1] if numbered else keys:
            yield from places(content[key], (*at, key))
    if isinstance(content, list):
        yield from places(content[0], (*at, 0)) if content else ()


def put(content: Any, at: Path, other: Any) -> Any:
    """The content with something else at a place."""
    found = copy.deepcopy(content)
    holder = found
    for step in at[:-1]:
        holder = holder[step]
    if other is MISSING:
        del holder[at[-1]]
    else:
        holder[at[-1]] = other
    return found


def poisoned(content: Any) -> Iterator[tuple[str, Any]]:
    """Every field × every other value, each with a name."""
    for at in places(content):
        for how, other in OTHERS.items():
            made = put(content, at, other)
            if json.dumps(made) != json.dumps(content):
                yield f"{'.'.join(map(str, at))}: {how}", made
