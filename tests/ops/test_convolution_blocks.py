"""One-dimensional convolutions on blocks of any sizes: forward, image and kernel gradients.

Each block gets its window from the blocks of all, as `halo` assembles it; numpy and the torch text
work on it; results are compared with loops over positions and taps. Integers: all must be equal.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from meshdsl.backends.runtime.values import block, parts_of
from meshdsl.ir.types import F64, Dim, TensorType
from meshdsl.ops.opdef import NumpyCall, Signature, lookup
from meshdsl.placed.sharding_rules import Row, rows
from meshdsl.prove.sample_values import join
from meshdsl.prove.torch_run import evaluate, window_call
from meshdsl.prove.window_rows import piece, reads_windows

CASES = int(os.environ.get("MESHDSL_CASES", "75"))

Array = np.ndarray


@dataclass(frozen=True)
class Case:
    """A convolution of an image of `size` with asymmetric padding, split over `devices`."""

    size: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    devices: int

    @property
    def positions(self) -> int:
        """The number of windows."""
        room = self.before + self.size + self.after - (self.kernel - 1) * self.dilation
        return (room - 1) // self.stride + 1

    def element(self, position: int, tap: int) -> int | None:
        """The element of the image at a tap; None in the padding."""
        found = position * self.stride - self.before + tap * self.dilation
        return found if 0 <= found < self.size else None


def drawn(rng: np.random.Generator) -> Case:
    """A case with at least one position."""
    while True:
        highs = (11, 4, 3, 2)
        size, kernel, stride, dilation = (int(rng.integers(1, high + 1)) for high in highs)
        before, after = int(rng.integers(0, 4)), int(rng.integers(0, 4))
        case = Case(size, kernel, stride, dilation, before, after, int(rng.integers(2, 5)))
        if case.positions >= 1:
            return case


def expected(case: Case, x: Array, k: Array, dy: Array) -> dict[str, Array]:
    """The results of the three operators, by loops. x[b, h], k[kh, o], dy[b, o, ho]."""
    y, dx, dk = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(k)
    for position in range(case.positions):
        for tap in range(case.kernel):
            at = case.element(position, tap)
            if at is not None:
                y[:, :, position] += x[:, at, None] * k[tap]
                dx[:, at] += dy[:, :, position] @ k[tap]
                dk[tap] += x[:, at] @ dy[:, :, position]
    return {"conv": y, "upconv": dx, "conv_kernel": dk}


def signatures(case: Case) -> dict[str, Signature]:
    """The calls of the three operators; what is before and after need not be equal."""
    b, o = Dim("b", 2), Dim("o", 2)
    h, kh, ho = Dim("h", case.size), Dim("kh", case.kernel), Dim("ho", case.positions)
    x, k, y = (TensorType(dims, F64) for dims in ((b, h), (kh, o), (b, o, ho)))
    options = {"stride": case.stride, "pad": case.before, "dilation": case.dilation}
    ahead = {"source": (h,), "window": (kh,), "target": (ho,)} | options
    back = {"source": (ho,), "window": (kh,), "target": (h,)} | options
    return {
        "conv": Signature((x, k), (y,), ahead | {"dims": y.dims}),
        "upconv": Signature((y, k), (x,), back | {"dims": x.dims}),
        "conv_kernel": Signature((x, y), (k,), ahead | {"dims": k.dims}),
    }


def exchanged(call: NumpyCall, operands: list[Array], wholes: list[Array], devices: int) -> None:
    """Check each window against what the blocks of all devices have of it."""
    for (index, dim), window in call.windows.items():
        x, at = np.moveaxis(wholes[index], call.ins[index].index(dim), 0), 0
        made = np.zeros((window[1] - window[0], *x.shape[1:]))
        for rank in range(devices):
            first, length = block(len(x), (devices,), (rank,))
            own = x[first : first + length]
            for place, count, at in parts_of(window, (first, first + length)):
                made[place : place + count] = own[at : at + count]
        got = np.moveaxis(operands[index], call.ins[index].index(dim), 0)
        np.testing.assert_array_equal(got, made)


def check_row(
    name: str, sig: Signature, row: Row, wholes: list[Array], whole: Array, devices: int
) -> None:
    """The results of all devices, of numpy and of the torch text, are `whole`."""
    opdef, found, texts = lookup(name), [], []
    for rank in range(devices):
        call, operands = piece(sig, row, wholes, (devices,), (rank,))
        exchanged(call, operands, wholes, devices)
        found.append(opdef.numpy(call, *operands))
        text = window_call(call, tuple(map(np.shape, operands)))
        tensors = [torch.tensor(a) for a in operands]
        texts.append(evaluate(opdef, text, tensors, rank).numpy())
    for parts in (found, texts):
        np.testing.assert_array_equal(join(parts, row.outs[0], sig.outs[0]), whole)


def check(case: Case, rng: np.random.Generator) -> int:
    """Every row of the three operators that reads windows; returns how many there are."""
    sizes = ((2, case.size), (case.kernel, 2), (2, 2, case.positions))
    x, k, dy = (rng.integers(-9, 10, shape).astype(np.float64) for shape in sizes)
    results, count = expected(case, x, k, dy), 0
    operands = {"conv": [x, k], "upconv": [dy, k], "conv_kernel": [x, dy]}
    for name, sig in signatures(case).items():
        for row in rows(lookup(name).factors(sig), 2, 1):
            if reads_windows(row):
                check_row(name, sig, row, operands[name], results[name], case.devices)
                count += 1
    return count


@pytest.mark.parametrize("part", range(5))
def test_convolutions_of_blocks_of_any_sizes_are_exact(part: int) -> None:
    rng = np.random.default_rng(part)
    for _ in range(CASES // 5):
        case = drawn(rng)
        try:
            check(case, rng)
        except Exception as error:
            raise AssertionError(case) from error
