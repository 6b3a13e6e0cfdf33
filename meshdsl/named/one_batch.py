"""The batches of a step as one: what a step makes once, of all batches that it accumulates.

Samples are along the dims of inputs that no parameter has: a batch K times as large has the same
parameters. A value made of them that has none of these dims has been reduced over the samples. Over
the batches of a step, such a value counts as its mean, as the loss does:

- what `:=` makes of it is made once, after the last batch;
- a number that inputs alone make, and that is divided by, such as the sum of the weights of all
  tokens, is that of the whole step: made before the first batch.

Both are as if the batches had been one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshdsl.diagnostics import Span, fail
from meshdsl.ir.program import Collected, Stacked, block_loops, every
from meshdsl.ir.rewrite import flows, free, makers, needed, rewritten, substitute
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.after_passes import Parting
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Update, Value, walk
from meshdsl.named.over_iterations import at_once
from meshdsl.ops.opdef import lookup

EACH = "write `each=true` to the optimizer: each batch is on its own"


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


class Samples:
    """The dims of a program along which batches have samples, and what values are made of."""

    def __init__(self, program: NamedProgram) -> None:
        self.program = program
        dims = {d for v in program.inputs for d in v.type.names}
        self.dims = dims.difference(*(p.value.type.names for p in program.params))
        self.operands: dict[Value, list[Value]] = {}
        for operand, result in (pair for n in every(program.body) for pair in flows(n)):
            self.operands.setdefault(result, []).append(operand)

    def has(self, value: Value) -> bool:
        """Whether a value has samples of its own."""
        return not self.dims.isdisjoint(value.type.names)

    def closure(self, values: Iterable[Value]) -> set[Value]:
        """The values that some are made of, and these themselves."""
        return _reached(values, self.operands)

    @cached_property
    def of_loops(self) -> set[Value]:
        """The values that depend on the results of a loop."""
        results = (v for n in block_loops(self.program.body, NamedLoop) for v in n.makes)
        return _reached(results, self._results)

    @cached_property
    def of_inputs(self) -> set[Value]:
        """The values that depend on an input."""
        return _reached(self.program.inputs, self._results)

    @cached_property
    def of_params(self) -> set[Value]:
        """The values that depend on a parameter."""
        return _reached((p.value for p in self.program.params), self._results)

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
    samples = Samples(program)
    assert program.goal is not None
    results = {program.goal.loss, *(o.value for o in program.outputs)}
    now, later = Parting(_late(samples, results)).block(program.body)
    made_later = {v for n in later for v in n.makes}
    stored = {p.value for p in program.params}
    read = dict.fromkeys((*(v for n in later for v in free(n)), *(u.new for u in program.updates)))
    means = tuple(v for v in read if v not in made_later and v not in stored)
    for value in means:
        _check_mean(value, samples)
    body = needed(now, {*results, *means})
    return Once(replace(program, body=body, updates=()), later, means, program.updates)


def _late(samples: Samples, results: set[Value]) -> set[Value]:
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


def _check_mean(value: Value, samples: Samples) -> None:
    """MD0297: batches have no one value of what an assignment reads."""
    name = f"`{value.label}`" if value.name else "a value"
    if value.type.dtype.kind != "float":
        message = f"`:=` reads {name} of each batch of a step, and {value.type.dtype} has no mean"
        back = f"and back to {value.type.dtype} where that is needed"
        help = f"cast it to f32 where it is made, {back}; or {EACH}"
        fail("MD0297", message, value.span, help=help)
    if not samples.dims and value in samples.of_inputs:
        message = f"`:=` reads {name} of each batch of a step, and a parameter has its samples"
        fail("MD0297", message, value.span, help=EACH)


# --- divisors --------------------------------------------------------------------------------

KEEP_DEGREE = ("add", "sub", "maximum", "minimum", "where")
ONE_OPERAND = (
    "cast",
    "identity",
    "neg",
    "abs",
    "transpose",
    "broadcast",
    "rename",
    "stop_gradient",
)
SUMS = ("sum", "einsum")
SUM = ("sum", 1)
REDUCTIONS = {"mean": ("mean", 0), "max": ("max", 0), "min": ("min", 0)}
"""By reduction: how its results are reduced over batches, and the power of their number by which
the result grows. Any other reduction is a `SUM`."""


@dataclass(frozen=True, slots=True)
class WholeDivisors:
    """The divisors of a step: the nodes that make them of all batches, and the program of one."""

    program: NamedProgram
    nodes: tuple[Node, ...] = ()


def with_whole_divisors(
    program: NamedProgram, inputs: Mapping[Value, Value], dim: Dim
) -> WholeDivisors:
    """The program that divides by sums of the step, where inputs alone make them.

    `inputs` has for each input all batches of it, along `dim`. Raises MD0297 for a ratio of sums
    that the parameters make: no batch alone has its gradient.
    """
    samples = Samples(program)
    outside_loops = makers(program.body)
    nodes: list[Node] = []
    new: dict[Value, Value] = {}
    assert program.goal is not None
    in_loss = samples.closure({program.goal.loss})
    for op in walk(program.body):
        if op.name != "div" or op.phase != "forward":
            continue
        numerator, divisor = op.ins
        if divisor in new or not _is_reduced(divisor, samples):
            continue
        if divisor not in samples.of_params and divisor in outside_loops:
            whole_divisor = _whole(divisor, samples, inputs, dim)
            if whole_divisor is not None:
                nodes += whole_divisor[0]
                new[divisor] = whole_divisor[1]
                continue
        if op.out in in_loss and _is_reduced(numerator, samples):
            _refuse_ratio(divisor, dim, op.span)
    if not new:
        return WholeDivisors(program)
    return WholeDivisors(replace(program, body=_divided(program.body, new)), tuple(nodes))


def _is_reduced(value: Value, samples: Samples) -> bool:
    """Whether a value is made of samples, and has none of its own."""
    return not samples.has(value) and any(map(samples.has, samples.closure({value})))


def _refuse_ratio(divisor: Value, dim: Dim, span: Span) -> None:
    name = f"`{divisor.label}`" if divisor.name else "a sum"
    message = (
        f"the loss is divided by {name}, of all samples of a step, and each of its {dim.size} "
        "batches makes another"
    )
    help = f"divide by sums of inputs alone, or take means; or {EACH}"
    fail("MD0297", message, span, help=help)


def _divided(nodes: Iterable[Node], new: Mapping[Value, Value]) -> tuple[Node, ...]:
    """The nodes, whose divisions read other divisors."""

    def divided(op: NamedOp) -> tuple[Node]:
        if op.name == "div" and op.ins[1] in new:
            return (replace(op, ins=(op.ins[0], new[op.ins[1]])),)
        return (op,)

    return rewritten(nodes, divided)


def _whole(
    divisor: Value, samples: Samples, inputs: Mapping[Value, Value], dim: Dim
) -> tuple[list[Node], Value] | None:
    """The nodes that make a divisor of all batches, for one of them; None where that is unknown.

    Sums grow with the number of batches, and so does what is divided by them: the divisor of one
    batch is its share of that of the step.
    """
    ops = [n for n in needed(samples.program.body, {divisor}) if isinstance(n, NamedOp)]
    of_samples = [n for n in ops if any(map(samples.has, (*n.ins, *n.outs)))]
    ends = [n for n in of_samples if not any(map(samples.has, n.outs))]
    if divisor in samples.of_loops or any(n.name not in (*SUMS, *REDUCTIONS) for n in ends):
        return None
    constants = [n for n in ops if not n.ins]
    nodes, totals = _totals([*constants, *of_samples], ends, inputs, dim)
    degrees = {n.out: REDUCTIONS.get(n.name, SUM)[1] for n in ends}
    for n in ops:
        if n in of_samples:
            continue
        grows = [degrees.get(v) for v in n.ins]
        degree = _degree(n, grows)
        if degree is not None:
            degrees.update(dict.fromkeys(n.outs, degree))
        elif any(d is not None for d in grows):
            return None
        totals.update((out, replace(out)) for out in n.outs)
        ins, outs = (tuple(totals.get(v, v) for v in vs) for vs in (n.ins, n.outs))
        nodes.append(replace(n, ins=ins, outs=outs))
    if degrees.get(divisor) == 0:
        return nodes, totals[divisor]
    return _share(nodes, totals[divisor], dim) if degrees.get(divisor) == 1 else None


def _totals(
    ops: list[NamedOp], ends: list[NamedOp], inputs: Mapping[Value, Value], dim: Dim
) -> tuple[list[Node], dict[Value, Value]]:
    """What `ends` reduce each batch to, reduced over all batches: the nodes, and the values."""
    stacks = {n.out: replace(n.out, type=n.out.type.along(dim), name=None) for n in ends}
    stacked = tuple(Stacked(all_, one) for one, all_ in inputs.items())
    collected = tuple(Collected(one, all_) for one, all_ in stacks.items())
    loop = _fresh(NamedLoop(dim, (), stacked, tuple(ops), ends[0].span, collected))
    nodes: list[Node] = [*(at_once(loop) or (loop,))]
    totals = {n.out: replace(n.out) for n in ends}
    for n in ends:
        name, _ = REDUCTIONS.get(n.name, SUM)
        attrs = (("dims", (dim,)),)
        nodes.append(NamedOp(name, (stacks[n.out],), (totals[n.out],), attrs, n.span))
    return nodes, totals


def _share(nodes: list[Node], whole: Value, dim: Dim) -> tuple[list[Node], Value]:
    """The part of a number of the step that is that of a batch, on average."""
    part, scale = replace(whole), Value(TensorType((), whole.type.dtype), whole.span)
    attrs = (("value", 1 / dim.size), ("dtype", whole.type.dtype))
    constant = NamedOp("constant", (), (scale,), attrs, whole.span)
    return [*nodes, constant, NamedOp("mul", (whole, scale), (part,), (), whole.span)], part


def _degree(op: NamedOp, degrees: list[int | None]) -> int | None:
    """The power of the number of batches that a result grows with; None where it is none."""
    powers = {d for d in degrees if d is not None}
    if not powers:
        return None
    if op.name in ONE_OPERAND or op.name in KEEP_DEGREE:
        return powers.pop() if len(powers) == 1 else None
    if op.name == "mul":
        return sum(powers) if len([d for d in degrees if d is not None]) == 1 else None
    if op.name == "div" and degrees[1] is None:
        return degrees[0]
    return 0 if powers == {0} else None


def _fresh(loop: NamedLoop) -> NamedLoop:
    """The loop on values of its own."""
    new = {v: replace(v) for n in loop.body for v in n.makes}
    collected = tuple(Collected(new.get(c.inside, c.inside), c.outer) for c in loop.collected)
    return replace(loop, body=substitute(loop.body, new), collected=collected)
