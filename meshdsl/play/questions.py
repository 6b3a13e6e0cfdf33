"""The questions of the page that either back end answers, and the refusal of what is none.

The back ends are the server on this machine (`http_server`) and the worker of a browser
(`browser_worker`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class HTTPRefused(Exception):
    """A question that is not answered: the status of HTTP, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status, self.why = status, why


_NAME = (str, type(None))
QUESTION: Mapping[str, Any] = {
    "text": str,
    "program": _NAME,
    "mesh": _NAME,
    "layout": _NAME,
    "sbp": _NAME,
    "cluster": _NAME,
    "reduce": str,
    "sizes": dict,
}
"""The entries of a question to `/compile` and `/search`, and their types."""
COLUMN: Mapping[str, Any] = {"kind": str, "name": str}
"""The entries of a column of `/compare`: a layout, by name or written out, or an `sbp` block."""
MOST_COLUMNS = 6
"""The most columns beside the present one."""


def check_form(found: Any, form: Mapping[str, Any]) -> None:
    """Refuse JSON that is not an object of exactly these entries."""
    if not isinstance(found, dict) or set(found) != set(form):
        raise HTTPRefused(400, f"the body has to be an object with {', '.join(form)}")
    for name, kind in form.items():
        if not isinstance(found[name], kind):
            raise HTTPRefused(400, f"`{name}` is of another type")
    for size in found.get("sizes", {}).values():
        if type(size) is not int or not 0 <= size <= 10**19:
            raise HTTPRefused(400, "a size is a whole number")
    try:
        json.dumps(found, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise HTTPRefused(400, "the text is not Unicode") from None
