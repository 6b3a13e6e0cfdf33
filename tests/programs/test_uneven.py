"""Dims that do not divide: every example and every way between placements, as on one device.

Bytes predicted are bytes counted. CI takes a few of the cases, by number; `MESHDSL_CASES` all.
"""

from __future__ import annotations

import itertools
import os
import random
import re
from collections.abc import Iterator

import pytest

from tests.programs.harness import Case, run_case
from tests.project import ROOT

ALL = "MESHDSL_CASES" in os.environ
SMALL = {"vocab": 16, "seq": 4, "batch": 4, "io": 4, "hidden": 8, "model": 4, "heads": 4, "key": 2}
SMALL |= {"layer": 2, "layers": 2, "pixels": 8, "classes": 6}
POLICIES = ("optimal", "deferred", "immediate", "mesh-tf")


def example_cases(name: str) -> Iterator[Case]:
    """An example under every layout and policy, each of its dims odd or 1 in turn."""
    text = (ROOT / "examples" / f"{name}.mdsl").read_text(encoding="utf-8")
    dims = [d for line in re.findall(r"^dim (.*)$", text, re.M) for d in re.findall(_SIZED, line)]
    layouts = re.findall(r"^layout (\w+)", text, re.M)
    sizes = {d: SMALL[d] for d in dims}
    for layout, policy, dim in itertools.product(layouts, POLICIES, dims):
        for size in (sizes[dim] - 1, 5, 1):
            mesh = "data:2,tp:2" if "tp:" in text else None
            yield Case(text, mesh, layout, policy, sizes | {dim: size}, name)  # type: ignore[arg-type]


_SIZED = re.compile(r"(\w+)\s*=\s*\d+\s*(?=,|$|#)")

EXAMPLES = [c for name in ("mlp", "transformer", "digits") for c in example_cases(name)]
EVERY = 1 if ALL else 97
"""CI takes each case of such a number; it shares no factor with how many layouts there are."""


@pytest.mark.parametrize(
    "case", EXAMPLES[::EVERY], ids=lambda c: f"{c.name}-{c.layout}-{c.reduce}-{c.dims}"
)
def test_an_example_with_a_dim_that_does_not_divide(case: Case) -> None:
    run_case(case)


# --- every way between placements ---------------------------------------------------------------

MESHES = ({"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 4, "b": 2})
PROGRAM = """dim i = {i}, j = {j}, k = {k}
program p(x[i, j], w[j, k], ids[i]: i32) {{
  u = x * 2.0
  h = einsum(u, w -> [i, k])
  y = relu(h)
  z = y + 1.0
  m = max[k](z)
  e = w[j = ids]
  s = sum[i](e * y)
  return z, m, s, e
}}
layout l {{ {rules} }}
"""


def way(number: int) -> Case:
    """A program whose tensors are placed one by one, at random."""
    rng = random.Random(number)
    mesh = rng.choice(MESHES)
    sizes = {d: rng.choice((1, 2, 3, 4, 5, 7, 8)) for d in "ijk"}
    rules = []
    for tensor, dims in {"x": "ij", "u": "ij", "w": "jk", "h": "ik", "y": "ik", "z": "ik"}.items():
        free = list(mesh)
        rng.shuffle(free)
        for dim in rng.sample(dims, 2):
            taken = [free.pop() for _ in range(rng.randint(0, len(free)))]
            target = f"({', '.join(taken)})" if len(taken) > 1 else "".join(taken) or "none"
            rules.append(f"{tensor}: {dim} -> {target}")
    text = PROGRAM.format(rules=", ".join(rules), **sizes)
    axes = ",".join(f"{a}:{n}" for a, n in mesh.items())
    return Case(text, axes, "l", rng.choice(POLICIES))


@pytest.mark.parametrize("number", range(int(os.environ.get("MESHDSL_CASES", "40"))))
def test_a_way_between_placements_of_uneven_blocks(number: int) -> None:
    run_case(way(number))
