"""Products of rows with the matrix of their group: only rows that are there are multiplied."""

from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import as_numbers


def rows_by_group(sizes: torch.Tensor, extent: int, start: int) -> tuple[torch.Tensor, list[int]]:
    """The rows of each group, all blocks after each other, and their number in each.

    `sizes` are over blocks, batches, groups; of rows there are here `extent` from `start` on. Those
    of a group are in the order of batches, then of rows.
    """
    ends = sizes.clamp(min=0).cumsum(-1, dtype=torch.int64)
    blocks, batches, groups = ends.shape
    rows = torch.arange(start, start + extent).expand(blocks, batches, extent).contiguous()
    group = torch.searchsorted(ends, rows, right=True)
    block = torch.arange(blocks).view(-1, 1, 1) * groups
    key = torch.where(group < groups, block + group, blocks * groups).flatten()
    counts = torch.bincount(key, minlength=blocks * groups + 1)[:-1].tolist()
    return key.argsort(stable=True)[: sum(counts)], counts


def grouped_product(
    x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor, start: int = 0
) -> torch.Tensor:
    """`x` [blocks, batches, rows, k] times `w` [blocks, groups, k, n], 0 where no row is."""
    at, counts = rows_by_group(sizes, x.shape[2], start)
    rows, matrices = x.flatten(0, 2)[at], w.flatten(0, 1)
    product = x.new_zeros(*x.shape[:3], w.shape[3])
    if not len(at):
        return product
    if can_group(rows, matrices):
        ends = torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32)
        products = torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    else:
        parts = zip(torch.split(rows, counts), matrices, strict=True)
        products = torch.cat([part @ matrix for part, matrix in parts])
    product.flatten(0, 2)[at] = products
    return product


def grouped_outer(
    x: torch.Tensor, y: torch.Tensor, sizes: torch.Tensor, start: int = 0
) -> torch.Tensor:
    """By block and group, the sum of the outer products of the rows of `x` and of `y`."""
    at, counts = rows_by_group(sizes, x.shape[2], start)
    both = (torch.split(side.flatten(0, 2)[at], counts) for side in (x, y))
    parts = zip(*both, strict=True)
    sums = [left.mT @ right for left, right in parts]
    shape = (x.shape[0], sizes.shape[2], x.shape[3], y.shape[3])
    return torch.stack(sums).view(shape) if sums else x.new_zeros(shape)


def can_group(rows: torch.Tensor, matrices: torch.Tensor) -> bool:
    """Whether torch has a kernel of all groups: of f64 there is none, and rows are aligned."""
    aligned = all(n * rows.element_size() % 16 == 0 for n in matrices.shape[1:])
    return rows.dtype != torch.float64 and aligned


def all_to_all_counted(
    x: torch.Tensor, leaving: torch.Tensor, arriving: torch.Tensor, group: Any
) -> torch.Tensor:
    """Exchange blocks as `all_to_all`, only the rows that are there: all others are zeros.

    `x` is over the dim that is split, the one that is joined, other batches, rows, and numbers of a
    row; the sizes of groups over the first three and groups: `leaving` before, `arriving` after.
    """
    size, rows = dist.get_world_size(group), x.shape[3]
    is_there = row_mask(leaving, rows)
    sent = as_numbers(x[is_there].contiguous())
    mask = row_mask(arriving, rows)
    by_sender = mask.view(mask.shape[0], size, *x.shape[1:4]).movedim(1, 0)
    leaves, arrives = (mask.reshape(size, -1).sum(1).tolist() for mask in (is_there, by_sender))
    received = sent.new_empty(sum(arrives), x.shape[4])
    dist.all_to_all_single(received, sent, arrives, leaves, group=group)
    joined = x.new_zeros(*by_sender.shape, x.shape[4])
    joined[by_sender] = received.view(x.dtype)
    return joined.movedim(0, 1).flatten(1, 2)


def row_mask(sizes: torch.Tensor, rows: int) -> torch.Tensor:
    """Which rows the groups have, by the sizes along the last dim."""
    return torch.arange(rows) < sizes.clamp(min=0).sum(-1)[..., None]
