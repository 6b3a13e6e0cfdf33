"""Parts of pages that are made of the program: `<!-- made: NAME ARGUMENTS -->` in a line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from docs._ext import api, codes, operators, pictures, schedules

_PLACE = re.compile(r"^<!-- made: (\S+) ?(.*?) -->$", re.MULTILINE)

MAKERS: Mapping[str, Callable[..., str]] = {
    "api": api.reference,
    "code": codes.page,
    "codes": codes.index,
    "operator": operators.page,
    "operators": operators.index,
    "mesh": pictures.mesh,
    "tensor": pictures.tensor,
    "collectives": pictures.collectives,
    "memory": pictures.memory,
    "schedule": schedules.picture,
    "schedules": schedules.reference,
}
"""By name, what makes the part, in Markdown, of the words behind the name."""


def filled(text: str) -> str:
    """The text of a page with its parts in place of the comments that ask for them."""
    return _PLACE.sub(lambda match: MAKERS[match[1]](*match[2].split()), text)
