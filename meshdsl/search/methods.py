"""The methods of search by name."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.search.layouts import Layouts
from meshdsl.search.problem import Method

METHODS: Mapping[str, Method] = {
    "layouts": Layouts(),
    "exhaustive": Layouts(bounds=False),
}
"""What `--method` takes."""
