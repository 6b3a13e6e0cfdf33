"""Pictures and texts of tensors, for every placement on meshes of one to three axes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import pytest

from meshdsl.backends.runtime.values import Spec, local_part
from meshdsl.placed.placements import Mesh
from meshdsl.report.pictures import tensor_picture as picture
from meshdsl.report.pictures import tensor_text as text
from meshdsl.report.pictures import thumbnail
from meshdsl.report.shard_view import Holding
from tests.notebook.markup import drawing, hatched, texts

MESHES = {
    "line": Mesh("line", (("a", 4),)),
    "square": Mesh("square", (("a", 2), ("b", 2))),
    "wide": Mesh("wide", (("a", 2), ("b", 4))),
    "cube": Mesh("cube", (("a", 2), ("b", 2), ("c", 2))),
    "long": Mesh("long", (("a", 16), ("b", 3))),
}
DIMS = {"batch": 96, "heads": 48, "seq": 192, "key": 48}


def holding(dims: dict[str, int], order: Mapping[str, tuple[str, ...]], mesh: Mesh) -> Holding:
    """A tensor that is partial along the axes under the name `P`."""
    splits = {dim: axes for dim, axes in order.items() if dim != "P"}
    shape = tuple(dims.values())
    return Holding("t", "f32", tuple(dims), shape, splits, order.get("P", ()), "sum", mesh)


def placements(mesh: Mesh, dims: dict[str, int]) -> Iterator[Holding]:
    """Every axis splits one of the dims, is partial, or has replicas."""
    for chosen in itertools.product([*dims, "P", None], repeat=len(mesh.axes)):
        order: dict[str, tuple[str, ...]] = {}
        for axis, what in zip(mesh.names, chosen, strict=True):
            if what is not None:
                order[what] = (*order.get(what, ()), axis)
        yield holding(dims, order, mesh)


CASES = list(itertools.product(MESHES, range(5)))


def blocks(held: Holding) -> dict[str, set[int]]:
    """The devices of every block, as the emitted program cuts it."""
    sizes = dict(zip(held.dims, held.shape, strict=True))
    spec = Spec("f32", sizes, dict(held.order))
    found: dict[str, set[int]] = {}
    for rank in range(held.mesh.devices):
        part = local_part(spec, dict(held.mesh.axes), rank)
        found.setdefault(str(part), set()).add(rank)
    return found


@pytest.mark.parametrize(("mesh", "count"), CASES)
def test_blocks_are_those_that_the_program_cuts(mesh: str, count: int) -> None:
    dims = dict(itertools.islice(DIMS.items(), count))
    for held in placements(MESHES[mesh], dims):
        drawn = held.holders(held.dims).values()
        assert sorted(map(sorted, drawn)) == sorted(map(sorted, blocks(held).values())), held


@pytest.mark.parametrize(("mesh", "count"), CASES)
def test_every_placement_is_drawn(mesh: str, count: int) -> None:
    dims = dict(itertools.islice(DIMS.items(), count))
    for held in placements(MESHES[mesh], dims):
        root = drawing(picture(held))
        labels = {held.label(ranks) for ranks in held.holders(held.dims).values()}
        if all(len(label) < 12 for label in labels) and max(map(held.parts, dims), default=1) <= 8:
            assert labels <= set(texts(root)), held
        assert bool(hatched(root)) == bool(held.partial)
        assert any("copies" in t for t in texts(root)) == (held.copies > 1)
        assert bool(hatched(drawing(thumbnail(held)))) == bool(held.partial)


@pytest.mark.parametrize(("mesh", "count"), CASES)
def test_every_placement_is_told(mesh: str, count: int) -> None:
    dims = dict(itertools.islice(DIMS.items(), count))
    for held in placements(MESHES[mesh], dims):
        told = text(held)
        for ranks in held.holders(held.dims).values():
            if len(held.label(ranks)) <= 24 and max(map(held.parts, dims), default=1) <= 8:
                assert held.label(ranks) in told, told
        assert ("partial over" in told) == bool(held.partial)
        assert ("copies" in told) == (held.copies > 1)


def test_a_table_of_text() -> None:
    square = MESHES["square"]
    held = holding({"batch": 64, "io": 512}, {"batch": ("a",), "P": ("b",)}, square)
    assert text(held).splitlines() == [
        "             io 512",
        "batch 0–31   0 + 1",
        "batch 32–63  2 + 3",
        "partial over b: the value is the sum of the parts (+)",
    ]


def test_four_dims_are_panels_with_rows_and_columns() -> None:
    order = {"batch": ("a",), "heads": ("b",), "key": ("c",)}
    told = text(holding(DIMS, order, MESHES["cube"])).splitlines()
    assert told[:3] == [
        "batch 0–47, heads 0–23:",
        "         key 0–23  key 24–47",
        "seq 192  0         1",
    ]
    assert len([line for line in told if line.endswith(":")]) == 4


def test_of_five_dims_those_that_are_split_are_drawn() -> None:
    five = {"layers": 4, **DIMS}
    held = holding(five, {"layers": ("a",), "key": ("b",)}, MESHES["square"])
    assert "not drawn: batch (whole)" in text(held)
    assert {"0", "1", "2", "3"} <= set(texts(drawing(picture(held))))


def test_devices_keep_their_colour() -> None:
    """A block has the colour of its first device, in every tensor."""
    square = MESHES["square"]
    rows = holding({"batch": 64}, {"batch": ("a",)}, square)
    columns = holding({"io": 64}, {"io": ("b",)}, square)
    fills = [
        [box.get("fill") for box in drawing(picture(h)).iter() if box.get("rx") == "2"]
        for h in (rows, columns)
    ]
    first, second = ([f for f in found if f != fills[0][0]] for found in fills)
    assert fills[0][0] == fills[1][0]
    assert first[-1] != second[-1]


def test_parts_beyond_eight_are_left_out_with_dots() -> None:
    held = holding({"batch": 64}, {"batch": ("a",)}, MESHES["long"])
    assert "…" in texts(drawing(picture(held)))
    assert text(held).splitlines()[0].count("batch") == 8


@pytest.mark.parametrize(("op", "label"), [("sum", "0 + 1"), ("max", "0 max 1"), ("prod", "0 × 1")])
def test_parts_are_joined_by_their_operator(op: str, label: str) -> None:
    mesh = Mesh("pair", (("a", 2),))
    held = Holding("t", "f32", (), (), {}, ("a",), op, mesh)
    assert text(held).splitlines()[0] == label
