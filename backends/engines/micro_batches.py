"""What a micro-batch is given as a batch of its own, and what becomes of the results of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from meshdsl.backends.engines.reference import Values, widened
from meshdsl.backends.runtime.values import Array, step_seed
from meshdsl.named.ir import Value
from meshdsl.pipeline import Compilation
from meshdsl.placed.pipelined import Piped

Arrays = Mapping[str, Array]


class MicroBatches:
    """A micro-batch as a batch of its own: the program of one, and what it is given.

    A schedule cuts a dim, or takes the batches that the optimizer accumulates.
    """

    def __init__(self, made: Compilation, pipe: Piped) -> None:
        self.whole, self.pipe = made.named, pipe
        self.program = made.of_batches(pipe)

    def given(self, inputs: Arrays, micro: int) -> Values:
        """The inputs of a micro-batch."""
        values: Values = {}
        for value, part in zip(self.whole.inputs, self.program.inputs, strict=True):
            array = np.asarray(inputs[value.label])
            values[part] = widened(self._part(array, value, part, micro), part.type)
        return values

    def _part(self, array: Array, whole: Value, part: Value, micro: int) -> Array:
        cut = self.pipe.cut
        if cut is None:
            return np.asarray(array[micro])
        if part.type.has(cut.dims[0]):
            axis, size = part.type.index(cut.dims[0]), part.type.size(cut.dims[0])
            return array.take(range(micro * size, (micro + 1) * size), axis)
        if part.role == "seed":
            return np.asarray(step_seed(int(array), micro), array.dtype)
        return array

    def joined(self, value: Value, each: Sequence[Array]) -> Array:
        """An output of the step from those of micro-batches."""
        cut = self.pipe.cut
        if not value.type.dims and value.type.dtype.kind == "float":
            return np.asarray(sum(each[1:], each[0]) / len(each))
        if cut is not None and value.type.has(cut.dims[0]):
            return np.concatenate(each, value.type.index(cut.dims[0]))
        return np.stack(each)
