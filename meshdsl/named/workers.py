"""Compressions of what each worker has: top-k, one bit and bytes, with error feedback.

A worker is a device with its own part of a gradient. Their parts are blocks of a dim `workers`
(`parts`), and all else is operators on these, so that what is sent is placed, counted and shown
like everything else. The program is written for one worker; `for_workers` makes it that of many,
once a layout has said where gradients are partial. What a worker does not send is added to its
next gradient: of this error it keeps its own part (`State.parts`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property

from meshdsl.ir.program import OpKind
from meshdsl.ir.types import I32, Dim, TensorType
from meshdsl.named.ir import NamedOp, NamedProgram, Value
from meshdsl.named.optimizers import Arithmetic, Compression, UpdateEmitter, master_dtype, widened
from meshdsl.ops.parts import BITS
from meshdsl.records import dataclass

Gradients = Sequence[tuple[Value, Value, tuple[str, ...]]]
"""Parameters, their gradients and the dims that are compressed: each slice along others by itself.

What has none of these is one number, and sent whole.
"""


def top_k(
    emitter: UpdateEmitter, compression: Compression, done: Value, grads: Gradients
) -> list[Value]:
    """The gradients as sums of the largest elements of each worker.

    After Lin et al. 2018 (Deep Gradient Compression), without its momentum correction. Of each
    tensor k = ⌈fraction · elements⌉ are sent, those of the greatest magnitude, of equals the first.
    """
    fraction = compression.options["fraction"]
    return [_Tensor(emitter, *g).top_k(fraction) if g[2] else g[1] for g in grads]


def one_bit(
    emitter: UpdateEmitter, compression: Compression, done: Value, grads: Gradients
) -> list[Value]:
    """The gradients as signs, each tensor with one scale, added up by blocks and sent as signs.

    The two phases of 1-bit Adam (Tang et al. 2021), for gradients; the scale is the mean
    magnitude (Karimireddy et al. 2019). Zero counts as positive.
    """
    return [_Tensor(emitter, *g).one_bit() if g[2] else g[1] for g in grads]


def int8(
    emitter: UpdateEmitter, compression: Compression, done: Value, grads: Gradients
) -> list[Value]:
    """The gradients as bytes, each group of elements with a scale, added up by blocks.

    An all_reduce in two phases, as that of `one_bit`: bytes are exchanged, and the sums of each
    block are sent as bytes again (Dettmers 2016; Wang et al. 2023, ZeRO++, has blocks of scales).
    What bytes and scales do not make smaller is sent whole.
    """
    group = compression.options["group"]
    return [_Tensor(emitter, *g).int8(group) if _fewer(g, group) else g[1] for g in grads]


def _fewer(gradient: tuple[Value, Value, tuple[str, ...]], group: int) -> bool:
    """Whether a tensor has more elements than words of four bytes in groups with a scale."""
    param, _, dims = gradient
    elements = math.prod(param.type.size(name) for name in dims)
    return bool(dims) and -(-elements // group) * (group // 4 + 1) < elements


def kept(fraction: float, elements: int) -> int:
    """How many of the elements of a tensor are sent: a fraction, as it is written, rounded up."""
    return math.ceil(Fraction(repr(fraction)) * elements)


def words_of(elements: int) -> int:
    """The words of i32 that the signs of so many elements take."""
    return -(-elements // BITS)


@dataclass(frozen=True)
class Dims:
    """The dims of a parameter's compression; a user's name cannot contain a dot.

    `workers` are split, and `every` of them are gathered; `words` of signs are gathered, and in
    `blocks` split over the workers, each of which adds up its own.
    """

    param: str
    elements: int = 0
    count: int = 1

    def named(self, name: str, size: int) -> Dim:
        """A dim of this parameter."""
        return Dim(f"{self.param}.sent.{name}", size)

    @cached_property
    def workers(self) -> Dim:
        """The workers, each with its own block."""
        return self.named("workers", self.count)

    @cached_property
    def every(self) -> Dim:
        """All workers on every device."""
        return self.named("all_workers", self.count)

    @cached_property
    def flat(self) -> Dim:
        """All elements of a tensor."""
        return self.named("flat", self.elements)

    @cached_property
    def words(self) -> Dim:
        """The words of all signs."""
        return self.named("words", words_of(self.elements))

    @cached_property
    def blocks(self) -> Dim:
        """The words of all signs, split over the workers."""
        return self.named("blocks", words_of(self.elements))

    @cached_property
    def padded(self) -> Dim:
        """The signs in all words."""
        return self.named("padded", words_of(self.elements) * BITS)

    @cached_property
    def bits(self) -> Dim:
        """The signs in a word."""
        return self.named("bits", BITS)


@dataclass(frozen=True, slots=True)
class SignScale:
    """The size that a sign stands for: the mean of `each`, of which the `after` is taken."""

    each: str
    after: str = ""

    def root(self, do: Arithmetic, mean: Value) -> Value:
        """The size, of the mean."""
        return do(self.after, mean) if self.after else mean


class _Tensor:
    """The compression of one parameter's gradient, along its dims `own`."""

    def __init__(
        self, emitter: UpdateEmitter, param: Value, grad: Value, own: tuple[str, ...]
    ) -> None:
        self.emitter, self.param, self.grad = emitter, param, grad
        # Rules for states are not for what is done to gradients.
        self.do = Arithmetic(emitter, master_dtype(param), param, role="grad")
        self.own = tuple(d for d in param.type.dims if d.name in own)
        self.around = tuple(d for d in param.type.dims if d.name not in own)
        self.dims = Dims(str(param.name), math.prod(d.size for d in self.own))
        self.bits_in_words = (self.dims.words, self.dims.bits)

    def top_k(self, fraction: float) -> Value:
        """The sum of what workers send; the rest is kept."""
        do, dims, mine = self.do, self.dims, self._flat(self._mine())
        top = dims.named("top", kept(fraction, dims.flat.size))
        places = {"source": (dims.flat,), "target": (top,)}
        _, index = do.all("top_k", do("abs", mine), **places)
        values = do("gather", mine, index, dim=dims.flat)
        sent = do("scatter_add", values, index, dim=dims.flat, dims=mine.type.dims)
        self._keep(do("sub", mine, sent))
        return self._shaped(do("scatter_parts", self._all(values), self._all(index), dim=dims.flat))

    def one_bit(self) -> Value:
        """The gradient that the signs of the blocks stand for; both errors are kept."""
        return self._in_signs(self._flat(self._mine()), SignScale("abs"))

    def one_bit_momentum(self, beta: float, rest: Value) -> Value:
        """The momentum that the signs of the blocks stand for; both errors are kept.

        Workers add up what they send, so each has its share of `rest`, which is whole.
        """
        do, dims = self.do, self.dims
        ones = do("broadcast", do.number(1.0), dims=(dims.every,))
        share = do("div", rest, do("sum", ones, dims=(dims.every,)))
        mine = do("add", self._mine(1 - beta), share)
        return self._in_signs(self._flat(mine), SignScale("square", "sqrt"))

    def momentum(self, beta: float, rest: Value) -> Value:
        """The momentum of a single number, whose gradient is sent whole."""
        grad = self.do("mul", widened(self.do, self.grad), 1 - beta)
        return self.do("add", grad, rest)

    def _in_signs(self, mine: Value, size: SignScale) -> Value:
        """What the signs of workers stand for, and those of the sums of blocks."""
        do, dims = self.do, self.dims
        scale = size.root(do, do("mean", do(size.each, mine), dims=(dims.flat,)))
        words = do(
            "pack_signs", self._in_pieces(mine, dims.padded, self.bits_in_words), dim=dims.bits
        )
        self._keep(do("sub", mine, self._signed(words, scale)))
        pairs = ((dims.workers, dims.every), (dims.words, dims.blocks))
        blocks = self._signs(do("rename", words, pairs=pairs))
        total = do("einsum", self._all(scale), blocks, dims=(*self.around, dims.blocks, dims.bits))
        return self._shaped(self._again(total, size))

    def _again(self, total: Value, size: SignScale) -> Value:
        """The signs of a sum that is split in blocks, with a scale for each of them."""
        do, dims = self.do, self.dims
        error = self.emitter.state(f"{self.param.name}.server_error", total.type, self.param)
        inside, per_block = self._inside(), (dims.blocks, dims.bits)
        corrected = do("mul", do("add", total, error), inside)
        summed, count = (
            do("parts", do("sum", each, dims=per_block), dim=dims.workers)
            for each in (do(size.each, corrected), inside)
        )
        scales = self._all(size.root(do, do("div", summed, do("maximum", count, 1.0))))
        words = do("pack_signs", corrected, dim=dims.bits)
        sent = do("mul", self._signs(words), self._by_block(scales, dims.blocks))
        self.emitter.update(error, do("mul", do("sub", corrected, sent), inside))
        words = do("rename", words, pairs=((dims.blocks, dims.words),))
        return self._signed(words, self._by_block(scales, dims.words))

    def int8(self, group: int) -> Value:
        """What the bytes of the blocks stand for; both errors are kept."""
        do, dims, mine = self.do, self.dims, self._flat(self._mine())
        count = -(-dims.flat.size // group)
        groups, blocks = dims.named("groups", count), dims.named("blocks", count)
        numbers, words = dims.named("numbers", group), dims.named("group_words", group // 4 + 1)
        padded = dims.named("padded", count * group)

        def packed(value: Value) -> Value:
            return do("pack_int8", value, dims=(numbers, words))

        def unpacked(value: Value) -> Value:
            return do("unpack_int8", value, dims=(words, numbers), dtype=do.dtype)

        said = packed(self._in_pieces(mine, padded, (groups, numbers)))
        self._keep(do("sub", mine, self._in_one(unpacked(said), (groups, numbers), padded)))
        pairs = ((dims.workers, dims.every), (groups, blocks))
        total = do("sum", unpacked(do("rename", said, pairs=pairs)), dims=(dims.every,))
        error = self.emitter.state(f"{self.param.name}.server_error", total.type, self.param)
        corrected = do("add", total, error)
        sent = packed(corrected)
        self.emitter.update(error, do("sub", corrected, unpacked(sent)))
        total = unpacked(do("rename", sent, pairs=((blocks, groups),)))
        return self._shaped(self._in_one(total, (groups, numbers), padded))

    # --- pieces ----------------------------------------------------------------------------------

    def _mine(self, factor: float = 1.0) -> Value:
        """What each worker has to send: its gradient, times `factor`, and its error.

        A part is widened once it is the worker's own: of a sum only the whole may be rounded.
        """
        do, dims = self.do, self.dims
        type_ = TensorType(self.param.type.dims, do.dtype)
        name = f"{self.param.name}.error"
        self.error = self.emitter.state(name, type_, self.param, parts=True)
        part, error = (do("parts", v, dim=dims.workers) for v in (self.grad, self.error))
        part = widened(do, part)
        return do("add", part if factor == 1 else do("mul", part, factor), error)

    def _flat(self, each: Value) -> Value:
        """What each worker has, in one dim."""
        do, dims = self.do, self.dims
        each = do("merge", each, dims=self.own, into=dims.flat)
        return do("transpose", each, dims=(dims.workers, *self.around, dims.flat))

    def _keep(self, rest: Value) -> None:
        """Keep of each worker what it has not sent."""
        own = self.do("sum", rest, dims=(self.dims.workers,))
        self.emitter.update(self.error, self._shaped(own))

    def _all(self, value: Value) -> Value:
        """What all workers have sent."""
        return self.do("rename", value, pairs=((self.dims.workers, self.dims.every),))

    def _shaped(self, value: Value) -> Value:
        """A value in one dim with those of the parameter."""
        value = self.do("split", value, dim=self.dims.flat, into=self.own)
        return self.do("transpose", value, dims=self.param.type.dims)

    def _in_pieces(self, value: Value, padded: Dim, pieces: tuple[Dim, ...]) -> Value:
        """A value in one dim as `pieces`, with zeros behind the last element."""
        do, flat = self.do, self.dims.flat
        ends = {"before": 0, "after": padded.size - flat.size, "value": 0}
        value = do("pad", value, source=(flat,), target=(padded,), **ends)
        return do("split", value, dim=padded, into=pieces)

    def _in_one(self, value: Value, pieces: tuple[Dim, ...], padded: Dim) -> Value:
        """A value in `pieces` in one dim, without what is behind the last element."""
        value = self.do("merge", value, dims=pieces, into=padded)
        part = {"start": 0, "stop": self.dims.flat.size, "target": self.dims.flat}
        return self.do("slice", value, dim=padded, **part)

    def _signs(self, words: Value) -> Value:
        return self.do("unpack_signs", words, dim=self.dims.bits, dtype=self.do.dtype)

    def _signed(self, words: Value, scale: Value) -> Value:
        """What signs stand for, in one dim."""
        value = self.do("mul", self._signs(words), scale)
        return self._in_one(value, self.bits_in_words, self.dims.padded)

    def _by_block(self, scales: Value, dim: Dim) -> Value:
        """The scale of the block that each word is in."""
        index = replace(self.do, dtype=I32)("block_index", dim=dim, ways=(1,))
        return self.do("gather", scales, index, dim=self.dims.every)

    def _inside(self) -> Value:
        """1 where a bit stands for an element, 0 behind the last."""
        count, dims = replace(self.do, dtype=I32), self.dims
        number = count("mul", count("iota", dim=dims.blocks), BITS)
        number = count("add", number, count("iota", dim=dims.bits))
        return self.do("cast", count("lt", number, dims.flat.size), dtype=self.do.dtype)


def one_bit_momentum(
    emitter: UpdateEmitter,
    param: Value,
    grad: Value,
    own: tuple[str, ...],
    beta: float,
    rest: Value,
) -> Value:
    """The momentum `rest` + (1 - beta) · gradient as signs, sent as `one_bit` sends a gradient.

    1-bit Adam (Tang et al. 2021): each worker compresses the momentum that its own gradient gives.
    The scale of a tensor leaves its norm as it is: the root of the mean square.
    """
    tensor = _Tensor(emitter, param, grad, own)
    return tensor.one_bit_momentum(beta, rest) if own else tensor.momentum(beta, rest)


PER_WORKER = {"topk": top_k, "onebit": one_bit, "int8": int8}
"""The compressions of gradients whose numbers depend on the number of workers."""

# --- of many workers ---------------------------------------------------------------------------


def is_per_worker(program: NamedProgram) -> bool:
    """Whether a training step compresses what each worker has by itself."""
    goal = program.goal
    compress = goal.optimizer.compress if goal is not None and program.updates else None
    return compress is not None and (compress.name in PER_WORKER or compress.is_of_momentum)


def for_workers(program: NamedProgram, ways: Mapping[str, tuple[int, ...]]) -> NamedProgram:
    """The program in which each parameter, by its name, has so many workers.

    They are given as the sizes of the mesh axes that they are on, the outer first.
    """
    sized: dict[str, Dim] = {}
    blocks: dict[str, tuple[int, ...]] = {}
    for param, sizes in ways.items():
        dims = Dims(param, count=math.prod(sizes))
        sized |= {d.name: d for d in (dims.workers, dims.every)}
        blocks |= {d.name: sizes for d in (dims.words, dims.blocks)}
    new: dict[Value, Value] = {}

    def resized(item: object) -> object:
        if isinstance(item, tuple):
            return tuple(resized(i) for i in item)
        return sized.get(item.name, item) if isinstance(item, Dim) else item

    def one(op: NamedOp) -> NamedOp:
        for value in op.outs:
            dims = tuple(sized.get(d.name, d) for d in value.type.dims)
            if dims != value.type.dims:
                new[value] = replace(value, type=replace(value.type, dims=dims))
        ins, outs = (tuple(new.get(v, v) for v in vs) for vs in (op.ins, op.outs))
        attrs = tuple((name, resized(item)) for name, item in op.attrs)
        if op.name == "block_index":
            attrs = (("dim", op.attr("dim")), ("ways", blocks[op.attr("dim").name]))
        resized_op = replace(op, ins=ins, outs=outs, attrs=attrs)
        several = op.name == "parts" and resized_op.attr("dim").size > 1
        return replace(resized_op, kind=OpKind.WORKER_PARTS) if several else resized_op

    body = tuple(
        one(node) if isinstance(node, NamedOp) and node.phase == "update" else node
        for node in program.body
    )
    return replace(program, body=body)
