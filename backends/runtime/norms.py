"""The gradients of norms; all is computed in f32 at least, and rounded once.

Torch 2.13 has a kernel for that of a root mean square norm on GPUs alone.
"""

import torch

from meshdsl.backends.runtime.private_kernels import agrees, waves


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


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of `rms_norm` along the last dim by x and by its scale g."""
    if x.is_cuda and x.numel():

        def trial() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
            dy_, x_ = waves(2, 5, 64, dtype=x.dtype, device=x.device).unbind()
            by_kernel = _rms_norm_kernel(dy_, x_, dy_[0], eps)
            return by_kernel, _rms_norm_backward(dy_, x_, dy_[0], eps)

        if agrees(("rms_norm_backward", x.dtype), trial):
            return _rms_norm_kernel(dy, x, g, eps)
    return _rms_norm_backward(dy, x, g, eps)


def _rms_norm_kernel(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._fused_rms_norm_backward
    dx, dg = kernel(dy.contiguous(), x, x.shape[-1:], _inverse(x, eps), g, [True, True])
    return dx, dg


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    r = _inverse(x, eps)
    dy, h = dy.to(r.dtype), x.to(r.dtype) * r
    dg = (dy * h).reshape(-1, x.shape[-1]).sum(0)
    dx = dy * g
    along = torch.linalg.vecdot(dx, h).unsqueeze(-1).div_(x.shape[-1])
    return dx.addcmul_(h, along, value=-1).mul_(r).to(x.dtype), dg.to(x.dtype)


def _inverse(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / rms(x), in f32 at least."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm: torch.Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def layer_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, g: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `layer_norm` along the last dim by x, by its scale g and by its shift."""
    dtype = x.dtype
    if not x.is_cuda:  # a CPU's kernel would round mean and deviation to two bytes
        wide = torch.promote_types(dtype, torch.float32)
        dy, x, g = dy.to(wide), x.to(wide), g.to(wide)
    stats = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)[1:]
    kernel = torch.ops.aten.native_layer_norm_backward
    shift = g  # of the shift the kernel reads only that there is one
    dx, dg, db = kernel(dy.contiguous(), x, x.shape[-1:], *stats, g, shift, [True, True, True])
    return dx.to(dtype), dg.to(dtype), db.to(dtype)
