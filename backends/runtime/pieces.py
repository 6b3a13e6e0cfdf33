"""Tensors in pieces, for what is done to large ones without memory for all of it."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch


def in_pieces(
    written: Sequence[torch.Tensor], read: Sequence[torch.Tensor], most: int
) -> Iterator[list[torch.Tensor]]:
    """Pieces of `most` elements of tensors of one shape; those of what is `written` are views."""
    first = written[0]
    if first.numel() <= most:
        yield [*written, *read]
        return
    is_flat = all(x.is_contiguous() for x in written)
    for index in pieces_of([first.numel()] if is_flat else first.shape, most):
        yield [flat_piece(x, index[0]) if is_flat else x[index] for x in (*written, *read)]


def pieces_of(shape: Sequence[int], most: int) -> Iterator[Any]:
    """Indices that cut a tensor, in the order of its elements, into pieces of `most` elements."""
    if 0 in shape:
        yield (slice(0, 0),)
        return
    row = torch.Size(shape[1:]).numel()
    step = most // row
    for first in range(0, shape[0], max(step, 1)):
        if step:
            yield (slice(first, first + step),)
        else:
            yield from ((first, *inner) for inner in pieces_of(shape[1:], most))


def flat_piece(tensor: torch.Tensor, index: slice) -> torch.Tensor:
    """Elements in the order of the dims: a view, or a copy of a tensor that is not contiguous.

    No more is copied than the rows that they lie in.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)[index]
    row = tensor[0].numel()
    start, stop = index.start // row, -(-min(index.stop, tensor.numel()) // row)
    if stop - start > 2:
        return tensor[start:stop].reshape(-1)[index.start - start * row : index.stop - start * row]
    ends = (
        (r, max(index.start - r * row, 0), min(index.stop - r * row, row))
        for r in range(start, stop)
    )
    return torch.cat([flat_piece(tensor[r], slice(a, b)) for r, a, b in ends])
