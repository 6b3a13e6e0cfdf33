"""The files of the prelude, and the names that they define, without reading what these mean."""

from __future__ import annotations

import functools
import re

from meshdsl.diagnostics import Source


@functools.cache
def files() -> tuple[Source, ...]:
    """The files of the prelude, named by their paths, in order."""
    from importlib import resources

    folder = resources.files("meshdsl.prelude")
    paths = sorted((f for f in folder.iterdir() if f.name.endswith(".mdsl")), key=lambda f: f.name)
    return tuple(Source(str(path), path.read_text(encoding="utf-8")) for path in paths)


@functools.cache
def function_names() -> frozenset[str]:
    """The names of all functions of the prelude."""
    each = (re.findall(r"^def (\w+)", part.text, re.MULTILINE) for part in files())
    return frozenset(name for found in each for name in found)
