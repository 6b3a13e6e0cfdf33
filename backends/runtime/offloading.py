"""States of an optimizer that lie elsewhere: read, worked on and written back in chunks."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from meshdsl.backends.runtime.main import local_value
from meshdsl.backends.runtime.pieces import in_pieces
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


class Away(ABC):
    """A tensor that a store keeps, of `shape` and `dtype`.

    It stands for the tensor where that is kept, moved to a device, or copied to the CPU.
    """

    def __init__(self, store: Store, like: torch.Tensor) -> None:
        self.store, self.shape, self.dtype = store, like.shape, like.dtype

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

    def __getitem__(self, part: Any) -> torch.Tensor:
        """A part of it, in memory."""
        return self.cpu()[part]

    def to(self, where: torch.device) -> "Away":
        """Itself: it stays where it is."""
        return self

    def clone(self) -> "Away":
        """A copy of it, kept beside the others."""
        return self.store.keep(self.cpu())

    def contiguous(self) -> "Away":
        """Itself, which is."""
        return self


def chunks(
    tensors: Sequence[torch.Tensor], states: Sequence[Away], size: int
) -> Iterator[list[torch.Tensor]]:
    """Pieces of tensors, and of states elsewhere, which are put back once they are worked on.

    Those of the first tensor are views; one of a state has at most `size` bytes.
    """
    at, most = 0, size // max(s.dtype.itemsize for s in states)
    room = [state.room(min(most, tensors[0].numel())) for state in states]
    for pieces in in_pieces(tensors[:1], tensors[1:], most):
        parts = [s.take(buffer, pieces[0], at) for s, buffer in zip(states, room, strict=True)]
        yield [*pieces, *parts]
        for state, part in zip(states, parts, strict=True):
            state.put(part, at)
        at += pieces[0].numel()
