"""Attention on a CPU: torch's fused kernel where it takes the operands, else written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from meshdsl.backends.runtime import attention_kernels, private_kernels
from meshdsl.backends.runtime.attention_kernels import (
    MASKED,
    attention_grad,
    attention_lse,
    attention_of_mask,
    attention_up_to,
)
from meshdsl.backends.runtime.private_kernels import agrees

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"


class _Operators(TorchDispatchMode):
    """The names of the operators that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("width", "count", "is_fused"),
    [(8, 5, True), (6, 5, False), (8, 0, False)],
    ids=["equal widths", "wider values", "empty memory"],
)
def test_the_fused_kernel_is_taken_where_it_can_be(width: int, count: int, is_fused: bool) -> None:
    """It is where widths are equal and nothing is empty: it never stores the scores."""
    q, k, v = torch.randn(1, 2, 4, 8), torch.randn(1, 2, count, 8), torch.randn(1, 2, count, width)
    with _Operators() as run:
        o, lse = attention_lse(q, k, v)
        attention_grad(torch.ones_like(o), q, k, v, o, lse)
    assert [n for n in run.names if n.startswith(FUSED)] == [FUSED, f"{FUSED}_backward"] * is_fused


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_row_that_sees_nothing_is_uniform(dtype: torch.dtype) -> None:
    """With the kernel, too, where a number takes the place of minus infinity."""
    q, k, v = (torch.randn(1, 2, 4, 8).to(dtype) for _ in range(3))
    mask = torch.arange(4)[:, None] > torch.arange(4)  # the first row sees nothing
    o, lse = attention_lse(q * 100, k, v, mask[None, None])
    uniform = v.double().mean(2)
    assert torch.allclose(o[:, :, 0].double(), uniform, atol=8 * torch.finfo(dtype).eps)
    assert (lse[:, :, 0] < MASKED / 2).all()
    assert (lse[:, :, 1:] > MASKED / 2).all()
    assert torch.equal(o, attention_of_mask(q * 100, k, v, mask[None, None]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_kernel_that_is_private_to_torch_is_tried_before_it_is_used(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trial of a GPU's kernels, on that of a CPU: right, then wrong, then refused."""
    monkeypatch.setattr(private_kernels, "AGREED", {})
    forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    like = torch.zeros(1, 1, 1, 32, dtype=dtype)

    def trial(factor: float) -> Any:
        def made(kernel: int, q: Any, k: Any, v: Any, causal: bool, scale: float) -> Any:
            return forward(q, k, v, 0.0, causal, scale=scale)

        def grad(kernel: int, *operands: Any) -> Any:
            *tensors, causal, scale = operands
            found = backward(*tensors, 0.0, causal, scale=scale)
            return [x * factor for x in found]

        monkeypatch.setattr(attention_kernels, "_on_gpu", made)
        monkeypatch.setattr(attention_kernels, "_grad_on_gpu", grad)
        return lambda: attention_kernels._trial(1, like, True, 0.2)

    assert agrees(("right",), trial(1.0))
    assert not agrees(("wrong",), trial(1.2))
    monkeypatch.undo()
    assert not agrees(("refused",), lambda: attention_kernels._trial(1, like, True, 0.2))


@pytest.mark.parametrize("last", [-1, 0, 2, 4, 9])
def test_attention_up_to_a_position_is_that_of_its_mask(last: int) -> None:
    """Below 0 every row is uniform, as where a mask hides all; beyond the end all is read."""
    q, k, v = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    seen = (torch.arange(5) <= last)[None, None, None]
    by_mask = attention_of_mask(q, k, v, seen, scale=0.3)
    assert torch.allclose(attention_up_to(q, k, v, last, scale=0.3), by_mask, atol=1e-6)
