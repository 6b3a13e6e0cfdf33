"""One device of a mesh: its rank, its process groups, and small exchanges between all.

For threads and processes alike. Every device makes the same calls in the same order.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from meshdsl.backends.runtime.values import (
    Part,
    Spec,
    first_replicas,
    group_members,
    local_part,
    shape_of,
)

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

Axes = tuple[str, ...]


class Ranks:
    """Device `rank`, counted in row-major order, of a mesh.

    `mesh` has the sizes of the axes. `dist` is `torch.distributed` or its stand-in, `groups` are
    its groups of this device, by axes joined with `+`; the one over all axes is among them.
    `where` is the torch device of its tensors. Without `dist`, one process acts for the whole mesh.
    """

    def __init__(
        self,
        mesh: dict[str, int],
        rank: int = 0,
        dist: Any = None,
        groups: Mapping[str, Any] | None = None,
        where: torch.device | str = "cpu",
    ) -> None:
        import torch

        self.mesh, self.rank, self.dist = mesh, rank, dist
        self.where = torch.device(where)
        self._groups = dict(groups or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Ranks:
        """Itself: devices are not copied."""
        return self

    def group(self, axes: Axes) -> Any:
        """The group of the devices that differ along `axes` only, in mesh order, or None."""
        return self._groups.get("+".join(axes))

    @property
    def world(self) -> Any:
        """The group of all devices."""
        return self.group(tuple(self.mesh))

    def members(self, axes: Axes) -> list[int]:
        """The ranks of the devices that differ from this one along `axes` only, in mesh order."""
        return next(ranks for ranks in group_members(self.mesh, axes) if self.rank in ranks)

    def groups(self, wanted: Sequence[Axes]) -> dict[str, Any]:
        """The groups over sets of axes, as emitted programs name them."""
        return {"+".join(axes): self.group(axes) for axes in wanted}

    # --- exchanges -----------------------------------------------------------------------------

    def total(self, value: int) -> int:
        """The sum of `value` over all devices."""
        import torch

        if self.dist is None:
            return value
        tensor = torch.tensor(value, dtype=torch.int64, device=self.where)
        self.dist.all_reduce(tensor, self.dist.ReduceOp.SUM, group=self.world)
        return int(tensor.item())

    def first(self, value: int) -> int:
        """The value of the first device."""
        return self.total(value if self.rank == 0 else 0)

    def everyone(self, value: T) -> list[T]:
        """The values of all devices, in rank order; small ones that can be pickled."""
        import torch

        if self.dist is None:
            return [value]
        pickled = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        length = torch.tensor(len(pickled), device=self.where)
        lengths = self._gather(length, self.world).tolist()
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device=self.where)
        mine[: len(pickled)] = pickled
        rows = self._gather(mine, self.world).cpu().numpy()
        return [pickle.loads(row[:n].tobytes()) for row, n in zip(rows, lengths, strict=True)]

    def all_do(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every device; returns all results, in rank order. A barrier.

        An error of one is raised on all; of several, that of the lowest rank.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        every = self.everyone((result, _sendable(failure)))
        for rank, (_, hindrance) in enumerate(every):
            if hindrance is not None:
                raise failure if failure and rank == self.rank else hindrance
        return [result for result, _ in every]

    def agreed(self, work: Callable[[], T]) -> T:
        """Do `work` on every device; returns its result here. An error of one is raised on all.

        Where none fails, one number is exchanged.
        """
        result: Any = None
        failure: Exception | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        if self.total(failure is not None):
            self.all_do(lambda: _raise(failure))
        return result  # type: ignore[no-any-return]

    def first_does(self, work: Callable[[], T]) -> T:
        """Do `work` on the first device; returns its result, or raises its error, on all.

        For work that only one may do, as with files, or that would yield the same on all.
        """
        result: Any = self.all_do(lambda: work() if self.rank == 0 else None)[0]
        return result  # type: ignore[no-any-return]

    # --- tensors -------------------------------------------------------------------------------

    def part(self, spec: Spec) -> Part:
        """The part of a tensor that is this device's local block."""
        return local_part(spec, self.mesh, self.rank)

    def whole(self, spec: Spec, block: torch.Tensor) -> torch.Tensor:
        """The whole of a tensor, on every device, from the blocks of all devices."""
        splitting = {axis for axes in spec.split.values() for axis in axes}
        axes = tuple(axis for axis in self.mesh if axis in splitting)
        if not axes:
            return block.clone()
        group = self.group(axes)
        if group is None:
            axes, group = tuple(self.mesh), self.world
        parts = [local_part(spec, self.mesh, rank) for rank in self.members(axes)]
        # Blocks may differ in size; they are sent as large as the largest.
        largest = [max(shape_of(p)[i] for p in parts) for i in range(block.dim())]
        padded = block.new_zeros(largest)
        padded[tuple(slice(n) for n in block.shape)] = block
        sized = zip(self._gather(padded, group), map(shape_of, parts), strict=True)
        blocks = (each[tuple(slice(n) for n in shape)] for each, shape in sized)
        return assembled(spec, self.mesh, zip(self.members(axes), blocks, strict=True))

    def whole_on_first(self, spec: Spec, block: torch.Tensor) -> torch.Tensor | None:
        """The whole of a tensor on the CPU of device 0, None on the others: processes only.

        Each block is sent once, by the first device that stores it, and each part of a sum.
        """
        block = block.contiguous()
        senders = first_replicas(spec, self.mesh)
        if self.rank:
            if self.rank in senders and block.numel():
                self.dist.send(_numbers(block), 0)
            return None

        def received(sender: int) -> torch.Tensor:
            if not sender:
                return block.cpu()
            sent = block.new_empty(shape_of(local_part(spec, self.mesh, sender)))
            if sent.numel():
                self.dist.recv(_numbers(sent), sender)
            return sent.cpu()

        return assembled(spec, self.mesh, ((sender, received(sender)) for sender in senders))

    def _gather(self, block: torch.Tensor, group: Any) -> torch.Tensor:
        """The blocks of a group, all of one shape, stacked along a new first dim."""
        stacked = block.new_empty(self.dist.get_world_size(group), *block.shape)
        gather = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        gather(_numbers(stacked), _numbers(block.contiguous()), group=group)
        return stacked


def assembled(
    spec: Spec, mesh: dict[str, int], blocks: Iterable[tuple[int, torch.Tensor]]
) -> torch.Tensor:
    """The whole of a tensor from blocks, each with the rank of its device.

    Parts of a sum are added up, those in bf16 as float32: each is to be given once.
    """
    import torch

    gathered, sizes = torch.empty(0), dict[str, int]()
    for rank, block in blocks:
        part = local_part(spec, mesh, rank)
        shape, key = shape_of(part), str(part)
        assert list(block.shape) == shape, f"device {rank} holds {list(block.shape)}, not {shape}"
        if spec.parts and block.dtype == torch.bfloat16:
            block = block.float()
        if not sizes:
            gathered = block.new_empty([*spec.dims.values()])
        gathered[part] = gathered[part] + block if spec.parts and key in sizes else block
        sizes[key] = block.numel()
    count = sum(sizes.values())
    assert count == gathered.numel(), f"the blocks hold {count} of {gathered.numel()} elements"
    return gathered


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in one dim; booleans as bytes, which every backend can send."""
    import torch

    return tensor.view(-1).view(torch.uint8 if tensor.dtype == torch.bool else tensor.dtype)


def _raise(failure: Exception | None) -> None:
    if failure is not None:
        raise failure


def _sendable(error: Exception | None) -> Exception | None:
    """An error that can be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever an exception's own __reduce__ or __init__ raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
