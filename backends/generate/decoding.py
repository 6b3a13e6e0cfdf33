"""One device that generates: the same in a thread and in a process of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from meshdsl.backends.engines.in_process import as_array, local_tensors
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.generate.task import Task, Tell
from meshdsl.backends.runtime.array_files import read_arrays

if TYPE_CHECKING:
    from meshdsl.backends.engines.in_process import LoadedProgram


class Speaker:
    """One device. All devices make the same calls in the same order, and choose the same tokens."""

    def __init__(self, ranks: Ranks, program: LoadedProgram, task: Task, tell: Tell) -> None:
        self.ranks, self.program, self.task, self.tell = ranks, program, task, tell
        self.groups = ranks.groups(program.GROUPS)
        arrays = {n: a for n, a in read_arrays(task.params).items() if n not in task.states}
        self.params = self._local(program.PARAMS, arrays)

    def _local(self, specs: Any, arrays: Any) -> dict[str, Any]:
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

    def _read(self, token: int, position: int) -> dict[str, Any]:
        """The outputs after one token, which every row of a batch is given."""
        specs = self.program.INPUTS
        wanted = {self.task.token: token, self.task.position: position}
        arrays = {n: np.full(tuple(specs[n].dims.values()), v, np.int64) for n, v in wanted.items()}
        inputs = self._local(specs, arrays)
        outputs: dict[str, Any] = self.program.device(
            self.ranks.rank, self.groups, inputs, self.params, {}
        )
        return outputs

    def _logits(self, outputs: dict[str, Any]) -> Any:
        """Those of the first row."""
        name = self.task.logits
        spec = self.program.OUTPUTS[name]
        logits = as_array(self.ranks.whole(spec, outputs[name]).cpu())
        return logits[tuple(slice(None) if d == self.task.words else 0 for d in spec.dims)]
