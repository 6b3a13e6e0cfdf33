"""What windows need that torch lacks. Pasted as text into emitted programs."""

import itertools
from typing import Any


def cut_out(x: Any, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
    """Return that many elements of the last dims of `x` from `starts` on; zeros beyond it."""
    import torch

    widths = []
    for at in range(1, len(sizes) + 1):
        widths += [-starts[-at], starts[-at] + sizes[-at] - x.shape[-at]]
    return torch.nn.functional.pad(x, widths)


def tap_of(index: Any, shape: tuple[int, ...], sizes: tuple[int, ...], strides: Any) -> Any:
    """Return the row-major number of the tap that `index` is: flat indices into dims of `shape`."""
    import torch

    remaining, step, tap = index, 1, torch.zeros_like(index)
    for at in range(1, len(sizes) + 1):
        first = torch.arange(index.shape[-at], device=index.device) * strides[-at]
        tap = tap + (remaining % shape[-at] - first.reshape(-1, *[1] * (at - 1))) * step
        remaining, step = remaining // shape[-at], step * sizes[-at]
    return tap.to(torch.int32)


def tap_slices(tap: tuple[int, ...], shape: Any, strides: tuple[int, ...]) -> Any:
    """Return the index of what one tap of positions of `shape` is, in dims of elements."""
    parts = zip(tap, shape, strides, strict=True)
    return (..., *(slice(t, t + max((n - 1) * s + 1, 0), s) for t, n, s in parts))


def taken(x: Any, at: Any, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Return, for each position, the element of its window in `x` at the tap of number `at`."""
    import torch

    shape, picked = at.shape[-len(sizes) :], torch.zeros_like(at, dtype=x.dtype)
    for number, tap in enumerate(itertools.product(*map(range, sizes))):
        picked += torch.where(at == number, x[tap_slices(tap, shape, strides)], 0)
    return picked


def put_back(
    dy: Any,
    at: Any,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    starts: tuple[int, ...],
    extents: tuple[int, ...],
) -> Any:
    """Return `extents` elements from `starts` on, to which `dy` is added at the taps `at`.

    It is added tap by tap, so that every element has the same sum however its dim is split.
    """
    import torch

    lead, shape = dy.shape[: -len(sizes)], dy.shape[-len(sizes) :]
    if 0 in shape:
        return dy.new_zeros((*lead, *extents))
    wide = ((n - 1) * s + size for n, s, size in zip(shape, strides, sizes, strict=True))
    wide_sum = dy.new_zeros((*lead, *wide))
    for number, tap in enumerate(itertools.product(*map(range, sizes))):
        wide_sum[tap_slices(tap, shape, strides)] += torch.where(at == number, dy, 0)
    return cut_out(wide_sum, starts, extents)


def window_sums(x: Any) -> Any:
    """Return the sums of windows, the last dim of `x`, each beginning one element on."""
    size = x.shape[-1]
    sums = x.new_zeros((*x.shape[:-2], max(x.shape[-2] + size - 1, 0)))
    for tap in range(size):
        sums[..., tap : tap + x.shape[-2]] += x[..., tap]
    return sums
