"""Sums of squares, as norms and losses read them."""

from collections.abc import Sequence

import torch

BLOCK = 1 << 16
"""How many squares BLAS adds up at once: it does so in the dtype, and blocks stay exact."""


def squared_norms(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of the squares of all elements of several tensors, added one after the other."""
    first, *others = map(squared_norm, xs)
    return sum(others, start=first)


def squared_norm(x: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of all elements; on a processor without a tensor of the squares."""
    if not x.is_contiguous():
        strides = x.stride()
        x = x.permute(sorted(range(x.dim()), key=lambda dim: -strides[dim]))
    if not (x.is_cpu and x.is_contiguous()):
        return torch.square(x).sum()
    flat = x.view(-1)
    if flat.numel() <= BLOCK:
        return torch.dot(flat, flat)
    return torch.stack([torch.dot(block, block) for block in torch.split(flat, BLOCK)]).sum()
