"""Short ways to compile and run a text, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Compilation, Options, compile_source


def compile_text(text: str, diagnostics: Diagnostics | None = None, **options: Any) -> Compilation:
    """The compilation of `text`; `options` are those of `pipeline.Options`."""
    bag = diagnostics if diagnostics is not None else Diagnostics()
    return compile_source(Source("test.mdsl", text), Options(**options), bag)


def named(text: str, **options: Any) -> NamedProgram:
    """The named program of `text`."""
    made = compile_source(Source("test.mdsl", text), Options(**options), Diagnostics(), "named")
    found = made.named
    assert isinstance(found, NamedProgram)
    return found


def run_text(text: str, inputs: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    """The outputs of `text` on the local engine."""
    from meshdsl.backends.engines.in_process import run_local

    emitted = compile_text(text, **options).emitted
    return run_local(emitted.text, inputs, lines=emitted.places).outputs
