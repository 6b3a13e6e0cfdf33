"""Micro-batches as batches of their own: what a stage that updates on the way goes by.

The program of one is that of the step, with the dim that is cut as small as its part: with one
stage, a table is the ordinary training of as many steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from meshdsl.backends.engines.reference import Values, widened
from meshdsl.backends.runtime.values import Array, step_seed
from meshdsl.diagnostics import Diagnostics, fail
from meshdsl.named.attention import spoken_names
from meshdsl.named.build import finish_named
from meshdsl.named.ir import Program, Value
from meshdsl.pipeline import Compilation, Known
from meshdsl.placed.stages import Piped

Arrays = Mapping[str, Array]


def count_of(made: Compilation, pipe: Piped) -> int:
    """The number of micro-batches of a step."""
    if pipe.cut is not None:
        return pipe.cut.micro
    goal = made.named.goal
    assert goal is not None, "a pipeline without a cut accumulates batches"
    accumulate: int = goal.optimizer.accumulate
    return accumulate


class MicroBatches:
    """A micro-batch as a batch of its own: the program of one, and what it is given.

    A schedule cuts a dim, or takes the batches that the optimizer accumulates.
    """

    def __init__(self, made: Compilation, pipe: Piped) -> None:
        self.whole, self.pipe = made.named, pipe
        self.program = self._program(made)
        self.count = count_of(made, pipe)
        self._check()

    def _program(self, made: Compilation) -> Program:
        chosen, cut = made.options, self.pipe.cut
        if cut is not None:
            if len(cut.dims) > 1:
                message = "updates on the way cut one dim, and the schedule names several"
                fail("MD0337", message, cut.span, help=f"write `{cut.name}[{cut.dims[0]}](…)`")
            size = self._size(cut.dims[0])
            if size % cut.micro:
                message = f"`{cut.dims[0]}` of size {size} does not divide into {cut.micro} parts"
                help = f"give it a multiple of {cut.micro}, or take fewer micro-batches"
                fail("MD0331", message, cut.span, help=help)
            sizes = {**chosen.set_dims, cut.dims[0]: size // cut.micro}
            chosen = replace(chosen, set_dims=sizes)
            made = Compilation(made.source, chosen, Diagnostics(), Known(made.tree))
        written = made.written
        goal = written.goal
        assert goal is not None, "what is cut is a training step"
        options = {**goal.optimizer.options, "accumulate": 1}
        goal = replace(goal, optimizer=replace(goal.optimizer, options=options))
        spoken = spoken_names(made.declarations) if chosen.fused else None
        return finish_named(replace(written, goal=goal), chosen.dtype, False, spoken=spoken)

    def _size(self, dim: str) -> int:
        found = (v.type.size(dim) for v in self.whole.inputs if v.type.has(dim))
        size = next(found, None)
        if size is None:
            message = f"no input has the dim `{dim}` that the schedule cuts"
            fail("MD0337", message, self.pipe.span, help="cut a dim of the inputs")
        return size

    def _check(self) -> None:
        """Refuse parameters and inputs whose sizes follow the dim that is cut."""
        cut = self.pipe.cut
        if cut is None:
            return
        dim = cut.dims[0]
        kept = [
            (p.value, q.value) for p, q in zip(self.whole.params, self.program.params, strict=True)
        ]
        kept += list(zip(self.whole.inputs, self.program.inputs, strict=True))
        for whole, part in kept:
            if whole.type.without(dim) != part.type.without(dim) or (
                whole.role == "param" and whole.type.has(dim)
            ):
                message = f"the size of `{whole.label}` follows from `{dim}`, which is cut"
                fail("MD0337", message, whole.span, help="give it a dim of its own size")

    def given(self, inputs: Arrays, micro: int) -> Values:
        """The inputs of a micro-batch."""
        found: Values = {}
        for whole, part in zip(self.whole.inputs, self.program.inputs, strict=True):
            array = np.asarray(inputs[whole.label])
            found[part] = widened(self._part(array, whole, part, micro), part.type)
        return found

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
