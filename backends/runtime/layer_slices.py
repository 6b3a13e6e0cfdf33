"""The slices of stacked parameters that a program reads at every call, such as one of a token."""

import torch


def slices(stack: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """The slices of a parameter along a dim: under inference mode made once, and kept with it."""
    if not torch.is_inference_mode_enabled():
        return stack.unbind(dim)  # autograd has to see this call
    kept: dict[int, tuple[torch.Tensor, ...]] = stack.__dict__.setdefault("slices", {})
    if dim not in kept:
        kept[dim] = stack.data.unbind(dim)  # views of the tensor itself would keep it for ever
    return kept[dim]
