"""Origins of the operators of a backward pass, where a pass has removed what they name.

A gradient is that of an operator of the forward pass (`ir.program.Origin`). Simplification merges
such an operator into another, or drops it where its result is not read; the gradient stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from meshdsl.ir.program import every
from meshdsl.ir.rewrite import defined, flows, substitute
from meshdsl.named.ir import NamedProgram, Node, Value

Steps = Mapping[Value, tuple[Value, ...]]
"""The values that each value leads to, the nearest first."""


def with_kept_origins(before: NamedProgram, after: NamedProgram) -> NamedProgram:
    """`after`, made by removing operators of `before`, with origins among the values that are left.

    A removed value is replaced by the first one computed from it, into which it was merged. Where
    none is left, it is replaced by the operand computed last: by an input or a parameter where all
    of what was computed is gone. A constant has no operand; it goes with those that read it.
    """
    named = {n.origin.of for n in every(after.body) if n.origin is not None}
    entering = (*after.inputs, *(p.value for p in after.params), *(s.value for s in after.states))
    left = named and {*entering, *(v for n in every(after.body) for v in defined(n))}
    gone = {v for n in every(before.body) for v in defined(n)} & named - left if named else set()
    if not gone:
        return after
    readers, operands = _steps(before.body)
    either = {v: (*readers.get(v, ()), *operands.get(v, ())) for v in {*readers, *operands}}
    ways = readers, operands, either
    origins: dict[Value, Value] = {}
    for of, earlier in _named(after.body, set(entering)):
        if of in gone and of not in origins:
            new = next(filter(None, (_nearest(of, steps, earlier) for steps in ways)), None)
            if new is not None:
                origins[of] = new
    return replace(after, body=substitute(after.body, {}, origins=origins))


def _named(nodes: Iterable[Node], earlier: set[Value]) -> Iterator[tuple[Value, set[Value]]]:
    """What origins name, in order, with all that is made earlier: no result of a loop in its body.

    `earlier` has what is there before the nodes, and then what they make.
    """
    for node in nodes:
        if node.origin is not None:
            yield node.origin.of, earlier
        earlier.update(node.enters)
        yield from _named(node.body, earlier)
        earlier.update(node.makes)


def _nearest(value: Value, steps: Steps, left: set[Value]) -> Value | None:
    """The first value that is left on the way from one that is not."""
    seen, waiting = {value}, [value]
    for one in waiting:
        for other in steps.get(one, ()):
            if other in left:
                return other
            if other not in seen:
                seen.add(other)
                waiting.append(other)
    return None


def _steps(nodes: Iterable[Node]) -> tuple[Steps, Steps]:
    """Steps from each value to those computed from it in the same phase, and to its operands.

    Of the operands, the one computed last is the first.
    """
    readers: dict[Value, list[Value]] = {}
    operands: dict[Value, list[Value]] = {}
    order: dict[Value, int] = {}
    phase: dict[Value, str] = {}
    for node in every(nodes):
        made = defined(node)
        order.update((v, len(order)) for v in made)
        phase.update(dict.fromkeys(made, node.phase))
    for operand, result in (pair for node in every(nodes) for pair in flows(node)):
        operands.setdefault(result, []).append(operand)
        if phase.get(operand) == phase[result]:
            readers.setdefault(operand, []).append(result)
    for read in operands.values():
        read.sort(key=lambda v: -order.get(v, -1))
    return (
        {value: tuple(results) for value, results in readers.items()},
        {value: tuple(read) for value, read in operands.items()},
    )
