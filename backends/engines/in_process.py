"""The local engine: every device of a mesh runs the emitted text in a thread of this process."""

from __future__ import annotations

import functools
import math
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.backends.engines.local_devices import DeviceThreads, LocalRunError
from meshdsl.backends.engines.local_dist import FILE, LocalDist, SentCollective
from meshdsl.backends.engines.reference import block_values
from meshdsl.backends.runtime.array_files import ArraysRefused, check_arrays
from meshdsl.backends.runtime.values import (
    NUMPY_DTYPES,
    Array,
    Part,
    Spec,
    first_replicas,
    has_sum,
    local_part,
    shape_of,
    spec_of,
)
from meshdsl.backends.torch.preamble import RUNTIME

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.runtime.offloading import Store

MOST_DEVICES = 1024
"""The most threads of one process; a bigger mesh is refused."""


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The results of a run.

    `outputs` are whole arrays, `device_outputs` the local blocks of each device. `sent` counts the
    collectives of each device. `updated` are parameters and states after a step that has new ones,
    laid out by `kept`, `device_updated` their local blocks. bf16 values are float32. `away` are the
    bytes of states that each device read and wrote, where they lie elsewhere.
    """

    outputs: dict[str, Array]
    device_outputs: tuple[dict[str, Array], ...]
    sent: tuple[Counter[SentCollective], ...]
    specs: dict[str, Spec]
    mesh: dict[str, int]
    seconds: float
    updated: dict[str, Array] = field(default_factory=dict)
    device_updated: tuple[dict[str, Array], ...] = ()
    kept: dict[str, Spec] = field(default_factory=dict)
    away: tuple[tuple[int, int], ...] = ()

    def wire_bytes(self, rank: int) -> int:
        """Bytes that device `rank` sends by ring algorithms."""
        return sum(sent.wire_bytes * count for sent, count in self.sent[rank].items())

    def disagreements(self) -> list[str]:
        """Tensors with replicas of a block that differ in value."""
        sentences = []
        outputs = (self.specs, self.outputs, self.device_outputs, "")
        updated = (self.kept, self.updated, self.device_updated, " after the step")
        for specs, wholes, every, when in (outputs, updated):
            for name, spec in specs.items():
                for rank, held in enumerate(every):
                    if spec.parts:
                        continue
                    block = wholes[name][local_part(spec, self.mesh, rank)]
                    if not np.array_equal(block, held[name], equal_nan=block.dtype.kind == "f"):
                        sentences.append(f"device {rank} holds other values of {name}{when}")
        return sentences


class LoadedProgram(ModuleType):
    """An emitted text, executed as a module."""

    MESH: dict[str, int]
    GROUPS: tuple[tuple[str, ...], ...]
    INPUTS: dict[str, Spec]
    PARAMS: dict[str, Spec]
    STATES: dict[str, Spec]
    OUTPUTS: dict[str, Spec]
    LOSS: str
    NORM: str
    dist: Any
    device: Any


def run_local(
    text: str,
    inputs: Mapping[str, Any] | None = None,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    lines: Mapping[int, str] | None = None,
) -> LocalRun:
    """Run every device of an emitted text and return the results.

    `inputs` and `params` are whole arrays (or what is sliced like one, a `StoredArray`); missing
    ones are drawn from the seed. `lines` maps lines of the text to places of the source.
    Raises LocalRunError; a KeyboardInterrupt passes through once all devices are released.
    """
    program = load(text)
    devices = math.prod(program.MESH.values())
    if devices > MOST_DEVICES:
        message = f"the local engine runs at most {MOST_DEVICES} devices, not {devices}"
        raise LocalRunError("MD0704", message, help="choose a smaller mesh with --mesh")
    check_given(inputs or {}, program.INPUTS, "inputs")
    check_given(params or {}, program.PARAMS, "parameters")
    local_inputs = local_tensors(program.MESH, program.INPUTS, inputs or {}, seed, range(devices))
    learned = local_tensors(program.MESH, program.PARAMS, params or {}, seed, range(devices))
    states = getattr(program, "STATES", None)
    local_states = local_tensors(program.MESH, states or {}, params or {}, seed, range(devices))
    stores = moved_away(states or {}, local_states)
    dist = LocalDist(program.MESH, program.GROUPS, lines)
    program.dist = dist
    started = time.monotonic()

    def call(rank: int) -> dict[str, torch.Tensor]:
        values = (
            local_inputs[rank],
            learned[rank],
            *(() if states is None else (local_states[rank],)),
        )
        outputs: dict[str, torch.Tensor] = program.device(rank, dist.groups(rank), *values)
        return outputs

    results = DeviceThreads(devices, dist, call, text).run()
    results.check()
    held = tuple({n: as_array(t) for n, t in outputs.items()} for outputs in results.outputs)
    outputs = {n: assemble(n, spec, program.MESH, held) for n, spec in program.OUTPUTS.items()}
    seconds = time.monotonic() - started
    run = LocalRun(outputs, held, tuple(dist.sent), program.OUTPUTS, program.MESH, seconds)
    if states is None:
        return run
    run = replace(run, away=tuple((store.read, store.written) for store in stores))
    return _with_updates(run, {**program.PARAMS, **states}, learned, local_states)


def _with_updates(
    run: LocalRun,
    specs: dict[str, Spec],
    params: list[dict[str, torch.Tensor]],
    states: list[dict[str, torch.Tensor]],
) -> LocalRun:
    """The run of a training step, with the updated parameters and states, whole and as blocks."""
    pairs = zip(params, states, strict=True)
    held = tuple({n: as_array(t) for n, t in {**p, **s}.items()} for p, s in pairs)
    updated = {n: assemble(n, spec, run.mesh, held) for n, spec in specs.items()}
    return replace(run, updated=updated, device_updated=held, kept=specs)


def load(text: str, above: int = 0) -> LoadedProgram:
    """Execute an emitted text as a module, not as the main program; its tables contain `Spec`s.

    Its lines are numbered as if `above` others preceded it.
    """
    from meshdsl.backends.runtime.vector_math import choose_vector_kernels

    choose_vector_kernels()  # devices that are threads all call them first in the same statement
    program = LoadedProgram("meshdsl_device_program")
    program_text, _, library = text.partition(RUNTIME)
    sys.modules[program.__name__] = program  # some decorators look their module up
    try:
        exec(_code("\n" * above + program_text), program.__dict__)
        for part in library.split(APART):
            exec(_compiled(part), program.__dict__)
    finally:
        del sys.modules[program.__name__]
    for name, table in program.__dict__.items():
        if name in TABLES:
            program.__dict__[name] = {key: spec_of(value) for key, value in table.items()}
    return program


TABLES = ("INPUTS", "PARAMS", "STATES", "OUTPUTS", "COTANGENTS", "PARAM_GRADS", "INPUT_GRADS")
APART = "\n\n\n"
"""The separator of definitions."""


def _code(text: str) -> CodeType:
    return compile(text, FILE, "exec", dont_inherit=True)


@functools.lru_cache(maxsize=4096)
def _compiled(part: str) -> CodeType:
    """The code of a definition of the support library; cached, for many programs share it."""
    return _code(part)


def check_given(arrays: Mapping[str, Any], specs: Mapping[str, Spec], what: str) -> None:
    """Refuse arrays that do not fit the program; missing ones are legal, they are drawn."""
    try:
        check_arrays(arrays, {n: spec for n, spec in specs.items() if n in arrays}, what)
    except ArraysRefused as refused:
        raise LocalRunError("MD0501", str(refused)) from None


def local_tensors(
    mesh: dict[str, int],
    specs: Mapping[str, Spec],
    arrays: Mapping[str, Any],
    seed: int,
    ranks: Sequence[int],
) -> list[dict[str, torch.Tensor]]:
    """The local blocks of the tensors in `specs` on each device of `ranks`, in own memory."""
    by_rank: list[dict[str, torch.Tensor]] = [{} for _ in ranks]
    for name, spec in specs.items():
        blocks: dict[str, torch.Tensor] = {}
        for rank, held in zip(ranks, by_rank, strict=True):
            part = local_part(spec, mesh, rank)
            if not has_sum(spec, mesh, rank):
                held[name] = _zeros(spec, part)
                continue
            if str(part) in blocks:
                held[name] = blocks[str(part)].clone()
                continue
            block = as_tensor(block_values(name, spec, arrays, seed, part), spec)
            held[name] = blocks[str(part)] = block
    return by_rank


def moved_away(specs: Mapping[str, Spec], tables: Sequence[dict[str, Any]]) -> list[Store]:
    """Move the tensors that lie elsewhere there: a store for each device, whose counts begin at 0.

    Raises MD0545 where they cannot be written.
    """
    names = [name for name, spec in specs.items() if spec.away]
    stores = []
    try:
        for table in tables if names else ():
            stores.append(store := store_of(specs))
            table.update({name: store.keep(table.pop(name)) for name in names})
            store.written = 0
    except OSError as error:
        raise LocalRunError("MD0545", full_disk(error)) from None
    return stores


def store_of(specs: Mapping[str, Spec]) -> Store:
    """What keeps the tensors of a device that lie elsewhere: all of them in one place."""
    from meshdsl.backends.runtime.disk import Disk
    from meshdsl.backends.runtime.host import Host

    return Disk() if any(spec.away == "disk" for spec in specs.values()) else Host()


def full_disk(error: OSError) -> str:
    """The message of states that could not be written."""
    folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
    return f"the states cannot be kept in a file in {folder}: {error.strerror or error}"


def _zeros(spec: Spec, part: Part) -> torch.Tensor:
    """What a device begins with that has no part of a sum."""
    import torch

    return torch.zeros(shape_of(part), dtype=torch_dtype(spec.dtype))


def as_tensor(values: Array, spec: Spec) -> torch.Tensor:
    """A block of a tensor, in memory of its own."""
    import torch

    return torch.from_numpy(np.array(values, order="C")).to(torch_dtype(spec.dtype))


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of the language's `dtype`."""
    import torch

    torch_type = getattr(torch, "bfloat16" if dtype == "bf16" else NUMPY_DTYPES[dtype])
    assert isinstance(torch_type, torch.dtype)
    return torch_type


def as_array(tensor: torch.Tensor) -> Array:
    """A local output as a numpy array (sharing its memory where it can)."""
    import torch

    tensor = tensor.cpu()
    array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def assemble(
    name: str, spec: Spec, mesh: dict[str, int], held: tuple[dict[str, Array], ...]
) -> Array:
    """The whole of output `name` from the blocks of the devices."""
    blocks: dict[str, tuple[Part, Array]] = {}
    firsts = first_replicas(spec, mesh) if spec.parts else []
    for rank, outputs in enumerate(held):
        part, block = local_part(spec, mesh, rank), outputs[name]
        shape = tuple(shape_of(part))
        assert block.shape == shape, f"device {rank} holds {block.shape} of {name}, not {shape}"
        if spec.parts and str(part) in blocks and rank in firsts:
            block = blocks.pop(str(part))[1] + block
        blocks.setdefault(str(part), (part, block))
    assembled = np.empty(tuple(spec.dims.values()), held[0][name].dtype)
    for part, block in blocks.values():
        assembled[part] = block
    return assembled
