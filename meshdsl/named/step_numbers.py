"""Numbers that inputs alone make, such as the sum of the weights of all tokens, of a whole step.

Where a step accumulates batches, what the loss or an output is divided or multiplied by is made of
all of them, before the first one: then a mean over batches is that of one batch K times as large.
A sum over the samples of a batch has a K-th of those of a step: divided so, it counts K times. What
else the loss makes of it has to be linear: no batch alone has its gradient otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from meshdsl.diagnostics import DiagnosticError, Span
from meshdsl.ir.program import Collected, Stacked
from meshdsl.ir.rewrite import makers, needed, rewritten, substitute
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.ir import NamedLoop, NamedOp, NamedProgram, Node, Value, walk
from meshdsl.named.one_batch import SampleFlow, refuse_batches
from meshdsl.named.over_iterations import at_once
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.records import dataclass

COMBINED = ("sum", "mean", "max", "min")
"""Reductions that are also operators: by one, the results of batches become that of a step."""


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The nodes that make numbers of the step, and the program of a batch that reads them."""

    nodes: tuple[Node, ...]
    program: NamedProgram


def with_step_numbers(
    program: NamedProgram, inputs: Mapping[Value, Value], dim: Dim
) -> StepNumbers:
    """The program of a batch, divided and multiplied by numbers of the step.

    `inputs` has for each input all batches of it, along `dim`. Raises MD0297 for a loss that is no
    mean over batches: a ratio of sums that parameters make, or what is not linear in a quotient.
    """
    return _Scaling(program, inputs, dim).result()


def may_be_batches(program: NamedProgram, count: int) -> bool:
    """Whether the loss may be accumulated over batches that are not each on their own."""
    try:
        with_step_numbers(program, {v: v for v in program.inputs}, Dim("batches", count))
    except DiagnosticError:
        return False
    return True


class _Scaling:
    """Finds the operators that divide or multiply by a number of the step, and what counts K times.

    `reads` has these operators with their numbers, by the index of the operand.
    """

    def __init__(self, program: NamedProgram, inputs: Mapping[Value, Value], dim: Dim) -> None:
        assert program.goal is not None
        self.program, self.inputs, self.dim = program, inputs, dim
        self.samples = SampleFlow(program)
        self.ops = [op for op in walk(program.body) if op.phase == "forward"]
        self.maker = {v: op for op in self.ops for v in op.outs}
        self.outside_loops = makers(program.body)
        self.in_loss = self.samples.closure(program.goal.losses)
        self.loss_path = self._reduced_path({*program.goal.losses})
        self.of_all_batches: dict[Value, tuple[list[Node], Value] | None] = {}
        self.reads = {op: numbers for op in self.ops if (numbers := self._numbers(op))}

    def result(self) -> StepNumbers:
        """The program and the nodes before it. Raises MD0297."""
        if not self.reads:
            return StepNumbers((), self.program)
        for op in self.ops:
            self._check(op)
        counted = {op for op in self.ops if self._counts(op)}
        nodes = [n for number in self.of_all_batches.values() if number for n in number[0]]

        def of_step(op: NamedOp) -> Iterable[NamedOp]:
            numbers = self.reads.get(op, {})
            ins = tuple(numbers.get(i, v) for i, v in enumerate(op.ins))
            new = replace(op, ins=ins) if numbers else op
            return _times(new, self.dim.size) if op in counted else (new,)

        program = replace(self.program, body=rewritten(self.program.body, of_step))
        return StepNumbers(tuple(nodes), program)

    # --- what is divided or multiplied by ------------------------------------------------------

    def _numbers(self, op: NamedOp) -> dict[int, Value]:
        """The numbers of the step that an operator is to read, by operand. Raises MD0297."""
        reduced = {i for i, v in enumerate(op.ins) if self.samples.is_reduced(v)}
        numbers = {i for i in reduced if op.ins[i] not in self.samples.of_params}
        others = {i for i, v in enumerate(op.ins) if v in self.samples.of_samples} - numbers
        sets = lookup(op.name).factors(_signature(op)).linear
        is_ratio = not self.samples.has(op.outs[0]) and op.outs[0] in self.in_loss
        for i in reduced - numbers if is_ratio else ():
            if any(sets) and not any(i in s for s in sets) and reduced - {i}:
                self._refuse_ratio(op.ins[i], op.span)
        scales = [i for i in numbers if others and any(others <= s and i not in s for s in sets)]
        new = {}
        for i in scales:
            number = self._of_step(op.ins[i])
            if number is not None:
                new[i] = number
            elif is_ratio and others <= reduced:
                self._refuse_ratio(op.ins[i], op.span)
        return new

    def _refuse_ratio(self, divisor: Value, span: Span) -> None:
        name = f"`{divisor.label}`" if divisor.name else "a number"
        message = (
            f"the loss is divided or multiplied by {name} that depends on all samples of a step; "
            f"each of its {self.dim.size} batches has another"
        )
        other = "divide by sums of inputs alone, or leave it out"
        refuse_batches(self.program, message, span, other)

    # --- what is made of it --------------------------------------------------------------------

    @cached_property
    def of_step(self) -> set[Value]:
        """The values that depend on a number of the step."""
        return self.samples.results_of(v for op in self.reads for v in op.outs)

    def _reduced_path(self, ends: set[Value]) -> set[Value]:
        """The values without samples that some are made of, through none that has samples."""
        path, left = set[Value](), [*ends]
        while left:
            value = left.pop()
            if value not in path and not self.samples.has(value):
                path.add(value)
                left += self.samples.operands.get(value, ())
        return path

    @cached_property
    def result_path(self) -> set[Value]:
        """The values without samples on the way to the loss, an output or a new state."""
        results = {o.value for o in self.program.outputs} | {u.new for u in self.program.updates}
        return self.loss_path | self._reduced_path(results)

    @cached_property
    def own_path(self) -> set[Value]:
        """The values without samples by which a batch changes its samples, of the step in part."""
        of_samples = (op for op in self.ops if any(map(self.samples.has, op.outs)))
        read = {v for op in of_samples for v in op.ins if v in self.of_step}
        return self._reduced_path({v for v in read if not self.samples.has(v)})

    def _reduction(self, op: NamedOp) -> str | None:
        """How an operator reduces samples; empty where it has none to reduce, None: otherwise."""
        if not any(map(self.samples.has, op.ins)) or any(map(self.samples.has, op.outs)):
            return ""
        return lookup(op.name).reduces(self.samples.dims, _signature(op))

    def _counts(self, op: NamedOp) -> bool:
        """Whether a result counts K times: a sum over samples, of or by a number of the step."""
        out = op.outs[0]
        if out not in self.result_path or out not in self.of_step:
            return False
        reduction = self._reduction(op)
        if reduction == "sum" and out in self.own_path:
            self._refuse_use(op)
        if reduction != "" or op not in self.reads:
            return reduction == "sum"
        powers = {
            p for i, v in enumerate(op.ins) if i not in self.reads[op] for p in self._power(v)
        }
        if powers not in ({0}, {1}) and out in self.in_loss:
            self._refuse_use(op)
        return powers == {1}

    def _power(self, value: Value) -> set[int | None]:
        """The powers of the number of batches that sums of a step have, and of a batch have not."""
        powers, seen, left = set[int | None](), set[Value](), [value]
        while left:
            part = left.pop()
            if part in seen or not self.samples.is_reduced(part):
                continue
            seen.add(part)
            op = self.maker.get(part)
            reduction = "" if op is None else self._reduction(op)
            if op in self.reads:
                powers.add(0)
            elif reduction != "":
                powers.add(0 if part in self.of_step else {"sum": 1, "mean": 0}.get(str(reduction)))
            else:
                powers.update(() if op is None or self._is_linear(op) else {None})
                left += self.samples.operands.get(part, ())
        return powers

    def _is_linear(self, op: NamedOp) -> bool:
        """Whether the mean of results over batches is that of the mean of its operands."""
        numbers = self.reads.get(op, {})
        ins = enumerate(op.ins)
        varying = {i for i, v in ins if v in self.samples.of_samples and i not in numbers}
        return lookup(op.name).is_linear(varying, _signature(op))

    def _check(self, op: NamedOp) -> None:
        """MD0297: the loss is not linear in what a number of the step divides."""
        if op.outs[0] not in self.loss_path or self.of_step.isdisjoint(op.ins):
            return
        reduction = self._reduction(op)
        is_mean = self._is_linear(op) if reduction == "" else reduction in ("sum", "mean")
        if not is_mean:
            self._refuse_use(op)

    def _refuse_use(self, op: NamedOp) -> None:
        message = (
            f"the loss has {lookup(op.name).words} of sums over all samples of a step; each of its "
            f"{self.dim.size} batches has other sums"
        )
        form = "`mean(l / sum(w))` with `w` made of inputs alone"
        other = f"write a sum of quotients, such as {form}"
        refuse_batches(self.program, message, op.span, other)

    # --- numbers of the step -------------------------------------------------------------------

    def _of_step(self, number: Value) -> Value | None:
        """A number as all batches make it; None where that is unknown."""
        if number not in self.of_all_batches:
            self.of_all_batches[number] = self._nodes_of(number)
        nodes_and_value = self.of_all_batches[number]
        return None if nodes_and_value is None else nodes_and_value[1]

    def _nodes_of(self, number: Value) -> tuple[list[Node], Value] | None:
        samples = self.samples
        if number not in self.outside_loops or number in samples.of_loops:
            return None
        ops = [n for n in needed(self.program.body, {number}) if isinstance(n, NamedOp)]
        of_samples = [n for n in ops if any(map(samples.has, (*n.ins, *n.outs)))]
        ends = {n: way for n in of_samples if (way := self._reduction(n)) != ""}
        others = [n for n in ops if n not in of_samples]
        read_inside = {v for n in of_samples for v in n.ins}
        is_known = all(way in COMBINED for way in ends.values())
        is_known &= all(len(n.outs) == 1 and n.out.type.dtype.kind != "bool" for n in ends)
        is_known &= not any(map(samples.is_reduced, read_inside))
        is_known &= all(n in ends or self._is_of_each(n) for n in of_samples)
        # What a batch has of an input without samples is no number of the step.
        if not is_known or any(v in self.inputs for n in others for v in n.ins):
            return None
        of_no_batch = [n for n in others if samples.of_samples.isdisjoint(n.outs)]
        in_batches = {*of_samples, *of_no_batch}
        nodes, totals = self._totals([n for n in ops if n in in_batches], ends)
        # What is named as an origin and has samples is not made here, but what it is reduced to.
        reduced = next(iter(totals.values()), number)
        of_batches = {v: reduced for n in of_samples for v in n.outs} | {**self.inputs}
        for n in others:
            totals.update((out, replace(out)) for out in n.outs)
            nodes += substitute((n,), totals, origins=of_batches | totals)
        return nodes, totals[number]

    def _is_of_each(self, op: NamedOp) -> bool:
        """Whether an operator does the same for each sample, or reduces a dim of each."""
        record, sig = lookup(op.name), _signature(op)
        dims = self.samples.dims & {d for t in (*sig.ins, *sig.outs) for d in t.names}
        gone = {d for d in dims if not sig.outs[0].has(d)}
        is_reduced = not gone or record.reduces(gone, sig) is not None
        return is_reduced and all(record.is_alike_along(d, sig) for d in dims - gone)

    def _totals(
        self, ops: list[NamedOp], ends: Mapping[NamedOp, str | None]
    ) -> tuple[list[Node], dict[Value, Value]]:
        """What `ends` reduce each batch to, reduced over all batches: the nodes, and the values."""
        stacks = {n.out: replace(n.out, type=n.out.type.along(self.dim), name=None) for n in ends}
        stacked = tuple(Stacked(all_, one) for one, all_ in self.inputs.items())
        collected = tuple(Collected(one, all_) for one, all_ in stacks.items())
        span = next(iter(ends)).span
        loop = _fresh(NamedLoop(self.dim, (), stacked, tuple(ops), span, collected))
        nodes: list[Node] = [*(at_once(loop) or (loop,))]
        totals = {n.out: replace(n.out) for n in ends}
        for n, way in ends.items():
            assert way is not None, "every reduction is known"
            attrs = (("dims", (self.dim,)),)
            nodes.append(NamedOp(way, (stacks[n.out],), (totals[n.out],), attrs, n.span))
        return nodes, totals


def _signature(op: NamedOp) -> Signature:
    return Signature(tuple(v.type for v in op.ins), tuple(v.type for v in op.outs), dict(op.attrs))


def _times(op: NamedOp, count: int) -> Iterator[NamedOp]:
    """An operator whose result is as many times as large."""
    dtype = op.out.type.dtype
    once, scale = replace(op.out, name=None, pins=()), Value(TensorType((), dtype), op.span)
    attrs = (("value", float(count) if dtype.kind == "float" else count), ("dtype", dtype))
    yield replace(op, outs=(once,))
    yield NamedOp("constant", (), (scale,), attrs, op.span, block=op.block)
    yield NamedOp("mul", (once, scale), (op.out,), (), op.span, block=op.block)


def _fresh(loop: NamedLoop) -> NamedLoop:
    """The loop on values of its own."""
    new = {v: replace(v) for n in loop.body for v in n.makes}
    collected = tuple(Collected(new.get(c.inside, c.inside), c.outer) for c in loop.collected)
    return replace(loop, body=substitute(loop.body, new), collected=collected)
