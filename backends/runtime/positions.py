"""Writing at indices of a tensor, and which of several positions is the last at an index."""

import torch


def last_at(index: torch.Tensor, size: int) -> torch.Tensor:
    """For each of `size` indices, the last position along the last dim of `index` that names it.

    -1 where none does; `index` is i64 in 0 … `size`, where `size` itself is nobody's.
    """
    order = torch.arange(index.shape[-1], device=index.device).expand(index.shape)
    last = torch.full((*index.shape[:-1], size + 1), -1, device=index.device)
    return last.scatter_reduce(-1, index, order, "amax").narrow(-1, 0, size)


def write_at(
    x: torch.Tensor, dim: int, index: torch.Tensor, new: torch.Tensor, first: int | None = None
) -> torch.Tensor:
    """`x`, of which the elements at `index` along its dim number `dim` become `new`, in place.

    `index` and `new` broadcast against `x`, along `dim` against each other; the values at equal
    indices are equal. Where `x` is a block that begins at index `first`, what lies elsewhere is not
    written; along `dim`, one index is written then.
    """
    if first is None and index.numel() == 1 and x.device.type == "cpu":
        x.select(dim, int(index)).copy_(new.select(dim, 0))
        return x
    count = max(index.shape[dim], new.shape[dim])
    shape = (*x.shape[:dim], count, *x.shape[dim + 1 :])
    index, new = index.expand(shape), new.expand(shape)
    if first is not None:
        size = x.shape[dim]
        if not size:
            return x
        inside = (index >= first) & (index < first + size)
        index = (index - first).clamp(0, size - 1)
        new = torch.where(inside, new, x.gather(dim, index))
    return x.scatter_(dim, index, new)
