"""Kernels of GPUs whose names are private to torch: each is tried once before it is used."""

from collections.abc import Callable, Sequence

import torch

AGREED: dict[tuple[object, ...], bool] = {}


def agrees(
    kernel: tuple[object, ...],
    trial: Callable[[], tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]],
) -> bool:
    """Whether a kernel computes what its definition does, by a `trial` that has both results.

    A torch that has another form of it, or refuses it, has none.
    """
    if kernel not in AGREED:
        try:
            AGREED[kernel] = all(map(_is_near, *trial()))
        except (AttributeError, TypeError, ValueError, RuntimeError):
            AGREED[kernel] = False
    return AGREED[kernel]


def _is_near(made: torch.Tensor, right: torch.Tensor) -> bool:
    bound = 5e-2 if made.dtype.itemsize == 2 else 1e-3
    return bool((made - right).abs().max() <= bound * right.abs().max())


def waves(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers for a trial, which no generator draws."""
    count = torch.Size(shape).numel()
    return torch.arange(count, device=device).mul(0.7).sin().view(shape).to(dtype)
