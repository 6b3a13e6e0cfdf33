"""What workers send of compressed gradients: sparse parts, and signs or bytes in words of i32."""

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


def pack_int8(x: torch.Tensor) -> torch.Tensor:
    """Multiples of a scale along the last dim, four in a word of i32; behind them the scale."""
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = (x.abs().amax(-1, keepdim=True).to(wide) / 127).float()
    # Of NaN and infinities, whose scale says what they are, the multiples are 0.
    multiples = torch.nan_to_num_(x / scale.masked_fill(scale == 0, 1), 0.0, 0.0, 0.0)
    multiples = multiples.round_().to(torch.int8)
    return torch.cat([bits_as(multiples, torch.int32), bits_as(scale, torch.int32)], -1)


def unpack_int8(words: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers in words of `pack_int8`."""
    multiples = bits_as(words[..., :-1], torch.int8).to(dtype)
    return multiples.mul_(bits_as(words[..., -1:], torch.float32))


def bits_as(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bits of `x`, in the order of its last dim, as numbers of another dtype."""
    return x.clone(memory_format=torch.contiguous_format).view(dtype)
