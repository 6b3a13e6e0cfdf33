"""Tensors of 8-bit floats with scales, and their products."""

import torch
import torch.nn.functional as F

LEAST_EXTREME = 1e-12
"""The least greatest magnitude of a tensor: zeros have a scale, too."""


def f8_scale(x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What 1 stands for in 8 bits, in f32: the greatest magnitude over `dims` is the largest."""
    if all(x.shape[dim] for dim in dims):
        extreme = torch.linalg.vector_norm(x, float("inf"), dims).float()
    else:
        extreme = torch.zeros([n for i, n in enumerate(x.shape) if i not in dims], device=x.device)
    scale = extreme.clamp(min=LEAST_EXTREME) / torch.finfo(dtype).max
    return scale  # type: ignore[no-any-return]


def to_f8(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Multiples of the scale as 8-bit floats, the nearest; what is beyond them, the largest."""
    largest = torch.finfo(dtype).max
    multiples = x.to(torch.float32, copy=True).div_(scale)
    return multiples.clamp_(-largest, largest).to(dtype)


def f8_einsum(
    form: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`torch.einsum(form, a * scale_a, b * scale_b)` as a product of matrices, added up in f32.

    A scale has all dims of its operand that the result has, or none.
    """
    operands, result = form.split("->")
    left, right = operands.split(",")
    summed = [d for d in left if d in right]
    rows, cols = ([d for d in dims if d not in summed] for dims in (left, right))
    sizes = dict(zip(left + right, a.shape + b.shape, strict=True))
    first = matrix(a, left, rows, summed)
    second = matrix(b, right, cols, summed)
    scale_a = scale_a.reshape(-1, 1) if scale_a.dim() else scale_a
    scale_b = scale_b.reshape(1, -1) if scale_b.dim() else scale_b
    product = f8_matmul(first, second, scale_a, scale_b, dtype)
    product = product.view([sizes[d] for d in rows + cols])
    return product.permute([(rows + cols).index(d) for d in result])


def matrix(x: torch.Tensor, dims: str, rows: list[str], summed: list[str]) -> torch.Tensor:
    """`x` as a matrix, one row for each index of `rows`, in order in memory."""
    ordered = x.permute([dims.index(d) for d in rows + summed]).contiguous()
    return ordered.view(ordered.shape[: len(rows)].numel(), ordered.shape[len(rows) :].numel())


def f8_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The product of `a` and the transpose of `b`, times the scales.

    Without units for 8 bits the operands are widened: the same product.
    """
    if not (has_f8_units(a) and a.numel() and b.numel()):
        return (a.float() @ b.float().t()).mul_(scale_a).mul_(scale_b).to(dtype)
    # The units take rows of multiples of 16 bytes, and as many columns.
    a, b = (padded_to(x, 1, 16) for x in (a, b))
    cols, b = b.shape[0], padded_to(b, 0, 16)
    if scale_a.dim() == scale_b.dim() == 0:
        written = torch.float32 if dtype == torch.float64 else dtype
        product = torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=written)
        return product[:, :cols].contiguous().to(dtype)
    one = torch.ones((), device=a.device)
    product = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)
    return product[:, :cols].mul(scale_a).mul_(scale_b).to(dtype)


def has_f8_units(x: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU that multiplies in 8 bits: of compute capability 8.9 or more."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)


def padded_to(x: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """`x` with zeros behind it, so that its size along `dim` is a multiple."""
    missing = -x.shape[dim] % multiple
    if not missing:
        return x
    numbers = F.pad(x.view(torch.uint8), (0, 0) * (1 - dim) + (0, missing))
    return numbers.view(x.dtype)
