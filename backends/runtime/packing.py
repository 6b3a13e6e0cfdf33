"""Collectives on several small tensors at once: one call on a flat buffer.

Every device of a group must call the same one with the same shapes. The results of an all_reduce
or a reduce_scatter are views of the buffer.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import (
    Pending,
    all_gather_start,
    all_reduce,
    all_reduce_start,
    reduce_scatter_start,
)

Tensors = Sequence[torch.Tensor]


def all_reduce_bucket(xs: Tensors, group: Any, op: str) -> list[torch.Tensor]:
    """The sum (max, min, prod) over the group of each tensor; all have one dtype."""
    # Two calls of torch, however many tensors: threads hand on Python's lock at each of them.
    flat = torch._utils._flatten_dense_tensors(xs)  # type: ignore[no-untyped-call]
    total = all_reduce(flat, group, op)
    parts = torch._utils._unflatten_dense_tensors(total, xs)  # type: ignore[no-untyped-call]
    return [p if p.numel() else p.view(x.shape) for p, x in zip(parts, xs, strict=True)]


def all_reduce_bucket_start(xs: Tensors, group: Any, op: str) -> Pending:
    """Begin an `all_reduce_bucket`."""
    flat = torch.cat([x.reshape(-1) for x in xs])
    shapes = [tuple(x.shape) for x in xs]
    started = all_reduce_start(flat, group, op)
    return Pending(
        started.kind, started.work, lambda: cut(started.finish(), shapes, [0] * len(shapes))
    )


def reduce_scatter_bucket(
    xs: Tensors, dims: Sequence[int], group: Any, op: str
) -> list[torch.Tensor]:
    """This device's block, along its dim, of the sum (max, min, prod) of each tensor."""
    return reduce_scatter_bucket_start(xs, dims, group, op).wait()  # type: ignore[no-any-return]


def reduce_scatter_bucket_start(xs: Tensors, dims: Sequence[int], group: Any, op: str) -> Pending:
    """Begin a `reduce_scatter_bucket`."""
    size = dist.get_world_size(group)
    outer = [x.movedim(dim, 0) if dim else x for x, dim in zip(xs, dims, strict=True)]
    # A row for each device, with its block of every tensor.
    rows = torch.cat([x.reshape(size, -1) for x in outer], 1)
    shapes = [(x.shape[0] // size, *x.shape[1:]) for x in outer]
    started = reduce_scatter_start(rows, 0, group, op)
    return Pending(started.kind, started.work, lambda: cut(started.finish().view(-1), shapes, dims))


def all_gather_bucket(xs: Tensors, dims: Sequence[int], group: Any) -> list[torch.Tensor]:
    """The blocks of all devices of each tensor, joined along its dim."""
    return all_gather_bucket_start(xs, dims, group).wait()  # type: ignore[no-any-return]


def all_gather_bucket_start(xs: Tensors, dims: Sequence[int], group: Any) -> Pending:
    """Begin an `all_gather_bucket`."""
    size = dist.get_world_size(group)
    outer = [x.movedim(dim, 0) if dim else x for x, dim in zip(xs, dims, strict=True)]
    started = all_gather_start(torch.cat([x.reshape(1, -1) for x in outer], 1), 0, group)
    shapes = [(x.shape[0] * size, *x.shape[1:]) for x in outer]
    sizes = [x.numel() for x in xs]

    def finish() -> list[torch.Tensor]:
        parts = started.finish().split(sizes, 1)
        return [
            part.reshape(shape).movedim(0, dim) if dim else part.reshape(shape)
            for part, shape, dim in zip(parts, shapes, dims, strict=True)
        ]

    return Pending(started.kind, started.work, finish)


def cut(
    flat: torch.Tensor, shapes: Sequence[tuple[int, ...]], dims: Sequence[int]
) -> list[torch.Tensor]:
    """The tensors that lie one after another in `flat`, their first dim moved to its place."""
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [
        part.view(shape).movedim(0, dim) if dim else part.view(shape)
        for part, shape, dim in zip(parts, shapes, dims, strict=True)
    ]
