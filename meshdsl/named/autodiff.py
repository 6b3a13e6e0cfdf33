"""Reverse mode on the named program: the gradient of a scalar, written in the same operators.

The backward pass is more of the same program, so that it is placed, reduced, costed and printed
like everything else. A loop is differentiated by a loop that runs from the last iteration to the
first; what it needs of the forward one is collected there. Contributions to one gradient are summed
as they are, still partial where they are. (Griewank and Walther 2008; for loops as here: JAX scan.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from meshdsl.named.autodiff_active import active
from meshdsl.named.autodiff_block import Block
from meshdsl.named.autodiff_call import about, source
from meshdsl.named.autodiff_tape import Tape
from meshdsl.named.builder import Builder, Scope
from meshdsl.named.ir import Node, Op, Repeat, Value, results
from meshdsl.named.prelude import prelude
from meshdsl.named.rewrite import substitute


def gradients(
    builder: Builder, loss: Value, wrt: Sequence[Value], seed: Value | None = None
) -> list[Value | None]:
    """The gradients of `loss` by the values `wrt`, emitted at the end of the current block.

    Differentiates the nodes of the block so far. Each gradient has the type of its tensor; None
    where the loss does not depend on it. `seed` is the gradient of the loss, 1 without.
    """
    return pulled_back(builder, [(loss, seed)], wrt)


def pulled_back(
    builder: Builder, seeds: Sequence[tuple[Value, Value | None]], wrt: Sequence[Value]
) -> list[Value | None]:
    """The same for a loss that depends on several values: pairs of one and its own gradient."""
    nodes = tuple(builder.frames[-1].body)
    tape = Tape(builder, active(nodes, set(wrt), builder.originals), frozenset(wrt))
    start = len(builder.frames[-1].body)
    with in_phase(builder, "backward"):
        block = Block(tape, nodes)
        for value, seed in seeds:
            emit = tape.emitter(value)
            block.add(value, seed if seed is not None else emit.number(1.0, value.type.dtype))
        block.reverse()
        found = _distinct(tape, [block.whole(v) if v in block.grads else None for v in wrt], wrt)
    body = builder.frames[-1].body
    body[:] = tape.with_collected(tuple(body))
    return _marked(builder, start, found, wrt)


def _distinct(tape: Tape, found: list[Value | None], wrt: Sequence[Value]) -> list[Value | None]:
    """Of each tensor a gradient of its own: what several have in common is named for the first.

    What is a copy of a forward value is no gradient either.
    """
    taken: set[Value] = set()
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is not None and (grad in taken or grad in tape.builder.originals):
            (grad,) = tape.emitter(value, source(value)).apply("identity", (grad,), {})
        found[index] = grad
        taken.update([grad] if grad is not None else [])
    return found


def _marked(
    builder: Builder, start: int, found: list[Value | None], wrt: Sequence[Value]
) -> list[Value | None]:
    """The gradients of parameters, marked as such: values of their own."""
    body = builder.frames[-1].body
    made = {v for n in body[start:] for v in results(n)}
    new: dict[Value, Value] = {}
    for index, (grad, value) in enumerate(zip(found, wrt, strict=True)):
        if grad is None or value.role != "param":
            continue
        if grad not in made:
            with in_phase(builder, "backward"):
                scope = Scope({}, {}, prelude(), value.path, value.functions)
                grad = builder.emit("identity", (grad,), {}, grad.span, scope)[0]
        for part in (grad, *_parts(body, grad)):
            new[part] = replace(part, role="grad", **about(source(value)))
            builder.place(new[part], len(builder.frames) - 1)
        found[index] = new[grad]
    body[start:] = substitute(body[start:], new)
    return found


def _parts(nodes: Sequence[Node], grad: Value) -> Iterator[Value]:
    """What a loop collects `grad` from, if it is collected: a gradient as well, slice by slice."""
    for loop in (n for n in nodes if isinstance(n, Repeat)):
        for made in (c.inside for c in loop.collected if c.outer is grad):
            if any(made in op.outs for op in loop.body if isinstance(op, Op)):
                yield made


@contextmanager
def in_phase(builder: Builder, phase: str) -> Iterator[None]:
    """What is emitted meanwhile belongs to `phase`, and to no `recompute` block."""
    before = builder.phase, builder.block
    builder.phase, builder.block = phase, None
    try:
        yield
    finally:
        builder.phase, builder.block = before
