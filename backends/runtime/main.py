"""The command line of an emitted program, and how one process of it starts, runs and ends."""

import argparse
import json
import math
import os
import sys
import time
import traceback
import zipfile
from collections.abc import Callable, Mapping, Sequence
from io import BufferedReader
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from meshdsl.backends.runtime.communication import make_groups
from meshdsl.backends.runtime.user_files import regular, replacing
from meshdsl.backends.runtime.values import Spec, drawn_part, first_replicas, local_part, spec_of
from meshdsl.backends.runtime.vector_math import choose_vector_kernels


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of a name such as `f32`."""
    letters = name.rstrip("0123456789")
    long = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint"}.get(letters, letters)
    return getattr(torch, long + name.removeprefix(letters))  # type: ignore[no-any-return]


def local_value(
    name: str, spec: Spec, file: Mapping[str, Any], seed: int, mesh: dict[str, int], rank: int
) -> torch.Tensor:
    """The part of a tensor that device `rank` holds: of the file, or made up if it has none."""
    part, dtype = local_part(spec, mesh, rank), torch_dtype(spec.dtype)
    if (spec.key or name) not in file:
        return torch.from_numpy(drawn_part(spec, name, seed, part)).to(dtype)
    try:
        array = torch.as_tensor(file[spec.key or name])
    except Exception as error:  # a damaged archive raises errors of all kinds
        raise ValueError(f"{spec.key or name} cannot be read: {error!r}") from None
    kinds = {(d.is_floating_point, d == torch.bool) for d in (array.dtype, dtype)}
    if len(kinds) > 1 or tuple(array.shape) != tuple(spec.dims.values()):
        raise ValueError(f"{name} is {array.dtype}{[*array.shape]}, not {spec.dtype}{spec.dims}")
    block, value = array[part], array[part].to(dtype, copy=True)
    lost = value.isinf() & block.isfinite() if dtype.is_floating_point else value != block
    if lost.any():
        raise ValueError(f"{name} holds values that do not fit {spec.dtype}")
    return value


def main(
    mesh: dict[str, int],
    groups: tuple[tuple[str, ...], ...],
    device: Callable[..., dict[str, torch.Tensor]],
    outputs: dict[str, str],
    *tables: dict[str, str],
    assigned: tuple[str, ...] = (),
    local: Callable[..., Any] = local_value,
) -> None:
    """Run `device` as one process of many. Exits with 2 on a wrong command, 3 on a failure.

    `tables` are inputs and parameters; with states, be it none, `device` yields new values of them.
    Parameters that the program has `assigned` begin anew where a file lacks them. Where
    states lie elsewhere, `local` keeps those there.
    """
    sys.stdout = open(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no output of the program
    rank, code = int(os.environ.get("RANK", "0")), 2
    specs = [{name: spec_of(text) for name, text in table.items()} for table in (*tables, outputs)]
    try:
        options = parse_options(mesh, trains=len(tables) > 2)
        arrays = read_file(options.params, specs[1], assigned)
        files = [read_file(options.inputs, specs[0]), arrays, arrays]
        held = [
            {n: local(n, spec, file, options.seed, mesh, rank) for n, spec in table.items()}
            for table, file in zip(specs[:-1], files, strict=False)
        ]
        code, where = 3, start(rank, math.prod(mesh.values()))
        held = on_device(held, specs, where)
        with torch.inference_mode():
            results = device(rank, make_groups(mesh, groups, rank), *held)
        for name, spec in specs[-1].items() if rank == 0 else ():
            value = "" if spec.dims else f" = {results[name].item()}"
            print(f"{name}: {spec.dtype}{[*spec.dims.values()]}{value}", flush=True)
        if options.out:
            write_whole(options.out, specs[-1], mesh, results)
        if options.updated:
            write_whole(options.updated, specs[1] | specs[2], mesh, held[1] | held[2])
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:  # whatever it is, the user gets a sentence and the line
        trace = [(f.f_code.co_qualname, at) for f, at in traceback.walk_tb(error.__traceback__)]
        lines = [at for name, at in trace if name.partition(".<locals>")[0] == "device"]  # or in it
        at = f" on device {rank}, line {lines[-1]} of {sys.argv[0]}" if lines else ""
        time.sleep(5 if code == 2 and rank else 0)  # all refuse alike: device 0 ends the others
        print(f"error{at}: {error}", file=sys.stderr, flush=True)
        time.sleep(0.5)  # others may have failed too: let them tell it
        os._exit(code)
    dist.barrier()  # without it gloo may abort when one process closes while others still read
    dist.destroy_process_group()


def on_device(
    tables: Sequence[Mapping[str, Any]], specs: Sequence[Mapping[str, Spec]], where: torch.device
) -> list[dict[str, Any]]:
    """Inputs, parameters and states on a device: their counter stays on the host."""
    return [
        {n: x if is_counter(of[n]) else x.to(where) for n, x in table.items()}
        for table, of in zip(tables, specs, strict=False)
    ]


def is_counter(spec: Spec) -> bool:
    """Whether a state counts the steps: what is computed of it are numbers of the host."""
    return spec.draw == ("steps",)


def parse_options(mesh: dict[str, int], trains: bool) -> argparse.Namespace:
    """The options of the command line; ValueError for what cannot be done."""
    devices, world = math.prod(mesh.values()), os.environ.get("WORLD_SIZE", "1")
    command = f"torchrun --nproc-per-node {devices} {' '.join(sys.argv)}"
    parser = argparse.ArgumentParser(epilog=f"Start it with: {command}")
    for name in ("--inputs", "--params"):
        parser.add_argument(name, metavar="FILE", help=".npz or .safetensors; else of the seed")
    parser.add_argument("--seed", type=int, default=0, help="for values that are made up")
    for name, what in (("--out", "outputs"), ("--updated", "parameters and states"))[: 1 + trains]:
        parser.add_argument(name, metavar="FILE.npz", help=f"write {what} as global arrays")
    parser.add_argument("--force", action="store_true", help="overwrite files")
    options = parser.parse_args(namespace=argparse.Namespace(updated=None))
    if world != str(devices):
        wanted = f"{devices} devices, {{ {', '.join(f'{a}: {size}' for a, size in mesh.items())} }}"
        raise ValueError(f"this program is for {wanted}, but {world} started\nrun: {command}")
    for path in filter(None, (options.out, options.updated)):
        if not path.endswith(".npz") or not os.path.isdir(os.path.dirname(path) or "."):
            raise ValueError(f"{path} cannot be written: it is no .npz, or there is no folder")
        if (os.path.exists(path) and not options.force) or options.out == options.updated:
            raise ValueError(f"{path} exists, or is named twice; --force overwrites it")
    return options


def read_file(path: str | None, specs: Mapping[str, Spec], optional: tuple[str, ...] = ()) -> Any:
    """The arrays of a .npz or .safetensors file by name; nothing in it can run code."""
    if path is None:
        return {}
    file = open(path, "rb", opener=regular)  # it stays open: arrays are read as they are needed
    try:
        arrays: Any = FileTensors(file) if path.endswith(".safetensors") else np.load(file)
        if isinstance(arrays, np.ndarray):
            raise ValueError("it holds one array without a name")
    except Exception as error:  # it is damaged, or of another kind
        file.close()
        raise ValueError(f"{path} cannot be read: {error!r}") from None
    needed = {name for name, spec in specs.items() if spec.draw != ("seed",)}
    if not needed - set(optional) <= set(arrays) <= set(specs):
        raise ValueError(f"{path} holds {', '.join(arrays)}, but needed are {', '.join(specs)}")
    return arrays


class FileTensors(dict[str, Any]):
    """The tensors of an open .safetensors file by name, each read where it is asked for."""

    def __init__(self, file: BufferedReader) -> None:
        size = int.from_bytes(file.read(8), "little")
        super().__init__(json.loads(file.read(min(size, 100_000_000))))
        self.pop("__metadata__", None)
        self.file, self.start = file, 8 + size

    def __getitem__(self, name: str) -> torch.Tensor:
        entry = super().__getitem__(name)
        first, end = entry["data_offsets"]
        data = bytearray(end - first)
        self.file.seek(self.start + first)
        if self.file.readinto(data) < len(data):
            raise ValueError(f"{self.file.name} ends within it")
        stored = torch.from_numpy(np.frombuffer(data, np.uint8))
        return stored.view(torch_dtype(entry["dtype"].lower())).view(entry["shape"])


def start(rank: int, world: int) -> torch.device:
    """Join the others (none without torchrun): over nccl if each has a GPU, else over gloo."""
    choose_vector_kernels()
    gpus, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", "0"))
    on_gpu = gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    where = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(where)
        torch.set_default_device(where)
        torch.backends.cudnn.allow_tf32 = False  # f32 has 24 bits here, as on a CPU
    store = None if "MASTER_ADDR" in os.environ else dist.HashStore()  # type: ignore[attr-defined]
    about: Any = {"backend": "nccl", "device_id": where} if on_gpu else {"backend": "gloo"}
    dist.init_process_group(store=store, rank=rank, world_size=world, **about)
    return where


def write_whole(
    path: str, specs: Mapping[str, Spec], mesh: dict[str, int], local: Mapping[str, torch.Tensor]
) -> None:
    """Write tensors as global arrays to a .npz file, on device 0; all devices take part."""
    wide = {name: x.float() if x.dtype == torch.bfloat16 else x for name, x in local.items()}
    held: Any = [None] * math.prod(mesh.values()) if dist.get_rank() == 0 else None
    dist.gather_object({name: x.cpu().numpy() for name, x in wide.items()}, held)
    if held is None:
        return
    with replacing(path) as file, zipfile.ZipFile(file, "w") as archive:
        for name, spec in specs.items():
            array = np.full([*spec.dims.values()], -0.0, held[0][name].dtype)
            for rank in first_replicas(spec, mesh):
                array[local_part(spec, mesh, rank)] += held[rank][name]
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
