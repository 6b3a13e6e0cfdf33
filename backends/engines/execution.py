"""The engines by name, and the preconditions of a run: values, and enough memory."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any

import numpy as np

from meshdsl.backends.data.wrong_data import refuse_arrays, refuse_file
from meshdsl.backends.draws import draws
from meshdsl.backends.engines.against_reference import NOTHING, Reference, TensorComparison
from meshdsl.backends.engines.asynchronous_reference import replay_of
from meshdsl.backends.engines.failures import RunError
from meshdsl.backends.engines.reference import copy_specs, made_up, whole_specs
from meshdsl.backends.runtime.array_files import (
    ArraysRefused,
    Refused,
    check_arrays,
    read_arrays,
    what_writes,
)
from meshdsl.backends.runtime.mapped_arrays import SUFFIX
from meshdsl.backends.runtime.values import Array, Spec
from meshdsl.diagnostics import Diagnostic, DiagnosticError, Source, Span, fail
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.pipeline import Compilation
from meshdsl.placed.ir import reduced_in
from meshdsl.placed.worker_parts import workers
from meshdsl.records import dataclass

ENGINES = ("local", "torchrun", "reference")
PROCESS_BYTES = 300 << 20
"""The memory in bytes of a process with torch before it computes anything."""


@dataclass(frozen=True, slots=True)
class InputSource:
    """The source of values: files of inputs and parameters, or else the seed.

    In the folder `timed` the processes of torchrun write how long their lines took
    (`line_profiler.timed_in`).
    """

    inputs: str | None = None
    params: str | None = None
    seed: int = 0
    timed: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a run. `sent` is (collectives, bytes) per device where they were counted.

    `updated` are the parameters and states after a step that has new ones.
    """

    outputs: dict[str, Array]
    seconds: float
    sent: tuple[tuple[int, int], ...] = ()
    disagreements: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())
    updated: Mapping[str, Array] = field(default_factory=dict)


def run(made: Compilation, engine: str, given: InputSource, budget: int | None = None) -> Result:
    """Run a compilation on one engine. Raises DiagnosticError, RunError included.

    `budget` is the available memory in bytes; None queries the machine.
    """
    arrays, notes = read_given(made, given)
    if engine != "reference":
        refuse_too_large(made, engine, budget)
    with errors_at(made.source):
        return replace(_ENGINES[engine](made, given, arrays), notes=notes)


@contextmanager
def errors_at(source: Source | None, resume: str | None = None) -> Iterator[None]:
    """Raise a RunError as a diagnostic, with the line of its place in the source.

    `resume` is the help of a run that can be resumed, where a device failed or was killed.
    """
    try:
        yield
    except RunError as error:
        diagnostic = replace(error.diagnostic, span=line_of(error.place, source))
        if resume is not None and error.code in ("MD0701", "MD0721"):
            diagnostic = replace(diagnostic, help=resume)
        raise DiagnosticError(diagnostic) from error


def line_of(place: str | None, source: Source | None) -> Span | None:
    """The source line that a place such as `mlp.mdsl:15` names, without its indentation."""
    file, _, line = (place or "").rpartition(":")
    if source is None or file != source.name or not line.isdecimal():
        return None
    text = source.line(int(line))
    start = source.starts[int(line) - 1] + len(text) - len(text.lstrip())
    return Span(source, start, start + len(text.strip()))


def verify(
    made: Compilation,
    given: InputSource,
    outputs: Mapping[str, Array],
    updated: Mapping[str, Array] = NOTHING,
) -> tuple[TensorComparison, ...]:
    """Compare outputs and updated tensors with the reference's on the same values."""
    return reference_of(made, given).compare(outputs, updated)


def reference_of(made: Compilation, given: InputSource) -> Reference:
    """The reference for any run on the same values. Raises MD0709 for one of several workers."""
    return _reference(made, given, read_given(made, given)[0], reduced_in(made.placed))


def check_reference(made: Compilation) -> None:
    """Refuse the reference of a step in which several workers compress what they have (MD0709)."""
    count = workers(made.placed)
    if count > 1:
        assert made.named.goal is not None
        goal = made.named.goal
        message = f"the reference has one worker, and `{goal.optimizer.compress}` here {count}"
        other = "verify on a mesh of one device, or without `compress`"
        refuse("MD0709", message, leave_out("--verify", safe=False), other, span=goal.span)


def _reference(
    made: Compilation,
    given: InputSource,
    arrays: tuple[Any, Any],
    reduced: frozenset[str] = frozenset(),
) -> Reference:
    check_reference(made)
    named, (of_inputs, of_params) = made.named, _specs(made)
    sides = (
        (of_inputs, arrays[0]),
        (of_params, arrays[1]),
        (copy_specs(named, draws(named)), arrays[1]),
    )
    inputs, params, states = (made_up(specs, stored, given.seed) for specs, stored in sides)
    return Reference(named, inputs, params, states, reduced, replay_of(made))


def read_given(
    made: Compilation, given: InputSource
) -> tuple[tuple[dict[str, Any], dict[str, Any]], tuple[str, ...]]:
    """The arrays of both files, checked against the program, and notes on rounded ones."""
    files: list[dict[str, Any]] = []
    notes: list[str] = []
    problems: list[Diagnostic] = []
    sides = zip(("inputs", "parameters"), (given.inputs, given.params), _specs(made), strict=True)
    states = frozenset(str(u.old.name) for u in made.named.updates if u.old.role == "param")
    for what, path, specs in sides:
        try:
            arrays, rounded = read_checked(path, specs, what, states) if path else ({}, [])
            files.append(arrays)
            notes += rounded
        except DiagnosticError as error:
            problems += error.diagnostics
    if problems:
        raise DiagnosticError(*problems)
    return (files[0], files[1]), tuple(notes)


def read_checked(
    path: str, specs: Mapping[str, Spec], what: str, optional: Collection[str] = ()
) -> tuple[dict[str, Any], list[str]]:
    """The arrays of a file of `inputs` or `parameters`, and notes on rounded ones.

    Those that are `optional`, as states that a program assigns, may be missing: they begin anew.
    A table of parameters in another program's model was compared when it was made.
    Raises MD0504 where they do not fit the program, MD0505 where there is no such file.
    """
    arrays: dict[str, Array] = {}
    try:
        arrays = dict(read_arrays(path))
        if path.endswith(SUFFIX):
            return arrays, []
        needed = {n: s for n, s in specs.items() if n in arrays or n not in optional}
        return arrays, check_arrays(arrays, needed, what)
    except ArraysRefused as refused:
        help = "give every array under its name, with these shapes and dtypes"
        if what == "parameters" and specs.keys().isdisjoint(arrays):
            help = "to read a model with names of its own, declare a `weights` block"
        refuse_arrays(refused, help)
    except Refused as refused:
        refuse_file(refused, path, what_writes(path))


def _specs(made: Compilation) -> tuple[dict[str, Spec], dict[str, Spec]]:
    return whole_specs(made.named, draws(made.named))


def refuse_too_large(made: Compilation, engine: str, budget: int | None) -> None:
    """Refuse a run that this machine lacks memory for; nothing is allocated to find out."""
    from meshdsl.backends.engines.in_process import MOST_DEVICES
    from meshdsl.device.memory import memory

    devices = made.device.mesh.devices
    if engine == "local" and devices > MOST_DEVICES:
        message = f"the local engine runs at most {MOST_DEVICES:,} devices, not {devices:,}"
        axis, size = max(made.device.mesh.declared, key=lambda each: each[1])
        smaller = {**dict(made.device.mesh.declared), axis: max(1, size * MOST_DEVICES // devices)}
        mesh = ",".join(f"{name}:{number}" for name, number in smaller.items())
        other = "`explain` and `compile` work at any size"
        refuse("MD0704", message, give("--mesh", mesh, safe=False), other)
    each = memory(made.device)["peak"] + (PROCESS_BYTES if engine == "torchrun" else 0)
    if budget is None:
        budget = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if devices * each > budget:
        fail(
            "MD0703",
            f"{devices:,} device{'s' * (devices > 1)} would hold {_gib(devices * each)}, "
            f"and this machine has {_gib(budget)}",
            help="choose a smaller mesh or smaller dims (`--set`); `explain` and `compile` work",
        )


def _gib(amount: int) -> str:
    return f"{amount / 2**30:,.1f} GiB"


def _run_local(made: Compilation, given: InputSource, arrays: tuple[Any, Any]) -> Result:
    from meshdsl.backends.engines.in_process import run_local

    emitted = made.emitted
    done = run_local(emitted.text, *arrays, seed=given.seed, lines=emitted.places)
    sent = tuple(
        (sum(calls.values()), int(done.wire_bytes(rank))) for rank, calls in enumerate(done.sent)
    )
    disagreements = tuple(done.disagreements())
    return Result(done.outputs, done.seconds, sent, disagreements, updated=done.updated)


def _run_torchrun(made: Compilation, given: InputSource, arrays: tuple[Any, Any]) -> Result:
    return run_torchrun(made.emitted.text, given, made.emitted.places)


def run_torchrun(text: str, given: InputSource, lines: Mapping[int, str] | None = None) -> Result:
    """Run an emitted text on one process per device, which read the files that are given.

    `lines` maps lines of the text to places of the source. Raises TorchrunError; a
    KeyboardInterrupt passes through. In every case all processes are gone afterwards.
    """
    from meshdsl.backends.engines.in_process import Emitted
    from meshdsl.backends.engines.torchrun import Launcher
    from meshdsl.backends.torch.emitter import ProgramText

    started = time.monotonic()
    inputs, params = (path and os.path.abspath(path) for path in (given.inputs, given.params))
    with Launcher("run", Emitted(ProgramText(text, dict(lines or {})))) as launcher:
        if launcher.run(replace(given, inputs=inputs, params=params)) != 0:
            raise launcher.error
        outputs, updated = (_arrays(launcher.folder / f"{n}.npz") for n in ("out", "updated"))
    return Result(outputs, time.monotonic() - started, updated=updated)


def _arrays(path: Path) -> dict[str, Array]:
    """The arrays of a file that processes have written; none where there is none."""
    if not path.exists():
        return {}
    with np.load(path, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _run_reference(made: Compilation, given: InputSource, arrays: tuple[Any, Any]) -> Result:
    started = time.monotonic()
    outputs, updated = _reference(made, given, arrays).answer
    return Result(outputs, time.monotonic() - started, updated=updated)


_ENGINES = {"local": _run_local, "torchrun": _run_torchrun, "reference": _run_reference}
