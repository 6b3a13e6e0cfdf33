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


def batch_norm_sums(
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients by scale and shift, from the statistics; of a part of the samples, its part."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    sums = [False, True, True]
    kernel = torch.ops.aten.native_batch_norm_backward
    _, dscale, dshift = kernel(dy, x, None, mean, variance, None, None, False, eps, sums)
    return dscale, dshift


def batch_norm_input_grad(
    dy: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    dscale: torch.Tensor,
    dshift: torch.Tensor,
    count: int,
    eps: float = 1e-5,
) -> torch.Tensor:
    """The gradient by x, from those by scale and shift; `count` numbers have one mean.

    With z the normalised x: scale / deviation * (dy - dshift / count - z * dscale / count).
    """
    if not x.numel():
        return torch.empty_like(x)
    slope = scale * torch.rsqrt(variance + eps)
    minus_means = dscale / -count, dshift / -count
    dx = torch.nn.functional.batch_norm(x, mean, variance, *minus_means, eps=eps).add_(dy)
    return dx.mul_(slope.view(-1, *[1] * (x.dim() - 2)))
