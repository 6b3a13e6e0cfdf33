"""Generating on an engine: every device a thread of this process, or a process under torchrun."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meshdsl.backends.data.wrong_data import refuse_arrays, refuse_file, rounded_note
from meshdsl.backends.engines.execution import errors_at, refuse_too_large
from meshdsl.backends.engines.in_process import (
    Emitted,
    LoadedProgram,
    LocalSession,
    Programs,
    Tensors,
    as_array,
    call_device,
    local_tensors,
    moved_away,
    torch_dtype,
)
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.torchrun import Launcher
from meshdsl.backends.generate.beams import BeamSearch
from meshdsl.backends.generate.continuation import Continuation
from meshdsl.backends.generate.contract import Chosen
from meshdsl.backends.generate.task import Task, Tell, TextPiece
from meshdsl.backends.runtime.array_files import ArraysRefused, Refused, check_arrays, read_arrays
from meshdsl.backends.runtime.mapped_arrays import SUFFIX
from meshdsl.backends.runtime.values import Array, Spec, local_part
from meshdsl.diagnostics import Diagnostic, fail
from meshdsl.disk_cache import from_json
from meshdsl.pipeline import Compilation

ENGINES = ("local", "torchrun")


def generate(programs: Chosen, engine: str, task: Task, tell: Tell) -> None:
    """Run the programs; `tell` gets every piece of text. Raises DiagnosticError."""
    step, prefill = programs.step.checked(), programs.prefill
    for compilation in (step, *([prefill.checked()] if prefill else [])):
        refuse_too_large(compilation, engine, None)
    texts = Emitted(step.emitted, None if prefill is None else prefill.emitted)
    with errors_at(step.source):
        _ENGINES[engine](texts, task, tell)


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
        refuse_arrays(refused, help)
    except Refused as refused:
        refuse_file(refused, path, "name the folder of a checkpoint, or what `--out` wrote")
    return [*map(rounded_note, notes)]


class Speaker:
    """One device. All devices make the same calls in the same order, and choose the same tokens."""

    def __init__(self, ranks: Ranks, programs: Programs, task: Task, tell: Tell) -> None:
        self.ranks, self.task, self.tell = ranks, task, tell
        self.contract = task.contract
        step = programs.program
        arrays = {
            n: a for n, a in read_arrays(task.params).items() if n not in task.contract.states
        }
        self.params = self._local(step.PARAMS, arrays)
        states = {n: step.PARAMS[n] for n in self.contract.states}
        self.step = _DeviceProgram(ranks, step, self.params)
        self.first_states = {n: self.params[n].clone() for n in states}
        self.prefill = None
        if programs.evaluation is not None:
            reader = programs.evaluation
            shared = {
                n: self.params[n] for n, s in reader.PARAMS.items() if _alike(s, step.PARAMS[n])
            }
            others = {n: s for n, s in reader.PARAMS.items() if n not in shared}
            self.prefill = _DeviceProgram(ranks, reader, {**shared, **self._local(others, arrays)})
        self.started = 0.0

    def _local(self, specs: Mapping[str, Spec], arrays: Mapping[str, Any]) -> Tensors:
        blocks = local_tensors(self.ranks.mesh, specs, arrays, 0, [self.ranks.rank])[0]
        moved_away(specs, [blocks])
        return {name: block.to(self.ranks.where) for name, block in blocks.items()}

    def run(self) -> list[list[int]]:
        """Continue all prompts, as many at once as the batch has rows; returns the new tokens."""
        self.started = time.perf_counter()
        generated = list[list[int]]()
        many = self.contract.rows // self.task.beams
        kind = Continuation if self.task.beams == 1 else BeamSearch
        for first in range(0, len(self.task.prompts), many):
            numbers = range(len(self.task.prompts))[first : first + many]
            texts = [kind(self.task, n) for n in numbers]
            self._continue(texts)
            generated += [text.tokens[len(self.task.prompts[text.number]) :] for text in texts]
        return generated

    def _continue(self, texts: Sequence[Continuation]) -> None:
        """Continue texts, each in rows of its own, until all have ended."""
        for name, block in self.first_states.items():
            self.params[name].copy_(block)
        rows = [(text, row) for text in texts for row in range(text.width)]
        rows += [rows[0]] * (self.contract.rows - len(rows))
        if self.prefill is not None:
            self._read_prompts(self.prefill, texts, rows)
        while alive := [text for text in texts if text.end is None]:
            at = None if self.contract.own_positions else alive[0].read
            indices = [_index(text, at) for text, _ in rows]
            tokens = [text.token(row, i) for (text, row), i in zip(rows, indices, strict=True)]
            positions = indices if at is None else at
            inputs = {self.contract.token: tokens, self.contract.position: positions}
            outputs = self.step({n: self._of_rows(a) for n, a in inputs.items()})
            for text in alive:
                text.read += 1
            self._extend(alive, rows, self.step, self.contract.logits, outputs)

    def _read_prompts(
        self, prefill: _DeviceProgram, texts: Sequence[Continuation], rows: Rows
    ) -> None:
        """Read the prompts in one pass: all of each, or what all of them have at one position."""
        names = self.contract.prefill
        assert names is not None, "there is a program for it"
        counts = {text: min(text.length, names.width) for text in texts}
        if not self.contract.own_positions:
            counts = dict.fromkeys(texts, min(counts.values()))
        tokens = np.zeros((self.contract.rows, names.width), np.int64)
        for at, (text, row) in enumerate(rows):
            tokens[at, : counts[text]] = [text.token(row, i) for i in range(counts[text])]
        spec = prefill.program.INPUTS[names.tokens]
        if self.contract.row is None:
            tokens = tokens[0]
        elif next(iter(spec.dims)) != self.contract.row:
            tokens = tokens.T
        count = self._of_rows([counts[text] for text, _ in rows])
        outputs = prefill({names.tokens: tokens, names.count: count})
        self._take_states(prefill)
        for text in texts:
            text.read = counts[text]
        self._extend(texts, rows, prefill, names.logits, outputs)

    def _take_states(self, prefill: _DeviceProgram) -> None:
        """The states of the step are those that the program of prompts made."""
        for name in self.contract.states:
            block, spec = prefill.params[name], prefill.program.PARAMS[name]
            if block is not self.params[name]:
                states = self.ranks.whole(spec, block)
                self.params[name].copy_(states[self.ranks.part(self.step.program.PARAMS[name])])

    def _of_rows(self, values: list[int] | int) -> list[int] | int:
        """Numbers of all rows as the input of a program that has them."""
        return values[0] if self.contract.row is None and isinstance(values, list) else values

    def _extend(
        self,
        texts: Sequence[Continuation],
        rows: Rows,
        part: _DeviceProgram,
        logits: str,
        outputs: Tensors,
    ) -> None:
        """Give the texts whose tokens all were read their next ones."""
        ready = [text for text in texts if text.end is None and text.read == text.length]
        if not ready:
            return
        values = self._logits(part.program.OUTPUTS[logits], outputs[logits])
        for text in ready:
            first = self._rows_of(text, rows)[0]
            chosen_from = values[first : first + text.width, : self.task.known]
            _refuse_non_numbers(chosen_from, text)
            tokens, shown = text.extend(chosen_from)
            if self.ranks.rank == 0 and tokens:
                seconds = time.perf_counter() - self.started
                self.tell(TextPiece(text.number, tokens, shown, text.end, seconds))

        self._reorder([text for text in ready if text.width > 1 and text.end is None], rows)

    def _rows_of(self, text: Continuation, rows: Rows) -> list[int]:
        return [at for at, (other, _) in enumerate(rows) if other is text][: text.width]

    def _reorder(self, texts: Sequence[Continuation], rows: Rows) -> None:
        """Let the rows of texts go on with the states of the rows that their beams came from."""
        order = list(range(self.contract.rows if texts else 0))
        for text in texts:
            own_rows = self._rows_of(text, rows)
            for row, source in zip(own_rows, text.sources, strict=True):
                order[row] = own_rows[source]
        dim = self.contract.row
        if dim is None or order == list(range(len(order))):
            return
        for name in self.contract.states:
            spec = self.step.program.PARAMS[name]
            if dim in spec.dims:
                axis = list(spec.dims).index(dim)
                block = _reordered(self.ranks, spec, self.params[name], axis, order)
                self.params[name].copy_(block)

    def _logits(self, spec: Spec, block: Any) -> Array:
        """Those of all rows: `[rows, vocabulary]`."""
        logits = as_array(self.ranks.whole(spec, block) if spec.split else block)
        if next(iter(spec.dims)) == self.contract.words and logits.ndim > 1:
            logits = logits.T
        return logits.reshape(-1, self.contract.counted)


Rows = Sequence[tuple[Continuation, int]]
"""For each row of the batch, its text and which row of this it is."""


class _DeviceProgram:
    """A program on one device, with its parameters there."""

    def __init__(self, ranks: Ranks, program: LoadedProgram, params: Tensors) -> None:
        self.ranks, self.program, self.params = ranks, program, params
        self._parts = {n: ranks.part(spec) for n, spec in program.INPUTS.items()}

    def __call__(self, inputs: Mapping[str, Array | list[int] | int]) -> Tensors:
        """The outputs, of whole inputs; the states among the parameters change."""
        blocks = {n: self._block(n, values) for n, values in inputs.items()}
        return call_device(self.ranks, self.program, (blocks, self.params, {}))

    def _block(self, name: str, values: Array | list[int] | int) -> Any:
        """This device's part of an input, in memory of its own."""
        import torch

        spec = self.program.INPUTS[name]
        if spec.split:
            values = np.asarray(values)[self._parts[name]]
        return torch.tensor(values, dtype=torch_dtype(spec.dtype), device=self.ranks.where)


def _refuse_non_numbers(logits: Array, text: Continuation) -> None:
    """Refuse logits of which none is the largest: NaN, infinity, or minus infinity alone (MD0720).

    Minus infinity leaves a token out.
    """
    if not all(map(math.isfinite, logits.max(-1).tolist())):
        place = f"token {text.length} of text {text.number + 1}"
        message = f"the logits after {place} are NaN or infinite"
        help = "look for such values in the parameters; `--dtype f64` rules out an overflow"
        fail("MD0720", message, help=help)


def _index(text: Continuation, position: int | None) -> int:
    """Which token a text reads: the one at `position`, or at its own (None) the next one.

    A text that has ended reads one again, since its row has to read something.
    """
    last = text.length - 1
    if position is not None:
        return min(position, last)
    return text.read if text.end is None else text.read - 1


def _reordered(ranks: Ranks, spec: Spec, block: Any, axis: int, order: Sequence[int]) -> Any:
    """The block of a tensor whose indices along an axis are in another order.

    Nothing is sent if every device has the rows that come to it.
    """
    import torch

    size = [*spec.dims.values()][axis]
    parts = [local_part(spec, ranks.mesh, n)[axis] for n in range(math.prod(ranks.mesh.values()))]
    held = [part if isinstance(part, list) else list(range(size)[part]) for part in parts]
    if all(order[row] in rows for rows in held for row in rows):
        rows = held[ranks.rank]
        index = torch.tensor([rows.index(order[row]) for row in rows], dtype=torch.int64)
        return block.index_select(axis, index.to(block.device))
    index = torch.tensor(order, device=block.device)
    return ranks.whole(spec, block).index_select(axis, index)[ranks.part(spec)]


def _alike(one: Spec, other: Spec) -> bool:
    """Whether two programs have the same blocks of a tensor."""
    return one._replace(draw=None, key="") == other._replace(draw=None, key="")


def _local(emitted: Emitted, task: Task, tell: Tell) -> None:
    programs = emitted.load()
    LocalSession(programs).run(lambda ranks: Speaker(ranks, programs, task, tell).run())


def _torchrun(emitted: Emitted, task: Task, tell: Tell) -> None:
    with Launcher("generate", emitted) as launcher:
        if launcher.run(task, lambda line: tell(from_json(line, TextPiece))) != 0:
            raise launcher.error


_ENGINES = {"local": _local, "torchrun": _torchrun}
