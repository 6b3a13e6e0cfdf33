"""States of an optimizer that lie in a file."""

import functools
import os
import tempfile
import weakref
from typing import Any

import torch

from meshdsl.backends.runtime.offloading import Away, Store


class Disk(Store):
    """The file of one device, in the folder TMPDIR.

    It has no name from the beginning: nothing is left of it, however the process ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = os.environ.get("TMPDIR") or tempfile.gettempdir()

    @functools.cached_property
    def file(self) -> Any:
        """The file, opened when the first tensor is kept."""
        file = tempfile.TemporaryFile(buffering=0, dir=self.folder)
        weakref.finalize(self, file.close)
        return file

    def keep(self, tensor: torch.Tensor) -> "OnDisk":
        """Write a tensor behind the others."""
        stored = OnDisk(self, tensor, self.size)
        self.size += tensor.nbytes
        stored.put(tensor, 0)
        return stored


class OnDisk(Away):
    """A tensor in the file of a device, from byte `start` on."""

    store: Disk

    def __init__(self, disk: Disk, like: torch.Tensor, start: int) -> None:
        super().__init__(disk, like)
        self.start = start

    def cpu(self) -> torch.Tensor:
        """All of it, in memory."""
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.fill(tensor, 0)
        return tensor

    def room(self, count: int) -> torch.Tensor:
        """Memory for a chunk of `count` elements."""
        return torch.empty(count, dtype=self.dtype, device="cpu")

    def take(self, room: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
        """The elements from number `at` on, as many and where those of `like` are."""
        part = room[: like.numel()].view(like.shape)
        self.fill(part, at)
        return part.to(like.device)

    def fill(self, values: torch.Tensor, at: int) -> None:
        """Fill a tensor with the elements from number `at` on."""
        left, start = bytes_of(values), self.start + at * values.itemsize
        while left:
            count = os.preadv(self.store.file.fileno(), [left], start)
            if not count:
                raise EOFError(f"the file of states in {self.store.folder} ends too early")
            left, start = left[count:], start + count
        self.store.read += values.nbytes

    def put(self, part: torch.Tensor, at: int) -> None:
        """Write a tensor over the elements from number `at` on."""
        left, start = bytes_of(part), self.start + at * part.itemsize
        while left:
            count = os.pwrite(self.store.file.fileno(), left, start)
            left, start = left[count:], start + count
        self.store.written += part.nbytes


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a tensor, or of a copy where its elements do not follow each other there."""
    flat = values.detach().cpu().reshape(-1)
    # One element, or none, may have any stride; bytes are seen with 1 alone.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data
