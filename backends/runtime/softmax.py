"""Gradients of softmax and log_softmax in the memory of their cotangent.

`dy` is dead and shares no memory. Torch's kernels fill their `out` as if it were contiguous,
whatever its strides are (torch 2.13), and read the memory they write to once only if it is: so dims
are permuted into memory order, and a tensor with gaps is copied to.
"""

from typing import Any

import torch


def softmax_backward_(dy: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of a softmax along `dim`, whose result is `y`."""
    return backward_into_(torch.ops.aten._softmax_backward_data, "grad_input", dy, y, dim)


def log_softmax_backward_(dy: torch.Tensor, y: torch.Tensor, dim: int) -> torch.Tensor:
    """The gradient of a log_softmax along `dim`, whose result is `y`."""
    return backward_into_(torch.ops.aten._log_softmax_backward_data, "out", dy, y, dim)


def backward_into_(
    kernel: Any, result: str, dy: torch.Tensor, y: torch.Tensor, dim: int
) -> torch.Tensor:
    """What `kernel` makes of dy and y, in the memory of `dy`; its overload has `result`."""
    order = sorted(range(dy.dim()), key=dy.stride, reverse=True)
    dense = dy.permute(order)
    if not dense.is_contiguous():
        return dy.copy_(kernel(dy, y, dim, dy.dtype))
    kernel.out(dense, y.permute(order), order.index(dim), dy.dtype, **{result: dense})
    return dy
