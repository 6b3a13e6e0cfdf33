"""The emitted text of what the pipeline made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.backends.draws import draws
from meshdsl.backends.torch_text import ProgramText, emit


def emit_compiled(made: Mapping[str, Any]) -> ProgramText:
    """The text of `made["device"]`, with made-up values as `made["named"]` says."""
    return emit(made["device"], draws(made["named"]))
