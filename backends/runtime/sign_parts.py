"""What workers send of compressed gradients: sparse parts of a sum, and signs in words of i32."""

import torch


def scatter_parts(values: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """The sum of sparse parts, given along the first dim, dense along the last.

    Part after part, whose indices are distinct: so every device adds in the same order.
    """
    out = values.new_zeros((*values.shape[1:-1], size))
    for part, at in zip(values, index.long(), strict=True):
        out.scatter_add_(-1, at, part)
    return out


def pack_signs(x: torch.Tensor) -> torch.Tensor:
    """The 32 signs along the last dim as one word of i32, the first in the lowest bit."""
    places = torch.arange(32, dtype=torch.int32, device=x.device)
    return ((x >= 0).to(torch.int32) << places).sum(-1, dtype=torch.int32)


def unpack_signs(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The signs in words as 1 and -1, along a new last dim."""
    places = torch.arange(32, dtype=torch.int32, device=words.device)
    return (((words.unsqueeze(-1) >> places) & 1) * 2 - 1).to(dtype)
