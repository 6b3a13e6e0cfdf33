"""Arrays in files, read block by block with `pread`.

Files are not mapped into memory: where a mapped file becomes shorter, the process is ended by the
system at its next access, without a word. A read that comes too short is an error like any other.
"""

import itertools
import math
import os
import weakref
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from meshdsl.backends.runtime.user_files import Refused, regular
from meshdsl.backends.runtime.values import Array

CALL = 16384
"""Bytes that are read in the time that one more call takes."""

Indices: TypeAlias = "range | Array"
"""Indices along a dim, in order and each once."""

LOAD_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, NotImplementedError)
"""What a damaged member of an archive raises, beside errors of the system and of memory."""


@dataclass(frozen=True)
class StoredArray:
    """One array of a file: `stored[slices]` reads that part of it (only that part where possible).

    `member` is the name inside a compressed archive, which has to be unpacked whole.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    stored: str
    offset: int = 0
    order: Any = "C"
    member: str = ""

    def __getitem__(self, part: Any) -> Array:
        """The values of one part of the array, in the byte order of this machine."""
        return from_stored(self.whole()[part], self.dtype)

    def whole(self) -> Any:
        """What reads blocks of the array as it is stored, or all of it, unpacked.

        Raises Refused where the file is not what it was when it was opened first.
        """
        if not self.member:
            return FileBlocks(self)
        try:
            with (
                open(self.path, "rb", opener=regular) as opened,
                zipfile.ZipFile(opened) as archive,
                archive.open(self.member) as file,
            ):
                return np.lib.format.read_array(file, allow_pickle=False)
        except (*LOAD_ERRORS, KeyError, RuntimeError, MemoryError) as error:
            raise Refused(f"{self.path} is damaged: {self.member}: {error}") from None
        except OSError as error:
            raise Refused(f"cannot read {self.path}: {error.strerror or error}") from None


def from_stored(array: Array, dtype: str) -> Array:
    """Values as numpy computes with them: native byte order, bf16 widened, bytes made truth."""
    array = np.asarray(array)
    if dtype == "bf16":
        return np.asarray(array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "bool":
        return np.asarray(array != 0)
    return np.array(array, dtype=array.dtype.newbyteorder("="))


class FileBlocks:
    """An array in an open file: `blocks[part]` reads a part, indexed as numpy does it.

    The file stays the one that was opened, also if another gets its name. Raises Refused where it
    cannot be opened or is too short, be it meanwhile.
    """

    def __init__(self, stored: StoredArray) -> None:
        self.path, self.offset, self.shape = stored.path, stored.offset, stored.shape
        self.dtype, self._turned = np.dtype(stored.stored), stored.order == "F"
        try:
            self._file = regular(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise Refused(f"cannot read {self.path}: {error.strerror}") from None
        weakref.finalize(self, os.close, self._file)

    @property
    def identity(self) -> tuple[int, ...]:
        """What tells the file from others, and from itself once it has changed."""
        found = os.fstat(self._file)
        return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: Any) -> Array:
        entries = _entries(part, self.shape)
        sels = [_selected(e, n) for e, n in zip(entries, self.shape, strict=True)]
        if self._turned:
            box = self._box(sels[::-1], self.shape[::-1]).T
        else:
            box = self._box(sels, self.shape)
        return np.asarray(box[tuple(_within(e, s) for e, s in zip(entries, sels, strict=True))])

    def _box(self, sels: Sequence[Indices], shape: tuple[int, ...]) -> Array:
        """The elements at all combinations of sorted indices of the dims, in C order."""
        level, width = _level(sels, shape, self.dtype.itemsize), self.dtype.itemsize
        box = np.empty([*map(len, sels[: level + 1]), *shape[level + 1 :]], self.dtype)
        steps = [math.prod(shape[i + 1 :]) * width for i in range(len(shape))]
        room, end = _bytes_of(box) if box.size else memoryview(b""), 0
        for start, size in _runs(sels[: level + 1], steps, width) if box.size else ():
            self.fill(room[end : end + size], self.offset + start)
            end += size
        for axis in range(level + 1, len(shape)):
            sel = sels[axis]
            at = slice(sel.start, sel.stop) if isinstance(sel, range) else sel
            box = box[(slice(None),) * axis + (at,)]
        return box

    def fill(self, room: memoryview, start: int) -> None:
        """Read bytes of the file from `start` on, as many as there is room for."""
        while room:
            try:
                got = os.preadv(self._file, [room], start)
            except OSError as error:
                raise Refused(f"cannot read {self.path}: {error.strerror}") from None
            if not got:
                raise Refused(f"{self.path} has become shorter while it was read")
            room, start = room[got:], start + got


def _bytes_of(box: Any) -> memoryview:
    return memoryview(box.reshape(-1).view(np.uint8))


def _entries(part: Any, shape: tuple[int, ...]) -> list[Any]:
    """One entry of an index for each dim."""
    entries = list(part) if isinstance(part, tuple) else [part]
    at = next((i for i, e in enumerate(entries) if e is Ellipsis), len(entries))
    missing = len(shape) - len(entries) + (at < len(entries))
    assert missing >= 0, f"{len(entries)} indices for {len(shape)} dims"
    return [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]


def _selected(entry: Any, size: int) -> Indices:
    """The indices of a dim that an entry needs, sorted and each once."""
    if isinstance(entry, slice):
        selected = range(size)[entry]
        return (
            selected
            if selected.step == 1
            else np.sort(np.arange(selected.start, selected.stop, selected.step))
        )
    every = np.unique(np.asarray(entry, np.int64))
    assert not len(every) or (every[0] >= 0 and every[-1] < size), f"an index beyond {size}"
    return every


def _within(entry: Any, selected: Indices) -> Any:
    """An entry of an index, for an array that has only the selected indices."""
    if isinstance(entry, slice):
        return slice(None, None, -1) if entry.step is not None and entry.step < 0 else slice(None)
    return np.searchsorted(np.asarray(selected), np.asarray(entry, np.int64))


def _pieces(selected: Indices) -> list[tuple[int, int]]:
    """The first and the number of the indices in each run without a gap."""
    if isinstance(selected, range):
        return [(selected.start, len(selected))]
    cuts = np.flatnonzero(np.diff(selected) != 1) + 1
    return [(int(p[0]), len(p)) for p in np.split(selected, cuts) if len(p)]


def _level(sels: Sequence[Indices], shape: tuple[int, ...], itemsize: int) -> int:
    """The dim whose runs are read whole in all inner dims: that of least calls and bytes."""
    cheapest, best, calls = math.inf, 0, 1
    for axis, chosen in enumerate(sels):
        read = calls * len(chosen) * math.prod(shape[axis + 1 :]) * itemsize
        cost = calls * len(_pieces(chosen)) * CALL + read
        if cost < cheapest:
            cheapest, best = cost, axis
        calls *= len(chosen)
    return best


def _runs(sels: Sequence[Indices], steps: Sequence[int], width: int) -> Iterator[tuple[int, int]]:
    """The first byte and the size of each run, in order. Without dims there is one element."""
    if not sels:
        yield 0, width
        return
    step = steps[len(sels) - 1]
    pieces = [(first * step, count * step) for first, count in _pieces(sels[-1])]
    outer = [[int(i) * step for i in sel] for sel, step in zip(sels[:-1], steps, strict=False)]
    for starts in itertools.product(*outer):
        base = sum(starts)
        yield from ((base + start, size) for start, size in pieces)
