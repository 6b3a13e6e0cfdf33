"""One device of a mesh by itself: the text it runs, and the memory that torch allocates for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshdsl.backends.engines.in_process import load, local_tensors, moved_away
from meshdsl.pipeline import Compilation


class Work:
    """A collective in flight; until it is deleted it keeps its tensors, as gloo and nccl do."""

    def __init__(self, *held: torch.Tensor) -> None:
        self.held = held

    def wait(self) -> None:
        """It is over at once."""

    def is_completed(self) -> bool:
        """It is."""
        return True


class Group(str):
    """A group of a device without others: its name."""

    def connect(self, source: int, target: int) -> None:
        """Makes no group for a pair."""

    def pair(self, source: int, target: int) -> tuple[Group, int, int]:
        """This group, and both places in it."""
        return self, source, target

    def allreduce_coalesced(self, xs: list[torch.Tensor], options: Any) -> Work:
        """Leaves all of `xs` as they are."""
        return Work(*xs)

    def all_gather_single_coalesced(
        self, outs: list[torch.Tensor], xs: list[torch.Tensor], options: Any
    ) -> Work:
        """Fills each of `outs` with copies of one of `xs`."""
        for out, x in zip(outs, xs, strict=True):
            for block in out.chunk(out.shape[0] // x.shape[0]):
                block.copy_(x)
        return Work(*outs, *xs)

    def reduce_scatter_single_coalesced(
        self, outs: list[torch.Tensor], xs: list[torch.Tensor], options: Any
    ) -> Work:
        """Fills each of `outs` with the first block of one of `xs`."""
        for out, x in zip(outs, xs, strict=True):
            out.copy_(x[: out.shape[0]])
        return Work(*outs, *xs)


class Alone:
    """`torch.distributed` for a device without others: what would arrive is what it has sent.

    Numbers are wrong, shapes and memory are right. A group is its name.
    """

    ReduceOp = torch.distributed.ReduceOp
    AllreduceCoalescedOptions = torch.distributed.AllreduceCoalescedOptions
    distributed_c10d = torch.distributed.distributed_c10d

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh

    def get_world_size(self, group: str) -> int:
        """The number of devices in the group."""
        return math.prod(self.mesh[axis] for axis in group.split("+"))

    def all_reduce(self, x: torch.Tensor, op: Any = None, **how: Any) -> Work:
        """Leaves `x` as it is."""
        return Work(x)

    def all_gather_single(self, out: torch.Tensor, x: torch.Tensor, **how: Any) -> Work:
        """Fills `out` with copies of `x`."""
        for block in out.view(-1).chunk(self.get_world_size(how["group"])):
            block.copy_(x.reshape(-1))  # one of them may be `x` itself
        return Work(out, x)

    def reduce_scatter_single(
        self, out: torch.Tensor, x: torch.Tensor, op: Any = None, **how: Any
    ) -> Work:
        """Fills `out` with the first block of `x`."""
        out.copy_(x.view(-1)[: out.numel()].view(out.shape))
        return Work(out, x)

    def isend(self, x: torch.Tensor, **how: Any) -> Work:
        """Sends to nobody."""
        return Work(x)

    def irecv(self, x: torch.Tensor, **how: Any) -> Work:
        """Leaves in `x` what is there."""
        return Work(x)

    def all_to_all_single(self, out: torch.Tensor, x: torch.Tensor, *_: Any, **how: Any) -> Work:
        """Copies `x`; of what is of another size nothing."""
        if out.numel() == x.numel():
            out.copy_(x)
        return Work(out, x)


def first_device(made: Compilation) -> tuple[int, Callable[[], Any]]:
    """Bytes of inputs, parameters and states of device 0, and its program as a call."""
    held, run = tables_of(made)
    kept = (t for kind in held for t in kind.values() if isinstance(t, torch.Tensor))
    return sum(t.untyped_storage().nbytes() for t in kept), run


def tables_of(made: Compilation) -> tuple[list[dict[str, Any]], Callable[[], Any]]:
    """Inputs, parameters and states of device 0, and its program as a call on them."""
    program = load(made.text)
    program.dist = Alone(program.MESH)
    groups = {name: Group(name) for name in ("+".join(axes) for axes in program.GROUPS)}
    tables = [program.INPUTS, program.PARAMS]
    tables += [program.STATES] if hasattr(program, "STATES") else []
    held = [local_tensors(program.MESH, table, {}, 0, range(1))[0] for table in tables]
    moved_away(getattr(program, "STATES", {}), held[-1:])
    return held, lambda: program.device(0, groups, *held)
