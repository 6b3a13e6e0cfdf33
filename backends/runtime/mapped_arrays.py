"""Parameters in the tensors of other files: read block by block, each of just its own bytes.

A table of them is a file, so that every process of a run reads the same ones.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from meshdsl.backends.runtime.stored import FileBlocks, StoredArray, from_stored
from meshdsl.backends.runtime.values import NUMPY_DTYPES, Array

SUFFIX = ".mapped.json"
"""The suffix of the file of a table."""


@dataclass(frozen=True)
class FileElements:
    """Elements of a file: at byte `offset` plus each index times `strides`, which are in bytes.

    `dtype` is the language's, `stored` numpy's.
    """

    path: str
    dtype: str
    stored: str
    offset: int
    strides: tuple[int, ...]

    def read(self, selected: Sequence[Array]) -> Array:
        """The values at all combinations of indices, of which each dim has some, sorted."""
        order = sorted(range(len(selected)), key=lambda axis: -self.strides[axis])
        outer, run = self._runs(selected, order)
        sizes = [len(selected[axis]) for axis in order]
        values = np.empty(sizes, np.dtype(self.stored))
        if values.size:
            blocks = FileBlocks(StoredArray(self.path, self.dtype, (), self.stored))
            flat: Any = values.reshape(-1).view(np.uint8)
            memory = memoryview(flat)
            for number, start in enumerate(outer.tolist()):
                blocks.fill(memory[number * run : (number + 1) * run], start)
        return from_stored(values, self.dtype).transpose(np.argsort(order))

    def _runs(self, selected: Sequence[Array], order: Sequence[int]) -> tuple[Array, int]:
        """The first byte of each run that is read at once, in order, and the bytes of a run.

        Runs have one length: they end where the indices of any dim have a gap.
        """
        run, starts = np.dtype(self.stored).itemsize, np.array([self.offset])
        inner = list(order)
        while inner and self.strides[inner[-1]] == run and _is_range(selected[inner[-1]]):
            axis = inner.pop()
            starts = starts + int(selected[axis][0]) * run if len(selected[axis]) else starts
            run *= len(selected[axis])
        for axis in inner:
            steps = selected[axis].astype(np.int64) * self.strides[axis]
            starts = (starts[:, None] + steps).reshape(-1)
        return starts, run


def _is_range(indices: Array) -> bool:
    return bool(np.all(np.diff(indices) == 1))


@dataclass(frozen=True)
class MappedArray:
    """A parameter in tensors of files: `array[part]` reads only the bytes of that part.

    Each combination of indices of the `numbered` dims has one of the `tensors`, in row-major order,
    whose `strides` are those of the other dims. Of these the files have the first `extents`
    indices; values at others are 0.
    """

    dtype: str
    shape: tuple[int, ...]
    numbered: tuple[int, ...]
    extents: tuple[int, ...]
    tensors: tuple[FileElements, ...]

    def __getitem__(self, part: Any) -> Array:
        """The values of a part, which has an entry for each dim: a slice, or sorted indices."""
        entries = part if isinstance(part, tuple) else (part,)
        assert len(entries) in (0, len(self.shape)), "an entry for each dim"
        entries = entries or (slice(None),) * len(self.shape)
        selected = [np.arange(n)[e] for e, n in zip(entries, self.shape, strict=True)]
        within = [axis for axis in range(len(self.shape)) if axis not in self.numbered]
        of_tensor = [
            selected[axis][selected[axis] < extent]
            for axis, extent in zip(within, self.extents, strict=True)
        ]
        is_whole = all(len(o) == len(selected[a]) for a, o in zip(within, of_tensor, strict=True))
        make = np.empty if is_whole else np.zeros
        values = make([len(s) for s in selected], numpy_dtype(self.dtype))
        held = dict(zip(within, (slice(len(o)) for o in of_tensor), strict=True))
        for at in np.ndindex(*(len(selected[axis]) for axis in self.numbered)):
            where = dict(zip(self.numbered, at, strict=True))
            number = 0
            for axis, index in where.items():
                number = number * self.shape[axis] + int(selected[axis][index])
            part_of_values = tuple({**held, **where}[axis] for axis in range(len(self.shape)))
            values[part_of_values] = self.tensors[number].read(of_tensor)
        return values


def mapped_text(arrays: Mapping[str, MappedArray]) -> str:
    """The text of a table."""
    return json.dumps({name: asdict(array) for name, array in arrays.items()})


def read_mapped(text: bytes) -> Iterator[tuple[str, MappedArray]]:
    """The arrays of a table that another process of this run has written."""
    for name, array in json.loads(text).items():
        tensors = (FileElements(**{**t, "strides": tuple(t["strides"])}) for t in array["tensors"])
        shape, numbered, extents = (tuple(array[k]) for k in ("shape", "numbered", "extents"))
        yield name, MappedArray(array["dtype"], shape, numbered, extents, tuple(tensors))


def end_of(elements: FileElements, sizes: Sequence[int]) -> int:
    """The byte after the last one of the elements."""
    last = sum((n - 1) * stride for n, stride in zip(sizes, elements.strides, strict=True))
    return elements.offset + last + np.dtype(elements.stored).itemsize if math.prod(sizes) else 0


def numpy_dtype(dtype: str) -> "np.dtype[Any]":
    """The numpy dtype of values of a dtype of the language, or of one that only numpy has."""
    return np.dtype(NUMPY_DTYPES.get(dtype, dtype))
