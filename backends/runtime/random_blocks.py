"""Random numbers of one block of a tensor, the same under every split. Pasted as text.

The counter is the row-major index of an element in the whole tensor, with the last dim in pairs: a
hash of 64 bits has a word for each of both. So a device draws its own block, and nothing else.
(SplitMix64, Steele et al. 2014; counters in place of a state as in Salmon et al. 2011.)
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshdsl.backends.runtime.splitmix import GOLDEN, MIX, keeping, wrapped

CHUNK = 1 << 14
"""The number of hashes at a time that stay in the cache of a processor."""

Sizes = tuple[int, ...]


def as_matrix(sizes: Sizes, shape: Sizes) -> Sizes:
    """The rows and columns of a block: its rows are one where they follow one another."""
    merged = sizes[-1] % 2 == 0 and shape[1:] == sizes[1:]
    return (1, math.prod(shape)) if merged else (math.prod(shape[:-1]), shape[-1])


def random_words(
    key: Any, sizes: Sizes, starts: Sizes, shape: Sizes, where: Any
) -> Iterator[tuple[Any, torch.Tensor, int]]:
    """The words of a block as a matrix, in chunks: where, the words, how many to skip.

    The block begins at `starts` of a tensor of `sizes`. The words of a chunk are int32; the first
    of each row belongs to an even index, perhaps one before the block. The next chunk reuses the
    memory.
    """
    height, columns = as_matrix(sizes, shape)
    rows: Any = 0
    for size, start, extent in zip(sizes[:-1], starts, shape, strict=False):
        indices = start if height == 1 else torch.arange(start, start + extent, device=where)
        rows = rows * size + indices if height == 1 else (rows * size + indices).view(-1, 1)
    skipped = starts[-1] % 2
    firsts = wrapped((rows * ((sizes[-1] + 1) // 2) + starts[-1] // 2) * GOLDEN)
    firsts = wrapped(firsts + key)
    width = (skipped + columns + 1) // 2
    most = CHUNK if where.type == "cpu" else 1 << 62
    if height == 1 and width <= most:  # the fewest calls, which count where elements are few
        z = torch.arange(width, device=where).mul_(GOLDEN).add_(firsts)[None]
        hash_into(z, torch.empty_like(z))
        yield ..., z.view(torch.int32), skipped
        return
    step, tall = min(max(width, 1), most), max(1, most // max(width, 1))
    base = torch.arange(step, device=where)[None].mul_(GOLDEN)
    memory = torch.empty((2, min(tall, height) * step), dtype=torch.int64, device=where)
    for top in range(0, height, tall):
        for left in range(0, width, step):
            begin = firsts if height == 1 else firsts[top : top + tall]
            deep, many = min(tall, height - top), min(step, width - left)
            z, other = memory[:, : deep * many].view(2, deep, many).unbind()
            torch.add(base[:, :many], wrapped(begin + wrapped(left * GOLDEN)), out=z)
            hash_into(z, other)
            low, high = max(0, 2 * left - skipped), min(columns, 2 * (left + many) - skipped)
            yield (
                (slice(top, top + deep), slice(low, high)),
                z.view(torch.int32),
                skipped * (not left),
            )


def hash_into(z: torch.Tensor, other: torch.Tensor) -> None:
    """Replace the elements of `z` by their hashes; `other` is memory of the same shape."""
    for shift, factor in MIX:
        torch.bitwise_right_shift(z, shift, out=other)
        z.bitwise_xor_(other.bitwise_and_((1 << 64 - shift) - 1)).mul_(factor)
    torch.bitwise_right_shift(z, 31, out=other)
    z.bitwise_xor_(other.bitwise_and_((1 << 33) - 1))


def dropped(x: torch.Tensor, rate: float, key: Any, sizes: Sizes, starts: Sizes) -> torch.Tensor:
    """Each element of `x` becomes 0 with probability `rate`, else 1 / (1 - rate) times itself.

    `x` is the block at `starts` of a tensor of `sizes`.
    """
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sizes, starts, shape = sizes or (1,), starts or (0,), tuple(x.shape) or (1,)
    matrix, (last, scale) = as_matrix(sizes, shape), keeping(rate)
    matrix_in, matrix_out = x.reshape(matrix), result.view(matrix)
    wide = torch.promote_types(x.dtype, torch.float32)
    factors: Any = None
    for at, words, skip in random_words(key, sizes, starts, shape, x.device):
        part = matrix_out[at]
        if words.shape != part.shape:
            words = words[:, skip : skip + part.shape[1]]
        if factors is None or factors.shape != part.shape:
            factors = torch.empty(part.shape, dtype=wide, device=x.device)
        torch.mul(matrix_in[at], torch.le(words, last, out=factors).mul_(scale), out=part)
    return result


def random_numbers(
    how: Callable[[Any, Any], Any], key: Any, sizes: Sizes, starts: Sizes, shape: Sizes
) -> torch.Tensor:
    """The block at `starts` of a tensor of `sizes`, in f32; `how` makes it of words."""
    result = torch.empty(shape)
    sizes, starts, shape = sizes or (1,), starts or (0,), shape or (1,)
    matrix = result.view(as_matrix(sizes, shape))
    for at, words, skip in random_words(key, sizes, starts, shape, result.device):
        part = matrix[at]
        part.copy_(how(words, torch)[:, skip : skip + part.shape[1]])
    return result
