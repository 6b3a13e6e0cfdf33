"""Small problems of search: every example on meshes of few devices."""

from __future__ import annotations

import functools
from typing import Any

from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.diagnostics import Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.search.candidate import Rules
from meshdsl.search.methods import METHODS
from meshdsl.search.problem import Problem, SearchResult
from meshdsl.search.request import SearchRequest
from meshdsl.syntax.parse import read_source
from tests.project import ROOT

LINE = Mesh("line", (("x", 2),))
SQUARE = Mesh("square", (("x", 2), ("y", 2)))
UNEQUAL = Mesh("unequal", (("x", 2), ("y", 4)))

NET = """
dim batch = 16, io = 8, hidden = 32
program net(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param b[hidden] = zeros()
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]) + b)
  y = einsum(h, v -> [batch, io])
  loss = mean((y - target)^2)
  return loss
  minimize loss with adam(lr=0.1)
}
"""
"""A training step that is searched in no time."""

LOOKUP = """
dim batch = 8, vocab = 64, model = 16, hidden = 64, layers = 4
program lookup(words[batch]: i32) {
  param embed[vocab, model]
  x = embed[vocab = words]
  repeat layers {
    param w[model, hidden]
    param v[hidden, model]
    x = x + einsum(gelu(einsum(x, w -> [batch, hidden])), v -> [batch, model])
  }
  logits = einsum(x, embed -> [batch, vocab])
  loss = mean(cross_entropy[vocab](logits, words))
  return loss
  minimize loss with adamw(lr=0.1, clip=1.0)
}
"""
"""A table, a loop, a composite along a dim that may be split, and a norm of all gradients."""

TEXTS = {"net": NET, "lookup": LOOKUP}
EXAMPLES = ("dlrm", "matmul", "moe", "nmt", "lm")

CASES = [
    *((name, mesh) for name in ("net", "mlp") for mesh in (LINE, SQUARE, UNEQUAL)),
    *((name, LINE) for name in ("lookup", *EXAMPLES)),
]
"""Programs and meshes of at most 8 devices that are searched whole."""


@functools.cache
def named(name: str) -> NamedProgram:
    """A named program: a text from here, or an example."""
    if name in TEXTS:
        source = Source(f"{name}.mdsl", TEXTS[name])
    else:
        source = read_source(ROOT / "examples" / f"{name}.mdsl")
    return Compilation(source, Options(program="lm" if name == "lm" else None)).named


def problem(
    name: str,
    mesh: Mesh,
    objective: str = "bytes",
    cluster: str = "",
    fixed: Rules = (),
    **limits: Any,
) -> Problem:
    """The problem of a program; `limits` are fields of `SearchRequest`."""
    timing = Timing(load(cluster), mesh) if cluster else None
    return Problem(named(name), mesh, objective, SearchRequest(**limits), timing, fixed)


@functools.cache
def solved(
    name: str,
    mesh: Mesh,
    method: str = "layouts",
    objective: str = "bytes",
    cluster: str = "",
    storage: bool = False,
    memory: int | None = None,
) -> SearchResult:
    """The result of a method for an example."""
    made = problem(name, mesh, objective, cluster, storage=storage, memory=memory)
    return METHODS[method].solve(made)
