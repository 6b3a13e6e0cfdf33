"""Tensors that are stored in a file."""

import functools
import os
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from meshdsl.backends.runtime.offloading import Away, Store, Transfer


class Disk(Store):
    """The file of one device, in the folder TMPDIR.

    It has no name from the beginning: nothing is left of it, however the process ends.
    """

    def __init__(self) -> None:
        super().__init__()
        # By size, where the bytes of what was stored are free again.
        self.free: dict[int, list[int]] = {}
        self.folder = os.environ.get("TMPDIR") or tempfile.gettempdir()

    @functools.cached_property
    def file(self) -> Any:
        """The file, opened when the first tensor is kept."""
        file = tempfile.TemporaryFile(buffering=0, dir=self.folder)
        weakref.finalize(self, file.close)
        return file

    @functools.cached_property
    def reader(self) -> ThreadPoolExecutor:
        """A thread that reads what is loaded, in order, while the device computes."""
        return ThreadPoolExecutor(1, "disk")

    @functools.cached_property
    def writer(self) -> ThreadPoolExecutor:
        """A thread that writes what is stored, in order, while the device computes."""
        return ThreadPoolExecutor(1, "disk")

    def store(self, tensor: torch.Tensor) -> Transfer:
        """Begin to write a tensor, in the order in which it lies."""
        self.written += tensor.nbytes
        values = torch.empty_like(tensor, device="cpu").copy_(tensor)
        free = self.free.setdefault(tensor.nbytes, [])
        start = free.pop() if free else self.size
        self.size = max(self.size, start + tensor.nbytes)
        on_disk = OnDisk(self, tensor.shape, tensor.dtype, start)
        weakref.finalize(on_disk, free.append, start)
        on_disk.where, on_disk.strides = tensor.device, values.stride()
        flat = values.as_strided((values.numel(),), (1,))
        on_disk.writing = self.writer.submit(on_disk.write, flat, 0)
        return Transfer(lambda: on_disk)

    def keep(self, tensor: torch.Tensor) -> "OnDisk":
        """Write a tensor behind the others."""
        stored = OnDisk(self, tensor.shape, tensor.dtype, self.size)
        self.size += tensor.nbytes
        stored.put(tensor, 0)
        return stored


class OnDisk(Away):
    """A tensor in the file of a device, from byte `start` on."""

    store: Disk

    def __init__(self, disk: Disk, shape: torch.Size, dtype: torch.dtype, start: int) -> None:
        super().__init__(disk, shape, dtype)
        self.start = start
        # How it lies where that is not in the order of its dims, and what is still writing it.
        self.strides: tuple[int, ...] | None = None
        self.writing: Future[None] | None = None

    def row(self, index: int) -> "OnDisk":
        """What it has at an index of its first dim: the same bytes of the file."""
        shape = self.shape[1:]
        start = self.start + index * shape.numel() * self.dtype.itemsize
        row = OnDisk(self.store, shape, self.dtype, start)
        row.where = self.where
        return row

    def load(self) -> Transfer:
        """Begin to read all of it into memory; it is moved to the device at the end."""
        flat = torch.empty(self.shape.numel(), dtype=self.dtype, device="cpu")
        tensor = flat.view(self.shape)
        if self.strides is not None:
            tensor = flat.as_strided(self.shape, self.strides)
        self.store.read += self.nbytes
        reading = self.store.reader.submit(self._read, flat)

        def finish() -> torch.Tensor:
            """The tensor, on the device. Raises OSError or EOFError."""
            reading.result()
            return tensor.to(self.where)

        return Transfer(finish)

    def _read(self, values: torch.Tensor) -> None:
        if self.writing is not None:
            self.writing.result()
        self.fill(values, 0)

    def cpu(self) -> torch.Tensor:
        """All of it, in memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(tensor, 0)
        self.store.read += self.nbytes
        return tensor

    def room(self, count: int) -> torch.Tensor:
        """Memory for a chunk of `count` elements."""
        return torch.empty(count, dtype=self.dtype, device="cpu")

    def take(self, room: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
        """The elements from number `at` on, as many and where those of `like` are."""
        part = room[: like.numel()].view(like.shape)
        self.fill(part, at)
        self.store.read += part.nbytes
        return part.to(like.device)

    def fill(self, values: torch.Tensor, at: int) -> None:
        """Fill a tensor with the elements from number `at` on."""
        left, start = bytes_of(values), self.start + at * values.itemsize
        while left:
            count = os.preadv(self.store.file.fileno(), [left], start)
            if not count:
                raise EOFError(f"the file in {self.store.folder} ends too early")
            left, start = left[count:], start + count

    def put(self, part: torch.Tensor, at: int) -> None:
        """Write a tensor over the elements from number `at` on."""
        self.write(part, at)
        self.store.written += part.nbytes

    def write(self, part: torch.Tensor, at: int) -> None:
        """The same, uncounted."""
        left, start = bytes_of(part), self.start + at * part.itemsize
        while left:
            count = os.pwrite(self.store.file.fileno(), left, start)
            left, start = left[count:], start + count


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a tensor, or of a copy where its elements do not follow each other there."""
    flat = values.detach().cpu().reshape(-1)
    # One element, or none, may have any stride; bytes are seen with 1 alone.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
