"""Work as a number that no machine changes: how many calls a function makes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def calls(run: Callable[[], Any]) -> int:
    """How many functions, those written in C included, are called while `run` runs."""
    count = 0

    def tell(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(tell)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count
