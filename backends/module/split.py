"""A device program with its vector-Jacobian product, cut in two: forward and backward.

Values that cross the cut are saved, as autograd saves the operands of a backward pass. Reductions
of parameters' gradients may be cut off from the backward pass, to be done once for several.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from meshdsl.device.buckets import in_buckets
from meshdsl.device.ir import Compute, DeviceProgram, Move, Node, Start, Var, Wait
from meshdsl.device.overlap import overlapped
from meshdsl.device.verify import verify
from meshdsl.ir.rewrite import reads_of
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class SplitPasses:
    """The statements of both passes; `saved` are the variables that the second reads of the first.

    They return `outputs`, and the gradients of `params` and `inputs`; `cotangents` are those of
    outputs, by name. Where the gradients of `params` are left as partial sums, the statements of
    `reduction` make `reduced` of them.
    """

    forward: tuple[Node, ...]
    backward: tuple[Node, ...]
    saved: tuple[Var, ...]
    outputs: tuple[tuple[str, Var], ...]
    cotangents: tuple[tuple[str, Var], ...]
    params: tuple[tuple[str, Var], ...]
    inputs: tuple[tuple[str, Var], ...]
    reduction: tuple[Node, ...] = ()
    reduced: tuple[tuple[str, Var], ...] = ()

    @property
    def returned(self) -> frozenset[Var]:
        """The gradients, of parameters and inputs."""
        return frozenset(v for _, v in (*self.params, *self.inputs))


def halves(
    program: DeviceProgram,
    cotangents: tuple[str, ...],
    params: tuple[str, ...],
    inputs: tuple[str, ...],
) -> SplitPasses:
    """Cut a program: names are those of `Vjp`, its last inputs and outputs.

    A statement belongs to the backward pass by its phase, or if it reads a value of that pass.
    """
    seeds = program.inputs[len(program.inputs) - len(cotangents) :]
    count = len(program.outputs) - len(params) - len(inputs)
    grads = [var for _, var in program.outputs[count:]]
    late: set[Var] = set(seeds)
    forward: list[Node] = []
    backward: list[Node] = []
    for node in program.body:
        if _phase(node) != "forward" or not late.isdisjoint(reads_of(node)):
            late.update(node.makes)
            backward.append(node)
        else:
            forward.append(node)
    numbers = _numbers(forward)
    backward[:0] = _again(forward, backward, numbers)
    available = (*program.inputs, *program.params, *(v for node in forward for v in node.makes))
    read = {v for node in backward for v in reads_of(node)} | set(grads)
    saved = tuple(v for v in available if v in read and v not in numbers and v not in late)
    return SplitPasses(
        tuple(forward),
        tuple(backward),
        saved,
        program.outputs[:count],
        tuple(zip(cotangents, seeds, strict=True)),
        tuple(zip(params, grads[: len(params)], strict=True)),
        tuple(zip(inputs, grads[len(params) :], strict=True)),
    )


def unreduced(cut: SplitPasses) -> SplitPasses:
    """The passes with what only reduces gradients of parameters cut off from the backward pass.

    These are the reshards at its end: they are linear, so that sums of gradients can go through
    them. A reduction inside of a loop stays in the backward pass, and one that several gradients
    are made of: each of these may be accumulated by itself.
    """
    movers = {node.target: node for node in cut.backward if isinstance(node, Move)}
    readers: dict[Var, list[Node]] = {}
    for node in cut.backward:
        for var in reads_of(node):
            readers.setdefault(var, []).append(node)
    grads = [v for _, v in cut.params]
    returned = {*(v for _, v in cut.inputs), *(v for v in grads if grads.count(v) > 1)}
    reduction: set[Node] = set()
    partials = []
    for name, grad in cut.params:
        var, moves = grad, list[Move]()
        while (
            (move := movers.get(var)) is not None
            and _is_linear(move)
            and var not in returned
            and all(reader in (*reduction, *moves) for reader in readers.get(var, ()))
        ):
            moves.append(move)
            var = move.source
        if var in returned or not any(move.step.moves for move in moves):
            moves, var = [], grad
        returned.add(var)
        reduction.update(moves)
        partials.append((name, var))
    return replace(
        cut,
        backward=tuple(node for node in cut.backward if node not in reduction),
        params=tuple(partials),
        reduction=tuple(node for node in cut.backward if node in reduction),
        reduced=cut.params,
    )


def _is_linear(move: Move) -> bool:
    """Whether what it makes of a sum is the sum of what it makes of the addends."""
    before, after = move.step.before, move.step.after
    ops = {before.op, after.op, move.step.op}
    return move.into is None and ops <= {None, "sum"} and not (before.windows or after.windows)


def hurried(program: DeviceProgram, cut: SplitPasses) -> SplitPasses:
    """Both passes with small collectives in buckets, and others issued early.

    Each by itself: no collective in flight crosses the cut. What makes the gradients is treated as
    a training step does updates.
    """
    saved = [(v.name, v) for v in cut.saved]
    first = replace(program, body=cut.forward, outputs=(*cut.outputs, *saved))
    stored = {v.value.name: v for v in program.params}
    held = [v for v in cut.saved if v not in program.params]
    cotangents = [v for _, v in cut.cotangents]
    updates = tuple((stored[name], grad) for name, grad in cut.reduced or cut.params)
    second = replace(
        program,
        inputs=(*held, *cotangents),
        body=cut.backward,
        outputs=(*cut.inputs, *cut.params) if cut.reduced else cut.inputs,
        updates=() if cut.reduced else updates,
    )
    partials = tuple(dict.fromkeys(v for _, v in cut.params))
    third = replace(program, inputs=partials, body=cut.reduction, outputs=(), updates=updates)
    return replace(
        cut,
        forward=_hurried(first).body,
        backward=_hurried(second).body,
        reduction=_hurried(third).body if cut.reduced else (),
    )


def _hurried(program: DeviceProgram) -> DeviceProgram:
    verify(program)
    for step in (in_buckets, overlapped):
        program = step(program)
        verify(program)
    return program


def _phase(node: Node) -> str:
    match node:
        case Compute():
            return node.phase
        case Start() | Wait():
            return node.collective.phase
    return node.phase


def _numbers(nodes: Iterable[Node]) -> set[Var]:
    """The variables that are numbers: constants, and moves of them. None is saved."""
    numbers: set[Var] = set()
    for node in nodes:
        if isinstance(node, Compute) and node.name == "constant":
            numbers.update(node.outs)
        elif isinstance(node, Move) and node.source in numbers:
            numbers.add(node.target)
    return numbers


def _again(forward: list[Node], backward: list[Node], numbers: set[Var]) -> list[Node]:
    """Statements on numbers that the backward pass rematerialises."""
    wanted = {v for node in backward for v in reads_of(node)}
    repeated: list[Node] = []
    for node in reversed(forward):
        if numbers.issuperset(node.makes) and not wanted.isdisjoint(node.makes):
            wanted.update(reads_of(node))
            repeated.append(node)
    return repeated[::-1]
