"""Tensors that are stored in another memory: loaded whole, or read and written back in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from meshdsl.backends.runtime.main import local_value
from meshdsl.backends.runtime.pieces import flat_piece, in_pieces, pieces_of
from meshdsl.backends.runtime.values import Spec


class Store(ABC):
    """Where one device keeps tensors beside its own memory.

    `size` are the bytes kept; `read` and `written` count what is moved to the device and back.
    """

    def __init__(self) -> None:
        self.size = self.read = self.written = 0

    def local_value(self, name: str, spec: Spec, *given: Any) -> Any:
        """As the function: what a device has of a tensor, kept here where that lies elsewhere."""
        found = local_value(name, spec, *given)
        return self.keep(found) if spec.away else found

    @abstractmethod
    def keep(self, tensor: torch.Tensor) -> "Away":
        """Keep a tensor; what stands for it from here on."""

    @abstractmethod
    def store(self, tensor: torch.Tensor) -> "Transfer":
        """Begin to keep a tensor for as long as something reads it: the `Away` for it."""


class Transfer:
    """A tensor on its way from one memory to another: it is there after `wait`."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        self.finish = finish

    def wait(self) -> Any:
        """The tensor, once it has arrived; it is not kept here."""
        finish = self.finish
        del self.finish
        return finish()


class Away(ABC):
    """A tensor that a store keeps, of `shape` and `dtype`, for the device `where`.

    It stands for the tensor where that is kept, moved to a device, or copied to the CPU.
    """

    def __init__(self, store: Store, shape: torch.Size, dtype: torch.dtype) -> None:
        self.store, self.shape, self.dtype = store, shape, dtype
        self.where = torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.shape.numel() * self.dtype.itemsize

    @abstractmethod
    def row(self, index: int) -> "Away":
        """What it has at an index of its first dim: kept in the same place."""

    @abstractmethod
    def load(self) -> Transfer:
        """Begin to move all of it to the device, into memory of its own."""

    @abstractmethod
    def cpu(self) -> torch.Tensor:
        """All of it, in memory."""

    @abstractmethod
    def room(self, count: int) -> torch.Tensor:
        """Memory for a chunk of `count` elements."""

    @abstractmethod
    def take(self, room: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
        """The elements from number `at` on, as many and where those of `like` are."""

    @abstractmethod
    def put(self, part: torch.Tensor, at: int) -> None:
        """Write what was taken back, worked on."""

    def __getitem__(self, part: Any) -> Any:
        """A row, which stays where it is; of other indices, a part in memory."""
        return self.row(part) if isinstance(part, int) else self.cpu()[part]

    def to(self, where: torch.device) -> "Away":
        """Itself: it stays where it is, and is loaded to there."""
        self.where = where
        return self

    def clone(self) -> "Away":
        """A copy of it, kept beside the others."""
        return self.store.keep(self.cpu()).to(self.where)

    def contiguous(self) -> "Away":
        """Itself, which is."""
        return self


def load(x: Away) -> torch.Tensor:
    """All of a tensor that is stored in another memory."""
    return load_start(x).wait()  # type: ignore[no-any-return]


def load_start(x: Away) -> Transfer:
    """Begin a `load`."""
    return x.load()


def store(place: Store, x: torch.Tensor) -> Away:
    """A tensor in another memory."""
    return store_start(place, x).wait()  # type: ignore[no-any-return]


def store_start(place: Store, x: torch.Tensor) -> Transfer:
    """Begin a `store`; `x` is not to be changed before it has ended."""
    return place.store(x)


def flat_pieces(tensor: torch.Tensor, most: int) -> Iterator[list[torch.Tensor]]:
    """A tensor in pieces of `most` elements, in the order of its dims wherever they lie."""
    if tensor.numel() <= most:
        yield [tensor]
        return
    for (index,) in pieces_of([tensor.numel()], most):
        yield [flat_piece(tensor, index)]


def chunks(
    tensors: Sequence[torch.Tensor],
    states: Sequence[Away],
    size: int,
    written: Sequence[Away] = (),
) -> Iterator[list[torch.Tensor]]:
    """Pieces of tensors, and of states elsewhere, which are put back once they are worked on.

    Those of the first of several tensors are views; one of a state has at most `size` bytes. Of
    what is only `written` there is room to be filled.
    """
    at, most = 0, size // max(s.dtype.itemsize for s in states)
    room = [state.room(min(most, tensors[0].numel())) for state in states]
    several = in_pieces(tensors[:1], tensors[1:], most)
    for pieces in several if len(tensors) > 1 else flat_pieces(tensors[0], most):
        first = pieces[0]
        parts = [s.take(buffer, first, at) for s, buffer in zip(states, room, strict=True)]
        filled = [torch.empty(first.shape, dtype=x.dtype, device=first.device) for x in written]
        yield [*pieces, *parts, *filled]
        for each, part in zip((*states, *written), (*parts, *filled), strict=True):
            each.put(part, at)
        at += first.numel()
