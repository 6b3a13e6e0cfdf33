"""Batch norm and its gradient by torch's kernels, on tensors [sample, channel, …].

`torch.native_batch_norm` yields the inverse deviation, not the variance that averages are made of.
So the statistics are computed by one kernel and the result by another, as they are inside of it.
The kernels divide by the number of elements, so that they are not called without any.
"""

import torch


def batch_norm(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float = 1e-5
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Each channel of `x` less its mean, over its deviation, scaled and shifted; mean, variance."""
    if not x.numel():
        return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(scale)
    mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    y = torch.nn.functional.batch_norm(x, mean, variance, scale, shift, eps=eps)
    return y, mean, variance


def batch_norm_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `batch_norm` by x, scale and shift, from `dy`, that by its first result."""
    if not x.numel():
        return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(scale)
    inverse = torch.rsqrt(variance + eps)
    every = [True, True, True]
    kernel = torch.ops.aten.native_batch_norm_backward
    dx, dscale, dshift = kernel(dy, x, scale, None, None, mean, inverse, True, eps, every)
    return dx, dscale, dshift
