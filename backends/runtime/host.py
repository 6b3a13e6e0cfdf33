"""Tensors that are stored in the memory of the host of a GPU.

A CPU has no other memory: there they are copies in it, which are moved as if it were another.
"""

from typing import Any

import torch

from meshdsl.backends.runtime.offloading import Away, Store, Transfer


class Host(Store):
    """What one device keeps in the memory of its host.

    A GPU reads and writes it on streams of their own, beside what it computes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams: dict[tuple[torch.device, str], Any] = {}

    def keep(self, tensor: torch.Tensor) -> "OnHost":
        """Keep a tensor beside the others."""
        self.size += tensor.nbytes
        values = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        return OnHost(self, values)

    def store(self, tensor: torch.Tensor) -> Transfer:
        """Begin to keep a tensor, in the order in which it lies; a CPU copies it at once."""
        self.written += tensor.nbytes
        is_cuda = tensor.device.type == "cuda"
        values = torch.empty_like(tensor, device="cpu", pin_memory=is_cuda)
        on_host = OnHost(self, values)
        on_host.where = tensor.device
        if not is_cuda:
            values.copy_(tensor)
            return Transfer(lambda: on_host)
        stream = self.stream(tensor.device, "to")
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            values.copy_(tensor, non_blocking=True)
        # Its memory is not given to others before it is read.
        tensor.record_stream(stream)
        on_host.arrived = stream.record_event()
        return Transfer(lambda: on_host)

    def stream(self, where: torch.device, way: str) -> Any:
        """The stream on which a GPU reads (`from`) or writes (`to`) the memory of the host."""
        key = where, way
        if key not in self.streams:
            self.streams[key] = torch.cuda.Stream(where)  # type: ignore[no-untyped-call]
        return self.streams[key]


class OnHost(Away):
    """A tensor in the memory of the host: pinned, where a GPU reads it."""

    store: Host

    def __init__(self, host: Host, values: torch.Tensor) -> None:
        super().__init__(host, values.shape, values.dtype)
        self.values = values
        # When it is there, where a GPU is still writing it.
        self.arrived: Any = None

    def to(self, where: torch.device) -> "OnHost":
        """Itself, which stays where it is; pinned from here on, if that is a GPU."""
        super().to(where)
        if where.type == "cuda" and not self.values.is_pinned():
            self.values = self.values.pin_memory()
        return self

    def row(self, index: int) -> "OnHost":
        """What it has at an index of its first dim: the same memory."""
        row = OnHost(self.store, self.values[index])
        row.where = self.where
        return row

    def load(self) -> Transfer:
        """Begin to move all of it to the device; a CPU copies it at once."""
        self.store.read += self.nbytes
        if self.where.type != "cuda":
            copy = self.values.clone()
            return Transfer(lambda: copy)
        stream = self.store.stream(self.where, "from")
        if self.arrived is not None:
            stream.wait_event(self.arrived)
        # The memory belongs to the stream that fills it, so nothing computed is waited for.
        with torch.cuda.stream(stream):
            moved = self.values.to(self.where, non_blocking=True)
        arrived = stream.record_event()

        def finish() -> torch.Tensor:
            """Let what is computed from here on wait; its memory is given back only after that."""
            computing = torch.cuda.current_stream(self.where)
            computing.wait_event(arrived)
            moved.record_stream(computing)
            return moved

        return Transfer(finish)

    def cpu(self) -> torch.Tensor:
        """All of it, which is there."""
        return self.values

    def room(self, count: int) -> torch.Tensor:
        """All of it in one row: a chunk is moved into memory of its own."""
        return self.values.view(-1)

    def take(self, room: torch.Tensor, like: torch.Tensor, at: int) -> torch.Tensor:
        """The elements from number `at` on, as many and where those of `like` are."""
        part = room[at : at + like.numel()].view(like.shape)
        self.store.read += part.nbytes
        return part.to(like.device, copy=True)

    def put(self, part: torch.Tensor, at: int) -> None:
        """Write what was taken back."""
        self.values.view(-1)[at : at + part.numel()].copy_(part.reshape(-1))
        self.store.written += part.nbytes
