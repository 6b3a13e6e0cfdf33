"""What torch refuses of tensors without elements: those of devices that have nothing of a dim."""

import torch


def extreme(x: torch.Tensor, dims: tuple[int, ...], which: str) -> torch.Tensor:
    """The `max` or `min` over `dims`; of no elements the least, or the most, of the dtype."""
    if all(x.shape[dim] for dim in dims):
        return x.amax(dims) if which == "max" else x.amin(dims)
    if x.dtype == torch.bool:
        none: float = which == "min"
    elif x.is_floating_point():
        none = float("-inf") if which == "max" else float("inf")
    else:
        none = torch.iinfo(x.dtype).min if which == "max" else torch.iinfo(x.dtype).max
    return x.new_full([n for i, n in enumerate(x.shape) if i not in dims], none)


def with_row(x: torch.Tensor, dim: int) -> torch.Tensor:
    """`x`, or where it has nothing along `dim` one row of zeros, so that it can be indexed."""
    return x if x.shape[dim] else x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])
