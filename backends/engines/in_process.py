"""The local engine: every device of a mesh runs the emitted text in a thread of this process."""

from __future__ import annotations

import functools
import itertools
import math
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from meshdsl.backends.engines.local_devices import DeviceThreads, LocalRunError, Worker
from meshdsl.backends.engines.local_dist import FILE, LocalDist, SentCollective
from meshdsl.backends.engines.ranks import Ranks, assembled
from meshdsl.backends.engines.reference import block_values
from meshdsl.backends.engines.turns import has_short_calls
from meshdsl.backends.runtime.array_files import ArraysRefused, check_arrays
from meshdsl.backends.runtime.values import (
    NUMPY_DTYPES,
    Array,
    Spec,
    first_replicas,
    has_sum,
    local_part,
    shape_of,
    spec_of,
)
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.backends.torch.preamble import RUNTIME
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.runtime.offloading import Store

T = TypeVar("T")
Tensors = dict[str, "torch.Tensor"]
"""Local blocks of one device, by name."""

MOST_DEVICES = 1024
"""The most threads of one process; a bigger mesh is refused."""


# --- texts, as modules ---------------------------------------------------------------------------


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

    @property
    def updated(self) -> dict[str, Spec]:
        """The parameters and states that a step gives new values; none of a forward pass."""
        states = getattr(self, "STATES", None)
        return {} if states is None else {**self.PARAMS, **states}


def load(text: str, above: int = 0) -> LoadedProgram:
    """Execute an emitted text as a module, not as the main program; its tables contain `Spec`s.

    Its lines are numbered as if `above` others preceded it.
    """
    from meshdsl.backends.runtime.vector_math import choose_vector_kernels

    choose_vector_kernels()  # devices that are threads all call them first in the same statement
    program = LoadedProgram("meshdsl_device_program")
    program_text, _, library = text.partition(RUNTIME)
    with _LOADING:
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
_LOADING = threading.Lock()
"""Lock around executing a text as a module, which all threads see meanwhile."""


def _code(text: str) -> CodeType:
    return compile(text, FILE, "exec", dont_inherit=True)


@functools.lru_cache(maxsize=4096)
def _compiled(part: str) -> CodeType:
    """The code of a definition of the support library; cached, for many programs share it."""
    return _code(part)


FILES = {"program": "program.py", "evaluation": "evaluation.py", "warmup": "warmup.py"}
"""The files of the texts that processes run."""


@dataclass(frozen=True, slots=True)
class Emitted:
    """The text of a program and, of a training run, the one that evaluates (None: not wanted).

    Of a generation the second one reads prompts in one pass. The first steps of a training run are
    those of the text `warmup`, where there is one. Lines are numbered as if each text followed the
    one before.
    """

    program: ProgramText
    evaluation: ProgramText | None = None
    warmup: ProgramText | None = None

    @property
    def every(self) -> dict[str, ProgramText]:
        """The texts there are, by the names of their fields."""
        texts = ((name, getattr(self, name)) for name in FILES)
        return {name: text for name, text in texts if text is not None}

    @property
    def text(self) -> str:
        """All texts."""
        return "".join(each.text for each in self.every.values())

    @property
    def places(self) -> dict[int, str]:
        """The source places of the lines of all."""
        return {
            line + self.above(name): place
            for name, each in self.every.items()
            for line, place in each.places.items()
        }

    def above(self, name: str) -> int:
        """How many lines are above the text of a field."""
        before = itertools.takewhile(lambda other: other != name, FILES)
        texts = (self.every.get(other) for other in before)
        return sum(text.text.count("\n") for text in texts if text is not None)

    def text_of(self, name: str) -> str:
        """The text of a field, its lines numbered as in `text`."""
        return "\n" * self.above(name) + self.every[name].text

    def load(self) -> Programs:
        """All texts as modules."""
        every = self.every.items()
        return Programs(self, **{name: load(each.text, self.above(name)) for name, each in every})

    def write(self, folder: Path) -> None:
        """Write the texts for other processes."""
        for name, each in self.every.items():
            (folder / FILES[name]).write_text(each.text, encoding="utf-8")


def emitted_in(folder: Path) -> Emitted:
    """The texts that `Emitted.write` wrote, without places."""
    paths = {name: folder / file for name, file in FILES.items() if (folder / file).exists()}
    texts = {name: ProgramText(path.read_text("utf-8"), {}) for name, path in paths.items()}
    return Emitted(**texts)


@dataclass(frozen=True, slots=True)
class Programs:
    """Texts as modules, which have one mesh."""

    emitted: Emitted
    program: LoadedProgram
    evaluation: LoadedProgram | None = None
    warmup: LoadedProgram | None = None

    @property
    def every(self) -> tuple[LoadedProgram, ...]:
        """Those there are."""
        programs = (self.program, self.evaluation, self.warmup)
        return tuple(program for program in programs if program is not None)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes with their sizes."""
        return self.program.MESH

    @property
    def devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh.values())

    @property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The sets of axes that the programs' collectives run over, and all axes."""
        axis_sets = {axes for program in self.every for axes in program.GROUPS}
        return tuple(sorted(axis_sets | {tuple(self.mesh)}))


# --- devices, as threads -------------------------------------------------------------------------


class LocalSession:
    """The devices of loaded programs, each a thread of this process. Runs one at a time.

    They run at once or, where their calls are short, in turns: `in_turns`. Threads that are
    `lasting` serve one run after another; those of a run that failed are abandoned. `sent` are the
    collectives of each device in the last run. During a run, `mark(rank)` records that a device
    begins anew, as a step of a training run.
    """

    mark: Callable[[int], None]

    def __init__(self, programs: Programs, lasting: bool = False) -> None:
        devices = programs.devices
        if devices > MOST_DEVICES:
            message = f"the local engine runs at most {MOST_DEVICES} devices, not {devices}"
            raise LocalRunError("MD0704", message, help="choose a smaller mesh with --mesh")
        self.programs, self.lasting = programs, lasting
        self.in_turns = has_short_calls(programs.emitted.program)
        self.sent: list[Counter[SentCollective]] = []
        self.forget_threads()
        _SESSIONS.add(self)

    def forget_threads(self) -> None:
        """Let the next run begin with threads of its own."""
        self._workers: list[Worker] = []
        self._lock = threading.Lock()

    def run(self, work: Callable[[Ranks], T]) -> list[T]:
        """What `work` returns on each device, in rank order.

        Raises LocalRunError for the first failure in program order, or what refused the run; a
        KeyboardInterrupt passes through once all devices are released.
        """
        programs, mesh = self.programs, self.programs.mesh
        with self._lock:
            workers, self._workers = self._workers, []
            if self.lasting and not workers:
                workers = [Worker(f"device {rank}") for rank in range(programs.devices)]
            dist = LocalDist(mesh, programs.groups, programs.emitted.places, self.in_turns)
            for program in programs.every:
                program.dist = dist

            def call(rank: int) -> T:
                return work(Ranks(mesh, rank, dist, dist.groups(rank)))

            text = programs.emitted.text
            threads = DeviceThreads(programs.devices, dist, call, text, workers or None)
            self.mark = threads.mark
            try:
                threads.run().check()
            finally:
                del self.mark  # what the run was given does not live on with this
            self._workers, self.sent = workers, dist.sent
            return threads.outputs


_SESSIONS: weakref.WeakSet[LocalSession] = weakref.WeakSet()


def _forget_threads() -> None:
    """In a process that was forked, begin with new threads and free locks: no thread came along."""
    global _LOADING
    _LOADING = threading.Lock()
    for session in list(_SESSIONS):
        session.forget_threads()


os.register_at_fork(after_in_child=_forget_threads)


# --- one run -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalRun:
    """The results of a run.

    `outputs` are whole arrays, `device_outputs` the local blocks of each device. `sent` counts the
    collectives of each device. `updated` are parameters and states after a step that has new ones,
    laid out by `kept`, `device_updated` their local blocks. bf16 values are float32. `away` are the
    bytes that each device read and wrote of what lies elsewhere.
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
    session = LocalSession(Emitted(ProgramText(text, dict(lines or {}))).load())
    program, mesh = session.programs.program, session.programs.mesh
    every = range(session.programs.devices)
    tables, stores = given_tables(program, inputs or {}, params or {}, seed, every)
    started = time.monotonic()
    results = session.run(lambda ranks: call_device(ranks, program, tables[ranks.rank]))
    outputs = whole_arrays(program.OUTPUTS, mesh, results)
    seconds = time.monotonic() - started
    away = tuple((store.read, store.written) for store in stores)
    about = (tuple(session.sent), program.OUTPUTS, mesh, seconds)
    run = LocalRun(outputs, _as_arrays(results), *about, away=away)
    specs = program.updated
    if not specs:
        return run
    held = [{n: t.cpu() for n, t in {**params, **states}.items()} for _, params, states in tables]
    updated, blocks = whole_arrays(specs, mesh, held), _as_arrays(held)
    return replace(run, updated=updated, device_updated=blocks, kept=specs)


def whole_arrays(
    specs: Mapping[str, Spec], mesh: dict[str, int], held: Sequence[Tensors]
) -> dict[str, Array]:
    """Whole tensors from the blocks of all devices, bf16 as float32."""

    def whole(name: str, spec: Spec) -> Array:
        blocks = ((rank, held[rank][name].cpu()) for rank in first_replicas(spec, mesh))
        return as_array(assembled(spec, mesh, blocks))

    return {name: whole(name, spec) for name, spec in specs.items()}


def _as_arrays(held: Sequence[Tensors]) -> tuple[dict[str, Array], ...]:
    return tuple({n: as_array(t) for n, t in tensors.items()} for tensors in held)


def call_device(ranks: Ranks, program: LoadedProgram, tables: Sequence[Tensors]) -> Tensors:
    """The outputs of one device, of its inputs, its parameters and, if there are any, states."""
    outputs: Tensors = program.device(ranks.rank, ranks.groups(program.GROUPS), *tables)
    return outputs


def given_tables(
    program: LoadedProgram,
    inputs: Mapping[str, Any],
    params: Mapping[str, Any],
    seed: int,
    ranks: Sequence[int],
) -> tuple[list[list[Tensors]], list[Store]]:
    """Inputs, parameters and, of a step that has them, states of each of `ranks`; and their stores.

    States that are copies of parameters begin as those in `params`. Raises LocalRunError for
    arrays that do not fit.
    """
    check_given(inputs, program.INPUTS, "inputs")
    check_given(params, program.PARAMS, "parameters")
    sides = [(program.INPUTS, inputs), (program.PARAMS, params)]
    states = getattr(program, "STATES", None)
    sides += [] if states is None else [(states, params)]
    blocks = [local_tensors(program.MESH, *side, seed, ranks) for side in sides]
    stores = moved_away(program.PARAMS | (states or {}), *blocks[1:])
    return [list(tables) for tables in zip(*blocks, strict=True)], stores


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
    import torch

    by_rank: list[Tensors] = [{} for _ in ranks]
    for name, spec in specs.items():
        blocks: dict[str, torch.Tensor] = {}
        for rank, held in zip(ranks, by_rank, strict=True):
            part = local_part(spec, mesh, rank)
            if not has_sum(spec, mesh, rank):
                dtype = torch_dtype(spec.dtype)
                held[name] = torch.zeros(shape_of(part), dtype=dtype, device="cpu")
                continue
            if str(part) in blocks:
                held[name] = blocks[str(part)].clone()
                continue
            block = as_tensor(block_values(name, spec, arrays, seed, part), spec)
            held[name] = blocks[str(part)] = block
    return by_rank


def moved_away(specs: Mapping[str, Spec], *tables: Sequence[dict[str, Any]]) -> list[Store]:
    """Move the tensors that lie elsewhere there: a store for each device, whose counts begin at 0.

    Each of `tables` is one of every device. Raises MD0545 where they cannot be written.
    """
    names = {name for name, spec in specs.items() if spec.away}
    stores = []
    try:
        for of_device in zip(*tables, strict=True) if names else ():
            stores.append(store := store_of(specs))
            for table in of_device:
                for name in names.intersection(table):
                    table[name] = store.keep(table.pop(name))
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


def as_tensor(values: Array, spec: Spec) -> torch.Tensor:
    """A block of a tensor, in memory of its own."""
    import torch

    flags = values.flags
    fresh = flags.owndata and flags.c_contiguous and flags.writeable  # not of the user's arrays
    return torch.from_numpy(values if fresh else np.array(values, order="C")).to(
        torch_dtype(spec.dtype)
    )


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
