"""The order of einsums of many operands counts what the layout makes of it."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.named.ir import walk
from meshdsl.placed.ir import Apply
from meshdsl.placed.ir import walk as walk_placed
from tests.compiling import compile_text, run_text

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
    placed = compile_text(CHAIN.format(**sizes), layout=layout)["placed"]
    applies = [n for n, _ in walk_placed(placed.body) if isinstance(n, Apply)]
    assert [n.op.name for n in applies] == ["einsum", "einsum"]
    return applies[0].op.out.type.names


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
    assert {op.name for op in walk(made["named"].body)} == {"einsum"}
