"""Gradients of norms: in f32 at least, and rounded once."""

from __future__ import annotations

import pytest
import torch

from meshdsl.backends.runtime.norms import layer_norm_backward, rms_norm_backward

FAR = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 1e-3}
"""Half a unit in the last place of a narrow result, of the largest value."""


@pytest.mark.parametrize("dtype", FAR, ids=str)
@pytest.mark.parametrize("shape", [(7,), (3, 5, 64)], ids=str)
def test_gradients_are_those_of_torch_in_float64(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(s, generator=generator) for s in (shape, shape, shape[-1:], shape[-1:]))
    dy, x, g, b = (value.to(dtype) for value in drawn)
    exact = [value.double().requires_grad_() for value in (x, g, b)]
    norms = torch.nn.functional
    by_rms = norms.rms_norm(exact[0], shape[-1:], exact[1], eps=1e-6)
    by_layer = norms.layer_norm(exact[0], shape[-1:], exact[1], exact[2], eps=1e-5)
    for y, found in (
        (by_rms, rms_norm_backward(dy, x, g, 1e-6)),
        (by_layer, layer_norm_backward(dy, x, g, 1e-5)),
    ):
        right = torch.autograd.grad(y, exact[: len(found)], dy.double())
        for mine, theirs in zip(found, right, strict=True):
            assert mine.dtype == dtype
            assert (mine - theirs).abs().max() <= FAR[dtype] * theirs.abs().max()
