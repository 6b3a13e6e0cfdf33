"""States of an optimizer that lie in a file: read, worked on and written back in chunks."""

import functools
import os
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshdsl.backends.runtime.main import local_value
from meshdsl.backends.runtime.values import Spec


class Disk:
    """The file of one device, in the folder TMPDIR. `read` and `written` count its bytes.

    It has no name from the beginning: nothing is left of it, however the process ends.
    """

    def __init__(self) -> None:
        self.folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
        self.size = self.read = self.written = 0

    @functools.cached_property
    def file(self) -> Any:
        """The file, opened when the first tensor is kept."""
        found = tempfile.TemporaryFile(buffering=0, dir=self.folder)
        weakref.finalize(self, found.close)
        return found

    def local_value(self, name: str, spec: Spec, *given: Any) -> Any:
        """As the function: what a device has of a tensor, kept here where that lies on disk."""
        found = local_value(name, spec, *given)
        return self.keep(found) if spec.disk else found

    def keep(self, tensor: torch.Tensor) -> "OnDisk":
        """Write a tensor behind the others; what stands for it from here on."""
        kept = OnDisk(self, tensor, self.size)
        self.size += tensor.nbytes
        kept.write(tensor)
        return kept


class OnDisk:
    """A tensor in the file of a device, from byte `start` on.

    It stands for the tensor where that is kept, moved to a device, or copied to the CPU.
    """

    def __init__(self, disk: Disk, like: torch.Tensor, start: int) -> None:
        self.disk, self.start = disk, start
        self.shape, self.dtype = like.shape, like.dtype

    def cpu(self) -> torch.Tensor:
        """All of it, in memory."""
        found = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(found)
        return found

    def __getitem__(self, part: Any) -> torch.Tensor:
        """A part of it, in memory."""
        return self.cpu()[part]

    def to(self, where: torch.device) -> "OnDisk":
        """Itself: it stays where it is."""
        return self

    def clone(self) -> "OnDisk":
        """A copy of it, behind the others in the file."""
        return self.disk.keep(self.cpu())

    def contiguous(self) -> "OnDisk":
        """Itself, which is."""
        return self

    def read(self, values: torch.Tensor, at: int = 0) -> None:
        """Fill a tensor with the elements from number `at` on."""
        left, start = bytes_of(values), self.start + at * values.itemsize
        while left:
            count = os.preadv(self.disk.file.fileno(), [left], start)
            if not count:
                raise EOFError(f"the file of states in {self.disk.folder} ends too early")
            left, start = left[count:], start + count
        self.disk.read += values.nbytes

    def write(self, values: torch.Tensor, at: int = 0) -> None:
        """Write a tensor over the elements from number `at` on."""
        left, start = bytes_of(values), self.start + at * values.itemsize
        while left:
            count = os.pwrite(self.disk.file.fileno(), left, start)
            left, start = left[count:], start + count
        self.disk.written += values.nbytes


def bytes_of(values: torch.Tensor) -> memoryview:
    """The memory of a tensor, or of a copy where its elements do not follow each other there."""
    flat = values.detach().cpu().reshape(-1)
    # One element, or none, may have any stride; bytes are seen with 1 alone.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def chunks(
    tensors: Sequence[torch.Tensor], states: Sequence[OnDisk], size: int
) -> Iterator[list[torch.Tensor]]:
    """Pieces of tensors, and of states on disk, which are written back once they are worked on.

    Those of the first tensor are views; one of a state has at most `size` bytes.
    """
    first, at, most = tensors[0], 0, size // max(s.dtype.itemsize for s in states)
    is_flat = first.is_contiguous()
    room = [torch.empty(min(most, first.numel()), dtype=s.dtype, device="cpu") for s in states]
    for index in pieces_of([first.numel()] if is_flat else first.shape, most):
        pieces = [flat_piece(x, index[0]) if is_flat else x[index] for x in tensors]
        parts = [x[: pieces[0].numel()].view(pieces[0].shape) for x in room]
        for state, part in zip(states, parts, strict=True):
            state.read(part, at)
        moved = [part.to(pieces[0].device) for part in parts]
        yield [*pieces, *moved]
        for state, part in zip(states, moved, strict=True):
            state.write(part, at)
        at += pieces[0].numel()


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
    """Elements of a tensor in the order of its dims: a view, or of another order in memory a copy.

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
