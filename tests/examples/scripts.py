"""The scripts of `examples/` as modules."""

from __future__ import annotations

import functools
import importlib.util
import sys
from types import ModuleType

from tests.project import ROOT


@functools.cache
def script(name: str) -> ModuleType:
    """`examples/NAME.py`, imported; `sys.path` stays as it was."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module, before = importlib.util.module_from_spec(spec), list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module
