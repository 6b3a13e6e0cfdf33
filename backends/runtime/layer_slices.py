"""The slices of stacked parameters that a program reads at every call, such as one of a token."""

import torch


def slices(stack: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
    """The slices of a parameter along a dim: under inference mode made once, and kept with it.

    They are made again where the parameter has other memory, as a module's after `to`.
    """
    if not torch.is_inference_mode_enabled():
        return stack.unbind(dim)  # autograd has to see this call
    address, by_dim = stack.__dict__.get("slices", (None, {}))
    if address != stack.data_ptr():
        address, by_dim = stack.data_ptr(), {}
        stack.__dict__["slices"] = address, by_dim
    if dim not in by_dim:
        by_dim[dim] = stack.data.unbind(dim)  # views of the tensor itself would keep it for ever
    sliced: tuple[torch.Tensor, ...] = by_dim[dim]
    return sliced
