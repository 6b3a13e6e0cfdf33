"""Convolution and its kin against what they are, written apart; and on blocks of their dims."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import F32, Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, lookup
from tests.compiling import compile_text, named
from tests.programs.harness import Case, run_case

CASES = int(os.environ.get("MESHDSL_CASES", "100")) // 20
"""Random convolutions on two axes: 5, or with `MESHDSL_CASES=6000` 300 of them."""

Array = Any


def _call(name: str, ins: tuple[TensorType, ...], arrays: list[Array], **attrs: object) -> Array:
    opdef = lookup(name)
    found = opdef.numpy(NumpyCall(ins, opdef.infer(ins, attrs), attrs), *arrays)
    assert isinstance(found, np.ndarray)
    return found


def _windows(x: Array, sizes: list[int], stride: int, dilation: int, before: list[int]) -> Array:
    """All windows of the last dims of `x`, by stride tricks: [..., positions, taps]."""
    dims = len(sizes)
    reach = [(k - 1) * dilation + 1 for k in sizes]
    lead = [(0, 0)] * (x.ndim - dims)
    wide = np.pad(x, [*lead, *((b, r + stride) for b, r in zip(before, reach, strict=True))])
    axes = tuple(range(x.ndim - dims, x.ndim))
    every = np.lib.stride_tricks.sliding_window_view(wide, reach, axis=axes)
    index: Any = (*[slice(None, None, stride)] * dims, *[slice(None, None, dilation)] * dims)
    return every[(..., *index)]


@pytest.mark.parametrize(
    ("dims", "stride", "dilation", "pad"),
    [*list(itertools.product((1, 2), (1, 2, 3), (1, 2), ("same", "valid", 1))), (3, 2, 1, "same")],
)
def test_a_convolution_is_the_einsum_of_all_windows(
    dims: int, stride: int, dilation: int, pad: str | int
) -> None:
    rng = np.random.default_rng(dims * 100 + stride * 10 + dilation)
    sizes, windows = [7, 6, 5][:dims], [3, 2, 2][:dims]
    before, outs = [], []
    for n, taps_ in zip(sizes, windows, strict=True):
        reach = (taps_ - 1) * dilation
        same = -(-n // stride)
        total = max((same - 1) * stride + reach + 1 - n, 0)
        p = pad if isinstance(pad, int) else {"same": total // 2, "valid": 0}[pad]
        before.append(p)
        outs.append(same if pad == "same" else (n + 2 * p - reach - 1) // stride + 1)
    b, g, c, o = Dim("b", 2), Dim("g", 2), Dim("c", 3), Dim("o", 2)
    fine = tuple(Dim(f"h{i}", n) for i, n in enumerate(sizes))
    taps = tuple(Dim(f"k{i}", n) for i, n in enumerate(windows))
    coarse = tuple(Dim(f"o{i}", n) for i, n in enumerate(outs))
    image, kernel = TensorType((b, g, c, *fine), F32), TensorType((g, o, c, *taps), F32)
    x, k = (rng.integers(-9, 10, t.shape).astype(float) for t in (image, kernel))
    options = {"stride": stride, "pad": pad, "dilation": dilation, "window": taps}
    out = (b, g, o, *coarse)
    found = _call("conv", (image, kernel), [x, k], source=fine, target=coarse, dims=out, **options)
    every = _windows(x, windows, stride, dilation, before)
    every = every[(..., *(slice(n) for n in outs), *[slice(None)] * dims)]
    letters = "xyz"[:dims], "uvw"[:dims]
    spec = f"bgc{letters[0]}{letters[1]},goc{letters[1]}->bgo{letters[0]}"
    np.testing.assert_array_equal(found, np.einsum(spec, every, k))
    # The transpose is its adjoint, and the gradient by the kernel is that of the products.
    y = rng.integers(-9, 10, found.shape).astype(float)
    cotangent = TensorType(out, F32)
    turned = {"source": coarse, "target": fine, **options}
    up = _call("upconv", (cotangent, kernel), [y, k], dims=image.dims, **turned)
    assert (found * y).sum() == (x * up).sum()
    along = {"source": fine, "target": coarse, **options}
    by_kernel = _call("conv_kernel", (image, cotangent), [x, y], dims=kernel.dims, **along)
    assert (found * y).sum() == (k * by_kernel).sum()


PROGRAM = """
dim b = {b}, c = {c}, o = {o}, h = {h}, w = {w}, kh = {kh}, kw = {kw}, ho = {ho}, wo = {wo}
program p(x[b, c, h, w], k[o, c, kh, kw], z[b, o, ho, wo]) {{
  y = conv[h by kh -> ho, w by kw -> wo](x, k, stride={stride}, pad={pad}, dilation={dilation})
  dx, dk = grad(sum(y * z), x, k)
  return y, dx, dk
}}
"""


def _program(**sizes: object) -> str:
    return PROGRAM.format(**sizes)


@pytest.mark.parametrize(("mesh", "layout"), [
    ("d:2", "{ b -> d }"),
    ("d:2", "{ c -> d }"),
    ("d:2", "{ o -> d }"),
    ("d:2", "{ h -> d, ho -> d }"),
    ("d:2", "{ w -> d, wo -> d }"),
    ("d:2", "{ h -> d }"),
    ("d:4", "{ h -> d, ho -> d }"),
    ("d:2,e:2", "{ h -> d, ho -> d, w -> e, wo -> e }"),
])  # fmt: skip
@pytest.mark.parametrize("stride", [1, 2])
def test_every_split_is_right(mesh: str, layout: str, stride: int) -> None:
    """DTensor is wrong in silence where it splits channels, rows or columns, or has a stride."""
    out = 8 // stride
    sizes = {"b": 2, "c": 2, "o": 2, "h": 8, "w": 8, "kh": 3, "kw": 3, "ho": out, "wo": out}
    text = _program(**sizes, stride=stride, pad='"same"', dilation=1)
    run_case(Case(text, mesh, layout))


def _drawn(rng: random.Random, parts: int) -> tuple[int, int, int]:
    """The sizes of a dim that `parts` devices split, of a window, and of its positions."""
    return parts * rng.randint(1, 11 // parts), rng.randint(1, 4), parts * rng.randint(1, 4)


@pytest.mark.parametrize("seed", range(CASES))
def test_random_convolutions_on_two_axes(seed: int) -> None:
    """Kernels larger than a block, blocks of image and result that drift apart."""
    rng = random.Random(seed)
    while True:
        p, q = rng.choice([(2, 2), (4, 1), (1, 4), (2, 1), (1, 2)])
        stride, dilation = rng.randint(1, 3), rng.randint(1, 2)
        pad: Any = rng.choice(["same", "valid", 1, 2])
        (h, kh, ho), (w, kw, wo) = _drawn(rng, p), _drawn(rng, q)
        sizes = {"b": 2, "c": 2, "o": 2, "h": h, "w": w, "kh": kh, "kw": kw, "ho": ho, "wo": wo}
        shown = pad if isinstance(pad, int) else f'"{pad}"'
        text = _program(**sizes, stride=stride, pad=shown, dilation=dilation)
        try:
            named(text)
        except DiagnosticError:
            continue
        break
    run_case(Case(text, f"d:{p},e:{q}", "{ h -> d, ho -> d, w -> e, wo -> e }"))


def test_the_fan_of_a_kernel_is_what_is_summed_at_a_position() -> None:
    text = "dim b = 2, c = 5, o = 7, h = 8, k = 3\nprogram p(x[b, c, h]) {\n"
    text += '  param w[o, c, k] = he()\n  return conv[h by k](x, w, pad="same")\n}\n'
    (param,) = named(text).params
    assert (param.fan_in, param.fan_out) == (15, 7)


def test_a_kernel_of_groups_has_a_gradient_where_an_image_has_one_position() -> None:
    """Torch's kernel for f64 refuses such an image if its dims are in another order in memory."""
    text = """dim e = 8, n = 2, k = 2, one = 1, out = 4
layout l { e -> x }
program p(x[e, n], b[e, one, out], w[k, e, out]) {
  y = upconv[n by k -> one](x, w, stride=1, pad=1, dilation=1 -> [e, one, out])
  d = grad(mean(y * b), w)
  return d
}
"""
    made = compile_text(text, mesh="x:2", layout="l", dtype="f64")
    d = run_local(made.text, seed=1).outputs["d"]
    assert d.shape == (2, 8, 4)
    assert np.isfinite(d).all()
