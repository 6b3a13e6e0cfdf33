"""The slices of stacked parameters that a program reads at every call, such as one of a token."""

import torch


def slices(stack: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """The slices of a parameter along a dim: under inference mode made once, and kept with it.

    They are made again where the parameter has other memory, as a module's after `to`.
    """
    if not torch.is_inference_mode_enabled():
        return stack.unbind(dim)  # autograd has to see this call
    address, kept = stack.__dict__.get("slices", (None, {}))
    if address != stack.data_ptr():
        address, kept = stack.data_ptr(), {}
        stack.__dict__["slices"] = address, kept
    if dim not in kept:
        kept[dim] = stack.data.unbind(dim)  # views of the tensor itself would keep it for ever
    made: tuple[torch.Tensor, ...] = kept[dim]
    return made
