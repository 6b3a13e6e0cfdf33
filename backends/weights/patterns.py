"""Keys of a model that differ in numbers alone, as patterns: `h.{}.attn.weight`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from meshdsl.backends.weights.model_files import ModelTensor
from meshdsl.records import dataclass

_NUMBER = re.compile(r"(?:(?<=\.)|^)(0|[1-9]\d{0,8})(?=\.|$)")
"""A part of a key between dots that is a number."""

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KeyPattern:
    """Keys of tensors of one dtype and shape: the `texts`, with a number between each two.

    Every combination of the `numbers` is a key.
    """

    texts: tuple[str, ...]
    numbers: tuple[range, ...]
    dtype: str
    shape: tuple[int, ...]

    def text(self, dims: Sequence[str]) -> str:
        """The key as a block of weights writes it, with a dim for each of the numbers."""
        parts = [self.texts[0]]
        for number, dim, text in zip(self.numbers, dims, self.texts[1:], strict=True):
            factor = "" if number.step == 1 else f"{number.step} * "
            offset = "" if number.start == 0 else f" + {number.start}"
            parts += ["{", factor, dim, offset, "}", text]
        return "".join(parts)

    @property
    def described(self) -> str:
        """The key with `*` for the numbers, its dtype and sizes, and how many there are."""
        count = math.prod(len(number) for number in self.numbers)
        times = f", {count} tensors" if count > 1 else ""
        sizes = ", ".join(map(str, self.shape))
        return f"{'*'.join(self.texts)!r} {self.dtype}[{sizes}]{times}"


def patterns_of(tensors: Mapping[str, ModelTensor]) -> list[KeyPattern]:
    """The patterns of all keys, in the order of the first key of each."""
    alike: dict[tuple[tuple[str, ...], str, tuple[int, ...]], list[Indices]] = {}
    for key, tensor in tensors.items():
        parts = _NUMBER.split(key)
        numbers = tuple(map(int, parts[1::2]))
        alike.setdefault((tuple(parts[::2]), tensor.dtype, tensor.shape), []).append(numbers)
    return [
        KeyPattern(texts, numbers, dtype, shape)
        for (texts, dtype, shape), indices in alike.items()
        for texts, numbers in _folded(texts, indices)
    ]


def _folded(
    texts: tuple[str, ...], indices: Sequence[Indices]
) -> Iterator[tuple[tuple[str, ...], tuple[range, ...]]]:
    """Patterns of keys that differ in the numbers between the texts.

    A number with one value is part of the text. One whose values are no range, or not there in
    every combination, has a pattern for each value.
    """
    values = [sorted(set(column)) for column in zip(*indices, strict=True)]
    ranges = [_as_range(each) for each in values]
    varying = [at for at, each in enumerate(values) if len(each) > 1]
    full = math.prod(map(len, values)) == len(indices)
    gaps = [at for at in varying if ranges[at] is None]
    single = [at for at, each in enumerate(values) if len(each) == 1]
    if single:
        yield from _with_value(texts, indices, single[0], values[single[0]][0])
    elif gaps or not full:
        at = min(gaps or varying, key=lambda at: len(values[at]))
        for value in values[at]:
            yield from _with_value(
                texts, [each for each in indices if each[at] == value], at, value
            )
    else:
        yield texts, tuple(each for each in ranges if each is not None)


def _with_value(
    texts: tuple[str, ...], indices: Sequence[Indices], at: int, value: int
) -> Iterator[tuple[tuple[str, ...], tuple[range, ...]]]:
    """Patterns with the number at one place in the text."""
    joined = (*texts[:at], f"{texts[at]}{value}{texts[at + 1]}", *texts[at + 2 :])
    yield from _folded(joined, [(*each[:at], *each[at + 1 :]) for each in indices])


def _as_range(values: Sequence[int]) -> range | None:
    """Sorted numbers as a range; None for gaps, also for one between just two numbers."""
    step = values[1] - values[0] if len(values) > 1 else 1
    numbers = range(values[0], values[-1] + 1, step)
    is_range = list(numbers) == list(values) and (step == 1 or len(values) > 2)
    return numbers if is_range else None
