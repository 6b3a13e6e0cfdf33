"""Collectives where the blocks of a group differ in size, since its mesh axes do not divide a dim.

`ways` are the numbers of blocks along each axis of the group, the outer first, or their sizes;
`size` is that of the dim on all of them together. Every device of a group must call the same one.
"""

import itertools
import math
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import Pending, all_gather_start, as_numbers
from meshdsl.backends.runtime.values import Way, block


def block_sizes(size: int, ways: tuple[Way, ...]) -> list[int]:
    """The sizes of the blocks of a dim, in the order of the devices of the group.

    Of `ways` the first alone may be sizes.
    """
    counts = [way if isinstance(way, int) else len(way) for way in ways]
    return [block(size, ways, at)[1] for at in itertools.product(*map(range, counts))]


def all_gather_uneven(
    x: torch.Tensor,
    dim: int,
    size: int,
    ways: tuple[Way, ...],
    group: Any,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The blocks of all devices joined along `dim`, or written `into` a tensor."""
    pending = all_gather_uneven_start(x, dim, size, ways, group, into)
    return pending.wait()  # type: ignore[no-any-return]


def all_gather_uneven_start(
    x: torch.Tensor,
    dim: int,
    size: int,
    ways: tuple[Way, ...],
    group: Any,
    into: torch.Tensor | None = None,
) -> Pending:
    """Begin an `all_gather_uneven`: blocks are sent as long as the largest, and cut on arrival."""
    sizes = block_sizes(size, ways)
    part = x.movedim(dim, 0)
    padded = part.new_zeros(max(sizes), *part.shape[1:])
    padded[: len(part)] = part
    started = all_gather_start(padded, 0, group)

    def finish() -> torch.Tensor:
        padded_rows = torch.chunk(started.finish(), len(sizes))
        rows = [r[:n] for r, n in zip(padded_rows, sizes, strict=False)]
        if into is None:
            return torch.cat(rows).movedim(0, dim)
        for target, row in zip(torch.split(into.movedim(dim, 0), sizes), rows, strict=True):
            target.copy_(row)
        return into

    return Pending(started.kind, started.work, finish)


def reduce_scatter_uneven(
    x: torch.Tensor, dim: int, ways: tuple[Way, ...], group: Any, op: str
) -> torch.Tensor:
    """This device's block, along `dim`, of the sum (max, min, prod) over the group."""
    return reduce_scatter_uneven_start(x, dim, ways, group, op).wait()  # type: ignore[no-any-return]


def reduce_scatter_uneven_start(
    x: torch.Tensor, dim: int, ways: tuple[Way, ...], group: Any, op: str
) -> Pending:
    """Begin a `reduce_scatter_uneven`: blocks are exchanged, and added up in the order of ranks."""
    addends = x.movedim(dim, 0).contiguous()
    sizes = block_sizes(len(addends), ways)
    rows = sizes[dist.get_rank(group)]
    parts = addends.new_empty(rows * len(sizes), *addends.shape[1:])
    work = dist.all_to_all_single(
        as_numbers(parts),
        as_numbers(addends),
        [rows] * len(sizes),
        sizes,
        group=group,
        async_op=True,
    )

    def finish() -> torch.Tensor:
        total, *others = torch.split(parts, [rows] * len(sizes))
        for other in others:
            total = combined(total, other, op)
        return total.movedim(0, dim)

    return Pending("reduce_scatter", work, finish)


def combined(x: torch.Tensor, y: torch.Tensor, op: str) -> torch.Tensor:
    """The sum (max, min, prod) of two tensors; of truth values the sum is `or`, the product `and`.

    A maximum with NaN is NaN.
    """
    if x.dtype == torch.bool:
        return x | y if op in ("sum", "max") else x & y
    if op in ("max", "min"):
        return torch.maximum(x, y) if op == "max" else torch.minimum(x, y)
    return x + y if op == "sum" else x * y


def all_to_all_uneven(
    x: torch.Tensor,
    split_dim: int,
    concat_dim: int,
    size: int,
    ways: tuple[tuple[Way, ...], tuple[Way, ...]],
    group: Any,
) -> torch.Tensor:
    """Exchange blocks: `x` whole along `split_dim` becomes whole along `concat_dim` instead.

    `size` is that of `concat_dim` on all devices of the group together, `ways` are those of
    `split_dim` and of `concat_dim`.
    """
    leaving, coming = ways
    pieces = torch.split(x, block_sizes(x.shape[split_dim], leaving), split_dim)
    block_shape = pieces[dist.get_rank(group)].shape
    shapes = [
        [*block_shape[:concat_dim], n, *block_shape[concat_dim + 1 :]]
        for n in block_sizes(size, coming)
    ]
    sent = torch.cat([piece.reshape(-1) for piece in pieces])
    arrives = [math.prod(shape) for shape in shapes]
    leaves = [piece.numel() for piece in pieces]
    received = sent.new_empty(sum(arrives))
    dist.all_to_all_single(as_numbers(received), as_numbers(sent), arrives, leaves, group=group)
    blocks = zip(torch.split(received, arrives), shapes, strict=True)
    return torch.cat([flat.view(shape) for flat, shape in blocks], concat_dim)
