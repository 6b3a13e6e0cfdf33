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

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import front
from meshdsl.placed.layout import collect_declared
from tests.programs.harness import Case, refusal, run_case
from tests.project import ROOT, matching

ALL = "MESHDSL_CASES" in os.environ
POLICIES = ("optimal", "deferred", "immediate", "mesh-tf")

SMALL = {"vocab": 16, "seq": 4, "batch": 4, "io": 4, "hidden": 8, "model": 4, "heads": 4, "key": 2}
SMALL |= {"layer": 2, "layers": 2, "pixels": 8, "classes": 6, "source": 3, "target": 3, "gate": 4}
SMALL |= {"group": 4, "token": 4, "experts": 4, "slot": 2, "inner": 4, "table": 4, "dense": 3}
SMALL |= {"bottom": 4, "top": 4, "one": 1, "kh": 3, "kw": 3, "c": 2, "c2": 4, "n": 4, "a": 2}
SMALL |= {"rows": 4, "cols": 8, "colors": 1, "c1": 2, "c3": 4, "c4": 4, "c5": 2, "wide": 4}

Sizes = dict[str, int]
FIXED: tuple[Sizes, ...] = ()


def _images(fine: str, coarse: str) -> dict[str, tuple[Sizes, ...]]:
    """Sizes of images and of their halves, which follow."""
    return {fine: tuple({fine: n, coarse: -(-n // 2)} for n in (7, 5, 1)), coarse: FIXED}


def _patches(whole: str, patches: str, inside: str) -> dict[str, tuple[Sizes, ...]]:
    """Numbers of patches and sizes of a patch, which the size of images follows."""
    many = tuple({patches: n, whole: 2 * n} for n in (3, 5, 1))
    return {patches: many, inside: tuple({inside: n, whole: 4 * n} for n in (1, 3)), whole: FIXED}


_ALEXNET = "h w h1 w1 h2 w2 h3 w3 h6 w6 kh kw mh mw lh lw".split()
TURNS: dict[str, dict[str, tuple[Sizes, ...]]] = {
    "nmt": {"gate": FIXED},
    "dlrm": {"one": FIXED},
    "resnet": _images("h", "h2") | _images("w", "w2"),
    "vit": _patches("height", "rows", "down") | _patches("width", "columns", "right"),
    "unet": {d: ({d: 16}, {d: 48}) for d in "hw"} | {"uh": FIXED, "uw": FIXED},
    "alexnet": dict.fromkeys(_ALEXNET, FIXED) | {"tower": ({"tower": 3}, {"tower": 1})},
}
"""What a dim in its turn may be, where it is bound to others. Of five halves, the last is odd."""

_SIZED = re.compile(r"(\w+)\s*=\s*(\d+)\s*(?=,|$|#)")


def example_cases(name: str) -> Iterator[Case]:
    """An example under every layout and policy, each of its dims odd or 1 in turn."""
    text = (ROOT / "examples" / f"{name}.mdsl").read_text(encoding="utf-8")
    dims = [d for line in re.findall(r"^dim (.*)$", text, re.M) for d in re.findall(_SIZED, line)]
    bound = TURNS.get(name, {})
    sizes = {d: int(n) if d in bound else SMALL.get(d, int(n)) for d, n in dims}
    turns = [
        turn
        for d, n in sizes.items()
        for turn in bound.get(d, tuple({d: odd} for odd in (n - 1, 5, 1) if odd not in (0, n)))
    ]
    # Pipelines are in tests/pipelines: stages and micro-batches are refused where they differ.
    declared = front(Source(name, text), {}, Diagnostics())
    layouts = [
        layout
        for layout, node in declared.layouts.items()
        if collect_declared(node, declared, Diagnostics()).schedule is None
    ]
    mesh = "data:2,tp:2" if name == "transformer" else None
    for layout, policy, turn in itertools.product(layouts, POLICIES, turns):
        said = "-".join(f"{d}{n}" for d, n in turn.items())
        made = f"{name}-{layout}-{policy}-{said}"
        # Whole numbers make ties among gates, which rounding decides; drawn ones make none.
        drawn = {"made_up": name == "moe"}
        yield Case(text, mesh, layout, policy, sizes | turn, made, **drawn)  # type: ignore[arg-type]


EXAMPLES = [c for path in matching("examples/*.mdsl") for c in example_cases(path.stem)]
EVERY = 1 if ALL else 293
"""CI takes each case of such a number; it shares no factor with how many layouts there are."""


@pytest.mark.parametrize("case", EXAMPLES[::EVERY], ids=lambda case: case.name)
def test_an_example_with_a_dim_that_does_not_divide(case: Case) -> None:
    if refusal(case) != "MD0341":  # the blocks of a ring have one size
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


@pytest.mark.parametrize("number", range(int(os.environ.get("MESHDSL_CASES", "12"))))
def test_a_way_between_placements_of_uneven_blocks(number: int) -> None:
    run_case(way(number))
