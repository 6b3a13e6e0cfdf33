"""The emitted program by itself. That it runs where there is no meshdsl: `test_readme.py`."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Options, compile_source
from meshdsl.syntax.parse import read_source

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def megatron():
    """The Megatron MLP for four devices, compiled."""
    source = read_source(EXAMPLES / "mlp.mdsl")
    options = Options(layout="megatron", set_dims={"batch": 8, "io": 32})
    return compile_source(source, options, Diagnostics())


def test_it_imports_only_the_standard_library_numpy_and_torch(megatron):
    tree = ast.parse(megatron.text)
    imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    roots = {name.split(".")[0] for name in imported} - {"numpy", "torch"}
    assert roots <= set(sys.stdlib_module_names)
