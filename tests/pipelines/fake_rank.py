"""Runs one device of an emitted text: `fake_rank.py TEXT.py RANK`.

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


def main(path: str, rank: int) -> None:
    """One step of device `rank`; prints the outputs with their shapes."""
    spec = importlib.util.spec_from_file_location("emitted", path)
    assert spec is not None
    assert spec.loader is not None
    text: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(text)
    text.check_index = lambda index, *about: index  # whose values are not there to be checked
    world = math.prod(text.MESH.values())
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    torch.set_default_device("meta")
    with torch.inference_mode():
        groups = text.make_groups(text.MESH, text.GROUPS, rank)
        held = [local(text, table, rank) for table in (text.INPUTS, text.PARAMS, text.STATES)]
        found = text.device(rank, groups, *held)
    print({name: tuple(value.shape) for name, value in found.items()})


def local(text: Any, table: dict[str, str], rank: int) -> dict[str, torch.Tensor]:
    """The blocks of a device, without values."""
    found = {}
    for name, written in table.items():
        spec = text.spec_of(written)
        shape = [part.stop - part.start for part in text.local_part(spec, text.MESH, rank)]
        found[name] = torch.empty(shape, dtype=text.torch_dtype(spec.dtype))
    return found


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
