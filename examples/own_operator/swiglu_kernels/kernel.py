"""The kernel behind `torch.ops.swiglu_kernels.swiglu`: here for CPUs, in one pass over memory.

A kernel for another device is one more function: `@swiglu.register_kernel("cuda")`, in Triton or
CUDA.
"""

from __future__ import annotations

import torch


@torch.library.custom_op("swiglu_kernels::swiglu", mutates_args=())
def swiglu(gate: torch.Tensor, up: torch.Tensor, alpha: float) -> torch.Tensor:
    """Gate * sigmoid(alpha * gate) * up, of two tensors of one shape, in new memory."""
    return (gate * alpha).sigmoid_().mul_(gate).mul_(up).contiguous()


@swiglu.register_fake
def _(gate: torch.Tensor, up: torch.Tensor, alpha: float) -> torch.Tensor:
    return torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
