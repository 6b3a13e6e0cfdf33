"""The devices of a training run, as one of them sees the others: threads or processes alike."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from meshdsl.backends.runtime.values import Spec, local_part

if TYPE_CHECKING:
    import torch

LONGEST = 4096
"""Bytes that a device may tell the others at once."""


class Team:
    """What device `rank` needs to act together with the others.

    `dist` is `torch.distributed` or what stands in for it, `groups` are the groups of this device
    by axes, `world` is the group of all devices. `leads`: this device acts for its process.
    """

    def __init__(
        self,
        rank: int,
        mesh: dict[str, int],
        dist: Any,
        groups: dict[str, Any],
        world: Any,
        leads: bool,
        where: Any = "cpu",
    ) -> None:
        self.rank, self.mesh, self.dist = rank, mesh, dist
        self.groups, self.world, self.leads, self.where = groups, world, leads, where

    def total(self, value: int) -> int:
        """The sum of what all devices bring."""
        import torch

        tensor = torch.tensor(value, dtype=torch.int64, device=self.where)
        self.dist.all_reduce(tensor, self.dist.ReduceOp.SUM, group=self.world)
        return int(tensor.item())

    def first(self, value: int) -> int:
        """What device 0 brings."""
        return self.total(value if self.rank == 0 else 0)

    def barrier(self) -> None:
        """Wait until all devices are here."""
        self.total(0)

    def everyone(self, value: Any) -> list[Any]:
        """What every device brings, in rank order: small things that JSON can hold."""
        import torch

        text = json.dumps(value).encode()
        assert len(text) <= LONGEST, f"{len(text)} bytes are too much to tell"
        mine = torch.zeros(LONGEST, dtype=torch.uint8, device=self.where)
        mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        return [json.loads(bytes(row.tolist()).rstrip(b"\0")) for row in self._gather(mine)]

    def whole(self, spec: Spec, block: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor of which every device brings its block, on every device."""
        whole = block.new_empty(tuple(spec.dims.values()))
        for rank, part in enumerate(self._gather(block.contiguous())):
            whole[local_part(spec, self.mesh, rank)] = part
        return whole

    def _gather(self, block: torch.Tensor) -> torch.Tensor:
        """The blocks of all devices, which are of one shape, under a new first dim."""
        count = self.dist.get_world_size(self.world)
        found = block.new_empty(count, *block.shape)
        gather = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        gather(found.view(-1), block.view(-1), group=self.world)
        return found
