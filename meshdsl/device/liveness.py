"""When local tensors are last read, and the most memory that is held at once.

A Python variable keeps its tensor until it is deleted. Only large tensors are worth a `del` in a
program that people read: smaller ones stay until their block ends, and are counted so.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshdsl.device.ir import Compute, Loop, Move, Node, Program, Var
from meshdsl.ops.opdef import lookup

LARGE = 1 << 20
"""Bytes from which on a tensor is deleted after its last use."""


def deaths(nodes: tuple[Node, ...], kept: frozenset[Var]) -> tuple[tuple[Var, ...], ...]:
    """Per node of a block, the large variables made in the block that nothing reads after it.

    `kept` are read after the block.
    """
    own = {v for node in nodes for v in made(node)}
    later: set[str] = {v.name for v in kept}
    found: list[tuple[Var, ...]] = []
    for node in reversed(nodes):
        touched = dict.fromkeys((*made(node), *reads(node)))
        dying = [v for v in touched if v in own and v.name not in later]
        found.append(tuple(v for v in dying if v.local.bytes >= LARGE and not _constant(node, v)))
        later.update(v.name for v in touched)
    return tuple(reversed(found))


def made(node: Node) -> tuple[Var, ...]:
    """The variables that a node assigns, of a loop those that are there after it."""
    match node:
        case Compute():
            return node.outs
        case Move():
            return (node.target,)
    return tuple(c.result for c in node.carries)


def reads(node: Node) -> tuple[Var, ...]:
    """The variables that a node reads, of a loop those from outside and what it reads inside."""
    match node:
        case Compute():
            return node.ins
        case Move():
            return (node.source,)
    inner = tuple(v for n in node.body for v in reads(n))
    return (*(c.init for c in node.carries), *(s for s, _ in node.stacked), *inner)


def _constant(node: Node, var: Var) -> bool:
    return isinstance(node, Compute) and node.op.name == "constant" and var in node.outs


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes held at once, beside inputs and parameters, and the line where."""

    bytes: int
    line: int


def peak(program: Program) -> Peak:
    """The worst moment of one device: live local tensors, the buffers of collectives among them."""
    start = program.placed.named.span.line
    outputs = frozenset(var for _, var in program.outputs)
    return _block(program.body, outputs, {}, Peak(0, start))


def memory(program: Program) -> dict[str, int]:
    """Bytes of one device: `params`, `inputs`, `activations` at the worst line, the `peak`."""
    params = sum(v.local.bytes for v in program.params)
    inputs = sum(v.local.bytes for v in program.inputs)
    worst = peak(program)
    total = params + inputs + worst.bytes
    return {
        "params": params,
        "inputs": inputs,
        "activations": worst.bytes,
        "peak": total,
        "peak_line": worst.line,
    }


def _block(
    nodes: tuple[Node, ...], kept: frozenset[Var], base: dict[Var, Var], worst: Peak
) -> Peak:
    """The worst moment of a block; `base` maps a view to the variable that owns its memory."""
    dying = deaths(nodes, kept)
    own = {v for node in nodes for v in made(node)}
    live: dict[Var, set[str]] = {}
    for node, dead in zip(nodes, dying, strict=True):
        for var in made(node):
            owner = _owner(node, var, base)
            # What a view shows of an input, or of something outside a loop, is counted there.
            if owner in own:
                live.setdefault(owner, set()).add(var.name)
        held = sum(v.local.bytes for v in live)
        inner = _loop(node, base) if isinstance(node, Loop) else Peak(0, node.span.line)
        if held + inner.bytes > worst.bytes:
            worst = Peak(held + inner.bytes, inner.line)
        for var in dead:
            names = live.get(base.get(var, var), set())
            names.discard(var.name)
            if not names:
                live.pop(base.get(var, var), None)
    return worst


def _loop(node: Loop, base: dict[Var, Var]) -> Peak:
    kept = frozenset(c.next for c in node.carries)
    for stack, inside in node.stacked:
        base[inside] = base.get(stack, stack)
    return _block(node.body, kept, base, Peak(0, node.span.line))


def _owner(node: Node, var: Var, base: dict[Var, Var]) -> Var:
    """Whose memory a new variable is: its own, or for views that of the operand."""
    source: Var | None = None
    if isinstance(node, Compute) and lookup(node.op.name).view and node.ins:
        source = node.ins[0]
    elif isinstance(node, Move) and node.step.kind == "slice":
        source = node.source
    if source is None:
        return var
    base[var] = base.get(source, source)
    return base[var]
