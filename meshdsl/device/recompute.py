"""`recompute=stage`: a stage keeps what it received of a micro-batch, and computes the rest again.

The forward pass keeps the initial values of what the stage's iterations carry, nothing else. The
backward pass begins with as much of the forward pass as it reads. (GPipe, Huang et al. 2019,
rematerialises so; Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", cuts networks
the same way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from meshdsl.device.ir import FORWARD, Collected, Compute, Loop, Move, Node, Part, Var, renamed
from meshdsl.device.liveness import is_constant, reads, totals
from meshdsl.device.names import Names
from meshdsl.ir.program import Carry, every

AGAIN = {
    Part.EVERY: Part.EVERY_AGAIN,
    Part.FIRST: Part.FIRST_AGAIN,
    Part.LOOP: Part.LOOP_AGAIN,
    Part.COLLECTED: Part.COLLECTED_AGAIN,
    Part.LAST: Part.LAST_AGAIN,
}
"""The part in which what a part of the forward pass makes is made once more."""

Pair = tuple[Part, Node]


def recomputed(pairs: list[Pair], micro: Loop, names: Names, lists: set[Var]) -> list[Pair]:
    """The statements of a micro-batch, with those again that its backward pass reads.

    `micro` is the loop over micro-batches. `lists` are the lists of the program, to which those of
    the second time are added.
    """
    sums = totals(micro)
    pairs = list(_kept_apart(pairs, names))
    forward = [(part, node) for part, node in pairs if part in FORWARD]
    backward = [(part, node) for part, node in pairs if part not in FORWARD]
    kept = {c.init for c in _iterations(forward).carries}

    def is_made_once(node: Node) -> bool:
        adds = not isinstance(node, Loop) and any(v.name in sums for v in node.makes)
        return is_constant(node) or bool(kept & {*node.makes}) or adds

    own = [(part, node) for part, node in forward if not is_made_once(node)]
    return _made_again(forward, backward, own, micro, names, lists)


def made_of_weights(
    pairs: list[Pair], micro: Loop, stored: frozenset[Var], names: Names, lists: set[Var]
) -> list[Pair]:
    """The statements of a micro-batch, with those again that parameters alone determine.

    So a backward pass reads what its own version of these makes. `stored` are the parameters.
    """
    forward = [(part, node) for part, node in pairs if part in FORWARD]
    backward = [(part, node) for part, node in pairs if part not in FORWARD]
    known = dict.fromkeys(stored, True)
    own = [(part, made) for part, node in forward if (made := _of_weights(node, known)) is not None]
    return _made_again(forward, backward, own, micro, names, lists)


def _of_weights(node: Node, known: dict[Var, bool]) -> Node | None:
    """What of a statement parameters alone determine, with the numbers of the program.

    `known` says of what they determine whether any parameter does; what is made is added to it.
    """
    if isinstance(node, Loop):
        inner = known | {s.inside: known[s.outer] for s in node.stacked if s.outer in known}
        for n in node.body:
            _of_weights(n, inner)
        body = tuple(n for n in node.body if all(v in inner for v in n.makes))
        collected = tuple(c for c in node.collected if inner.get(c.inside))
        known.update((c.outer, True) for c in collected)
        stacked = tuple(s for s in node.stacked if s.inside in inner)
        made = replace(node, carries=(), body=body, collected=collected, stacked=stacked)
        return made if collected else None
    if not all(v in known for v in node.reads):
        return None
    of_weights = any(known[v] for v in node.reads)
    known.update(dict.fromkeys(node.makes, of_weights))
    return node if of_weights else None


def _made_again(
    forward: list[Pair],
    backward: list[Pair],
    own: list[Pair],
    micro: Loop,
    names: Names,
    lists: set[Var],
) -> list[Pair]:
    """The statements, with those of `own` again that the backward pass reads."""
    again = list(_needed(own, _read_by(backward)))
    new = {
        v: replace(v, name=name)
        for v, name in _fresh((v for _, n in again for v in _defines(n)), names)
    }
    lists |= {new[v] for v in lists if v in new}
    later = [(AGAIN[part], _again(node, new, names)) for part, node in again]
    later += [(part, renamed(node, new)) for part, node in backward]
    sums = {v for _, node in forward for v in node.makes if v.name in totals(micro)}
    first = _needed(forward, _read_by(later) | sums | {*micro.ends}, lambda part: part.sends)
    return [*first, *later]


def _iterations(pairs: list[Pair]) -> Loop:
    (loop,) = (node for part, node in pairs if part is Part.LOOP)
    assert isinstance(loop, Loop)
    return loop


def _read_by(pairs: Iterable[Pair]) -> set[Var]:
    return {v for _, node in pairs for v in reads(node)}


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
            new |= {v: replace(v, name=later[v.name]) for v in _defines(node) if v.name in later}
        if node is loop:
            behind = True
            yield from ((Part.FIRST, start) for start in begun)
            looped = renamed(replace(loop, body=body), new)
            assert isinstance(looped, Loop)
            yield part, replace(looped, carries=carries)
        else:
            yield part, renamed(node, new)


def _not_in_place(
    body: tuple[Node, ...], end: Var, names: Names, new: dict[Var, Var]
) -> tuple[Node, ...]:
    """The body, with a value of its own where one was written over what was carried."""
    found = []
    for node in body:
        if end in node.makes:
            new[end] = replace(end, name=names.fresh(end.name))
            if isinstance(node, Loop):
                (item,) = (c for c in node.collected if c.outer is end)
                collected = tuple(
                    Collected(c.inside, c.outer, c.is_list) if c is item else c
                    for c in node.collected
                )
                inner = _not_in_place(node.body, item.inside, names, new)
                node = replace(node, body=inner, collected=collected)
            elif isinstance(node, Compute):
                node = replace(node, onto=None)
        found.append(node)
    return tuple(found)


# --- what is needed ------------------------------------------------------------------------------


def _needed(
    pairs: list[Pair],
    wanted: set[Var],
    always: Callable[[Part], bool] = lambda part: False,
) -> list[Pair]:
    """The statements that make what is wanted, and those that are there for other reasons."""
    wanted = set(wanted)
    found: list[Pair] = []
    for part, node in reversed(pairs):
        if always(part) or not wanted.isdisjoint(node.makes):
            if isinstance(node, Loop):
                node = _narrowed(node, wanted)
            wanted.update(reads(node))
            found.append((part, node))
    return found[::-1]


def _narrowed(loop: Loop, wanted: set[Var]) -> Loop:
    """A loop that makes what is wanted of it alone."""
    collected = tuple(c for c in loop.collected if c.outer in wanted)
    carries = tuple(c for c in loop.carries if c.result in wanted)
    while True:
        ends = {*(c.next for c in carries), *(c.inside for c in collected)}
        body = tuple(node for _, node in _needed([(Part.LOOP, n) for n in loop.body], ends))
        read = ends | {v for n in body for v in reads(n)}
        more = tuple(c for c in loop.carries if c in carries or c.inside in read)
        if more == carries:
            break
        carries = more
    stacked = tuple(s for s in loop.stacked if s.inside in read)
    return replace(loop, carries=carries, collected=collected, body=body, stacked=stacked)


# --- once more -----------------------------------------------------------------------------------


def _defines(node: Node) -> Iterator[Var]:
    """The variables that a statement defines, also those of its body."""
    for n in every((node,)):
        yield from n.makes
        if isinstance(n, Loop):
            yield from n.enters


def _fresh(variables: Iterable[Var], names: Names) -> Iterator[tuple[Var, str]]:
    """Another name for each variable; those of one name have one again."""
    found: dict[str, str] = {}
    for var in variables:
        if var.name not in found:
            found[var.name] = names.fresh(var.name)
        yield var, found[var.name]


def _again(node: Node, new: dict[Var, Var], names: Names) -> Node:
    """A statement of the forward pass as one of the backward pass."""
    made = renamed(node, new)
    assert isinstance(made, Compute | Move | Loop), f"{made} of a pass"
    made = replace(made, phase="backward")
    if not isinstance(made, Loop):
        return made
    body = tuple(_again(n, {}, names) for n in made.body)
    return replace(made, body=body, index=names.fresh(made.index))
