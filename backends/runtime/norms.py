"""The gradient of a root mean square norm by the tensor that is normalised.

Torch 2.13 has a kernel for it on GPUs alone.
"""

import torch


def rms_norm_grad(dy: torch.Tensor, x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    """With r = 1 / rms(x) along `dim`: r * (dy - x * r^2 * mean(dy * x)), in four passes."""
    along, r = rms_terms(dy, x, dim, eps)
    return torch.addcmul(dy, x, along, value=-1).mul_(r)


def rms_norm_grad_(dy: torch.Tensor, x: torch.Tensor, dim: int, eps: float) -> torch.Tensor:
    """The same in the memory of `dy`."""
    along, r = rms_terms(dy, x, dim, eps)
    return dy.addcmul_(x, along, value=-1).mul_(r)


def rms_terms(
    dy: torch.Tensor, x: torch.Tensor, dim: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """r^2 * mean(dy * x) and r, with `dim` of one element."""
    wide = torch.float32 if x.dtype == torch.bfloat16 else None
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True, dtype=wide)
    r = norm.square_().div_(x.shape[dim]).add_(eps).rsqrt_()
    dot = torch.linalg.vecdot(dy, x, dim=dim).unsqueeze(dim)
    return dot.div_(x.shape[dim]).mul_(r.square()), r
