"""Training steps of small programs: run on every device, compared with reference and torch."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.against_reference import errors
from meshdsl.backends.engines.in_process import (
    Emitted,
    LocalRun,
    LocalSession,
    as_array,
    call_device,
    load,
    local_tensors,
    whole_arrays,
)
from meshdsl.backends.engines.reference import made_up, reference_step, whole_specs
from meshdsl.backends.runtime.values import Array, Spec, local_part
from meshdsl.backends.torch.emitter import ProgramText
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.explanation import explain
from tests.programs.harness import Case, check_bytes, compiled

Arrays = dict[str, Array]
Held = tuple[dict[str, Array], ...]
"""The local blocks of each device, by name."""


@dataclass(frozen=True, slots=True)
class Step:
    """One training step on every device: the run, and the local blocks afterwards."""

    run: LocalRun
    held: Held
    specs: dict[str, Spec]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A case as it is trained: its named program, the emitted text, what `explain` says."""

    named: NamedProgram
    emitted: ProgramText
    report: Any

    def step(
        self, inputs: Mapping[str, Any], kept: Mapping[str, Any], before: Held | None = None
    ) -> Step:
        """One step; `kept` are parameters and states, drawn or begun where they are missing.

        With the blocks of the step `before`, every device goes on with its own. Raises
        AssertionError unless devices sent just the bytes that were predicted.
        """
        found = on_devices(self.emitted, inputs, kept, before)
        assert found.run.disagreements() == []
        check_bytes(self.report, found.run)
        return found


def compiled_step(case: Case, dtype: str | None = "f64") -> Compiled:
    """`case` compiled; by default with every float in f64."""
    made = compiled(case, dtype)
    return Compiled(made.named, made.emitted, explain(made.device))


def on_devices(
    emitted: ProgramText,
    inputs: Mapping[str, Any],
    kept: Mapping[str, Any],
    before: Held | None = None,
) -> Step:
    """Run every device of an emitted text once, as `run_local` does, and keep all local blocks."""
    session = LocalSession(Emitted(emitted).load())
    program, mesh = session.programs.program, session.programs.mesh
    sides = [(program.INPUTS, inputs), (program.PARAMS, kept)]
    sides += [(program.STATES, kept)] if hasattr(program, "STATES") else []
    ranks = range(session.programs.devices)
    blocks = [local_tensors(mesh, *side, 0, ranks) for side in sides]
    tables = [list(each) for each in zip(*blocks, strict=True)]
    for rank, last in enumerate(before or ()):
        for own in tables[rank][1:]:
            own.update({name: torch.from_numpy(last[name].copy()) for name in own})
    results = session.run(lambda ranks: call_device(ranks, program, tables[ranks.rank]))
    stored = [dict(ChainMap(*each[1:])) for each in tables]
    specs = {**program.PARAMS, **program.updated}
    shown, held = (
        tuple({n: as_array(t) for n, t in blocks.items()} for blocks in each)
        for each in (results, stored)
    )
    outputs = whole_arrays(program.OUTPUTS, mesh, results)
    updated = whole_arrays(specs, mesh, stored)
    sent = tuple(session.sent)
    run = LocalRun(outputs, shown, sent, program.OUTPUTS, mesh, 0.0, updated)
    return Step(run, held, specs)


# --- one device -------------------------------------------------------------------------------


def values(program: NamedProgram, seed: int = 0) -> tuple[Arrays, Arrays]:
    """Inputs and parameters as every engine makes them up."""
    inputs, params = whole_specs(program, draws(program))
    return made_up(inputs, seed=seed), made_up(params, seed=seed)


ROUNDING = 1e-12
"""max|Δ| in f64 of sums of numbers around 1, some of them divided by a small deviation."""


def hold_to(
    step: Step, outputs: Mapping[str, Array], kept: Mapping[str, Array], most: float
) -> None:
    """Every device's part of outputs, parameters and states is right to `most`, of max|ref|."""
    mesh = step.run.mesh
    for name, array in outputs.items():
        error, relative = errors(step.run.outputs[name], array)
        # What cancels to 0 has no size to be compared with: sums of a norm over its own dim.
        assert relative <= most or error <= ROUNDING, f"output {name} is off by {relative}"
    for name, array in kept.items():
        whole = max(float(np.max(np.abs(array), initial=0.0)), 1e-12)
        for rank, held in enumerate(step.held):
            block = array[local_part(step.specs[name], mesh, rank)]
            error = float(np.max(np.abs(held[name] - block), initial=0.0)) / whole
            assert error <= most, f"device {rank}: {name} is off by {error}"


def check_step(case: Case, most: float = 1e-9) -> Compiled:
    """One step of `case` in f64 is that of the reference, on every device; bytes are predicted."""
    made = compiled_step(case)
    inputs, params = values(made.named)
    outputs, kept = reference_step(made.named, inputs, params, {})
    hold_to(made.step(inputs, params), outputs, kept, most)
    return made


# --- torch's own gradients --------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def whole(text: str, evaluate: bool = False) -> Compilation:
    """`text` compiled for one device in f64: the step, or only the forward pass."""
    options = Options(mesh="one:1", dtype="f64", evaluate=evaluate)
    return compile_source(Source("test.mdsl", text), options, Diagnostics())


def autograd(text: str, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> Arrays:
    """The gradients of output `loss` by the parameters: torch's, of the emitted forward pass."""
    program = load(whole(text, evaluate=True).text)
    (given,) = local_tensors(program.MESH, program.INPUTS, inputs, 0, range(1))
    (leaves,) = local_tensors(program.MESH, program.PARAMS, params, 0, range(1))
    for leaf in leaves.values():
        leaf.requires_grad_(leaf.is_floating_point())
    program.device(0, {}, given, leaves)["loss"].backward()
    return {name: t.grad.numpy() for name, t in leaves.items() if t.grad is not None}
