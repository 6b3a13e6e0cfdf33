"""Training by the table of a pipeline, on one device: every version of every stage as it says.

Stage s computes its block of the loop with the version of its parameters that the table gives it
at that moment, and `U` applies the optimizer to that block alone. Nothing depends on time: a table
determines all numbers. Where a backward pass reads another version than its forward pass did
(AMPNet, Gaunt et al. 2017), activations are those of the forward pass, weights the other version's.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np

from meshdsl.backends.engines.reference import (
    Slices,
    Values,
    applied,
    begun,
    computing,
    enter,
    iterate,
    leave,
    run_nodes,
    widened,
)
from meshdsl.backends.runtime.values import Array, step_seed
from meshdsl.named.ir import NamedLoop, Value
from meshdsl.pipeline import Compilation
from meshdsl.placed.async_checks import check_built, check_table, count_of
from meshdsl.placed.pipelined import Piped
from meshdsl.placed.stage_parts import PassSection, StageParts, StageUpdate
from meshdsl.records import dataclass
from meshdsl.schedule.table import ANNEAL, Action
from meshdsl.schedule.verification import StageVersions, Verified

Arrays = Mapping[str, Array]

DECAY = math.exp(-2)
"""What is left of an update in the average of `corrected` after as many updates as passes are
apart: D of Yang et al. 2021, section 3.2, whose value it is."""


@dataclass(frozen=True)
class Replayed:
    """The results of a table: outputs, and parameters and states after it, by name.

    Numbers are means over micro-batches, tensors are put together again. `copies` is the most
    versions of its parameters that each stage has kept at once.
    """

    outputs: dict[str, Array]
    updated: dict[str, Array]
    copies: tuple[int, ...]


def replay_of(made: Compilation) -> Replay | None:
    """The replay of a training step whose layout has updates on the way; None for any other.

    Raises MD0337 and MD0330 for a program that cannot be trained so, MD0331 for sizes.
    """
    pipe = made.placed.pipe
    if pipe is None or pipe.use is None or not made.asynchronous:
        return None
    check_built(pipe, away="")
    table = pipe.use.verified(made.placed.mesh.size(pipe.axis), count_of(made.named, pipe))
    return Replay(made, pipe, table)


class Replay:
    """The training step of a program by a table; with updates on the way or without."""

    def __init__(self, made: Compilation, pipe: Piped, table: Verified) -> None:
        self.whole, self.table = made.named, table
        self.batches = MicroBatches(made, pipe)
        program = self.batches.program
        stages = table.schedule.stages
        self.parts = StageParts(program, pipe, stages)
        self.updates = tuple(self.parts.update(s) for s in range(stages))
        self.anneal = ANNEAL if pipe.use is None else pipe.use.anneal
        check_table(pipe, table)

    def step(self, inputs: Arrays, params: Arrays, states: Arrays) -> Replayed:
        """Carry the table out; arrays are whole, by name. Raises RunError.

        A state that is not in `states` begins as in the first step.
        """
        with computing():
            run = _TableRun(self, inputs, params, states)
            for place in self.table.order:
                run.act(self.table.action(place))
            if not self.table.schedule.updates:
                for stage in run.stages:
                    stage.update()
            return run.result()


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


@dataclass
class _ReplayedStage:
    """A stage in the course of a table: versions of its parameters, states, gradients."""

    run: _TableRun
    number: int
    reads: StageVersions | None
    program: StageUpdate
    weights: dict[int, Values]
    states: Values
    newest: int = 0
    copies: int = 1
    waiting: list[Values] = field(default_factory=list)
    average: Values = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)

    @property
    def corrected(self) -> bool:
        """Whether backward passes read an estimate of what their forward pass read."""
        return self.run.replay.table.schedule.weights == "corrected"

    def forward(self, micro: int) -> Values:
        """The parameters that a forward pass reads."""
        return self.weights[self.reads.forward[micro] if self.reads else 0]

    def backward(self, micro: int) -> Values:
        """The parameters that a backward pass reads."""
        if self.reads is None:
            return self.weights[0]
        read, before = self.reads.backward[micro], self.reads.forward[micro]
        weights = self.weights[read]
        if not self.corrected or read == before:
            return weights
        apart = read - before
        return {v: w - apart * self.average[v] for v, w in weights.items()}

    @property
    def behind(self) -> int:
        """By how many updates a gradient is older than what it is applied to, at most."""
        return max(self.reads.staleness, default=0) if self.reads else 0

    def update(self) -> None:
        """Make the next version: of the mean gradient of the micro-batches that wait."""
        block, old = self.program.block, {**self.weights[self.newest], **self.states}
        values = {block[v]: array for v, array in old.items() if v in block}
        for gradient in self.program.gradients:
            total = self.waiting[0][gradient]
            for each in self.waiting[1:]:
                total = total + each[gradient]
            values[block[gradient]] = total / len(self.waiting)
        run_nodes(self.program.nodes, values, applied)
        new_values = {u.old: values[u.new] for u in self.program.updates}
        if self.corrected:
            new_values |= self._slower(old, new_values)
        self._keep({v: new_values.get(v, w) for v, w in self.weights[self.newest].items()})
        self.states = {v: new_values.get(v, s) for v, s in self.states.items()}
        self.waiting.clear()

    def _slower(self, old: Values, made: Values) -> Values:
        """Steps divided by the staleness, less and less of it: to the power 1 - k / K in update k.

        (Yang et al. 2021, section 3.1: the learning rate is.) Optimizers step in proportion to it.
        """
        counter = self.run.program.counter
        assert counter is not None, "the optimizer counts its steps"
        power = 1 - min(int(self.states[counter]) / self.run.replay.anneal, 1)
        factor = max(1, self.behind) ** -power
        copies = {s.value for s in self.run.program.states if s.is_copy}
        stepped = {v: new for v, new in made.items() if v.role == "param" or v in copies}
        return {v: old[v] + (new - old[v]) * factor for v, new in stepped.items()}

    def _keep(self, weights: Values) -> None:
        """Add a version, and drop those that no pass will read."""
        before = self.weights[self.newest]
        if self.corrected and self.behind:
            decay = DECAY ** (1 / self.behind)
            self.average = {
                v: decay * self.average[v] + (1 - decay) * (w - before[v])
                for v, w in weights.items()
            }
        self.newest += 1
        self.weights[self.newest] = weights
        self.prune()
        self.copies = max(self.copies, len(self.weights))

    def prune(self) -> None:
        """Drop the versions that neither a pass will read nor an update."""
        needed = {self.newest}
        if self.reads is not None:
            every = set(range(len(self.reads.forward)))
            needed |= {self.reads.forward[m] for m in every - self.begun}
            needed |= {self.reads.backward[m] for m in every - self.done}
        self.weights = {v: w for v, w in self.weights.items() if v in needed}


@dataclass
class _Flying:
    """A micro-batch in flight: its values, what the loops have collected, gradients not added."""

    values: Values
    collected: Slices = field(default_factory=dict)
    gradients: dict[int, Values] = field(default_factory=dict)


class _TableRun:
    """The course of one table."""

    def __init__(self, replay: Replay, inputs: Arrays, params: Arrays, states: Arrays) -> None:
        self.replay, self.parts = replay, replay.parts
        self.program, self.inputs = replay.parts.program, inputs
        begun_values = begun(self.program, params, states)
        self.fixed = {p.value: begun_values[p.value] for p in self.program.params}
        versions = {v.stage: v for v in replay.table.versions}
        self.stages = [
            self._stage(n, versions.get(n), begun_values) for n in range(self.parts.stages)
        ]
        self.fixed = {v: a for v, a in self.fixed.items() if v not in self.parts.trained}
        self.flying: dict[int, _Flying] = {}
        self.outputs: dict[str, dict[int, Array]] = defaultdict(dict)

    def _stage(self, number: int, reads: StageVersions | None, kept: Values) -> _ReplayedStage:
        program = self.replay.updates[number]
        mine = {u.old: self._block(u.old, kept[u.old], number) for u in program.updates}
        weights = {v: array for v, array in mine.items() if v.role == "param"}
        states = {v: array for v, array in mine.items() if v.role != "param"}
        average = {v: np.zeros_like(array) for v, array in weights.items()}
        return _ReplayedStage(self, number, reads, program, {0: weights}, states, average=average)

    def _block(self, value: Value, array: Array, stage: int) -> Array:
        if not self.parts.is_block(value):
            return array
        return array.take(self.parts.blocks[stage], value.type.index(self.parts.loop.dim.name))

    # --- actions ---------------------------------------------------------------------------------

    def act(self, action: Action) -> None:
        """Do one action of the table."""
        stage, micro = self.stages[action.stage], action.micro
        match action.kind:
            case "F":
                self._forward(stage, micro)
            case "B":
                self._backward(stage, micro)
                self._add(stage, micro)
            case "I":
                self._backward(stage, micro)
            case "W":
                self._add(stage, micro)
            case "U":
                stage.update()

    def _forward(self, stage: _ReplayedStage, micro: int) -> None:
        if stage.number == 0:
            self.flying[micro] = _Flying(self.replay.batches.given(self.inputs, micro) | self.fixed)
        flying, weights = self.flying[micro], stage.forward(micro)
        flying.values |= weights
        if stage.number == 0:
            self._section(PassSection.BEFORE, flying)
            enter(self.parts.loop, flying.values)
        self._iterate(self.parts.loop, stage, flying, weights)
        stage.begun.add(micro)
        if stage.number == self.parts.stages - 1:
            leave(self.parts.loop, flying.values)
            self._section(PassSection.BEHIND, flying)
            for output in self.program.outputs:
                self.outputs[output.name][micro] = flying.values[output.value]

    def _backward(self, stage: _ReplayedStage, micro: int) -> None:
        flying, weights = self.flying[micro], stage.backward(micro)
        flying.values |= weights
        first, last = stage.number == 0, stage.number == self.parts.stages - 1
        if stage.reads and stage.reads.backward[micro] != stage.reads.forward[micro]:
            self._again(stage, flying, weights)
        if last:
            self._section(PassSection.GRADIENT_BEHIND, flying)
            enter(self.parts.gradient_loop, flying.values)
        self._iterate(self.parts.gradient_loop, stage, flying, weights)
        if first:
            leave(self.parts.gradient_loop, flying.values)
            self._section(PassSection.GRADIENT_BEFORE, flying)
        flying.gradients[stage.number] = {
            v: self._gradient(v, stage, flying) for v in stage.program.gradients
        }

    def _again(self, stage: _ReplayedStage, flying: _Flying, weights: Values) -> None:
        """Compute anew what parameters alone determine: a backward pass reads it of its version."""
        for section, nodes in self.parts.of_weights.items():
            if self.parts.stage_of(section) == stage.number:
                run_nodes(nodes, flying.values, applied)
        self._iterate(self.parts.loop_of_weights, stage, flying, weights)

    def _add(self, stage: _ReplayedStage, micro: int) -> None:
        """Add the gradients of a micro-batch to those that wait for an update."""
        flying = self.flying[micro]
        stage.waiting.append(flying.gradients.pop(stage.number))
        stage.done.add(micro)
        stage.prune()
        if all(micro in each.done for each in self.stages):
            del self.flying[micro]

    def _section(self, section: PassSection, flying: _Flying) -> None:
        run_nodes(self.parts.nodes(section), flying.values, applied)

    def _iterate(
        self, loop: NamedLoop, stage: _ReplayedStage, flying: _Flying, weights: Values
    ) -> None:
        """Run a stage's block of the iterations of a loop."""
        block, dim = self.parts.blocks[stage.number], loop.dim.name

        def slice_of(outer: Value, index: int) -> Array:
            if outer in flying.collected:
                return flying.collected[outer][index]
            mine = outer in weights
            stack = weights[outer] if mine else flying.values[outer]
            part: Array = stack.take(index - block.start * mine, outer.type.index(dim))
            return part

        iterate(loop, block, flying.values, applied, slice_of, flying.collected)

    def _gradient(self, value: Value, stage: _ReplayedStage, flying: _Flying) -> Array:
        if value not in flying.collected:
            return flying.values[value]
        slices = flying.collected[value]
        return np.stack([slices[i] for i in self.parts.blocks[stage.number]])

    # --- results ---------------------------------------------------------------------------------

    def result(self) -> Replayed:
        """The outputs, and the newest version of every stage, put together."""
        outputs = {}
        for output in self.program.outputs:
            each = [array for _, array in sorted(self.outputs[output.name].items())]
            outputs[output.name] = self.replay.batches.joined(output.value, each)
        updated: dict[str, Array] = {}
        for update in self.program.updates:
            versions = []
            for stage in self.stages:
                held = {**stage.weights[stage.newest], **stage.states}
                if update.old in held:
                    versions.append(held[update.old])
            if self.parts.is_block(update.old):
                axis = update.old.type.index(self.parts.loop.dim.name)
                updated[str(update.old.name)] = np.concatenate(versions, axis)
            else:
                updated[str(update.old.name)] = versions[0]
        return Replayed(outputs, updated, tuple(stage.copies for stage in self.stages))
