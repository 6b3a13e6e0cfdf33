"""The command line of an emitted program, and how one process of it starts, runs and ends."""

import argparse
import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from meshdsl.backends.runtime.collectives import make_groups
from meshdsl.backends.runtime.files import (
    ArraysRefused,
    Refused,
    check_arrays,
    check_writable,
    read_arrays,
    regular,
    write_npz,
)
from meshdsl.backends.runtime.output import keep_stdout
from meshdsl.backends.runtime.values import Array, Spec, cast, draw, local_part

GRACE = 0.5
"""Seconds that a failed process waits before it ends, so that others can tell theirs too."""

OVER = "MESHDSL_OVER"
"""What the environment calls the file that whoever started the processes makes when they have."""

Device = Callable[..., dict[str, torch.Tensor]]


class Process(NamedTuple):
    """One process of the program: its rank, the options, and where its tensors live."""

    rank: int
    options: argparse.Namespace
    where: torch.device


def main(
    mesh: dict[str, int],
    groups: tuple[tuple[str, ...], ...],
    inputs: dict[str, Spec],
    params: dict[str, Spec],
    outputs: dict[str, Spec],
    device: Device,
    states: dict[str, Spec] | None = None,
) -> None:
    """Run `device` as one process of many. Exits with 2 on a wrong command, 3 on a failure.

    With `states` of an optimizer, that is one training step from their beginning.
    """
    keep_stdout()
    options = parse_options(mesh, states is not None)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    started = time.monotonic()
    try:
        check_world(mesh, world)
        for path in (options.out, options.updated) if rank == 0 else ():
            if path:
                check_writable(path, options.force)
        values: tuple[dict[str, Array], ...] = local_values(options, inputs, params, mesh, rank)
        if states is not None:
            values = (*values, begin_states(options, states, mesh, rank))
        process = Process(rank, options, start(rank, world))
        specs = (inputs, params, *(() if states is None else (states,)))
        given = tuple(on_device(process, *side) for side in zip(specs, values, strict=True))
        local = run_device(process, make_groups(mesh, groups, rank), given, device)
        found = show_outputs(process, mesh, outputs, local)
        if options.updated and states is not None:
            kept = given[1] | given[2]
            write_whole(process, mesh, {**params, **states}, kept, options.updated)
        report_success(process, found, time.monotonic() - started)
    except Refused as refused:
        leave(rank, options, 2, refused)
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:  # whatever it is, the user gets a sentence and the line
        leave(rank, options, 3, error)
    # Without the barrier gloo may abort when one process closes while others still read.
    dist.barrier()
    dist.destroy_process_group()


def parse_options(mesh: dict[str, int], trains: bool) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=f"A program for {math.prod(mesh.values())} devices (made by meshdsl).",
        epilog=f"Start it with: {torchrun_command(mesh, [])}",
    )
    files = ".npz or .safetensors"
    parser.add_argument("--inputs", metavar="FILE", help=f"{files}; made up from the seed without")
    parser.add_argument("--params", metavar="FILE", help=f"{files}; made up from the seed without")
    parser.add_argument("--seed", type=int, default=0, help="for values that are made up")
    parser.add_argument("--out", metavar="FILE.npz", help="write the outputs as global arrays")
    parser.set_defaults(updated=None)
    if trains:
        after = "write parameters and states after the step as global arrays"
        parser.add_argument("--updated", metavar="FILE.npz", help=after)
    parser.add_argument("--force", action="store_true", help="let --out overwrite a file")
    parser.add_argument("--report", metavar="FILE", help="write what happened as JSON")
    return parser.parse_args()


def torchrun_command(mesh: dict[str, int], arguments: list[str]) -> str:
    """The command that starts this program on as many processes as it needs."""
    command = ["torchrun", "--nproc-per-node", str(math.prod(mesh.values())), sys.argv[0]]
    return shlex.join([*command, *arguments])


def check_world(mesh: dict[str, int], world: int) -> None:
    """Refuse a number of processes that is not the number of devices, before they communicate."""
    if world != math.prod(mesh.values()):
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
        raise Refused(
            f"this program is for {math.prod(mesh.values())} devices ({axes}), "
            f"but {world} started\nrun: {torchrun_command(mesh, sys.argv[1:])}"
        )


def local_values(
    options: argparse.Namespace,
    inputs: dict[str, Spec],
    params: dict[str, Spec],
    mesh: dict[str, int],
    rank: int,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """What this device holds of the inputs and the parameters, from files or made up."""
    both = [("inputs", options.inputs, inputs), ("parameters", options.params, params)]
    files: list[Mapping[str, Any] | None] = []
    refusals, notes = [], []
    for what, path, specs in both:
        files.append(read_arrays(path) if path else None)
        try:
            notes += check_arrays(files[-1] or {}, specs, what) if path else []
        except ArraysRefused as refused:
            refusals.append(str(refused))
    if refusals:
        raise Refused("\n".join(refusals))
    for note in notes if rank == 0 else ():
        print(f"note: {note}", file=sys.stderr)
    given, learned = (
        {name: local_value(file, name, spec, options.seed, mesh, rank) for name, spec in s.items()}
        for file, (_, _, s) in zip(files, both, strict=True)
    )
    return given, learned


def begin_states(
    options: argparse.Namespace, states: dict[str, Spec], mesh: dict[str, int], rank: int
) -> dict[str, Array]:
    """What an optimizer begins with; what copies a parameter is read from its file."""
    file = read_arrays(options.params) if options.params else {}
    found = {}
    for name, spec in states.items():
        given = file if spec.key and spec.key in file else None
        found[name] = local_value(given, spec.key or name, spec, options.seed, mesh, rank)
    return found


def local_value(
    file: Mapping[str, Any] | None,
    name: str,
    spec: Spec,
    seed: int,
    mesh: dict[str, int],
    rank: int,
) -> Array:
    """What this device holds of one tensor."""
    if file is None:
        return draw(spec, name, seed, mesh, rank)
    try:
        return cast(file[name][local_part(spec, mesh, rank)], spec.dtype)
    except ValueError as error:
        raise Refused(f"{name}: {error}") from None


def start(rank: int, world: int) -> torch.device:
    """Join the other processes: over nccl when each has a GPU of its own, else over gloo."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        where = torch.device("cuda", local)
        torch.cuda.set_device(where)
        torch.set_default_device(where)
    else:
        where = torch.device("cpu")
    backend = "nccl" if where.type == "cuda" else "gloo"
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(backend, device_id=where if where.type == "cuda" else None)
    else:  # one device, started without torchrun
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    return where


def run_device(
    process: Process,
    groups: dict[str, Any],
    values: tuple[dict[str, torch.Tensor], ...],
    device: Device,
) -> dict[str, torch.Tensor]:
    """The local outputs of this device. `values`: inputs, parameters, and states if there are."""
    with torch.inference_mode():
        return device(process.rank, groups, *values)


def on_device(
    process: Process, specs: dict[str, Spec], arrays: dict[str, Array]
) -> dict[str, torch.Tensor]:
    """Arrays as tensors where this process computes; numpy has no bf16, they are made so here."""
    found = {}
    for name, array in arrays.items():
        tensor = torch.from_numpy(array).to(process.where)
        found[name] = tensor.bfloat16() if specs[name].dtype == "bf16" else tensor
    return found


def show_outputs(
    process: Process, mesh: dict[str, int], specs: dict[str, Spec], local: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Print every output on rank 0, and write them where `--out` says; what there is to report."""
    found: dict[str, Any] = {}
    for name, spec in specs.items():
        sizes = list(spec.dims.values())
        found[name] = {"dtype": spec.dtype, "shape": sizes}
        if not sizes:
            found[name]["value"] = local[name].item()
    for name, entry in found.items() if process.rank == 0 else ():
        value = f" = {entry['value']}" if "value" in entry else ""
        print(f"{name}: {entry['dtype']}{entry['shape']}{value}")
    if process.options.out:
        write_whole(process, mesh, specs, local, process.options.out)
    return found


def write_whole(
    process: Process,
    mesh: dict[str, int],
    specs: dict[str, Spec],
    local: Mapping[str, torch.Tensor],
    path: str,
) -> None:
    """Write tensors as global arrays to a file, on rank 0; all devices take part."""
    whole = {n: gather_output(spec, mesh, process, local[n]) for n, spec in specs.items()}
    if process.rank == 0:
        write_npz(path, whole)


def gather_output(spec: Spec, mesh: dict[str, int], process: Process, block: torch.Tensor) -> Array:
    """The whole output on rank 0, from the first device that holds each block (empty elsewhere)."""
    blocks: dict[str, int] = {}
    for rank in range(dist.get_world_size()):
        blocks.setdefault(str(local_part(spec, mesh, rank)), rank)
    block = block.contiguous()
    whole = torch.empty(list(spec.dims.values()) if process.rank == 0 else [0], dtype=block.dtype)
    for rank in blocks.values():
        if rank == process.rank != 0:
            dist.send(block.view(torch.uint8) if block.dtype == torch.bool else block, 0)
        elif process.rank == 0:
            part = block
            if rank:
                part = torch.empty_like(block)
                dist.recv(part.view(torch.uint8) if part.dtype == torch.bool else part, rank)
            whole[local_part(spec, mesh, rank)] = part.cpu()
    return (whole.float() if whole.dtype == torch.bfloat16 else whole).numpy()


def report_success(process: Process, outputs: dict[str, Any], seconds: float) -> None:
    """Write the report of a run that went well."""
    if process.options.report and process.rank == 0:
        with open(process.options.report, "w", encoding="utf-8", opener=regular) as file:
            json.dump({"version": 1, "ok": True, "seconds": seconds, "outputs": outputs}, file)


def leave(rank: int, options: argparse.Namespace, code: int, error: Exception) -> NoReturn:
    """End this process after an error, not waiting for others to close their connections."""
    found = describe_error(error)
    if options.report:
        path = f"{options.report}.rank{rank}"
        with open(path, "w", encoding="utf-8", opener=regular) as file:
            json.dump({"version": 1, "ok": False, "rank": rank, "exit": code, **found}, file)
    if code == 2 and rank != 0:
        time.sleep(10 * GRACE)  # all refuse alike: rank 0 tells of it and ends the others
    where = "" if code == 2 else f" on device {rank}, line {found['line']} of {sys.argv[0]}"
    print(f"error{where}: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    if code == 3:
        linger()
    os._exit(code)


def linger() -> None:
    """Wait until the others have told their failures: for a moment, or as `OVER` says."""
    over = os.environ.get(OVER, "")
    until = time.monotonic() + (40 * GRACE if over else GRACE)
    while time.monotonic() < until and not os.path.exists(over):
        time.sleep(GRACE / 20)


def describe_error(error: Exception) -> dict[str, Any]:
    """An error as data: the line of `device` it came from, and the counters of the loops around."""
    line, loops, in_collective = None, {}, False
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "device" and line is None:
            line = trace.tb_lineno
            loops = {k: v for k, v in trace.tb_frame.f_locals.items() if type(v) is int}
        waits = code.co_qualname == "Pending.wait" and trace.tb_next is None
        in_collective |= waits or code.co_filename.endswith("distributed_c10d.py")
        trace = trace.tb_next
    known = {key: getattr(error, key, None) for key in ("place", "position", "value")}
    kind = "Refused" if isinstance(error, Refused) else type(error).__name__
    found = {"kind": kind, "message": str(error), "line": line, "loops": loops, **known}
    return {**found, "in_collective": in_collective}
