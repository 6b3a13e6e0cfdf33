"""A process of `benchmarks/training.py`: it holds the variants of a case and times their steps."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.training_cases import Case, first_values

PROCESSORS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
CHECKED = 5
"""Steps of which the losses are compared."""


def run_torch(pipe: Connection, rank: int, store: str) -> None:
    """Be device `rank` of two over gloo, with one thread."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    pair = False

    def make(case: Case, text: str) -> dict[str, Callable[[], Any]]:
        nonlocal pair
        pair = case.devices > 1
        return torch_variants(case, text, rank)

    serve(pipe, make, lambda: dist.barrier() if pair else None)
    dist.barrier()
    dist.destroy_process_group()


def run_local(pipe: Connection) -> None:
    """Be the local engine: a thread of this process for each device."""
    import torch

    from meshdsl.backends.engines.in_process import Emitted, LocalSession, call_device
    from meshdsl.backends.engines.ranks import Ranks

    session: Any = None
    given: list[tuple[dict[str, Any], ...]] = []

    def run(steps: int) -> tuple[list[float], float, float]:
        """The losses of all steps, and seconds and processor seconds of one."""
        program = session.programs.program
        taken: list[tuple[float, float]] = []

        def device(ranks: Ranks) -> list[Any]:
            torch.set_num_threads(1)  # no more processors than the others have
            tables = given[ranks.rank]
            started, worked = time.perf_counter(), time.process_time()
            found = [call_device(ranks, program, tables)["loss"] for _ in range(steps)]
            if ranks.rank == 0:
                taken.append((time.perf_counter() - started, time.process_time() - worked))
            return found

        losses = session.run(device)[0]
        (wall, worked) = taken[0]
        return [float(x) for x in losses], wall / steps, worked / steps

    while (asked := pipe.recv()) is not None:
        kind, first, second = asked
        if kind == "make":
            pin(first.devices)
            session = LocalSession(Emitted(first.emitted()).load())
            session.in_turns = session.in_turns and not first.at_once
            program = session.programs.program
            kinds = (program.INPUTS, program.PARAMS, program.STATES)
            given = [tuple(tensors(program, k, r) for k in kinds) for r in range(first.devices)]
            pipe.send({"local": run(CHECKED)[0]})
            continue
        pipe.send(run(second)[1:])


def run_jax(pipe: Connection) -> None:
    """Be two devices of JAX."""
    from benchmarks.training_jax import configure

    configure()
    serve(pipe, jax_variants, lambda: None)


def serve(
    pipe: Connection,
    make: Callable[[Case, str], dict[str, Callable[[], Any]]],
    barrier: Callable[[], object],
) -> None:
    """Do what is asked: `("make", case, text)` or `("time", variant, steps)`, until None."""
    variants: dict[str, Callable[[], Any]] = {}
    while (asked := pipe.recv()) is not None:
        kind, first, second = asked
        if kind == "make":
            pin(first.devices)
            variants.clear()
            variants |= make(first, second)
            pipe.send({name: losses(step) for name, step in variants.items()})
            continue
        pipe.send(seconds(variants[first], second, barrier))


def pin(devices: int) -> None:
    """Give all threads of this process, and those to come, one processor for each device."""
    if hasattr(os, "sched_setaffinity"):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), PROCESSORS[:devices])


def losses(step: Callable[[], Any]) -> list[float]:
    """The losses of the first steps."""
    return [float(step()) for _ in range(CHECKED)]


def seconds(
    step: Callable[[], Any], count: int, barrier: Callable[[], object]
) -> tuple[float, float]:
    """Seconds that a step took, and of the processor, on average over `count`."""
    barrier()
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(count):
        found = step()
    float(found)
    ended = time.perf_counter()
    return (ended - started) / count, (time.process_time() - worked) / count


# --- variants ------------------------------------------------------------------------------------


def torch_variants(case: Case, text: str, rank: int) -> dict[str, Callable[[], Any]]:
    """The emitted program, by hand, and with DTensor; only device 0 has those of one device."""
    if rank >= case.devices:
        return {}
    import torch

    from meshdsl.backends.engines.in_process import load

    program = load(text)
    made = {"emitted": emitted(program, rank), "hand": by_hand(case, program, rank)}
    # Torch 2.13 cannot compile its AdamW with a rate that is a tensor.
    if case.compiled and case.optimizer == "sgd":
        torch.compiler.reset()  # programs share code objects, so what was compiled is of another
        compiled = load(text)
        compiled.device = torch.compile(compiled.device)
        made["compiled"] = emitted(compiled, rank)
    if case.devices > 1:
        made["DTensor"] = with_dtensor(case, program)
    return made


def emitted(program: Any, rank: int) -> Callable[[], Any]:
    """A step of the emitted program, as training runs it."""
    import torch

    groups = program.make_groups(program.MESH, program.GROUPS, rank)
    inputs, params, states = (
        tensors(program, specs, rank) for specs in (program.INPUTS, program.PARAMS, program.STATES)
    )

    def step() -> Any:
        with torch.inference_mode():
            return program.device(rank, groups, inputs, params, states)["loss"]

    return step


def by_hand(case: Case, program: Any, rank: int) -> Callable[[], Any]:
    """The step by hand."""
    from benchmarks.training_by_hand import ByHand

    params, inputs = (tensors(program, s, rank) for s in (program.PARAMS, program.INPUTS))
    return ByHand(case, params, inputs)


def with_dtensor(case: Case, program: Any) -> Callable[[], Any]:
    """The step with DTensor."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.training_dtensor import WithDTensor

    params = tensors(program, program.PARAMS, None)
    inputs = tensors(program, program.INPUTS, None)
    return WithDTensor(case, params, inputs, init_device_mesh("cpu", (2,)))


def jax_variants(case: Case, text: str) -> dict[str, Callable[[], Any]]:
    """The step in JAX."""
    from benchmarks.training_jax import WithJax
    from meshdsl.backends.engines.in_process import load

    program = load(text)
    whole = {"device": 1}
    params, inputs = (first_values(specs, whole, 0) for specs in (program.PARAMS, program.INPUTS))
    return {"JAX": WithJax(case, params, inputs)}


def tensors(program: Any, specs: Any, rank: int | None) -> dict[str, Any]:
    """The first values on device `rank`, or whole ones for None."""
    import torch

    mesh = {"device": 1} if rank is None else program.MESH
    arrays = first_values(specs, mesh, rank or 0)
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
