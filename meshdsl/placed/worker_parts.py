"""Compressions of what each worker has: which devices the workers are, and what cannot be.

A worker is a device with its own part of each gradient, as the batches that it reads give it. What
has been reduced before it is compressed, or is split, has no such parts: that is refused (MD0316),
for the numbers would be those of another number of workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

from meshdsl.diagnostics import advice, fail
from meshdsl.ir import program as ir
from meshdsl.ir.program import OpKind
from meshdsl.named.ir import Goal, NamedProgram, Value
from meshdsl.named.workers import Dims, for_workers, is_per_worker
from meshdsl.placed.ir import Apply, Node, PlacedProgram, PlacedTensor, Reshard
from meshdsl.placed.placements import Placement
from meshdsl.placed.request import Request
from meshdsl.syntax.call_edits import with_option
from meshdsl.syntax.enclosing import optimizer_of


def workers(program: PlacedProgram) -> int:
    """How many workers compress what they have; 0 where none do."""
    nodes = ir.every(program.body)
    sizes = (n.attr("dim").size for n in nodes if isinstance(n, Apply) and n.name == "parts")
    return max(sizes, default=0)


def with_workers(request: Request) -> Request:
    """The request with the operators of as many workers as there are, and rules for their dims.

    They are on the axes over which `request.parts` has the errors partial. Raises MD0316 where
    gradients are split, or have not all the same workers.
    """
    if not request.parts or not is_per_worker(request.program):
        return request
    by_axes = dict[tuple[str, ...], Value]()
    for error, placed in request.parts.items():
        if placed.splits:
            _refuse_split(request.program, error, placed)
        by_axes.setdefault(placed.partial, error)
    if len(by_axes) > 1:
        (axes, one), (others, other) = list(by_axes.items())[:2]
        said = f"`{_param(one)}` has parts {_over(axes)}, that of `{_param(other)}` {_over(others)}"
        _refuse(request.program, f"the gradient of {said}")
    (axes,) = by_axes
    if not axes:
        _need_whole_inputs(request)
        return request
    sizes = tuple(request.mesh.size(axis) for axis in axes)
    params = [_param(error) for error in request.parts]
    request = request.on(for_workers(request.program, dict.fromkeys(params, sizes)))
    for dims in map(Dims, params):
        for dim in (dims.workers, dims.blocks):
            request = request.also(dim, axes, _goal(request.program).span)
    return request


def _need_whole_inputs(request: Request) -> None:
    """Refuse gradients that are whole although devices read other parts of the inputs."""
    for value in request.program.inputs:
        splits = request.ruled(value).splits
        if splits:
            message = f"no gradient has parts {_over(splits[0][1])}, which splits `{value.label}`"
            _refuse(request.program, message)


def check_parts(program: PlacedProgram) -> None:
    """Raise MD0316 where a part that is compressed is not what the device has computed.

    A gradient may have been split by a rule for `grads`, and is one part then. It, or a term of it,
    may have been reduced, or is whole on every device: of all parts but one, zeros were made.
    """
    makers = dict(_makers(program.body))
    for node in ir.every(program.body):
        if not isinstance(node, Apply) or node.kind is not OpKind.WORKER_PARTS:
            continue
        if not node.outs[0].placement.axes_of(node.attr("dim").name):
            _refuse_split(program.named, node.outs[0].value, node.ins[0].placement)
        whole_term = _made_up(node.ins[0], makers)
        if whole_term is not None:
            name = f"`{whole_term.value.label}`" if whole_term.value.name else "a term"
            message = f"of the gradient of `{_param(node.outs[0].value)}`, {name} is already whole"
            _refuse(program.named, message)


def _makers(
    nodes: tuple[Node, ...],
) -> Iterator[tuple[PlacedTensor, tuple[Node | PlacedTensor, ...]]]:
    """What each version is made by: a node, or another version."""
    for node in ir.every(nodes):
        if isinstance(node, ir.Leaf):
            yield from ((tensor, (node,)) for tensor in node.makes)
        for carry in node.carries:
            yield carry.inside, (carry.init, carry.next)
            yield carry.result, (carry.init, carry.next)
        yield from ((s.inside, (s.outer,)) for s in node.stacked)
        yield from ((c.outer, (c.inside,)) for c in node.collected)


def _made_up(
    tensor: PlacedTensor, made: dict[PlacedTensor, tuple[Node | PlacedTensor, ...]]
) -> PlacedTensor | None:
    """A version on the way to a partial one of which all parts but one are zeros, if any."""
    seen, open_ = set[PlacedTensor](), [tensor]
    while open_:
        tensor = open_.pop()
        if tensor in seen or not tensor.placement.partial:
            continue
        seen.add(tensor)
        for maker in made.get(tensor, ()):
            if isinstance(maker, PlacedTensor):
                open_.append(maker)
            elif isinstance(maker, Reshard):
                filled = any(step.kind == "zero_fill" for step in maker.route.steps)
                if filled and not _is_zero(maker.source, made):
                    return maker.source
                open_.append(maker.source)
            elif isinstance(maker, Apply):
                open_.extend(maker.ins)
    return None


def _is_zero(
    tensor: PlacedTensor, made: dict[PlacedTensor, tuple[Node | PlacedTensor, ...]]
) -> bool:
    """Whether a version is zeros, as sums over batches begin."""
    (maker,) = made.get(tensor, (None,))
    if isinstance(maker, Reshard):
        return _is_zero(maker.source, made)
    if not isinstance(maker, Apply):
        return False
    if maker.name in ("broadcast", "cast"):
        return _is_zero(maker.ins[0], made)
    return maker.name == "zeros" or (maker.name == "constant" and not maker.attr("value"))


# --- refusals ----------------------------------------------------------------------------------


def _param(value: Value) -> str:
    """The parameter whose update a value is of: its rules bind that."""
    assert value.rules_from is not None
    return str(value.rules_from.name)


def _goal(program: NamedProgram) -> Goal:
    assert program.goal is not None
    return program.goal


def _over(axes: tuple[str, ...]) -> str:
    return "over " + " and ".join(f"`{axis}`" for axis in axes) if axes else "on no axis"


def _refuse_split(program: NamedProgram, error: Value, placed: Placement) -> NoReturn:
    message = f"the gradient of `{_param(error)}` is split {_over(placed.splits[0][1])}"
    _refuse(program, message)


def _refuse(program: NamedProgram, message: str) -> NoReturn:
    goal = _goal(program)
    compress = goal.optimizer.compress
    optimizer = optimizer_of(goal.span)
    fixes = () if optimizer is None else with_option(optimizer, "compress", "powersgd(2)")
    every = f"{advice(fixes) or '`compress=powersgd(2)`'}, which goes with every layout"
    help = f"{every}; or split the batch alone, without rules for `grads`, and reduce `deferred`"
    message = f"`{compress}` compresses what each device has: {message}"
    fail("MD0316", message, goal.span, help=help, fixes=fixes)
