"""Which of several positions is the last at an index."""

import torch


def last_at(index: torch.Tensor, size: int) -> torch.Tensor:
    """For each of `size` indices, the last position along the last dim of `index` that names it.

    -1 where none does; `index` is i64 in 0 … `size`, where `size` itself is nobody's.
    """
    order = torch.arange(index.shape[-1], device=index.device).expand(index.shape)
    last = torch.full((*index.shape[:-1], size + 1), -1, device=index.device)
    return last.scatter_reduce(-1, index, order, "amax").narrow(-1, 0, size)
