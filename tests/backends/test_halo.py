"""`halo` and `window` on the in-process engine, against slices of the padded whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.values import coordinates
from meshdsl.device.ir import Move
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.types import BOOL, F32, I64, Dim, TensorType
from meshdsl.ops.opdef import Reads
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed import collectives as c
from meshdsl.placed.placements import WHOLE, Mesh, Placement, Window, placement
from meshdsl.prove.window_rows import padded
from tests.backends.conftest import emitted

MESHES = ({"p": 1}, {"p": 2}, {"p": 3}, {"p": 4}, {"p": 2, "q": 2}, {"q": 2, "p": 3})


def blocks(mesh: dict[str, int], placed: Placement, type_: TensorType) -> list[list[Any]]:
    """By device the [start, stop) that it has of each dim."""
    over = Mesh("m", tuple(mesh.items()))
    held = {d.name: placed.held(d.name, d.size, over) for d in type_.dims}
    devices = [coordinates(mesh, rank) for rank in range(over.devices)]
    return [[held[d][placed.number(d, over, at)] for d in type_.names] for at in devices]


def cut(x: np.ndarray, parts: list[Any], fills: list[object]) -> np.ndarray:
    """The block at `parts` of the whole, with fill around it."""
    for at, (part, fill) in enumerate(zip(parts, fills, strict=True)):
        x = padded(x, at, part, fill)
    return x


def numbers(of: Reads) -> tuple[int, int, int, int, bool]:
    """The numbers of a window as the functions of the runtime take them."""
    return of.mul, of.div, of.lo, of.hi, of.flip


def moves(
    over: Mesh, base: Placement, placed: Placement, windows: list[Window], last: Window | None
) -> tuple[list[c.Step], Placement]:
    """The steps to windows, one after the other, and the placement in the end."""
    steps, here = [], base
    for window in windows:
        steps.append(c.halo(over, here, placed.axes_of(window.dim), window))
        here = steps[-1].after
    if last is not None:
        step = c.cut(over, here, replace(here, windows=(last,)))
        assert step is not None
        steps.append(step)
        here = step.after
    return steps, here


def call(step: c.Step, placed: Placement, type_: TensorType, over: Mesh) -> str:
    """The text of a step."""
    w, groups = step.window, ", groups" * step.moves
    args = f"{placed.axes_of(w.dim)}, {(w.size, w.loop)}, {numbers(w.reads)}, {w.reads.fill!r}"
    args += f", rank, MESH{groups}"
    if (of := step.wider) is not None:
        args += f", {(numbers(of.reads), of.reads.fill is None)}"
    if step.moves:
        windows = c.padding_windows(step.before, over)
        about = ((type_.index(v.dim), placed.axes_of(v.dim), v) for v in windows)
        padded = ((*at, (v.size, v.loop), numbers(v.reads), v.reads.fill) for *at, v in about)
        args += f", {tuple(padded)}"
    return f"x = {step.kind}(x, {type_.index(w.dim)}, {args})"


def program(
    mesh: dict[str, int],
    type_: TensorType,
    own: list[list[Any]],
    shape: tuple[int, ...],
    steps: list[c.Step],
    placed: Placement,
) -> str:
    """A program that takes the steps on each device's `own` block, and shows it with its shape.

    Blocks are shown as large as the largest, which has the `shape`.
    """
    over = Mesh("m", tuple(mesh.items()))
    calls = [call(step, placed, type_, over) for step in steps]
    body = [f"own = {own}[rank]", "x = inputs['x'][tuple(slice(*o) for o in own)]", *calls]
    body.append(f"y = torch.zeros({list(shape)}, dtype=x.dtype)")
    body.append("y[tuple(slice(n) for n in x.shape)] = x")
    body.append("return {'y': y[None], 'shape': torch.tensor(x.shape)[None]}")
    split = f"{{'device': {tuple(mesh)}}}"
    devices, dtype = math.prod(mesh.values()), type_.dtype.name
    dims = {f"d{i}": n for i, n in enumerate(shape)}
    return emitted(
        "\n".join(body),
        mesh,
        groups=tuple({step.axes for step in steps}),
        inputs=f"{{'x': Spec({dtype!r}, { ({d.name: d.size for d in type_.dims}) }, {{}})}}",
        outputs=f"{{'y': Spec({dtype!r}, { ({'device': devices} | dims) }, {split}),"
        f" 'shape': Spec('i64', { ({'device': devices, 'n': len(shape)}) }, {split})}}",
        use=("halo", "window"),
    )


def check(
    mesh: dict[str, int],
    type_: TensorType,
    placed: Placement,
    windows: list[Window],
    whole: bool = False,
    last: Window | None = None,
) -> None:
    """The windows of blocks, or of the `whole`, one after the other, and the bytes sent.

    The `last` is cut from the one before.
    """
    over = Mesh("m", tuple(mesh.items()))
    x = np.random.default_rng(5).integers(0, 2 if type_.dtype == BOOL else 99, type_.shape)
    x = x.astype(type_.dtype.numpy)
    base = WHOLE if whole else placed
    steps, here = moves(over, base, placed, windows, last)
    own, shape = blocks(mesh, base, type_), here.local(type_, over).shape
    found = run_local(program(mesh, type_, own, shape, steps, placed), {"x": x})
    fills = {step.window.dim: step.window.reads.fill for step in steps}
    for rank, parts in enumerate(blocks(mesh, here, type_)):
        expected = cut(x, parts, [fills.get(d) for d in type_.names])
        assert tuple(found.outputs["shape"][rank]) == expected.shape
        got = found.outputs["y"][rank][tuple(slice(n) for n in expected.shape)]
        np.testing.assert_array_equal(got, expected)
    sent = [found.wire_bytes(rank) for rank in range(over.devices)]
    told = zip(*(step.by_device(type_, over) for step in steps), strict=True)
    assert sent == [*map(sum, told)] or (not steps and not any(sent))


def reads(fills: tuple[Any, ...] = (0.0, 1.0, None)) -> st.SearchStrategy[Reads]:
    """Anything that an operator may read."""
    small = st.integers(-4, 4)
    made = st.builds(
        lambda mul, div, lo, width, flip, fill: Reads(mul, div, lo, lo + width, flip, fill),
        st.integers(1, 3), st.integers(1, 3), small, st.integers(0, 4), st.booleans(),
        st.sampled_from(fills),
    )  # fmt: skip
    return made.filter(lambda r: r.mul == 1 or r.div == 1)


@given(
    st.sampled_from(MESHES), st.integers(1, 9), st.integers(1, 9), reads(), st.booleans(),
    st.sampled_from((F32, I64, BOOL)), st.integers(0, 1),
)  # fmt: skip
def test_a_window_is_a_slice_of_the_padded_whole(mesh, size, loop, read, whole, dtype, at):
    dims = [Dim("other", 2)]
    dims.insert(at, Dim("d", size))
    over = Mesh("m", tuple(mesh.items()))
    placed = placement(over, {"d": tuple(reversed(mesh))})
    if placed.splits:
        check(mesh, TensorType(tuple(dims), dtype), placed, [Window("d", size, read, loop)], whole)


@given(
    st.sampled_from(MESHES), st.integers(1, 9), st.integers(1, 9), reads(), reads(),
    st.sampled_from((F32, BOOL)),
)  # fmt: skip
def test_windows_of_the_same_steps_are_cut_from_their_hull(mesh, size, loop, one, two, dtype):
    """And from each other, where one covers the other."""
    over = Mesh("m", tuple(mesh.items()))
    placed, type_ = placement(over, {"d": tuple(mesh)}), TensorType((Dim("d", size),), dtype)
    if not placed.splits:
        return
    other = replace(one, lo=two.lo, hi=two.hi, fill=two.fill)
    pair = [Window("d", size, read, loop) for read in (one, other)]
    hull = pair[0].hull(pair[1])
    assert hull is not None
    for window in pair:
        check(mesh, type_, placed, [hull], last=window)
        for wider in (w for w in pair if w.covers(window)):
            check(mesh, type_, placed, [wider], last=window)


@given(
    st.integers(1, 7), st.integers(1, 7), reads((0.0, 3.0, None)), reads((0.0, 2.0)),
    st.integers(1, 5),
)  # fmt: skip
def test_two_dims_are_exchanged_one_after_the_other_with_their_corners(h, w, of_h, of_w, loop):
    mesh = {"p": 2, "q": 3}
    type_ = TensorType((Dim("h", h), Dim("b", 2), Dim("w", w)), F32)
    placed = placement(Mesh("m", tuple(mesh.items())), {"h": ("q",), "w": ("p",)})
    check(mesh, type_, placed, [Window("h", h, of_h, loop), Window("w", w, of_w, loop)])


@given(
    st.sampled_from(MESHES), st.integers(1, 9), st.integers(-9, 9), st.booleans(),
)  # fmt: skip
def test_what_wraps_comes_from_the_other_end(mesh, size, by, flip):
    placed = placement(Mesh("m", tuple(mesh.items())), {"d": tuple(mesh)})
    if placed.splits:
        lo = -(by % size)
        window = Window("d", size, Reads(lo=lo, hi=lo, flip=flip, fill="wrap"), size)
        check(mesh, TensorType((Dim("d", size), Dim("other", 2)), F32), placed, [window])


CONVOLUTION = """
dim n = 4, h = 64, w = 64, c = 64, out = 8, kh = 3, kw = 3
mesh m = { r: 2, q: 2 }
layout image { h -> r, w -> q }
program net(x[n, c, h, w]) {
  param k[out, c, kh, kw]
  return conv[h by kh, w by kw](x, k, pad=1 -> [n, out, h, w])
}
"""


def test_a_convolution_of_blocks_sends_neither_padding_nor_a_corner_twice() -> None:
    """Of blocks of 32 x 32 a device sends a row, a column, and one corner on to another."""
    made = compile_source(Source("case.mdsl", CONVOLUTION), Options(), Diagnostics())
    inputs, params = np.zeros((4, 64, 64, 64), "f4"), np.ones((8, 64, 3, 3), "f4")
    found = run_local(made.text, {"x": inputs}, {"k": params})
    sent = 4 * 64 * (32 + 32 + 1) * F32.bytes
    assert sent == 66_560
    assert [found.wire_bytes(rank) for rank in range(4)] == [sent] * 4
    steps = [n.step for n in made.device.body if isinstance(n, Move) and n.step.moves]
    assert sum(step.wire(made.device.inputs[0].type, made.device.mesh) for step in steps) == sent
