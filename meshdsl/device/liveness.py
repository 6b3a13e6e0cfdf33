"""Liveness: the last reads of local tensors, hence where the program deletes them.

A Python variable keeps its tensor until it is deleted, and a view keeps the memory that it shows.
Only large tensors are worth a `del` in a program that people read: smaller ones stay until their
block ends, and are counted so.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

from meshdsl.device.ir import (
    Bucket,
    Compute,
    DeviceLoop,
    DeviceProgram,
    Move,
    Node,
    Pipeline,
    StageRows,
    Start,
    Var,
    Wait,
    written_into,
)
from meshdsl.ir.program import block_loops, every, loops
from meshdsl.ir.rewrite import reads_of
from meshdsl.ir.types import LARGE
from meshdsl.ops.opdef import Signature, lookup


def deaths(
    nodes: tuple[Node, ...], kept: frozenset[Var], entered: frozenset[Var] = frozenset()
) -> tuple[tuple[Var, ...], ...]:
    """Per node of a block, the large variables of the block that nothing reads after it.

    Those are made in it, or `entered` with the iteration of a loop; `kept` are read after the
    block. A tensor in a bucket counts as large as all of it; what is added to a sum right behind
    the statement that makes it is in no variable, whatever its size. With a stack die the slices
    of it that loops leave behind.
    """
    sums = ((m, n) for m, n in pairwise(nodes) if isinstance(n, Compute) and n.onto == 0)
    at_once = {add.ins[1] for maker, add in sums if _adds_at_once(maker, add)}
    local = entered | {v for node in nodes if not is_constant(node) for v in node.makes}
    later: set[str] = {v.name for v in kept}
    dead_after: list[tuple[Var, ...]] = []
    for node in reversed(nodes):
        touched = {v.name: v for v in (*reads_of(node), *node.makes)}
        dying = [v for v in touched.values() if v in local and v.name not in later]
        together = isinstance(node.collective if isinstance(node, Start) else node, Bucket)
        size = sum(v.local.bytes for v in dying) if together else 0
        dead_after.append(
            tuple(v for v in dying if max(size, v.local.bytes) >= LARGE or v in at_once)
        )
        later.update(touched)
    dead_after.reverse()
    stacks = {s.outer for n in nodes if isinstance(n, DeviceLoop) for s in n.slices}
    if stacks.isdisjoint(v for dead in dead_after for v in dead):
        return tuple(dead_after)
    left = _left_slices(nodes)
    return tuple((*dead, *(v for stack in dead for v in left[stack])) for dead in dead_after)


def _left_slices(nodes: tuple[Node, ...]) -> defaultdict[Var, list[Var]]:
    """By stack, the variables that loops leave behind which show its memory: the last slice.

    A large slice of what another loop collected is deleted in each iteration already.
    """
    left: defaultdict[Var, list[Var]] = defaultdict(list)
    made_by = {c.outer: c for node in nodes for c in node.collected}
    for loop in block_loops(nodes, DeviceLoop):
        if isinstance(loop, Pipeline):
            continue  # its passes are functions, and their variables end with them
        shown: dict[Var, Var] = {}
        for item in loop.stacked:
            stack, source = item.outer, made_by.get(item.outer)
            if source is None or not (source.is_list or item.inside.local.bytes >= LARGE):
                shown[item.inside] = stack
        there = loop.in_slices
        shown.update({v: stack for v, stack in there.items() if v.local.bytes < LARGE})
        for node in every(loop.body):
            if isinstance(node, Compute) and node.ins and node.ins[0] in shown:
                if shows_operand(node):
                    shown[node.outs[0]] = shown[node.ins[0]]
            shown.update({s.inside: shown[s.outer] for s in node.stacked if s.outer in shown})
        for var, stack in shown.items():
            if var not in loop.ends or var in there:
                left[stack].append(var)
    return left


def _adds_at_once(maker: Node, add: Compute) -> bool:
    """Whether a statement behind the maker of a value adds that to a sum."""
    if not isinstance(maker, Compute) or add.name != "add" or is_constant(maker):
        return False
    total, part = add.ins
    return maker.outs == (part,) and total.local.names == part.local.names


def entered(node: DeviceLoop, collected: frozenset[Var]) -> frozenset[Var]:
    """Variables that begin an iteration and may die in it: carries, slices of `collected`."""
    carried = (c.inside for c in node.carries)
    return frozenset((*carried, *(s.inside for s in node.stacked if s.outer in collected)))


def given_up(node: DeviceLoop, dead: tuple[Var, ...]) -> tuple[Var, ...]:
    """Variables `dead` after a loop that only begin a carry: deleted as the loop begins."""
    inside = {*(s.outer for s in node.slices), *(v for n in node.body for v in reads_of(n))}
    begun = {c.init for c in node.carries} - inside - set(node.makes)
    carried = {c.inside.name for c in node.carries}
    return tuple(v for v in dead if v in begun and v.name not in carried)


def sums(node: DeviceLoop) -> frozenset[Var]:
    """The sums that a loop adds up in place, in memory of their own."""
    rows = {v for s in node.stacked if isinstance(s, StageRows) for v in (s.outer, s.other)}
    rows.update(blocks(node).values())
    carried = (c for c in node.carries if c.next is not c.inside or c.inside in rows)
    return frozenset(c.result for c in carried if c.next.name == c.inside.name == c.init.name)


def totals(node: DeviceLoop) -> frozenset[str]:
    """The names of the sums that a loop over micro-batches carries, and of the rows of them."""
    carried = {c.inside: c.inside.name for c in node.carries}
    rows = (s.inside.name for s in node.stacked if s.outer in carried)
    return frozenset((*carried.values(), *rows, *(v.name for v in blocks(node))))


def blocks(node: DeviceLoop) -> dict[Var, Var]:
    """The blocks of micro-batches, written in place, and the carry that each is cut from."""
    carried = {c.inside for c in node.carries}
    cut = (n for n in node.body if isinstance(n, Move) and n.step.kind == "slice")
    block_of = {n.target: n.source for n in cut if n.source in carried}
    over = (n.over for n in node.body if isinstance(n, Compute) and n.over is not None)
    return {v: block_of[v] for v in over if v in block_of}


def left_over(node: DeviceLoop, collected: frozenset[Var]) -> tuple[Var, ...]:
    """The large variables of an iteration that are dead after it, having been handed on."""
    local = entered(node, collected) | {v for n in node.body for v in n.makes}
    carried = {c.inside.name for c in node.carries}
    ends = {v.name: v for v in node.ends if v in local and v.name not in carried}
    return tuple(v for v in ends.values() if v.local.bytes >= LARGE)


def collected(program: DeviceProgram) -> frozenset[Var]:
    """The variables that loops collect."""
    return frozenset(c.outer for node in every(program.body) for c in node.collected)


def used_up(program: DeviceProgram) -> frozenset[Var]:
    """The slices that loops take from the end of a list, which nothing else reads."""
    read = uses(program)
    made_in: dict[Var, tuple[int, bool]] = {}

    def found(nodes: tuple[Node, ...], depth: int) -> Iterator[Var]:
        for loop in block_loops(nodes, DeviceLoop):
            made_in.update({c.outer: (depth, loop.reverse) for c in loop.collected})
            for item in loop.stacked:
                # A list read in an inner loop is read more than once.
                ends = made_in.get(item.outer) == (depth, not loop.reverse)
                if item.outer in program.lists and ends and read[item.outer] == 1:
                    yield item.inside
            yield from found(loop.body, depth + 1)

    return frozenset(found(program.body, 0))


def records(program: DeviceProgram) -> Iterator[tuple[Var, ...]]:
    """The lists that one loop fills and one other takes from the end: they may be one of tuples."""
    taken, popped = dict[Var, DeviceLoop](), used_up(program)
    together: dict[tuple[DeviceLoop, DeviceLoop], list[Var]] = {}
    for loop in loops(program.body, DeviceLoop):
        taken.update({s.outer: loop for s in loop.stacked if s.inside in popped})
    for loop in loops(program.body, DeviceLoop):
        for item in loop.collected:
            if item.outer in taken:
                together.setdefault((loop, taken[item.outer]), []).append(item.outer)
    yield from (tuple(lists) for lists in together.values() if len(lists) > 1)


def uses(program: DeviceProgram) -> Counter[Var]:
    """The number of reads of each variable, those at the end of a step included.

    The sources of a collective count once, at its `Wait`; targets that are collected late, too.
    """
    counts: Counter[Var] = Counter(kept_after(program))
    for node in every(program.body):
        match node:
            case DeviceLoop():
                counts.update((*node.reads, *node.ends))
            case Wait():
                targets = node.collective.makes if node.late else ()
                counts.update((*node.collective.reads, *targets))
            case Compute() | Move() | Bucket():
                counts.update(node.reads)
    return counts


def last_readers(program: DeviceProgram, uses: Mapping[Var, int]) -> dict[Var, Compute]:
    """By variable that several operators of its block read, and nothing else does, the last one.

    What that one writes over it, no other has: their results show none of its memory. Integers are
    left out, whose text may be kept as indices. `uses` counts the reads of the program.
    """
    last: dict[Var, Compute] = {}
    blocks = [program.body, *[node.body for node in every(program.body) if node.body]]
    for nodes in blocks:
        readers: dict[Var, list[Compute]] = {}
        for node in nodes:
            if isinstance(node, Compute):
                for var in node.reads:
                    if var in readers:
                        readers[var].append(node)
            for var in node.makes:
                if uses[var] > 1 and var.local.dtype.kind == "float":
                    readers[var] = []
        for var, each in readers.items():
            if len({*each}) == uses[var] and not any(_keeps(n, var) for n in each[:-1]):
                last[var] = each[-1]
    return last


def read_before(program: DeviceProgram, readers: Mapping[Var, Compute]) -> frozenset[Var]:
    """The variables of `last_readers`, and those that show them: under these names others read it.

    What is written over them has another name.
    """
    read = set(readers)
    for node in every(program.body):
        if isinstance(node, Compute) and node.ins and node.ins[0] in read and shows_operand(node):
            read.update(node.outs)
    return frozenset(read)


def _keeps(node: Compute, var: Var) -> bool:
    """Whether the result of an operator that reads a variable has memory of it."""
    if shows_operand(node):
        return node.ins[0] is var
    return node.over is var or any(node.ins[at] is var for at in overwrites(node))


def is_constant(node: Node) -> bool:
    """Whether a node is a number, which has no variable."""
    return isinstance(node, Compute) and node.name == "constant"


def kept_after(program: DeviceProgram) -> frozenset[Var]:
    """Variables live after the last statement: outputs, and new values of parameters and states."""
    return frozenset((*(v for _, v in program.outputs), *(new for _, new in program.updates)))


def kept_inside(node: DeviceLoop) -> frozenset[Var]:
    """Variables live at the end of an iteration."""
    return frozenset(node.ends)


def shown_by(program: DeviceProgram) -> dict[Var, Var]:
    """By variable, the earlier one whose memory it shows or overwrites, in order."""
    shown: dict[Var, Var] = {}
    for node in every(program.body):
        shown.update({s.inside: s.outer for s in node.slices})
        shown.update(node.in_slices)
        sources = {**_shown(node), **written_into(node)}
        shown.update({var: sources[var] for var in node.makes if var in sources})
    return shown


def overwrites(node: Compute) -> tuple[int, ...]:
    """The operands that an operator overwrites with its results, one for each, if it does."""
    return lookup(node.name).overwritten(len(node.ins)) if node.onto is None else (node.onto,)


def shows_operand(node: Compute) -> bool:
    """Whether the result may show memory of the first operand."""
    record = lookup(node.name)
    types, attrs = tuple(v.value.type for v in node.ins), dict(node.attrs)
    if record.passes:
        sig = Signature(types, tuple(v.value.type for v in node.outs), attrs)
        moved = (loop.ins[0] for loop in record.factors(sig).loops if any(loop.reads))
        split = node.ins[0].placement.axes_of
        return any(dim is not None and split(dim) for dim in moved)
    return bool(node.ins) and record.shows_operand(types, attrs)


def relabels(node: Compute, views: Collection[Var]) -> bool:
    """Whether a view shows each element of its operand once, under other dims.

    `views` may show elements several times, or not all of a tensor. No operator's view does both,
    so one of as many elements shows each once.
    """
    operand = node.ins[0]
    return operand not in views and operand.local.elements == node.outs[0].local.elements


def unchanged(program: DeviceProgram) -> frozenset[Var]:
    """The parameters and states that stay the same tensors: what a step makes of them is in these.

    An update writes the new value over the old one, or a loop does over its slices, or it is the
    old one.
    """
    before: dict[Var, Var] = {}
    for node in program.body:
        if isinstance(node, Compute) and node.onto is None and lookup(node.name).overwrites:
            before.update(zip(node.outs, (node.ins[i] for i in overwrites(node)), strict=True))
        elif isinstance(node, Compute) and node.name == "identity":
            before[node.out] = node.ins[0]
        before.update((c.outer, c.stack) for c in node.collected if c.stack is not None)

    def first(var: Var) -> Var:
        return first(before[var]) if var in before else var

    return frozenset(old for old, new in program.updates if first(new) is old)


def numbers(program: DeviceProgram) -> frozenset[Var]:
    """The results that are numbers of Python: of such operators, read by scalars of updates."""
    nodes = [node for node in every(program.body) if isinstance(node, Compute)]
    computed = {node.outs[0] for node in nodes if lookup(node.name).number is not None}
    reads: Counter[Var] = Counter()
    for node in nodes if computed else ():
        if lookup(node.name).each > 1:
            reads.update(computed.intersection(node.ins))
    counts = uses(program) if computed else reads
    return frozenset(var for var in computed if reads[var] == counts[var])


def _shown(node: Node) -> dict[Var, Var]:
    """By variable that a node makes, the operand whose memory it shows or overwrites."""
    if isinstance(node, Compute):
        if shows_operand(node):
            return dict.fromkeys(node.outs, node.ins[0])
        return {var: node.ins[at] for var, at in zip(node.outs, overwrites(node), strict=False)}
    if isinstance(node, Move) and node.step.kind == "slice":
        return {node.target: node.source}
    return {c.outer: c.stack for c in node.collected if c.stack is not None}
