"""The batches of a step as one: what a step makes once, of all batches that it accumulates.

Samples are along the dims of inputs that no parameter has: a batch K times as large has the same
parameters. A value made of them that has none of these dims has been reduced over the samples. Over
the batches of a step, such a value counts as its mean, as the loss does:

- what `:=` makes of it is made once, after the last batch;
- a number that inputs alone make, and that is divided or multiplied by, such as the sum of the
  weights of all tokens, is that of the whole step (`step_numbers.py`).

Both are as if the batches had been one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NoReturn

from meshdsl.diagnostics import Fix, Span, advice, fail
from meshdsl.ir.program import block_loops, every
from meshdsl.ir.rewrite import flows, free, needed
from meshdsl.ir.types import Dim
from meshdsl.named.after_passes import Parting
from meshdsl.named.ir import NamedLoop, NamedProgram, Node, Update, Value, walk
from meshdsl.ops.opdef import lookup
from meshdsl.records import dataclass
from meshdsl.syntax.call_edits import with_option
from meshdsl.syntax.enclosing import optimizer_of

EACH = "each batch is then on its own"


def each_batch(program: NamedProgram) -> tuple[Fix, ...]:
    """The fix by which each batch of a step is on its own."""
    assert program.goal is not None
    optimizer = optimizer_of(program.goal.span)
    return () if optimizer is None else with_option(optimizer, "each", "true")


def refuse_batches(program: NamedProgram, message: str, span: Span, *others: str) -> NoReturn:
    """Raise MD0297, whose help takes each batch on its own, or does `others`."""
    fixes = each_batch(program)
    each = advice(fixes) or "write `each=true` to the optimizer"
    help = "; or ".join([f"{each}: {EACH}", *others])
    fail("MD0297", message, span, help=help, fixes=fixes)


@dataclass(frozen=True, slots=True)
class Once:
    """A step's program of one batch, and what follows the last one.

    `means` are the values of a batch whose means over all of them are read by the nodes `later`,
    or are the new values of `updates`.
    """

    program: NamedProgram
    later: tuple[Node, ...]
    means: tuple[Value, ...]
    updates: tuple[Update, ...]


def sample_dims(program: NamedProgram) -> tuple[Dim, ...]:
    """The dims of samples, in the order of the inputs: those of inputs that no parameter has.

    One that a parameter has, as learned positions have it, is of the same size in every batch.
    """
    learned = {name for param in program.params for name in param.value.type.names}
    dims = (dim for value in program.inputs for dim in value.type.dims)
    return tuple(dict.fromkeys(dim for dim in dims if dim.name not in learned))


class SampleFlow:
    """The dims of a program along which batches have samples, and what values are made of."""

    def __init__(self, program: NamedProgram) -> None:
        self.program = program
        self.dims = {dim.name for dim in sample_dims(program)}
        self.operands: dict[Value, list[Value]] = {}
        for operand, result in (pair for n in every(program.body) for pair in flows(n)):
            self.operands.setdefault(result, []).append(operand)

    def has(self, value: Value) -> bool:
        """Whether a value has samples of its own."""
        return not self.dims.isdisjoint(value.type.names)

    def is_reduced(self, value: Value) -> bool:
        """Whether a value is made of samples, and has none of its own."""
        return value in self.of_samples and not self.has(value)

    def results_of(self, values: Iterable[Value]) -> set[Value]:
        """The values that depend on some, and these themselves."""
        return _reached(values, self._results)

    def closure(self, values: Iterable[Value]) -> set[Value]:
        """The values that some are made of, and these themselves."""
        return _reached(values, self.operands)

    @cached_property
    def of_loops(self) -> set[Value]:
        """The values that depend on the results of a loop."""
        results = (v for n in block_loops(self.program.body, NamedLoop) for v in n.makes)
        return self.results_of(results)

    @cached_property
    def of_samples(self) -> set[Value]:
        """The values that depend on one with samples."""
        return self.results_of(v for v in {*self.operands, *self.program.inputs} if self.has(v))

    @cached_property
    def of_inputs(self) -> set[Value]:
        """The values that depend on an input."""
        return self.results_of(self.program.inputs)

    @cached_property
    def of_params(self) -> set[Value]:
        """The values that depend on a parameter."""
        return self.results_of(p.value for p in self.program.params)

    @cached_property
    def _results(self) -> dict[Value, list[Value]]:
        """What is made of each value."""
        results: dict[Value, list[Value]] = {}
        for result, operands in self.operands.items():
            for operand in operands:
                results.setdefault(operand, []).append(result)
        return results


def _reached(values: Iterable[Value], steps: Mapping[Value, Sequence[Value]]) -> set[Value]:
    """The values, and all those that steps lead to from them."""
    reached = set(values)
    left = [*reached]
    while left:
        more = [v for v in steps.get(left.pop(), ()) if v not in reached]
        reached.update(more)
        left += more
    return reached


def once(program: NamedProgram) -> Once:
    """The program without its updates, which are made once. Raises MD0297."""
    if not program.updates:
        return Once(program, (), (), ())
    samples = SampleFlow(program)
    assert program.goal is not None
    results = {*program.goal.losses, *(o.value for o in program.outputs)}
    now, later = Parting(_late(samples, results)).block(program.body)
    made_later = {v for n in later for v in n.makes}
    stored = {p.value for p in program.params}
    read = dict.fromkeys((*(v for n in later for v in free(n)), *(u.new for u in program.updates)))
    means = tuple(v for v in read if v not in made_later and v not in stored)
    for value in means:
        _check_mean(value, samples)
    body = needed(now, {*results, *means})
    return Once(replace(program, body=body, updates=()), later, means, program.updates)


def _late(samples: SampleFlow, results: set[Value]) -> set[Value]:
    """The values that updates alone are made of, less those that samples or random numbers need."""
    program = samples.program
    assigned = samples.closure(u.new for u in program.updates) - samples.closure(results)
    of_each_batch = {
        v
        for op in walk(program.body)
        if assigned.issuperset(op.outs)
        and (lookup(op.name).surface.seeded or any(map(samples.has, (*op.ins, *op.outs))))
        for v in (*op.ins, *op.outs)
    }
    return assigned - samples.closure(of_each_batch)


def _check_mean(value: Value, samples: SampleFlow) -> None:
    """MD0297: batches have no one value of what an assignment reads."""
    name = f"`{value.label}`" if value.name else "a value"
    if value.type.dtype.kind != "float":
        message = f"`:=` reads {name} of each batch of a step, and {value.type.dtype} has no mean"
        back = f"and cast the result back to {value.type.dtype} where that is needed"
        cast = f"cast what it is computed from to f32, {back}"
        refuse_batches(samples.program, message, value.span, cast)
    if not samples.dims and value in samples.of_inputs:
        message = f"`:=` reads {name} of each batch of a step, and a parameter has its samples"
        refuse_batches(samples.program, message, value.span)
