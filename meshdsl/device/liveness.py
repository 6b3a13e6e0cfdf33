"""When local tensors are last read, and the most memory that is held at once.

A Python variable keeps its tensor until it is deleted. Only large tensors are worth a `del` in a
program that people read: smaller ones stay until their block ends, and are counted so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

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


def deaths(
    nodes: tuple[Node, ...], kept: frozenset[Var], entered: frozenset[Var] = frozenset()
) -> tuple[tuple[Var, ...], ...]:
    """Per node of a block, the large variables of the block that nothing reads after it.

    Those are made in it, or `entered` with the trip of a loop; `kept` are read after the block.
    What goes into a bucket is as large as all of it.
    """
    own = entered | {v for node in nodes if not is_constant(node) for v in made(node)}
    later: set[str] = {v.name for v in kept}
    found: list[tuple[Var, ...]] = []
    for node in reversed(nodes):
        touched = {v.name: v for v in (*reads(node), *made(node))}
        dying = [v for v in touched.values() if v in own and v.name not in later]
        together = isinstance(node.collective if isinstance(node, Start) else node, Bucket)
        size = sum(v.local.bytes for v in dying) if together else 0
        found.append(tuple(v for v in dying if max(size, v.local.bytes) >= LARGE))
        later.update(touched)
    return tuple(reversed(found))


def entered(node: Loop, collected: frozenset[Var]) -> frozenset[Var]:
    """What a trip begins with and need not keep: carries, and slices of what was `collected`."""
    carried = (c.inside for c in node.carries)
    return frozenset((*carried, *(s for stack, s in node.stacked if stack in collected)))


def given_up(node: Loop, dead: tuple[Var, ...]) -> tuple[Var, ...]:
    """Of what is `dead` after a loop, what only a carry begins with: it goes as the loop begins."""
    inside = {*(s for s, _ in slices(node)), *(v for n in node.body for v in reads(n))}
    begun = {c.init for c in node.carries} - inside - set(made(node))
    carried = {c.inside.name for c in node.carries}
    return tuple(v for v in dead if v in begun and v.name not in carried)


def sums(node: Loop) -> frozenset[Var]:
    """What a loop has added up in place, in memory that nobody else sees."""
    return frozenset(c.result for c in node.carries if c.next.name == c.inside.name == c.init.name)


def left_over(node: Loop, collected: frozenset[Var]) -> tuple[Var, ...]:
    """The large variables of a trip that nothing reads once it is over: what it has handed on."""
    own = entered(node, collected) | {v for n in node.body for v in made(n)}
    carried = {c.inside.name for c in node.carries}
    ends = {v.name: v for v in _ends(node) if v in own and v.name not in carried}
    return tuple(v for v in ends.values() if v.local.bytes >= LARGE)


def collected(program: Program) -> frozenset[Var]:
    """What loops collect."""
    loops = (node for node in every(program.body) if isinstance(node, Loop))
    return frozenset(c.outer for loop in loops for c in loop.collected)


def used_up(program: Program) -> frozenset[Var]:
    """The slices that loops take from the end of a list, which nobody else reads."""
    read = uses(program)
    made_in: dict[Var, tuple[int, bool]] = {}

    def found(nodes: tuple[Node, ...], depth: int) -> Iterator[Var]:
        for node in nodes:
            if isinstance(node, Loop):
                made_in.update({c.outer: (depth, node.reverse) for c in node.collected})
                for stack, inside in node.stacked:
                    # One that stands in another loop comes by more than once.
                    ends = made_in.get(stack) == (depth, not node.reverse)
                    if stack in program.lists and ends and read[stack] == 1:
                        yield inside
                yield from found(node.body, depth + 1)

    return frozenset(found(program.body, 0))


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


def is_constant(node: Node) -> bool:
    """Whether a node is a number, which no variable holds."""
    return isinstance(node, Compute) and node.op.name == "constant"


def kept_after(program: Program) -> frozenset[Var]:
    """What is read when the last statement is done: outputs, and the new values of what is kept."""
    return frozenset((*(v for _, v in program.outputs), *(new for _, new in program.updates)))


def kept_inside(node: Loop) -> frozenset[Var]:
    """What is read at the end of an iteration."""
    return frozenset(_ends(node))


def shown_by(program: Program) -> dict[Var, Var]:
    """By variable, the one before it whose memory it shows, or was written into: in order."""
    found: dict[Var, Var] = {}
    for node in every(program.body):
        if isinstance(node, Loop):
            found.update({inside: stack for stack, inside in slices(node)})
        pairs = ((var, _shown(node, var)) for var in made(node))
        found.update({var: source for var, source in pairs if source is not None})
    return found


def overwrites(node: Compute) -> tuple[int, ...]:
    """The operands that an operator writes its results over, one for each, if it does."""
    return lookup(node.op.name).overwrites if node.onto is None else (node.onto,)


def shows_operand(node: Compute) -> bool:
    """Whether the result may show memory of the first operand."""
    types = tuple(v.value.type for v in node.ins)
    return bool(node.ins) and lookup(node.op.name).shows_operand(types, dict(node.op.attrs))


def slices(node: Loop) -> tuple[tuple[Var, Var], ...]:
    """Pairs of (stack, slice) of a loop, those too that are only read ahead."""
    return (*node.stacked, *(pair for ahead in node.ahead for pair in ahead.slices))


def _shown(node: Node, var: Var) -> Var | None:
    """The operand whose memory a variable shows, or was written into."""
    source: Var | None = None
    if isinstance(node, Compute):
        if lookup(node.op.name).view and node.ins:
            source = node.ins[0]
        elif over := overwrites(node):
            source = node.ins[over[node.outs.index(var)]]
    elif isinstance(node, Move) and node.step.kind == "slice":
        source = node.source
    elif isinstance(node, Loop):
        source = next((c.stack for c in node.collected if c.outer is var), None)
    return source
