"""The order of einsums of many operands counts what the layout makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.named.ir import walk
from meshdsl.placed.contraction import MOST_EXACT, order
from meshdsl.placed.ir import Apply
from meshdsl.placed.ir import walk as walk_placed
from tests.compiling import compile_text, named, run_text
from tests.work import calls

ROOT = Path(__file__).parents[2]

CHAIN = """
dim m = {m}, a = {a}, b = {b}, k = {k}
mesh pair = {{ x: 4 }}
layout whole {{ }}
layout split {{ a -> x }}
program p(u[m, a], v[a, b], w[b, k]) {{
  y = einsum(u, v, w -> [m, k])
  return y
}}
"""


def intermediate(layout: str, **sizes: int) -> tuple[str, ...]:
    """The dims of what is contracted first."""
    placed = compile_text(CHAIN.format(**sizes), layout=layout).placed
    applies = [n for n, _ in walk_placed(placed.body) if isinstance(n, Apply)]
    assert [n.name for n in applies] == ["einsum", "einsum"]
    return applies[0].out.type.names


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"m": 2, "a": 64, "b": 64, "k": 64}, ("m", "b")),
        ({"m": 64, "a": 64, "b": 64, "k": 2}, ("a", "k")),
    ],
)
def test_fewest_flops_without_a_layout(sizes, expected):
    assert intermediate("whole", **sizes) == expected


def test_bytes_moved_can_change_the_order():
    sizes = {"m": 4, "a": 16, "b": 64, "k": 8}
    assert intermediate("whole", **sizes) == ("m", "b")
    # Summing the split dim `a` first would all_reduce [m, b]; last, only [m, k].
    assert intermediate("split", **sizes) == ("a", "k")


@pytest.mark.parametrize("layout", ["whole", "split"])
def test_outer_products_and_dims_of_one_operand(layout):
    text = CHAIN.replace("u, v, w -> [m, k]", "u, v, w, v -> [k]").format(m=4, a=8, b=4, k=4)
    rng = np.random.default_rng(0)
    shapes = {"u": (4, 8), "v": (8, 4), "w": (4, 4)}
    arrays = {n: rng.integers(-2, 3, s).astype(np.float32) for n, s in shapes.items()}
    expected = np.einsum("ma,ab,bk,ab->k", arrays["u"], arrays["v"], arrays["w"], arrays["v"])
    np.testing.assert_array_equal(run_text(text, arrays, layout=layout)["y"], expected)


def test_the_product_is_never_made():
    made = compile_text(CHAIN.replace("einsum(u, v, w -> [m, k])", "sum[a, b](u * v * w)").format(
        m=4, a=8, b=4, k=4
    ))  # fmt: skip
    assert {op.name for op in walk(made.named.body)} == {"einsum"}


# --- many operands ---------------------------------------------------------------------------


def many(count: int, rank: int, dims: int, result: int) -> str:
    """An einsum of `count` tensors, each with `rank` of `dims` dims; the last two are 3 and 1."""
    sizes = [*[2] * (dims - 2), 3, 1]
    named = [f"d{i}" for i in range(dims)]
    tensors = [[named[(i * (j + 2) + j) % dims] for j in range(rank)] for i in range(count)]
    tensors = [list(dict.fromkeys(t)) for t in tensors]
    inputs = ", ".join(f"x{i}[{', '.join(t)}]" for i, t in enumerate(tensors))
    kept = list(dict.fromkeys(d for t in tensors for d in t))[:result]
    given = ", ".join(f"x{i}" for i in range(count))
    return (
        "dim " + ", ".join(f"{d} = {n}" for d, n in zip(named, sizes, strict=True)) + "\n"
        f"layout whole {{ }}\nlayout split {{ d0 -> x }}\nmesh pair = {{ x: 2 }}\n"
        f"program p({inputs}) {{\n  y = einsum({given} -> [{', '.join(kept)}])\n  return y\n}}\n"
    )


MANY = {
    "16 operands that share dims": many(16, 3, 9, 3),
    "40 operands that share dims": many(40, 3, 12, 2),
    "16 operands that share nothing": many(16, 1, 16, 4),
    "40 vectors": many(40, 1, 40, 0),
    "40 operands of the same dims": many(40, 2, 3, 1),
}


@pytest.mark.parametrize("layout", ["whole", "split"])
@pytest.mark.parametrize("name", MANY)
def test_many_operands(name: str, layout: str) -> None:
    made = compile_text(MANY[name], layout=layout, reduce="immediate")
    inputs = made.named.inputs
    rng = np.random.default_rng(0)
    arrays = {v.label: rng.integers(1, 3, v.type.shape).astype(np.float64) for v in inputs}
    number = {d: i for i, d in enumerate(made.declarations.dims)}
    (output,) = made.named.outputs
    terms: list[Any] = [
        x for v in inputs for x in (arrays[v.label], [number[d] for d in v.type.names])
    ]
    wanted = np.einsum(*terms, [number[d] for d in output.value.type.names], optimize="greedy")
    found = run_text(MANY[name], arrays, layout=layout, reduce="immediate", dtype="f64")["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("name", MANY)
def test_the_work_of_finding_an_order_is_bounded(name: str) -> None:
    (op,) = walk(named(MANY[name]).body)
    order(op, {"d0": 2})  # what is loaded once
    assert calls(lambda: order(op, {"d0": 2})) < 40_000


def test_the_largest_search_that_is_exact() -> None:
    (op,) = walk(named(many(MOST_EXACT, 1, MOST_EXACT, 4)).body)
    assert calls(lambda: order(op, {})) < 400_000


def test_an_order_is_the_same_in_every_process() -> None:
    code = (
        "from tests.placed.test_contraction import *\n"
        "for text in MANY.values():\n"
        "    (op,) = walk(named(text).body)\n"
        "    print(list(order(op, {'d0': 2})))\n"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(found) == 1
