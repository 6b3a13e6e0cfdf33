"""States of an optimizer that lie in the memory of the host of a GPU.

A CPU has no other: there nothing moves.
"""

import torch

from meshdsl.backends.runtime.offloading import Away, Store


class Host(Store):
    """What one device keeps in the memory of its host."""

    def keep(self, tensor: torch.Tensor) -> "OnHost":
        """Keep a tensor beside the others."""
        self.size += tensor.nbytes
        return OnHost(self, tensor)


class OnHost(Away):
    """A tensor in the memory of the host: pinned, where a GPU reads it."""

    def __init__(self, host: Host, like: torch.Tensor) -> None:
        super().__init__(host, like)
        self.values = torch.empty(self.shape, dtype=self.dtype, device="cpu").copy_(like)

    def to(self, where: torch.device) -> "OnHost":
        """Itself, which stays where it is; pinned from here on, if that is a GPU."""
        if where.type == "cuda" and not self.values.is_pinned():
            self.values = self.values.pin_memory()
        return self

    def cpu(self) -> torch.Tensor:
        """All of it, which is there."""
        return self.values

    def room(self, count: int) -> torch.Tensor:
        """All of it in one row: there is no need of more memory."""
        return self.values.view(-1)

    def take(self, room: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
        """The elements from number `at` on, as many and where those of `like` are."""
        part = room[at : at + like.numel()].view(like.shape)
        moved = part.to(like.device)
        self.store.read += 0 if moved is part else part.nbytes
        return moved

    def put(self, part: torch.Tensor, at: int) -> None:
        """Write what was taken back; on a CPU it is there already."""
        stored = self.values.view(-1)[at : at + part.numel()]
        if stored.data_ptr() != part.data_ptr():
            stored.copy_(part.reshape(-1))
            self.store.written += part.nbytes
