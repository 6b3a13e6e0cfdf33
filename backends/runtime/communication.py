"""Collectives on local tensors, one function each.

Every device of a group must call the same one with the same shapes.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.values import (
    blocks_and_windows,
    group_members,
    group_name,
    in_mesh_order,
    overlap,
    parts_of,
    source_rank,
)

Groups = dict[str, Any]
"""The process groups of a device, by mesh axes: `"axis+axis"`."""


def make_groups(mesh: dict[str, int], groups: tuple[tuple[str, ...], ...], rank: int) -> Groups:
    """The process group of this device over each set of mesh axes, under `"axis+axis"`.

    A line (`pipe:forward`) has the ranks along its axis instead: `pairs_of` makes its groups.
    """
    by_axes: Groups = {"+".join(axes): group_members(mesh, axes) for axes in groups}
    for name, every in [*by_axes.items()]:
        for members in every if ":" not in name else ():  # all processes take part in all groups
            is_world = len(members) == dist.get_world_size()
            group = dist.group.WORLD if is_world else dist.new_group(members)
            if rank in members:
                by_axes[name] = group
    return by_axes


class Pending:
    """A collective under way: until `wait`, its result is not there, and what is sent is needed.

    `kind` is its name, `work` torch's handle; `finish` makes the result.
    """

    def __init__(self, kind: str, work: Any, finish: Callable[[], Any]) -> None:
        self.kind, self.work, self.finish = kind, work, finish

    def wait(self) -> Any:
        """The result, once it has arrived; it is not kept here."""
        work, finish = self.work, self.finish
        del self.work, self.finish
        work.wait()
        return finish()


def all_reduce(x: torch.Tensor, group: Any, op: str) -> torch.Tensor:
    """The sum (max, min, prod) over the group; `x` may be overwritten."""
    sent = as_sent(x, op).contiguous()
    dist.all_reduce(as_numbers(sent), reduce_op(op, x), group=group)
    return as_received(sent, x.dtype)


def all_reduce_start(x: torch.Tensor, group: Any, op: str) -> Pending:
    """Begin an `all_reduce`."""
    sent, dtype = as_sent(x, op).contiguous(), x.dtype
    work = dist.all_reduce(as_numbers(sent), reduce_op(op, x), group=group, async_op=True)
    return Pending("all_reduce", work, lambda: as_received(sent, dtype))


def all_gather(
    x: torch.Tensor, dim: int, group: Any, into: torch.Tensor | None = None
) -> torch.Tensor:
    """The blocks of all devices joined along `dim`, laid out in memory with `dim` outermost.

    Or written `into` a tensor, of which `x` may be this device's block.
    """
    return all_gather_start(x, dim, group, into).wait()  # type: ignore[no-any-return]


def all_gather_start(
    x: torch.Tensor, dim: int, group: Any, into: torch.Tensor | None = None
) -> Pending:
    """Begin an `all_gather`; what is in `into` is not to be read any more."""
    block = x.movedim(dim, 0).contiguous()
    if into is not None and dim == 0 and into.is_contiguous():
        gathered = into
    else:
        count = block.shape[0] * dist.get_world_size(group)
        gathered = block.new_empty(count, *block.shape[1:])
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work = gather(as_numbers(gathered), as_numbers(block), group=group, async_op=True)
    return Pending("all_gather", work, lambda: placed(gathered.movedim(0, dim), into))


def placed(x: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """A tensor, in the memory of another one where it is to be there."""
    return x if into is None or x.data_ptr() == into.data_ptr() else into.copy_(x)


def reduce_scatter(x: torch.Tensor, dim: int, group: Any, op: str) -> torch.Tensor:
    """This device's block, along `dim`, of the sum (max, min, prod) over the group."""
    return reduce_scatter_start(x, dim, group, op).wait()  # type: ignore[no-any-return]


def reduce_scatter_start(x: torch.Tensor, dim: int, group: Any, op: str) -> Pending:
    """Begin a `reduce_scatter`."""
    addends = as_sent(x.movedim(dim, 0).contiguous(), op)
    block = addends.new_empty(addends.shape[0] // dist.get_world_size(group), *addends.shape[1:])
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    op, dtype = reduce_op(op, x), x.dtype
    work = scatter(as_numbers(block), as_numbers(addends), op, group=group, async_op=True)
    return Pending("reduce_scatter", work, lambda: as_received(block, dtype).movedim(0, dim))


def all_to_all(x: torch.Tensor, split_dim: int, concat_dim: int, group: Any) -> torch.Tensor:
    """Exchange blocks: `x` whole along `split_dim` becomes whole along `concat_dim` instead."""
    return all_to_all_start(x, split_dim, concat_dim, group).wait()  # type: ignore[no-any-return]


def all_to_all_start(x: torch.Tensor, split_dim: int, concat_dim: int, group: Any) -> Pending:
    """Begin an `all_to_all`."""
    size = dist.get_world_size(group)
    around = x.shape[:split_dim], x.shape[split_dim + 1 :]
    blocks = x.view(*around[0], size, x.shape[split_dim] // size, *around[1])
    # In memory: receiver, then `concat_dim`, so that what arrives lies joined without a copy.
    inner = concat_dim + (concat_dim > split_dim)
    sent = blocks.movedim((split_dim, inner), (0, 1)).contiguous()
    received = torch.empty_like(sent)
    numbers = as_numbers(received), as_numbers(sent)
    work = dist.all_to_all_single(*numbers, group=group, async_op=True)
    joined = received.flatten(0, 1).movedim(0, concat_dim)
    return Pending("all_to_all", work, lambda: joined)


def permute(
    x: torch.Tensor,
    rank: int,
    mesh: dict[str, int],
    before: dict[str, tuple[str, ...]],
    after: dict[str, tuple[str, ...]],
    groups: Groups,
    shape: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Pass blocks on: `x` is the block under the splits `before`, the result that under `after`.

    `shape` is that of the result where it may be another than that of `x`.
    """
    moved = {axis for s in (before, after) for axes in s.values() for axis in axes}
    axes = tuple(axis for axis in mesh if axis in moved)
    members = next(ranks for ranks in group_members(mesh, axes) if rank in ranks)
    sources = [source_rank(mesh, member, before, after) for member in members]
    sent = as_numbers(x.contiguous())
    received = sent.new_empty(x.shape if shape is None else shape)
    arrives, leaves = ([0] * len(members) for _ in range(2))
    arrives[members.index(sources[members.index(rank)])] = received.numel()
    leaves[sources.index(rank)] = sent.numel()
    group = groups[group_name(mesh, axes)]
    dist.all_to_all_single(received.view(-1), sent.view(-1), arrives, leaves, group=group)
    return received.view(x.dtype)


Padded = tuple[int, tuple[str, ...], tuple[int, int], tuple[int, int, int, int, bool], float]
"""A window with numbers beyond the borders: the dim, the axes, the sizes, the reads, the fill."""


def padding_of(padded: Padded, rank: int, mesh: dict[str, int]) -> tuple[int, int, int, float]:
    """The dim of a window, and how many elements before and behind it are its fill."""
    dim, axes, sizes, reads, fill = padded
    start, stop = blocks_and_windows(mesh, axes, [rank], sizes, reads, False)[1][0]
    extent = max(stop - start, 0)
    return dim, min(max(-start, 0), extent), min(max(stop - sizes[0], 0), extent), fill


def without(x: torch.Tensor, padding: list[tuple[int, int, int, float]]) -> torch.Tensor:
    """A view of `x` without padding."""
    for dim, before, behind, _ in padding:
        x = x.narrow(dim, before, max(x.shape[dim] - before - behind, 0))
    return x


def halo(
    x: torch.Tensor,
    dim: int,
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    reads: tuple[int, int, int, int, bool],
    fill: float | str | None,
    rank: int,
    mesh: dict[str, int],
    groups: Groups,
    padded: tuple[Padded, ...] = (),
) -> torch.Tensor:
    """What this device's block of a loop reads of `dim`: own elements, others' and `fill`.

    `sizes` are those of the dim and of the loop, both split over `axes`, outer first; `reads` as in
    `span`. Without a fill the window ends at the border; with "wrap" it goes on at the other end.
    What earlier windows have `padded` is not sent: each device has it.
    """
    over = in_mesh_order(mesh, axes)
    members = next(ranks for ranks in group_members(mesh, over) if rank in ranks)
    blocks, read = blocks_and_windows(mesh, axes, members, sizes, reads, fill is None)
    me = members.index(rank)
    period = sizes[0] if fill == "wrap" else 0
    leaves = [parts_of(window, blocks[me], period) for window in read]
    arrives = [parts_of(read[me], block, period) for block in blocks]
    leaves[me], arrives[me] = [], []
    padding = [padding_of(place, rank, mesh) for place in padded]
    rows = as_numbers(without(x, padding)).movedim(dim, 0)
    sent = [rows.narrow(0, at, length) for parts in leaves for _, length, at in parts]
    buffer = (torch.cat(sent) if sent else rows[:0]).contiguous()
    counts, lengths = ([sum(n for _, n, _ in p) for p in every] for every in (arrives, leaves))
    received = buffer.new_empty(sum(counts), *rows.shape[1:])
    group = groups[group_name(mesh, over)]
    dist.all_to_all_single(received, buffer, counts, lengths, group=group)
    framed_block = framed(x, dim, blocks[me], read[me], sizes[0], fill)
    first = 0
    for place, length, _ in (part for parts in arrives for part in parts):
        part = received.narrow(0, first, length).view(x.dtype)
        arrived = framed_block.narrow(dim, place, length)
        without(arrived, padding).copy_(part.movedim(0, dim))
        for at, before, behind, number in padding:
            arrived.narrow(at, 0, before).fill_(number)
            arrived.narrow(at, arrived.shape[at] - behind, behind).fill_(number)
        first += length
    return framed_block


def window(
    x: torch.Tensor,
    dim: int,
    axes: tuple[str, ...],
    sizes: tuple[int, int],
    reads: tuple[int, int, int, int, bool],
    fill: float | str | None,
    rank: int,
    mesh: dict[str, int],
    wider: tuple[tuple[int, int, int, int, bool], bool] | None = None,
) -> torch.Tensor:
    """A `halo` of which nothing is sent: of a block that needs no other, or of the whole dim.

    Or `x` is a window itself, that of the reads `wider`, and whether it ends at the border.
    """
    blocks, read = blocks_and_windows(mesh, axes, [rank], sizes, reads, fill is None)
    held = (0, sizes[0]) if x.shape[dim] == sizes[0] else blocks[0]
    if wider is not None:
        held = blocks_and_windows(mesh, axes, [rank], sizes, *wider)[1][0]
    return framed(x, dim, held, read[0], sizes[0], fill)


def framed(
    x: torch.Tensor,
    dim: int,
    block: tuple[int, int],
    window: tuple[int, int],
    size: int,
    fill: float | str | None,
) -> torch.Tensor:
    """A new tensor for indices `window` of `dim`: what `x`, the `block`, has of it, and fill."""
    start, stop = window
    frame = x.new_empty([*x.shape[:dim], stop - start, *x.shape[dim + 1 :]])
    if isinstance(fill, float | int):
        for a, b in (overlap((start, 0), window), overlap((size, stop), window)):
            frame.narrow(dim, a - start, b - a).fill_(fill)
    for place, length, at in parts_of(window, block, size if fill == "wrap" else 0):
        frame.narrow(dim, place, length).copy_(x.narrow(dim, at, length))
    return frame


def as_numbers(x: torch.Tensor) -> torch.Tensor:
    """The same memory; truth values and 8-bit floats as bytes, which every backend can send."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def as_sent(x: torch.Tensor, op: str) -> torch.Tensor:
    """What is reduced for `x`: itself, or for an extreme of floats integers in their order.

    NaN is beyond all of them: gloo and nccl forget NaN.
    """
    if op not in ("max", "min") or not x.is_floating_point():
        return x
    wide = x if x.element_size() > 2 else x.float()  # no integers of two bytes can be sent
    bits = wide.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    least, most = torch.iinfo(bits.dtype).min, torch.iinfo(bits.dtype).max
    codes = torch.where(bits < 0, bits ^ most, bits)
    return codes.masked_fill_(wide.isnan(), most if op == "max" else least)


def as_received(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a reduction of `as_sent` yields, in the dtype of what was to be reduced."""
    if x.dtype == dtype:
        return x
    bits = torch.where(x < 0, x ^ torch.iinfo(x.dtype).max, x)
    return bits.view(torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def reduce_op(op: str, x: torch.Tensor) -> Any:
    """Torch's name of a reduction; of truth values the sum is `or` and the product `and`."""
    op = {"sum": "max", "prod": "min"}.get(op, op) if x.dtype == torch.bool else op
    return getattr(dist.ReduceOp, {"prod": "PRODUCT"}.get(op, op.upper()))


def embed_block(x: torch.Tensor, dim: int, start: int, size: int) -> torch.Tensor:
    """`x` as the block that begins at `start` of a tensor of zeros, `size` long along `dim`."""
    shape = [*x.shape[:dim], size, *x.shape[dim + 1 :]]
    embedded = x.new_zeros(shape)
    embedded.narrow(dim, start, x.shape[dim]).copy_(x)
    return embedded
