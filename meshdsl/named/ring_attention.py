"""Attention in a ring: keys and values go from device to device, results are merged.

`seq` of the queries and `mem` of keys and values are split alike, in D blocks. In step 0 a device
attends to its own block of `mem`. Before each of the D - 1 other steps, which are a loop, every
block goes to the next device, so that in step t device i attends to block i - t; what it has found
in a block is merged by the logarithms of the sums of exponentials (Liu et al. 2023, after Milakov
and Gimelshein 2018). The backward pass sends the blocks once more, and the gradient of each block
goes along with it.

Of a causal attention, device i needs only blocks up to its own: the last device has all the work,
and the others wait. A `balanced` ring has the positions in an order in which device i has half
blocks i and 2D - 1 - i (`balanced_order.py`; the order of Llama 3 and Megatron-LM, after Brandon et
al. 2023). Then in each step but the first exactly two of the four products of half blocks are
unmasked, on every device: the second half of the queries with the first half of the keys, and the
first halves where the block is from before, the second halves where it is from behind.
No mask is made, and nothing is computed that is masked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field

from meshdsl.ir.program import Carry
from meshdsl.ir.types import F32, Dim
from meshdsl.named.builder import Frame
from meshdsl.named.emit import Emit
from meshdsl.named.ir import NamedLoop, NamedOp, Value
from meshdsl.records import dataclass

NOTHING = -1e30
"""The logarithm of a sum of exponentials that counts for nothing beside any other."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The dims of a ring: `seq` of queries and `mem` of keys, each in `parts` blocks."""

    seq: Dim
    mem: Dim
    parts: int
    balanced: bool

    @property
    def blocks(self) -> Dim:
        """The dim of the blocks, one on each device, of queries and keys alike."""
        return Dim(f"{self.seq.name}.blocks", self.parts)

    @property
    def half(self) -> Dim:
        """The two halves of a block in balanced order."""
        return Dim(f"{self.seq.name}.half", 2)

    def inner(self, dim: Dim, count: int = 1) -> Dim:
        """The dim of a block of `seq` or `mem`, or of a half of it."""
        name = f"{dim.name}.block" if count == 1 else f"{dim.name}.part"
        return Dim(name, dim.size // self.parts // count)


@dataclass(slots=True)
class _RingSteps:
    """The steps of one attention, or of its gradient, being emitted."""

    op: NamedOp
    ring: Ring
    emit: Emit

    @property
    def is_causal(self) -> bool:
        return bool(self.op.attr("causal"))

    # --- blocks ------------------------------------------------------------------------------

    def split(self, x: Value, dim: Dim) -> Value:
        """`x` in blocks of `dim`, which is `seq` or `mem`."""
        into = (self.ring.blocks, self.ring.inner(dim))
        return self.emit("split", x, dim=dim, into=into)

    def whole(self, x: Value, dim: Dim) -> Value:
        """The inverse of `split`."""
        return self.emit("merge", x, dims=(self.ring.blocks, self.ring.inner(dim)), into=dim)

    def halves(self, x: Value, dim: Dim) -> Value:
        """Blocks of `dim` in halves."""
        into = (self.ring.half, self.ring.inner(dim, 2))
        return self.emit("split", x, dim=self.ring.inner(dim), into=into)

    def joined(self, x: Value, dim: Dim) -> Value:
        """The inverse of `halves`."""
        dims = (self.ring.half, self.ring.inner(dim, 2))
        return self.emit("merge", x, dims=dims, into=self.ring.inner(dim))

    def half(self, x: Value, index: int) -> Value:
        return self.emit("pick", x, dim=self.ring.half, index=index)

    def passed_on(self, x: Value, name: str) -> Value:
        """Every block on the next device, under a name that programs and reports show."""
        return self.emit.known_as(name)("roll", x, dim=self.ring.blocks, by=1)

    def keys(self, k: Value, v: Value) -> tuple[Value, Value]:
        """Keys and values, passed on."""
        return self.passed_on(k, "k_passed"), self.passed_on(v, "v_passed")

    # --- steps -------------------------------------------------------------------------------

    def repeat(
        self,
        values: Mapping[str, Value],
        step: Callable[[Value, tuple[Value, ...]], tuple[Value, ...]],
    ) -> tuple[Value, ...]:
        """`values` after all steps but the first; `step` makes those of one from the ones before.

        It is given, by block of queries, whether the block of keys in a step is from before, and
        not from behind. The names of the values are what programs and reports show.
        """
        builder, op = self.emit.builder, self.op
        dim = Dim(f"{self.ring.seq.name}.steps", self.ring.parts - 1)
        numbers, blocks = (self.emit("iota", dim=d) for d in (dim, self.ring.blocks))
        builder.frames.append(Frame(dim))
        insides = tuple(self.alike(name, v) for name, v in values.items())
        is_before = self.emit("gt", blocks, builder.reach(numbers))
        nexts = step(is_before, insides)
        frame = builder.frames.pop()
        results = tuple(self.alike(name, v) for name, v in values.items())
        carries = map(Carry, values.values(), insides, nexts, results)
        body = tuple(frame.body)
        loop = NamedLoop(
            dim,
            tuple(carries),
            builder.stacks(frame),
            body,
            op.span,
            phase=op.phase,
            block=op.block,
            origin=op.origin,
        )
        builder.frames[-1].body.append(loop)
        return results

    def alike(self, name: str, value: Value) -> Value:
        """Another value of the same type, at the depth of loops that is being built."""
        fields = {**self.emit.fields, "name_hint": name}
        return self.emit.builder.value(value.type, value.span, value, **fields)

    def is_second(self) -> Value:
        """Which half is the second."""
        index = self.emit("iota", dim=self.ring.half)
        return self.emit("eq", index, self.emit.number(1, index.type.dtype))

    def where(self, condition: Value, x: Value, other: Value | float) -> Value:
        """A choice in the order of the dims of `x`."""
        chosen = self.emit("where", condition, x, other)
        dims = {d.name: d for v in (x, chosen) for d in v.type.dims}
        return self.emit.full(chosen, tuple(dims.values()))

    # --- kernels -----------------------------------------------------------------------------

    def attrs(
        self, rows: Dim, columns: Dim, more: tuple[Dim, ...], causal: bool
    ) -> dict[str, object]:
        """The attributes of the attention of blocks: `more` dims come before the `rows`."""
        key, _ = self.op.attr("dims")
        out = tuple(
            d
            for dim in self.op.attr("out")
            for d in ((*more, rows) if dim == self.ring.seq else (dim,))
        )
        scale = self.op.attr("scale")
        causal_dims = (rows,) * causal
        attrs = {"dims": (key, columns), "out": out, "scale": scale, "causal": causal_dims}
        return {**attrs, "block": True}

    def of_block(self, causal: bool) -> dict[str, object]:
        ring = self.ring
        return self.attrs(ring.inner(ring.seq), ring.inner(ring.mem), (ring.blocks,), causal)

    def of_half(self) -> dict[str, object]:
        ring = self.ring
        more = (ring.blocks, ring.half)
        return self.attrs(ring.inner(ring.seq, 2), ring.inner(ring.mem, 2), more, False)

    def wide(self, x: Value) -> Value:
        """`x` in a dtype in which partial results are added up."""
        return self.emit.cast(x, F32) if x.type.dtype.bytes < F32.bytes else x


def ring_attention(
    op: NamedOp, ring: Ring, ins: tuple[Value, ...], emit: Emit
) -> tuple[Value, ...]:
    """The results of an attention or its gradient on `ins`, emitted as the steps of a ring."""
    steps = _RingSteps(op, ring, emit)
    results = (_gradient if op.name == "attention_grad" else _forward)(steps, ins)
    return results[: len(op.outs)]


# --- forward -------------------------------------------------------------------------------------


def _forward(steps: _RingSteps, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """The result, and the logarithm of the sum of exponentials: carried, with keys and values."""
    ring, emit = steps.ring, steps.emit
    q, k, v = steps.split(ins[0], ring.seq), *(steps.split(x, ring.mem) for x in ins[1:3])
    o, lse = emit.known_as("o_block").all(
        "attention_lse", q, k, v, **steps.of_block(steps.is_causal)
    )
    if ring.balanced:
        q, o, lse = (steps.halves(x, ring.seq) for x in (q, o, lse))

    def step(is_before: Value, values: tuple[Value, ...]) -> tuple[Value, ...]:
        k, v, o, lse = values
        k, v = steps.keys(k, v)
        if ring.balanced:
            return k, v, *_two_products(_HalfBlockPairs(steps, is_before), q, k, v, (o, lse))
        more, more_lse = emit.known_as("o_block").all(
            "attention_lse", q, k, v, **steps.of_block(False)
        )
        if steps.is_causal:
            more_lse = steps.where(is_before, more_lse, NOTHING)
        return k, v, *_merged(steps, (o, lse), more, more_lse)

    _, _, o, lse = steps.repeat(
        {"k_block": k, "v_block": v, "o_sum": steps.wide(o), "lse_sum": lse}, step
    )
    if ring.balanced:
        o, lse = steps.joined(o, ring.seq), steps.joined(lse, ring.seq)
    return steps.whole(o, ring.seq), steps.whole(lse, ring.seq)


def _merged(
    steps: _RingSteps, old: tuple[Value, Value], o: Value, lse: Value
) -> tuple[Value, Value]:
    """Results of two blocks, with their logarithms; NOTHING as one leaves its result out."""
    emit, dims = steps.emit, old[0].type.dims
    both = emit("logaddexp", old[1], lse)
    shares = (emit("exp", emit("sub", one, both)) for one in (old[1], lse))
    parts = (
        emit.full(emit("mul", x, share), dims)
        for x, share in zip((old[0], steps.wide(o)), shares, strict=True)
    )
    return emit("add", *parts), both


def _two_products(
    pairs: _HalfBlockPairs, q: Value, k: Value, v: Value, old: tuple[Value, Value]
) -> tuple[Value, Value]:
    """The results so far merged with the two products of half blocks that no mask hides."""
    steps = pairs.steps
    k, v = (steps.halves(x, steps.ring.mem) for x in (k, v))
    operands = pairs.queries(q), pairs.keys(k), pairs.keys(v)
    o, lse = steps.emit.known_as("o_block").all("attention_lse", *operands, **steps.of_half())
    merged = _merged(steps, old, o, steps.where(pairs.is_own, lse, NOTHING))
    first, first_lse = steps.half(o, 0), steps.half(lse, 0)
    return _merged(steps, merged, first, steps.where(pairs.is_behind, first_lse, NOTHING))


@dataclass(slots=True)
class _HalfBlockPairs:
    """Which half blocks the two products of a step are of.

    Number 1 is of the second half of the queries and the first of the keys; number 0 of the first
    halves where the block of keys `is_before`, else of the second halves.

    is_own:    by block and number, whether product p is of half p of the queries, and of the first
               half of the keys.
    is_behind: by block and half of the queries, whether product 0 is of that half, the second.
    """

    steps: _RingSteps
    is_before: Value
    is_own: Value = field(init=False)
    is_behind: Value = field(init=False)

    def __post_init__(self) -> None:
        emit, second = self.steps.emit, self.steps.is_second()
        self.is_own = emit("logical_or", self.is_before, second)
        self.is_behind = emit("logical_and", emit("logical_not", self.is_before), second)

    def queries(self, x: Value) -> Value:
        """What queries have, by half, for the two products."""
        return self.steps.where(self.is_own, x, self.steps.half(x, 1))

    def keys(self, x: Value) -> Value:
        """What keys have, by half, for the two products."""
        first, second = self.steps.half(x, 0), self.steps.half(x, 1)
        chosen = self.steps.emit("where", self.is_own, first, second)
        return self.steps.emit.full(chosen, x.type.dims)

    def of_queries(self, x: Value) -> Value:
        """By half of the queries, the sum of what the two products have yielded."""
        steps = self.steps
        diagonal = steps.where(self.is_own, x, 0.0)
        other = steps.emit("where", self.is_behind, steps.half(x, 0), 0.0)
        return steps.emit("add", diagonal, steps.emit.full(other, x.type.dims))

    def of_keys(self, x: Value) -> Value:
        """By half of the keys, the sum of what the two products have yielded."""
        steps, emit = self.steps, self.steps.emit
        first, second = steps.half(x, 0), steps.half(x, 1)
        of_first = emit("add", second, steps.where(self.is_before, first, 0.0))
        of_second = steps.where(emit("logical_not", self.is_before), first, 0.0)
        chosen = emit("where", steps.is_second(), of_second, of_first)
        return emit.full(chosen, x.type.dims)


# --- backward ------------------------------------------------------------------------------------


def _gradient(steps: _RingSteps, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """The gradients: that of the queries stays, those of keys and values go along with these.

    After the last step each block would be on the device before its own. It is sent on once more,
    and so is its gradient: at home.
    """
    ring, emit = steps.ring, steps.emit
    do, q, o, lse = (steps.split(ins[i], ring.seq) for i in (0, 1, 4, 5))
    k, v = (steps.split(x, ring.mem) for x in ins[2:4])
    attrs = steps.of_block(steps.is_causal)
    dq, dk, dv = emit.known_as("d_block").all("attention_grad", do, q, k, v, o, lse, **attrs)
    if ring.balanced:
        do, q, o, lse, dq = (steps.halves(x, ring.seq) for x in (do, q, o, lse, dq))

    def step(is_before: Value, values: tuple[Value, ...]) -> tuple[Value, ...]:
        k, v, dq, dk, dv = values
        k, v = steps.keys(k, v)
        more, *by_block = _of_step(steps, is_before, (do, q, k, v, o, lse))
        dq = emit("add", dq, steps.wide(more))
        dk, dv = (
            steps.passed_on(emit("add", x, of_block), name)
            for x, of_block, name in zip(
                (dk, dv), by_block, ("d_k_passed", "d_v_passed"), strict=True
            )
        )
        return k, v, dq, dk, dv

    values = {"k_block": k, "v_block": v, "d_q_sum": steps.wide(dq)}
    values |= {"d_k_block": emit.zeros(dk.type), "d_v_block": emit.zeros(dv.type)}
    _, _, dq, *home = steps.repeat(values, step)
    dk, dv = (emit("add", *pair) for pair in zip((dk, dv), home, strict=True))
    if ring.balanced:
        dq = steps.joined(dq, ring.seq)
    return steps.whole(dq, ring.seq), steps.whole(dk, ring.mem), steps.whole(dv, ring.mem)


def _of_step(steps: _RingSteps, is_before: Value, ins: tuple[Value, ...]) -> tuple[Value, ...]:
    """The gradients by queries, keys and values of what a device attends to in a step."""
    do, q, k, v, o, lse = ins
    if steps.ring.balanced:
        pairs, mem = _HalfBlockPairs(steps, is_before), steps.ring.mem
        do, q, o, lse = (pairs.queries(x) for x in (do, q, o, lse))
        k, v = (pairs.keys(steps.halves(x, mem)) for x in (k, v))
        d_queries, *d_keys = steps.emit.known_as("d_block").all(
            "attention_grad", do, q, k, v, o, lse, **steps.of_half()
        )
        of_keys = (steps.joined(pairs.of_keys(x), mem) for x in d_keys)
        return pairs.of_queries(d_queries), *of_keys
    if steps.is_causal:  # the softmax of a block that does not count is 0
        lse = steps.where(is_before, lse, -NOTHING)
    return steps.emit.known_as("d_block").all(
        "attention_grad", do, q, k, v, o, lse, **steps.of_block(False)
    )
