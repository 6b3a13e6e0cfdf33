"""`recompute=stage`: a stage keeps what it received of a micro-batch, and computes the rest again.

The forward pass keeps the initial values of what the stage's iterations carry, nothing else. The
backward pass begins with as much of the forward pass as it reads. (GPipe, Huang et al. 2019,
rematerialises so; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", cuts networks
the same way.)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from meshdsl.device.ir import (
    FORWARD,
    Compute,
    DeviceLoop,
    Move,
    Node,
    StagePhase,
    Var,
    renamed,
)
from meshdsl.device.liveness import is_constant, totals
from meshdsl.device.names import Names
from meshdsl.ir.program import Carry, Leaf, block_loops, every
from meshdsl.ir.rewrite import defined, needed, reads_of

AGAIN = {
    StagePhase.EVERY: StagePhase.EVERY_AGAIN,
    StagePhase.FIRST: StagePhase.FIRST_AGAIN,
    StagePhase.LOOP: StagePhase.LOOP_AGAIN,
    StagePhase.COLLECTED: StagePhase.COLLECTED_AGAIN,
    StagePhase.LAST: StagePhase.LAST_AGAIN,
}
"""The part in which what a part of the forward pass makes is made once more."""

Pair = tuple[StagePhase, Node]


def recomputed(pairs: list[Pair], micro: DeviceLoop, names: Names, lists: set[Var]) -> list[Pair]:
    """The statements of a micro-batch, with those again that its backward pass reads.

    `micro` is the loop over micro-batches. `lists` are the lists of the program, to which those of
    the second time are added.
    """
    sums = totals(micro)
    pairs = list(_kept_apart(pairs, names))
    forward = [(part, node) for part, node in pairs if part in FORWARD]
    backward = [(part, node) for part, node in pairs if part not in FORWARD]
    carried = {c.init for c in _iterations(forward).carries}

    def is_made_once(node: Node) -> bool:
        adds = isinstance(node, Leaf) and any(v.name in sums for v in node.makes)
        return is_constant(node) or bool(carried & {*node.makes}) or adds

    repeated = [(part, node) for part, node in forward if not is_made_once(node)]
    return _made_again(forward, backward, repeated, micro, names, lists)


def made_of_weights(
    pairs: list[Pair], micro: DeviceLoop, stored: frozenset[Var], names: Names, lists: set[Var]
) -> list[Pair]:
    """The statements of a micro-batch, with those again that parameters alone determine.

    So a backward pass reads what its own version of these makes. `stored` are the parameters.
    """
    forward = [(part, node) for part, node in pairs if part in FORWARD]
    backward = [(part, node) for part, node in pairs if part not in FORWARD]
    determined = dict.fromkeys(stored, True)
    repeated = [
        (part, restricted)
        for part, node in forward
        if (restricted := _of_weights(node, determined)) is not None
    ]
    return _made_again(forward, backward, repeated, micro, names, lists)


def slices_cut_again(
    pairs: list[Pair], inputs: Collection[Var], names: Names, lists: set[Var]
) -> list[Pair]:
    """The statements of a micro-batch, with those again that cut what its backward pass reads.

    So a pass keeps no slice of an input for another one: it is there all the time.
    """
    forward = [(part, node) for part, node in pairs if part in FORWARD]
    backward = [(part, node) for part, node in pairs if part not in FORWARD]
    cuts: list[Pair] = [
        (part, node)
        for part, node in forward
        if isinstance(node, Move) and node.step.kind == "slice" and node.source in inputs
    ]
    return [*forward, *_with_again(cuts, backward, names, lists)]


def _of_weights(node: Node, known: dict[Var, bool]) -> Node | None:
    """What of a statement parameters alone determine, with the numbers of the program.

    `known` says of what they determine whether any parameter does; what is made is added to it.
    """
    if isinstance(node, DeviceLoop):
        inner = known | {s.inside: known[s.outer] for s in node.stacked if s.outer in known}
        for n in node.body:
            _of_weights(n, inner)
        body = tuple(n for n in node.body if all(v in inner for v in n.makes))
        collected = tuple(c for c in node.collected if inner.get(c.inside))
        known.update((c.outer, True) for c in collected)
        stacked = tuple(s for s in node.stacked if s.inside in inner)
        restricted = replace(node, carries=(), body=body, collected=collected, stacked=stacked)
        return restricted if collected else None
    if not all(v in known for v in node.reads):
        return None
    of_weights = any(known[v] for v in node.reads)
    known.update(dict.fromkeys(node.makes, of_weights))
    return node if of_weights else None


def _made_again(
    forward: list[Pair],
    backward: list[Pair],
    own: list[Pair],
    micro: DeviceLoop,
    names: Names,
    lists: set[Var],
) -> list[Pair]:
    """The statements that something reads, with those of `own` again for the backward pass."""
    later = _with_again(own, backward, names, lists)
    sums = {v for _, node in forward for v in node.makes if v.name in totals(micro)}
    first = _needed(forward, _read_by(later) | sums | {*micro.ends}, lambda part: part.sends)
    return [*first, *later]


def _with_again(own: list[Pair], backward: list[Pair], names: Names, lists: set[Var]) -> list[Pair]:
    """The backward pass, behind those of `own` again that it reads."""
    again = list(_needed(own, _read_by(backward)))
    new = {v: replace(v, name=name) for v, name in _fresh(_defined(n for _, n in again), names)}
    lists |= {new[v] for v in lists if v in new}
    repeated = [(AGAIN[part], _again(node, lambda v: new.get(v, v), names)) for part, node in again]
    return [*repeated, *((part, renamed(node, new)) for part, node in backward)]


def _iterations(pairs: list[Pair]) -> DeviceLoop:
    nodes = (node for part, node in pairs if part is StagePhase.LOOP)
    (loop,) = block_loops(nodes, DeviceLoop)
    return loop


def _read_by(pairs: Iterable[Pair]) -> set[Var]:
    return {v for _, node in pairs for v in reads_of(node)}


# --- what is kept --------------------------------------------------------------------------------


def _kept_apart(pairs: list[Pair], names: Names) -> Iterator[Pair]:
    """The statements, with initial values of the iterations that nothing is written over."""
    loop = _iterations(pairs)
    new: dict[Var, Var] = {}
    begun = []
    body = loop.body
    for carry in loop.carries:
        hint = f"{carry.init.hint or carry.init.name}_in"
        init = replace(carry.init, name=names.fresh(hint), hint=hint)
        begun.append(
            Compute("identity", (carry.init,), (init,), (), carry.init.value.span, loop.phase)
        )
        if carry.next.name == carry.inside.name:
            body = _not_in_place(body, carry.next, names, new)
        name = names.fresh(carry.inside.name)
        new |= {v: replace(v, name=name) for v in (carry.inside, carry.result)}
    ends = [new.get(c.next, c.next) for c in loop.carries]
    carries = tuple(
        Carry(node.outs[0], new[c.inside], end, new[c.result])
        for node, c, end in zip(begun, loop.carries, ends, strict=True)
    )
    later = {c.inside.name: new[c.inside].name for c in loop.carries}
    behind = False
    for part, node in pairs:
        if behind:
            # Versions of what was carried have one name behind the loop, too.
            new |= {v: replace(v, name=later[v.name]) for v in _defined((node,)) if v.name in later}
        if node is loop:
            behind = True
            yield from ((StagePhase.FIRST, start) for start in begun)
            looped = renamed(replace(loop, body=body), new)
            yield part, replace(looped, carries=carries)
        else:
            yield part, renamed(node, new)


def _not_in_place(
    body: tuple[Node, ...], end: Var, names: Names, new: dict[Var, Var]
) -> tuple[Node, ...]:
    """The body, with a value of its own where one was written over what was carried."""
    nodes = []
    for node in body:
        if end in node.makes:
            new[end] = replace(end, name=names.fresh(end.name))
            match node:
                case DeviceLoop():
                    (item,) = (c for c in node.collected if c.outer is end)
                    collected = tuple(
                        replace(c, stack=None) if c is item else c for c in node.collected
                    )
                    inner = _not_in_place(node.body, item.inside, names, new)
                    node = replace(node, body=inner, collected=collected)
                case Compute():
                    node = replace(node, onto=None)
        nodes.append(node)
    return tuple(nodes)


# --- what is needed ------------------------------------------------------------------------------


def _needed(
    pairs: list[Pair],
    wanted: set[Var],
    always: Callable[[StagePhase], bool] = lambda part: False,
) -> list[Pair]:
    """The statements that make what is wanted, and those that are there for other reasons."""
    wanted = set(wanted)
    kept: list[Pair] = []
    for part, node in reversed(pairs):
        wanted.update(node.makes if always(part) else ())
        kept += [(part, narrowed) for narrowed in needed((node,), wanted)]
    return kept[::-1]


# --- once more -----------------------------------------------------------------------------------


def _defined(nodes: Iterable[Node]) -> Iterator[Var]:
    """The variables that statements define, also those of their bodies."""
    return (v for n in every(nodes) for v in defined(n))


def _fresh(variables: Iterable[Var], names: Names) -> Iterator[tuple[Var, str]]:
    """Another name for each variable; those of one name have one again."""
    fresh: dict[str, str] = {}
    for var in variables:
        if var.name not in fresh:
            fresh[var.name] = names.fresh(var.name)
        yield var, fresh[var.name]


def _again(node: Node, of: Callable[[Var], Var], names: Names) -> Node:
    """A statement of the forward pass as one of the backward pass, on other variables."""
    if isinstance(node, Leaf):
        return node.with_values(of, phase="backward")
    body = tuple(_again(n, of, names) for n in node.body)
    return node.with_values(of, phase="backward", body=body, index=names.fresh(node.index))
