"""Runs devices of an emitted text, one after the other: `fake_rank.py TEXT.py RANK …`.

The process group is torch's fake one and tensors are on `meta`: nothing is sent or computed, but
every statement checks its shapes, and every message its group.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


def main(path: str, ranks: list[int]) -> None:
    """One step of each device; prints the outputs with their shapes."""
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None
    assert spec.loader is not None
    text: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    text.check_index = lambda index, *about: index  # whose values are not there to be checked
    torch.set_default_device("meta")
    for rank in ranks:
        print(stepped(text, rank))


def stepped(text: Any, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of what a device returns."""
    world = math.prod(text.MESH.values())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        with torch.inference_mode():
            groups = text.make_groups(text.MESH, text.GROUPS, rank)
            held = [local(text, table, rank) for table in (text.INPUTS, text.PARAMS, text.STATES)]
            held[2] = {
                n: torch.zeros((), dtype=x.dtype, device="cpu")
                if text.is_counter(text.spec_of(text.STATES[n]))
                else x
                for n, x in held[2].items()
            }
            outputs = text.device(rank, groups, *held)
    finally:
        dist.destroy_process_group()
    return {name: tuple(value.shape) for name, value in outputs.items()}


def local(text: Any, table: dict[str, str], rank: int) -> dict[str, torch.Tensor]:
    """The blocks of a device, without values."""
    found = {}
    for name, written in table.items():
        spec = text.spec_of(written)
        shape = [part.stop - part.start for part in text.local_part(spec, text.MESH, rank)]
        found[name] = torch.empty(shape, dtype=text.torch_dtype(spec.dtype))
    return found


if __name__ == "__main__":
    main(sys.argv[1], [int(word) for word in sys.argv[2:]])
