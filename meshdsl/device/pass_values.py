"""What passes of a pipeline keep for later passes of the same micro-batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from meshdsl.device.ir import FORWARD, INPUTS, WEIGHTS, Pipeline, StagePhase, Var
from meshdsl.device.liveness import is_constant, totals
from meshdsl.ir.rewrite import reads_of

Where = int | str
"""A stage of a network that rules cut; of a loop on the stages the `first`, `last` or `every` one.

All stages of a loop have one text.
"""

Kept = Mapping[Where, list[Var]]
"""Variables by where they are kept."""


def kept_for_backward(node: Pipeline) -> Kept:
    """What backward passes read of forward passes."""
    return _read_in((*INPUTS, *WEIGHTS), _made_in(FORWARD, node), node)


def kept_for_weights(node: Pipeline) -> Kept:
    """What the second halves of backward passes read of what the first ones keep or make."""
    kept = ((var, at) for at, each in kept_for_backward(node).items() for var in each)
    return _read_in(WEIGHTS, (*kept, *_made_in(INPUTS, node)), node)


def _read_in(
    parts: tuple[StagePhase, ...], candidates: Iterable[tuple[Var, Where]], node: Pipeline
) -> Kept:
    """Those variables that some parts read; sums are there all the time."""
    read, sums = {v for n in node.of(*parts) for v in reads_of(n)}, totals(node)
    by_place: dict[Where, list[Var]] = {}
    for var, at in dict.fromkeys(candidates):
        if var in read and var.name not in sums:
            by_place.setdefault(at, []).append(var)
    return by_place


def _made_in(parts: tuple[StagePhase, ...], node: Pipeline) -> Iterator[tuple[Var, Where]]:
    """The variables that some parts make, and where; numbers have none.

    A message is where it arrives. What the iterations of the last stage carry is read there.
    """
    received = node.received
    for maker, part, ends in node.places:
        if part not in parts or is_constant(maker):
            continue
        results = {c.result for c in maker.carries} if part is StagePhase.LOOP else ()
        for var in maker.makes:
            if ends:
                yield var, ends[-1]
            elif var in received:
                yield var, "every"
            else:
                yield var, "last" if var in results else part.stages
