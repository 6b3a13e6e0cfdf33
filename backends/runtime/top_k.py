"""The greatest elements along a dim, and all in order; equal ones by their index."""

import torch


def top_k(x: torch.Tensor, dim: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `k` greatest elements along `dim`, the greatest first, and their indices as i32.

    Of equal elements the first comes first, which `torch.topk` does not promise: every element is
    compared together with its index, as one integer of 64 bits. NaN is greater than any number.
    """
    n = x.shape[dim]
    if x.element_size() > 4:
        values, index = torch.sort(x, dim=dim, descending=True, stable=True)
        return values.narrow(dim, 0, k), index.narrow(dim, 0, k).to(torch.int32)
    shape = [-1 if i == dim else 1 for i in range(x.dim())]
    back = torch.arange(n - 1, -1, -1, device=x.device).view(shape)
    keys = (_ordered(x).long() << 32) + back
    index = n - 1 - (keys.topk(k, dim).values & 0xFFFFFFFF)
    return x.gather(dim, index), index.to(torch.int32)


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """i32 in the order of `x`: of a float, its bits, where the two zeros and all NaN are alike."""
    if not x.is_floating_point():
        return x
    x = x.float()
    bits = x.where(~x.isnan(), torch.nan).add(0.0).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def sort_along(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The elements along `dim` from the least on, NaN last, and their indices as i32; stable."""
    values, index = torch.sort(x, dim=dim, stable=True)
    return values, index.to(torch.int32)
