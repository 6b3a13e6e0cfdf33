"""Generating on an engine: every device a thread of this process, or a process under torchrun."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from meshdsl.backends.engines.execution import errors_at, refuse_too_large
from meshdsl.backends.engines.in_process import (
    Emitted,
    LoadedProgram,
    LocalSession,
    Tensors,
    as_array,
    call_device,
    local_tensors,
)
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.torchrun import Launcher
from meshdsl.backends.generate.task import Task, Tell
from meshdsl.backends.runtime.array_files import ArraysRefused, Refused, check_arrays, read_arrays
from meshdsl.backends.runtime.mapped_arrays import SUFFIX
from meshdsl.backends.runtime.values import Array, Spec
from meshdsl.diagnostics import Diagnostic, fail
from meshdsl.disk_cache import from_json
from meshdsl.pipeline import Compilation

ENGINES = ("local", "torchrun")


def generate(made: Compilation, engine: str, task: Task, tell: Tell) -> None:
    """Run the one-step program; `tell` gets every new token. Raises DiagnosticError."""
    refuse_too_large(made, engine, None)
    with errors_at(made.source):
        _ENGINES[engine](Emitted(made.emitted), task, tell)


def checked_params(made: Compilation, path: str, states: tuple[str, ...]) -> list[Diagnostic]:
    """Refuse parameters that do not fit (MD0504) or cannot be read (MD0505); notes on rounded ones.

    States begin anew, and what else the file has is of another program of the model.
    """
    from meshdsl.backends.draws import draws
    from meshdsl.backends.engines.reference import whole_specs

    specs = whole_specs(made.named, draws(made.named))[1]
    specs = {name: spec for name, spec in specs.items() if name not in states}
    if path.endswith(SUFFIX):  # compared when it was made
        return []
    try:
        arrays = {n: a for n, a in read_arrays(path).items() if n in specs}
        notes = check_arrays(arrays, specs, "parameters")
    except ArraysRefused as refused:
        help = "both programs call a parameter alike, and have it of one size: `--set`, as trained"
        fail("MD0504", str(refused), help=help)
    except Refused as refused:
        fail("MD0505", str(refused), help="name the folder of a checkpoint, or what `--out` wrote")
    return [Diagnostic("MD0506", note, severity="note") for note in notes]


class Speaker:
    """One device. All devices make the same calls in the same order, and choose the same tokens."""

    def __init__(self, ranks: Ranks, program: LoadedProgram, task: Task, tell: Tell) -> None:
        self.ranks, self.program, self.task, self.tell = ranks, program, task, tell
        self.contract = task.contract
        arrays = {
            n: a for n, a in read_arrays(task.params).items() if n not in task.contract.states
        }
        self.params = self._local(program.PARAMS, arrays)
        # All elements of an input are one number.
        zeros = {n: np.zeros(tuple(s.dims.values()), np.int64) for n, s in program.INPUTS.items()}
        self.inputs = self._local(program.INPUTS, zeros)

    def _local(self, specs: Mapping[str, Spec], arrays: Mapping[str, Any]) -> Tensors:
        blocks = local_tensors(self.ranks.mesh, specs, arrays, 0, [self.ranks.rank])[0]
        return {name: block.to(self.ranks.where) for name, block in blocks.items()}

    def run(self) -> list[int]:
        """The tokens after the prompt."""
        generated: list[int] = []
        tokens = list(self.task.prompt)
        for position in range(len(tokens) + self.task.steps - 1):
            outputs = self._read(tokens[position], position)
            if position + 1 < len(self.task.prompt):
                continue
            tokens.append(self.task.next(self._logits(outputs), position))
            generated.append(tokens[-1])
            if self.ranks.rank == 0:
                self.tell(tokens[-1])
        return generated

    def _read(self, token: int, position: int) -> Tensors:
        """The outputs after one token, which every row of a batch is given."""
        wanted = {self.contract.token: token, self.contract.position: position}
        inputs = {n: x.new_full(x.shape, wanted[n]) for n, x in self.inputs.items()}
        return call_device(self.ranks, self.program, (inputs, self.params, {}))

    def _logits(self, outputs: Tensors) -> Array:
        """Those of the first row."""
        name = self.contract.logits
        spec = self.program.OUTPUTS[name]
        logits = as_array(self.ranks.whole(spec, outputs[name]))
        return logits[tuple(slice(None) if d == self.contract.words else 0 for d in spec.dims)]


def _local(emitted: Emitted, task: Task, tell: Tell) -> None:
    programs = emitted.load()
    LocalSession(programs).run(lambda ranks: Speaker(ranks, programs.program, task, tell).run())


def _torchrun(emitted: Emitted, task: Task, tell: Tell) -> None:
    with Launcher("generate", emitted) as launcher:
        if launcher.run(task, lambda line: tell(from_json(line, int))) != 0:
            raise launcher.error


_ENGINES = {"local": _local, "torchrun": _torchrun}
