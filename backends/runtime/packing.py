"""Collectives on several small tensors at once: one call, without a buffer that they are copied to.

Every device of a group must call the same one with the same shapes. nccl sends the tensors in one
launch, gloo packs them itself.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import (
    Pending,
    as_numbers,
    as_received,
    as_sent,
    reduce_op,
)

Tensors = Sequence[torch.Tensor]


def all_reduce_bucket(xs: Tensors, group: Any, op: str) -> list[torch.Tensor]:
    """The sum (max, min, prod) over the group of each tensor, which may be overwritten.

    All have one dtype.
    """
    return all_reduce_bucket_start(xs, group, op).wait()  # type: ignore[no-any-return]


def all_reduce_bucket_start(xs: Tensors, group: Any, op: str) -> Pending:
    """Begin an `all_reduce_bucket`."""
    sent, dtype = [as_sent(x, op).contiguous() for x in xs], xs[0].dtype
    options = asynchronous(dist.AllreduceCoalescedOptions())
    options.reduceOp = reduce_op(op, xs[0])
    work = group.allreduce_coalesced([as_numbers(x) for x in sent], options)
    return Pending("all_reduce", work, lambda: [as_received(x, dtype) for x in sent])


def reduce_scatter_bucket(
    xs: Tensors, dims: Sequence[int], group: Any, op: str
) -> list[torch.Tensor]:
    """This device's block, along its dim, of the sum (max, min, prod) of each tensor."""
    return reduce_scatter_bucket_start(xs, dims, group, op).wait()  # type: ignore[no-any-return]


def reduce_scatter_bucket_start(xs: Tensors, dims: Sequence[int], group: Any, op: str) -> Pending:
    """Begin a `reduce_scatter_bucket`."""
    size, dtype = dist.get_world_size(group), xs[0].dtype
    addends = [as_sent(outermost(x, dim), op) for x, dim in zip(xs, dims, strict=True)]
    blocks = [x.new_empty(x.shape[0] // size, *x.shape[1:]) for x in addends]
    options = asynchronous(dist.distributed_c10d.ReduceScatterOptions())
    options.reduceOp = reduce_op(op, xs[0])
    scatter = getattr(group, "reduce_scatter_single_coalesced", None)
    scatter = scatter or group.reduce_scatter_tensor_coalesced
    work = scatter([as_numbers(x) for x in blocks], [as_numbers(x) for x in addends], options)

    def finish() -> list[torch.Tensor]:
        received = [as_received(x, dtype) for x in blocks]
        return [x.movedim(0, dim) if dim else x for x, dim in zip(received, dims, strict=True)]

    return Pending("reduce_scatter", work, finish)


def all_gather_bucket(xs: Tensors, dims: Sequence[int], group: Any) -> list[torch.Tensor]:
    """The blocks of all devices of each tensor, joined along its dim."""
    return all_gather_bucket_start(xs, dims, group).wait()  # type: ignore[no-any-return]


def all_gather_bucket_start(xs: Tensors, dims: Sequence[int], group: Any) -> Pending:
    """Begin an `all_gather_bucket`."""
    size = dist.get_world_size(group)
    blocks = [outermost(x, dim) for x, dim in zip(xs, dims, strict=True)]
    gathered = [x.new_empty(x.shape[0] * size, *x.shape[1:]) for x in blocks]
    gather = getattr(group, "all_gather_single_coalesced", None)
    gather = gather or group.allgather_into_tensor_coalesced
    options = asynchronous(dist.distributed_c10d.AllgatherOptions())  # type: ignore[attr-defined]
    work = gather([as_numbers(x) for x in gathered], [as_numbers(x) for x in blocks], options)

    def finish() -> list[torch.Tensor]:
        return [x.movedim(0, dim) if dim else x for x, dim in zip(gathered, dims, strict=True)]

    return Pending("all_gather", work, finish)


def outermost(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor with `dim` outermost in memory."""
    return (x.movedim(dim, 0) if dim else x).contiguous()


def asynchronous(options: Any) -> Any:
    """The options of a collective that does not wait; before torch 2.8 none of them did."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options
