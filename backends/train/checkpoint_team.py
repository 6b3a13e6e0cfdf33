"""The processes that save a checkpoint together: what hinders one stops all, with one message."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from meshdsl.backends.train.checkpoint_folder import Damaged, DiskError, describe, digest

T = TypeVar("T")


class Team:
    """The processes that save together; by itself where there is no group."""

    def __init__(self, group: Any) -> None:
        import torch.distributed as dist

        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)

    @property
    def is_first(self) -> bool:
        """Whether this process does what only one may do."""
        return self.rank == 0

    def all_do(self, work: Callable[[], T]) -> list[T]:
        """Do `work` on every process and return what each found; all wait for all.

        Raises DiskError on every process when an error of the system hinders one.
        """
        import torch.distributed as dist

        mine = _attempt(work)
        every = [mine]
        if self.group is not None:
            every *= dist.get_world_size(self.group)
            dist.all_gather_object(every, mine, group=self.group)
        for _, hindrance in every:
            if hindrance is not None:
                raise DiskError(hindrance)
        return [found for found, _ in every]

    def first_does(self, work: Callable[[], Any]) -> None:
        """Do `work` on the first process while the others wait. Raises DiskError on all."""

        def only_the_first() -> None:
            if self.is_first:
                work()

        self.all_do(only_the_first)

    def digests(self, folder: Path) -> dict[str, Any]:
        """Size and checksum of every file that this process wrote. Raises OSError."""
        mine = sorted(folder.glob(f"__{self.rank}_*"))
        mine += [folder / ".metadata"] if self.is_first else []
        return {path.name: digest(path) for path in mine}


def _attempt(work: Callable[[], Any]) -> tuple[Any, str | None]:
    """What `work` found, or what hindered it."""
    try:
        return work(), None
    except OSError as error:
        return None, describe(error)
    except Damaged as damage:
        return None, f"{damage}; do all processes see the same folder?"
