"""When local tensors are last read, and the most memory that is held at once.

A Python variable keeps its tensor until it is deleted. Only large tensors are worth a `del` in a
program that people read: smaller ones stay until their block ends, and are counted so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from meshdsl.device.ir import (
    Bucket,
    Collective,
    Compute,
    Loop,
    Move,
    Node,
    Program,
    Start,
    Var,
    Wait,
    every,
)
from meshdsl.ops.opdef import lookup

LARGE = 1 << 20
"""Bytes from which on a tensor is deleted after its last use."""


def deaths(nodes: tuple[Node, ...], kept: frozenset[Var]) -> tuple[tuple[Var, ...], ...]:
    """Per node of a block, the large variables made in the block that nothing reads after it.

    What goes into a bucket is as large as all of it. `kept` are read after the block.
    """
    own = {v for node in nodes if not _is_constant(node) for v in made(node)}
    later: set[str] = {v.name for v in kept}
    found: list[tuple[Var, ...]] = []
    for node in reversed(nodes):
        touched = dict.fromkeys((*made(node), *reads(node)))
        dying = [v for v in touched if v in own and v.name not in later]
        together = isinstance(node.collective if isinstance(node, Start) else node, Bucket)
        size = sum(v.local.bytes for v in dying) if together else 0
        found.append(tuple(v for v in dying if max(size, v.local.bytes) >= LARGE))
        later.update(v.name for v in touched)
    return tuple(reversed(found))


def made(node: Node) -> tuple[Var, ...]:
    """The variables that a node assigns or makes room for; of a loop those there after it."""
    match node:
        case Compute():
            return node.outs
        case Move() | Bucket():
            return _targets(node)
        case Start() | Wait():
            # Room for what arrives is made at the start; of the next trip the loop counts it.
            return () if isinstance(node, Start) and node.ahead else _targets(node.collective)
    return (*(c.result for c in node.carries), *(c.outer for c in node.collected))


def reads(node: Node) -> tuple[Var, ...]:
    """The variables that a node reads, of a loop those from outside and what it reads inside."""
    match node:
        case Compute():
            return node.ins
        case Move() | Bucket():
            return _sources(node)
        case Start():
            return () if node.ahead else _sources(node.collective)
        case Wait():
            return (*_targets(node.collective), *_under_way(node.collective))
    return (*_outer_reads(node), *(v for n in node.body for v in reads(n)), *_ends(node))


def _outer_reads(node: Loop) -> tuple[Var, ...]:
    return (*(c.init for c in node.carries), *(s for s, _ in slices(node)))


def _ends(node: Loop) -> tuple[Var, ...]:
    """What is read at the end of an iteration."""
    return (*(c.next for c in node.carries), *(c.inside for c in node.collected))


def uses(program: Program) -> Counter[Var]:
    """How often each variable is read, those that a step ends with among them."""
    found: Counter[Var] = Counter(var for _, var in program.outputs)
    found.update(new for _, new in program.updates)
    for node in every(program.body):
        match node:
            case Loop():
                found.update((*_outer_reads(node), *_ends(node)))
            case Wait():
                found.update(_sources(node.collective))
            case Compute() | Move() | Bucket():
                found.update(reads(node))
    return found


def _under_way(node: Collective) -> tuple[Var, ...]:
    """What a collective reads until it is over, beside its targets.

    A bucket has copied it, and an all_reduce works in the memory of its target.
    """
    copied = isinstance(node, Bucket) or node.step.kind == "all_reduce"
    return () if copied else _sources(node)


def _sources(node: Collective) -> tuple[Var, ...]:
    return tuple(m.source for m in node.moves)


def _targets(node: Collective) -> tuple[Var, ...]:
    return tuple(m.target for m in node.moves)


def _is_constant(node: Node) -> bool:
    """Whether a node is a number, which no variable holds."""
    return isinstance(node, Compute) and node.op.name == "constant"


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes held at once, beside inputs and parameters, and the line where."""

    bytes: int
    line: int


def peak(program: Program) -> Peak:
    """The worst moment of one device: live local tensors, the buffers of collectives among them."""
    start = program.placed.named.span.line
    outputs = kept_after(program)
    # Gradients are counted apart: they own no memory here.
    apart = gradients(program)
    return _block(program.body, outputs, {}, Peak(0, start), apart)


def kept_after(program: Program) -> frozenset[Var]:
    """What is read when the last statement is done: outputs, and the new values of what is kept."""
    return frozenset((*(v for _, v in program.outputs), *(new for _, new in program.updates)))


def memory(program: Program) -> dict[str, int]:
    """Bytes of one device: what is kept by role, `activations` at the worst line, the `peak`.

    Gradients of parameters count as held throughout, as they are held at the end of the backward
    pass; versions on the way there are activations.
    """
    params = sum(v.local.bytes for v in program.params)
    state = sum(v.local.bytes for v in program.states)
    inputs = sum(v.local.bytes for v in program.inputs)
    grads = sum(v.local.bytes for v in gradients(program))
    worst = peak(program)
    total = params + grads + state + inputs + worst.bytes
    return {
        "params": params,
        "grads": grads,
        "state": state,
        "inputs": inputs,
        "activations": worst.bytes,
        "peak": total,
        "peak_line": worst.line,
    }


def gradients(program: Program) -> frozenset[Var]:
    """The gradients of parameters, as they settle."""
    settled = {t.value: t.placement for t in program.placed.tensors if t.value.role == "grad"}
    every = (v for node in program.body for v in made(node))
    return frozenset(v for v in every if settled.get(v.value) == v.placement)


def _block(
    nodes: tuple[Node, ...],
    kept: frozenset[Var],
    base: dict[Var, Var],
    worst: Peak,
    apart: frozenset[Var] = frozenset(),
) -> Peak:
    """The worst moment of a block; `base` maps a view to the variable that owns its memory.

    Variables `apart` are counted elsewhere.
    """
    dying = deaths(nodes, kept)
    own = {v for node in nodes for v in made(node)}
    live: dict[Var, set[str]] = {}
    for node, dead in zip(nodes, dying, strict=True):
        for var in made(node):
            owner = _owner(node, var, base)
            # What a view shows of an input, or of something outside a loop, is counted there.
            if owner in own and owner not in apart:
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


def kept_inside(node: Loop) -> frozenset[Var]:
    """What is read at the end of an iteration."""
    return frozenset(_ends(node))


def _loop(node: Loop, base: dict[Var, Var]) -> Peak:
    kept = kept_inside(node)
    for stack, inside in slices(node):
        base[inside] = base.get(stack, stack)
    found = _block(node.body, kept, base, Peak(0, node.span.line))
    # Room for the next trip; until it is issued, room for this trip that is not yet waited for.
    ahead = sum(v.local.bytes for a in node.ahead for v in _targets(a.collective))
    return Peak(found.bytes + ahead, found.line)


def _owner(node: Node, var: Var, base: dict[Var, Var]) -> Var:
    """Whose memory a new variable is: its own, or for views that of the operand."""
    source = _shown(node, var)
    if source is None:
        return var
    base[var] = base.get(source, source)
    return base[var]


def slices(node: Loop) -> tuple[tuple[Var, Var], ...]:
    """Pairs of (stack, slice) of a loop, those too that are only read ahead."""
    return (*node.stacked, *(pair for ahead in node.ahead for pair in ahead.slices))


def _shown(node: Node, var: Var) -> Var | None:
    """The operand whose memory a variable shows, or was written into."""
    source: Var | None = None
    if isinstance(node, Compute):
        opdef = lookup(node.op.name)
        if opdef.view and node.ins:
            source = node.ins[0]
        elif opdef.overwrites:
            source = node.ins[opdef.overwrites[node.outs.index(var)]]
    elif isinstance(node, Move) and node.step.kind == "slice":
        source = node.source
    return source
