"""Batch norms between their statements and one operator: found there, and taken apart again.

`fuse_batch_norms` makes `batch_norm_stats` of a tensor less its mean, over the root of its
variance, that is scaled and shifted in each channel; with other statistics, `frozen_batch_norm`.
`batch_norm_parts` is the definition in primitives, for a dim of the statistics that is split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from itertools import permutations

from meshdsl.ir.program import every
from meshdsl.ir.rewrite import in_blocks, makers, rewritten_block
from meshdsl.named.attention_fusion import Spoken, is_spoken_of, noted
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedOp, NamedProgram, Node, Value, uses_of
from meshdsl.records import dataclass

BATCH_NORMS = (
    *("batch_norm_stats", "frozen_batch_norm"),
    *("batch_norm_grad", "batch_norm_sums", "batch_norm_input_grad"),
)
ROOTS = ("rsqrt", "sqrt")
"""What a norm multiplies by, or divides by."""

# --- statements are one operator ---------------------------------------------------------------


def fuse_batch_norms(program: NamedProgram, spoken: Spoken = ()) -> NamedProgram:
    """`program` with an operator for what is normalised by statistics of each channel.

    Of the tensors between, those that are pinned or that are `spoken` of by a layout stay, and so
    does the norm. The mean and the variance of a batch are results of the operator. The result of
    the pass is the same with more that is spoken of, unless its names are among its `unspoken`.
    """
    for node in every(program.body):
        if isinstance(node, NamedOp) and node.name in ROOTS:
            finder = _NormFinder(uses_of(program), frozenset(spoken), makers(every(program.body)))
            body = in_blocks(program.body, finder.block)
            return noted(replace(program, body=body), finder.unspoken, finder.kept)
    return program


@dataclass(frozen=True, slots=True)
class _Norm:
    """A norm that `end` yields.

    `between` are the operators that it replaces, `statistics` those of the mean and the variance,
    if they are of the batch.
    """

    end: NamedOp
    x: Value
    mean: Value
    variance: Value
    scale: Value
    shift: Value
    eps: float
    between: tuple[NamedOp, ...]
    statistics: tuple[NamedOp, ...] = ()

    def operator(self) -> NamedOp:
        """The norm as one operator."""
        eps = ("eps", self.eps)
        if not self.statistics:
            operands = (self.x, self.mean, self.variance, self.scale, self.shift)
            attrs = (("dim", self.mean.type.dims[0]), eps)
            return replace(self.end, name="frozen_batch_norm", ins=operands, attrs=attrs)
        outs = (self.end.out, *(op.out for op in self.statistics))
        attrs = (("dims", self.statistics[0].attr("dims")), eps)
        ins = (self.x, self.scale, self.shift)
        return replace(self.end, name="batch_norm_stats", ins=ins, outs=outs, attrs=attrs)


@dataclass(frozen=True, slots=True)
class _NormFinder:
    """`made` has the operator that makes each value.

    `unspoken` are names of what is replaced, `kept` of what is spoken of, so that it stays.
    """

    uses: Mapping[Value, int]
    spoken: frozenset[tuple[str, str]]
    made: Mapping[Value, NamedOp]
    unspoken: set[str] = field(default_factory=set)
    kept: set[str] = field(default_factory=set)

    def block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes of a block, with each norm where its first statistic is; frozen, at its end."""
        fused: dict[Value, tuple[NamedOp, ...]] = {}
        places = {v: at for at, v in enumerate(v for node in nodes for v in node.makes)}
        for node in nodes:
            norm = self.norm(node) if isinstance(node, NamedOp) else None
            if norm is None or not self.may_be_fused(norm, places):
                continue
            computed = [op.out for op in (*norm.statistics, norm.end)]
            computed.sort(key=places.__getitem__)
            if any(value in fused for value in computed):
                continue
            fused |= dict.fromkeys(computed, ())
            fused[computed[0]] = (norm.operator(),)
            self.unspoken.update(op.out.label for op in norm.between)
        return rewritten_block(nodes, lambda op: fused.get(op.outs[0], (op,)))

    def may_be_fused(self, norm: _Norm, places: Mapping[Value, int]) -> bool:
        """Whether nobody misses what is between, and the operands are there in time.

        `places` has the values that are made in the block of the norm, in order.
        """
        ops = (norm.end, *norm.between, *norm.statistics)
        between = [op.out for op in norm.between]
        spoken = [v.label for v in between if is_spoken_of(v, self.spoken)]
        self.kept.update(spoken)
        if spoken or any(v.pins for v in between) or len({(op.phase, op.block) for op in ops}) > 1:
            return False
        if not norm.statistics:
            return True
        computed = [places.get(op.out, -1) for op in norm.statistics]
        return max(places.get(v, -1) for v in norm.operator().ins) < min(computed)

    # --- what a norm is ------------------------------------------------------------------------

    def norm(self, end: NamedOp) -> _Norm | None:
        """The norm that an addition ends: of its three factors, one is a tensor less its mean."""
        if end.name != "add":
            return None
        for scaled, shift in (end.ins, end.ins[::-1]):
            between: list[NamedOp] = []
            factors, divisors = self.factors(scaled, between)
            if (len(factors), len(divisors)) not in ((3, 0), (2, 1)):
                continue
            for centred, scale, *inverse in permutations(factors):
                (root,) = (*inverse, *divisors)
                found = self.ordered(end, centred, scale, shift, root, ROOTS[len(divisors)])
                if found is not None:
                    return replace(found, between=(*found.between, *between))
        return None

    def factors(self, value: Value, between: list[NamedOp]) -> tuple[list[Value], list[Value]]:
        """The factors of a product and what divides it; its parts are read by nothing else."""
        op = self.made.get(value)
        if op is None or op.name not in ("mul", "div") or self.uses[value] != 1:
            return [value], []
        between.append(op)
        factors, divisors = self.factors(op.ins[0], between)
        if op.name == "div":
            return factors, [*divisors, op.ins[1]]
        more, others = self.factors(op.ins[1], between)
        return [*factors, *more], [*divisors, *others]

    def ordered(
        self,
        end: NamedOp,
        centred: Value,
        scale: Value,
        shift: Value,
        deviation: Value,
        root_name: str,
    ) -> _Norm | None:
        """The norm, if all factors are what they should be: `root_name` makes the deviation."""
        less, root = self.op_of(centred, "sub"), self.op_of(deviation, root_name)
        added = None if root is None else self.op_of(root.ins[0], "add")
        if less is None or root is None or added is None:
            return None
        (x, mean), (variance, eps) = less.ins, added.ins
        constant = self.op_of(eps, "constant")
        if constant is None:
            variance, eps = eps, variance
            constant = self.op_of(eps, "constant")
        channels = (mean, variance, scale, shift)
        alike = all(v.type == mean.type for v in channels) and mean.type.dtype == x.type.dtype
        if constant is None or not alike or len(mean.type.dims) != 1 or x.type != end.out.type:
            return None
        between = (less, root, added)
        norm = _Norm(end, x, *channels, constant.attr("value"), between)
        return self.with_statistics(norm)

    def with_statistics(self, norm: _Norm) -> _Norm:
        """The norm, with the operators of its mean and variance if they are of its tensor."""
        mean = self.mean_of(norm.mean, norm.x)
        variance = self.op_of(self.same(norm.variance), "mean")
        square = None if variance is None else self.op_of(variance.ins[0], "square")
        less = None if square is None else self.op_of(square.ins[0], "sub")
        if mean is None or variance is None or square is None or less is None:
            return norm
        subtracted = self.mean_of(less.ins[1], norm.x)
        if subtracted is None or self.same(less.ins[0]) is not self.same(norm.x):
            return norm
        if len({frozenset(op.attr("dims")) for op in (mean, subtracted, variance)}) > 1:
            return norm
        between = tuple(dict.fromkeys((*norm.between, square, less)))
        return replace(norm, between=between, statistics=(mean, variance))

    def mean_of(self, value: Value, x: Value) -> NamedOp | None:
        """The operator that computes a value, if it is a mean of `x`."""
        op = self.op_of(self.same(value), "mean")
        return op if op is not None and self.same(op.ins[0]) is self.same(x) else None

    def op_of(self, value: Value, name: str) -> NamedOp | None:
        """The operator `name` that makes a value, if one does."""
        op = self.made.get(value)
        return op if op is not None and op.name == name else None

    def same(self, value: Value) -> Value:
        """What a value is another name of."""
        while (op := self.op_of(value, "identity")) is not None:
            value = op.ins[0]
        return value


# --- and its definition ------------------------------------------------------------------------


def batch_norm_parts(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> tuple[Value, ...]:
    """The results of a norm or its gradient on `ins`, emitted in primitives; one norm is frozen."""
    parts = {
        "batch_norm_stats": _forward,
        "batch_norm_grad": _gradient,
        "batch_norm_sums": _sums,
        "batch_norm_input_grad": _input_grad,
        "frozen_batch_norm": _frozen,
    }
    return tuple(parts[op.name](op, ins, emit))


def _forward(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> Iterator[Value]:
    x, scale, shift = ins
    dims, (channel,) = op.attr("dims"), scale.type.dims
    mean = emit("mean", x, dims=dims)
    centred = emit.known_as("centred")("sub", x, mean)
    squares = emit.known_as("square")("square", centred)
    variance = emit("mean", squares, dims=dims)
    operands = (x, mean, variance, scale, shift)
    yield emit("frozen_batch_norm", *operands, dim=channel, eps=op.attr("eps"))
    yield mean
    yield variance


def _gradient(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> Iterator[Value]:
    """The sums of all samples, and what follows from them."""
    dy, x, _, mean, variance = ins
    attrs = {"dims": (), "eps": op.attr("eps")}
    sums = emit.all("batch_norm_sums", dy, x, mean, variance, **attrs)
    count = math.prod(d.size for d in op.attr("dims"))
    yield emit("batch_norm_input_grad", *ins, *sums, count=count, **attrs)
    yield from sums


def _sums(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> Iterator[Value]:
    dy, x, mean, variance = ins
    centred = emit.known_as("centred")("sub", x, mean)
    inverse = _inverse_deviation(variance, op.attr("eps"), emit)
    yield emit("mul", emit("einsum", dy, centred, dims=mean.type.dims), inverse)
    yield emit("sum", dy, dims=tuple(d for d in dy.type.dims if d not in mean.type.dims))


def _input_grad(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> Iterator[Value]:
    """With z the normalised x: scale / deviation * (dy - dshift / count - z * dscale / count).

    What is computed has the names of torch's own kernel.
    """
    dy, x, scale, mean, variance, dscale, dshift = ins
    share = 1 / op.attr("count")
    centred = emit.known_as("centred")("sub", x, mean)
    inverse = _inverse_deviation(variance, op.attr("eps"), emit)
    scaling = emit.known_as("proj_scale")
    proj_scale = scaling("mul", scaling("mul", dscale, share), inverse)
    centred_grad = emit("sub", dy, emit.known_as("grad_mean")("mul", dshift, share))
    proj = emit.known_as("proj")("mul", centred, proj_scale)
    grad_scale = emit.known_as("grad_scale")("mul", scale, inverse)
    yield emit("mul", emit("sub", centred_grad, proj), grad_scale)


def _inverse_deviation(variance: Value, eps: float, emit: Emit) -> Value:
    named = emit.known_as("invstd")
    return named("rsqrt", named("add", variance, eps))


def _frozen(op: NamedOp, ins: tuple[Value, ...], emit: Emit) -> Iterator[Value]:
    x, mean, variance, scale, shift = ins
    inverse = _inverse_deviation(variance, op.attr("eps"), emit)
    normalised = emit("mul", emit("sub", x, mean), inverse)
    yield emit("add", emit("mul", normalised, scale), shift)
