"""Blocks of dims that do not divide: nested, each as `numpy` and `torch.chunk` would cut it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.placed.placements import Mesh, placement
from meshdsl.placed.reshard import route
from tests.work import calls


def cut(indices: list[int], ways: int) -> list[list[int]]:
    """The indices in so many runs of one length, rounded up; the last ones short or empty."""
    length = -(-len(indices) // ways)
    return [indices[i * length : (i + 1) * length] for i in range(ways)]


def test_blocks_over_two_axes_refine_the_blocks_of_the_outer() -> None:
    for size, p, q in itertools.product(range(1, 65), (2, 3, 4), (2, 3, 4)):
        mesh = Mesh("m", (("x", p), ("y", q)))
        split = placement(mesh, {"d": ("x", "y")})
        wanted = [inner for outer in cut(list(range(size)), p) for inner in cut(outer, q)]
        found = [list(range(start, stop)) for start, stop in split.blocks("d", size, mesh)]
        assert found == wanted, (size, p, q)
        largest = split.local(TensorType((Dim("d", size),), F32), mesh).size("d")
        assert largest == max(map(len, found)) == len(found[0])
        assert split.is_uneven("d", size, mesh) == (len({*map(len, found)}) > 1)
        spec = Spec("f32", {"d": size}, {"d": ("x", "y")})
        parts = [local_part(spec, dict(mesh.axes), rank)[0] for rank in range(p * q)]
        assert [list(np.arange(size)[part]) for part in parts] == wanted


def test_a_dim_may_be_split_by_the_later_axis_first() -> None:
    mesh = Mesh("m", (("x", 2), ("y", 3)))
    split = placement(mesh, {"d": ("y", "x")})
    assert split.blocks("d", 7, mesh) == ((0, 2), (2, 3), (3, 5), (5, 6), (6, 7), (7, 7))
    assert placement(mesh, {}).blocks("d", 7, mesh) == ((0, 7),)


Splits = dict[str, tuple[str, ...]]
ROUTES: dict[str, tuple[Splits, tuple[str, ...], Splits]] = {
    "all_gather": ({"d": ("x", "y")}, (), {}),
    "reduce_scatter": ({}, ("x",), {"d": ("x",)}),
    "all_to_all": ({"d": ("x",)}, (), {"e": ("x",)}),
    "permute": ({"d": ("x", "y")}, (), {"d": ("y", "x")}),
}


@pytest.mark.parametrize("kind", ROUTES)
def test_the_work_for_uneven_blocks_grows_with_the_devices(kind: str) -> None:
    before, partial, after = ROUTES[kind]
    type_ = TensorType((Dim("d", 1_009), Dim("e", 1_013)), F32)

    def work(devices: int) -> int:
        mesh = Mesh("m", (("x", devices), ("y", 2)))
        ends = placement(mesh, before, partial, "sum" if partial else None), placement(mesh, after)
        return calls(lambda: route(type_, *ends, mesh))

    assert work(400) < 3 * work(200)
