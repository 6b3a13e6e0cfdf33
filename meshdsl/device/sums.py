"""Sums over the iterations of a loop, added up in place: one buffer for all iterations.

`accumulate=K` carries sums of gradients. Each addend is added as soon as it exists, so no iteration
has a second set of gradients, and addends that an inner loop makes slice by slice are added slice
by slice. The sum of a narrower dtype needs no cast: it is widened as it is added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, DeviceProgram, Move, Node, Var
from meshdsl.device.liveness import uses
from meshdsl.device.memory import MemoryReuse
from meshdsl.device.names import Names, names_of
from meshdsl.ir.program import Carry, Leaf, Stacked, every
from meshdsl.ir.rewrite import in_blocks, reads_of, substitute
from meshdsl.ir.types import LARGE
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.placed.strategies import flops

Nodes = tuple[Node, ...]


def summed_in_place(program: DeviceProgram) -> DeviceProgram:
    """The program with its carried sums added up in place.

    Only a training step: any other may be differentiated by torch's autograd.
    """
    if not program.updates and program.placed.pipe is None:
        return program
    body = _Sums(program).block(program.body)
    return _without_unread_zeros(replace(program, body=body))


class _Sums:
    def __init__(self, program: DeviceProgram) -> None:
        self.names = Names(names_of(program))
        self.uses = uses(program)

    def block(self, nodes: Nodes) -> Nodes:
        """The nodes of a block; a loop's sums begin with zeros of their own right before it."""
        makers = {v: node for node in nodes for v in node.makes}
        with_zeros: list[Node] = []
        for node in nodes:
            zeros: list[Compute] = []
            if not isinstance(node, Leaf):
                node, zeros = self._loop(node, makers)
            with_zeros += [*zeros, node]
        return tuple(with_zeros)

    def _loop(
        self, loop: DeviceLoop, makers: Mapping[Var, Node]
    ) -> tuple[DeviceLoop, list[Compute]]:
        body, carries, zeros = self.block(loop.body), [], []
        for carry in loop.carries:
            begun = _zeros(carry, makers)
            body = self._where_it_lies(carry, body) if begun is not None else body
            add = self._addition(carry, body)
            if begun is not None and add is not None:
                next_ = _renamed(carry.next, carry.inside.name)
                body = self._added(body, add, carry.inside, next_)
                init = _renamed(carry.init, carry.inside.name)
                zeros.append(replace(begun, outs=(init,)))
                carry = replace(carry, init=init, next=next_)
            carries.append(carry)
        return replace(loop, body=body, carries=tuple(carries)), zeros

    def _addition(self, carry: Carry[Var], body: Nodes) -> Compute | None:
        """The operator that adds to the carry, if nothing else reads either of them."""
        add = _maker(carry.next, body)
        alone = self.uses[carry.inside] == self.uses[carry.next] == 1
        if not isinstance(add, Compute) or add.name != "add" or not alone:
            return None
        fits = carry.inside in add.ins and carry.inside.local == carry.next.local
        return add if fits else None

    def _where_it_lies(self, carry: Carry[Var], body: Nodes) -> Nodes:
        """The body with an addend moved to where the sum is carried, in place of the sum.

        A rule for the sum may place it otherwise than what is added to it: then the sum is moved
        to its addend and back in every iteration. Moves are linear, so to move what is added is
        the same, and the sum stays in its memory.
        """
        back, total = self._moved_from(carry.next, body)
        add = _maker(total, body)
        if not isinstance(add, Compute) or add.name != "add" or self.uses[total] != 1:
            return body
        ways = [self._moved_from(v, body) for v in add.ins]
        index = next((i for i, (_, v) in enumerate(ways) if v is carry.inside), None)
        if index is None or self.uses[carry.inside] != 1:
            return body
        part, (forth, _) = add.ins[1 - index], ways[index]
        alike = part.local == total.local and part.placement == total.placement
        if not (back or forth) or not alike or carry.inside.local != carry.next.local:
            return body
        moves, moved = self._of_addend(part, tuple(reversed(back)))
        local = Signature((carry.inside.local, moved.local), (carry.next.local,), dict(add.attrs))
        ins, cost = (carry.inside, moved), flops(lookup("add"), local)
        adds = replace(add, ins=ins, outs=(carry.next,), flops=cost)
        remaining = tuple(n for n in body if n not in back and n not in forth)
        return _swapped(remaining, add, *moves, adds)

    def _moved_from(self, var: Var, body: Nodes) -> tuple[list[Move], Var]:
        """The linear moves that only a variable is made by, the last one first, and their source.

        Nothing else reads what is made between them.
        """
        moves: list[Move] = []
        while isinstance(maker := _maker(var, body), Move) and self.uses[var] == 1:
            if maker.step.op not in (None, "sum"):
                break
            moves.append(maker)
            var = maker.source
        return moves, var

    def _of_addend(self, part: Var, moves: tuple[Move, ...]) -> tuple[list[Move], Var]:
        """The same moves of another variable, and what they make of it."""
        moved, var = list[Move](), part
        for move in moves:
            there = replace(part, placement=move.target.placement, local=move.target.local)
            target = replace(there, name=self.names.fresh(part.name))
            moved.append(replace(move, source=var, target=target))
            self.uses[target] = 1
            var = target
        return moved, var

    def _added(self, body: Nodes, add: Compute, total: Var, next_: Var) -> Nodes:
        """The body with the addend of `add` added to `total` in place, right where it is made."""
        (part,) = (v for v in add.ins if v is not total)
        maker = _maker(part, body)
        alone = self.uses[part] == 1
        if alone and isinstance(maker, Compute) and is_cast_of_floats(maker):
            remaining = tuple(node for node in body if node is not maker)
            narrow = replace(add, ins=(total, maker.ins[0]))
            return self._added(_swapped(remaining, add, narrow), narrow, total, next_)
        if alone and isinstance(maker, Move) and (inside := self._filled_inside(maker, body)):
            return self._added(inside, add, total, next_)
        if alone and (collecting := _slice_by_slice(maker, part, total)):
            loop, item = collecting
            remaining = tuple(node for node in body if node is not add)
            return _swapped(remaining, loop, self._in_slices(loop, item, add, total, next_))
        onto = replace(add, ins=(total, part), outs=(next_,), onto=0)
        if maker is None or (isinstance(maker, Move) and part.local.bytes < LARGE):
            # Collectives of small tensors may share a bucket, which an addition between them ends.
            return _swapped(body, add, onto)
        remaining = tuple(node for node in body if node is not add)
        return _swapped(remaining, maker, maker, onto)

    def _filled_inside(self, fill: Move, body: Nodes) -> Nodes | None:
        """The body with the zeros of a loop's slices made in the loop, in place of its stack's."""
        stack = fill.source
        if fill.step.kind != "zero_fill" or fill.step.dim is not None or self.uses[stack] != 1:
            return None
        collecting = _slice_by_slice(_maker(stack, body), stack, fill.target)
        if collecting is None:
            return None
        loop, item = collecting
        slice_ = item.inside
        after = fill.target.placement.without_dim(loop.dim.name)
        target = replace(slice_, name=self.names.fresh(slice_.name), placement=after)
        step = replace(fill.step, before=slice_.placement, after=after)
        filled = DeviceCollected(target, fill.target)
        inner = replace(
            loop,
            body=(*loop.body, replace(fill, step=step, source=slice_, target=target)),
            collected=tuple(filled if c is item else c for c in loop.collected),
        )
        self.uses[target] = 1
        return _swapped(tuple(node for node in body if node is not fill), loop, inner)

    def _in_slices(
        self, loop: DeviceLoop, item: DeviceCollected, add: Compute, total: Var, next_: Var
    ) -> DeviceLoop:
        """The loop that adds its slices to those of `total`, instead of collecting them."""
        before = self._slice(total, item, loop)
        after = _renamed(before, before.name)
        local = Signature((before.local, item.inside.local), (after.local,), dict(add.attrs))
        each = replace(
            add, ins=(before, item.inside), outs=(after,), flops=flops(lookup("add"), local)
        )
        body = self._added((*loop.body, each), each, before, after)
        collected = tuple(
            DeviceCollected(after, next_, stack=total) if c is item else c for c in loop.collected
        )
        stacked = (*loop.stacked, Stacked(total, before))
        return replace(loop, body=body, stacked=stacked, collected=collected)

    def _slice(self, total: Var, item: DeviceCollected, loop: DeviceLoop) -> Var:
        type_ = total.value.type.without(loop.dim.name)
        value = replace(item.inside.value, type=type_)
        local = total.local.without(loop.dim.name)
        placement = total.placement.without_dim(loop.dim.name)
        return Var(self.names.fresh(total.name), value, placement, local, total.hint)


def _zeros(carry: Carry[Var], makers: Mapping[Var, Node]) -> Compute | None:
    """The operator that makes the zeros which a carry begins with, if it does.

    Parts that sum to zeros are zeros as well.
    """
    if carry.init.placement.op not in (None, "sum"):
        return None
    maker = makers.get(carry.init)
    while (same := _passes(maker)) is not None:
        maker = makers.get(same)
    return maker if isinstance(maker, Compute) and maker.name == "zeros" else None


def _passes(maker: Node | None) -> Var | None:
    """The variable that must be zero for the node's result to be zero, or None."""
    match maker:
        case Move() if maker.step.kind == "zero_fill":
            return maker.source
        case Compute() if maker.name == "identity":
            return maker.ins[0]
    return None


def _maker(var: Var, body: Nodes) -> Node | None:
    return next((node for node in body if var in node.makes), None)


def _renamed(var: Var, name: str) -> Var:
    """Another version of a variable, which takes over the name."""
    return replace(var, name=name)


def is_cast_of_floats(node: Compute) -> bool:
    """Whether a node only gives floats another dtype, to add them up in or to send."""
    kinds = {v.local.dtype.kind for v in (*node.ins, *node.outs)}
    return lookup(node.name).converts and kinds == {"float"}


def _slice_by_slice(
    maker: Node | None, part: Var, total: Var
) -> tuple[DeviceLoop, DeviceCollected] | None:
    """The loop that collects `part`, and as what, if `total` can be added to slice by slice."""
    if not isinstance(maker, DeviceLoop) or part.local.dims != total.local.dims:
        return None
    items = (c for c in maker.collected if c.outer is part and not c.is_list and c.stack is None)
    item = next(items, None)
    return None if item is None else (maker, item)


def _swapped(nodes: Nodes, old: Node, *new: Node) -> Nodes:
    """The nodes with one replaced by others."""
    return tuple(n for node in nodes for n in (new if node is old else (node,)))


# --- sums of what is added by index --------------------------------------------------------------


def added_directly(program: DeviceProgram) -> DeviceProgram:
    """The program with operators that add their results to sums, instead of making a tensor first.

    Only where the addition is written over the sum, nothing else reads the result, and nothing
    touches the sum in between.
    """
    nodes = (node for node in every(program.body) if isinstance(node, Compute))
    if not any(lookup(node.name).adds_to for node in nodes):
        return program
    adding = _Adding(program)
    body = substitute(adding.block(program.body), adding.renamed)
    return replace(program, body=body)


class _Adding:
    """`renamed` are the results that have memory of an operand, and now its name, too."""

    def __init__(self, program: DeviceProgram) -> None:
        self.uses, self.over = uses(program), dict(MemoryReuse(program).found())
        self.outside = {v for _, v in (*program.outputs, *program.updates)}
        self.gaps = _gaps(program)
        self.slices = {s.inside for node in every(program.body) for s in node.stacked}
        self.renamed: dict[Var, Var] = {}

    def block(self, nodes: Nodes) -> Nodes:
        """The nodes of a block, and of the loops in it."""
        nodes = tuple(node.with_body(self.block) for node in nodes)
        makers = {v: i for i, node in enumerate(nodes) for v in node.makes}
        new, gone = dict[Node, Node](), set[Node]()
        # The results that are now made earlier, where their addends are, and the place of these.
        moved: dict[Var, int] = {}
        for at, add in enumerate(nodes):
            if not isinstance(add, Compute) or not self._is_written_over(add):
                continue
            total, part = add.ins
            made_at = makers.get(part, at)
            maker = nodes[made_at]
            if self.uses[part] != 1 or not isinstance(maker, Compute):
                continue
            name = self.renamed.get(total, total).name
            if not _may_add(maker, total, self.gaps.get(name)):
                continue
            others = (n for n in nodes[made_at:at] if n not in gone)
            between = (v.name for n in others for v in (*reads_of(n), *n.makes))
            if total.name not in between and moved.get(total, -1) < made_at:
                new[maker] = replace(maker, outs=add.outs, into=total)
                gone.add(add)
                moved[add.out] = made_at
                if add.onto is None:
                    self._share_name(total, add.out)
        return tuple(new.get(node, node) for node in nodes if node not in gone)

    def _share_name(self, total: Var, new: Var) -> None:
        """Give a result the name of the sum that it is added to; a slice gets that of the result.

        Nothing else reads a slice that is written over.
        """
        name = self.renamed.get(total, total).name
        if total not in self.slices:
            self.renamed[new] = _renamed(new, name)
            return
        self.renamed[total] = replace(total, name=new.name, value=new.value, hint=new.hint)
        self.gaps.pop(new.name, None)
        if name in self.gaps:
            self.gaps[new.name] = self.gaps[name]

    def _is_written_over(self, add: Compute) -> bool:
        """Whether an operator is an addition that is written over its first operand."""
        if add.name != "add" or add.onto is not None:
            return add.name == "add" and add.onto == 0
        return self.over.get(add.out) is add.ins[0] and add.out not in self.outside


def _gaps(program: DeviceProgram) -> dict[str, frozenset[int]]:
    """By name of a variable, the dims before which its memory has gaps, by position.

    Those that their operators make contiguous have none, and have that memory for good. A slice of
    a stack has one where the dim of the slices was. A variable that is missing lies anyhow.
    """
    gaps: dict[str, frozenset[int]] = {}
    moved = {c.inside.name for n in every(program.body) for c in n.carries if not _stays(c)}
    for node in every(program.body):
        if isinstance(node, Compute) and node.over is None and _makes_contiguous(node):
            gaps[node.out.name] = frozenset()
        for item in node.stacked:
            if item.outer.name in gaps:
                before = gaps[item.outer.name]
                gaps.update(_gaps_of_slice(item, before))
    return {name: each for name, each in gaps.items() if name not in moved}


def _gaps_of_slice(item: Stacked[Var], gaps: frozenset[int]) -> dict[str, frozenset[int]]:
    """The gaps of a slice by its name; nothing where it is no slice along one dim."""
    names, inside = item.outer.local.names, item.inside.local.names
    at = next((i for i, name in enumerate(names) if name not in inside), len(names))
    if names[:at] + names[at + 1 :] != inside or at == len(names):
        return {}
    left = {gap - (gap > at) for gap in gaps}
    return {item.inside.name: frozenset((left | {at}) - {0})}


def _makes_contiguous(node: Compute) -> bool:
    """Whether an operator makes a contiguous tensor, in memory of its own."""
    return node.name == "zeros" or lookup(node.name).contiguous(node.local)


def _stays(carry: Carry[Var]) -> bool:
    """Whether a carried variable has one memory in all iterations."""
    return carry.init.name == carry.inside.name == carry.next.name


def _may_add(maker: Compute, total: Var, gaps: frozenset[int] | None) -> bool:
    """Whether an operator can add its result to a sum, with gaps before some dims; None: any."""
    (out, *others), adds_to = maker.outs, lookup(maker.name).adds_to
    if others or adds_to is None or maker.into is not None or out.local != total.local:
        return False
    gaps = frozenset(range(1, len(total.local.dims))) if gaps is None else gaps
    split = {d for var in (*maker.ins, out) for d, _ in var.placement.splits}
    return adds_to(maker.local, frozenset(split), gaps)


# --- dead zeros --------------------------------------------------------------------------------


def _without_unread_zeros(program: DeviceProgram) -> DeviceProgram:
    """The program without zeros that no loop begins with any more."""
    while True:
        read = uses(program)
        gone = {
            node
            for node in every(program.body)
            if _is_zeros(node) and not any(read[v] for v in node.makes)
        }
        if not gone:
            return program
        program = replace(program, body=in_blocks(program.body, partial(_without, gone)))


def _is_zeros(node: Node) -> bool:
    """Whether a node makes zeros, or passes on what may be zeros."""
    made_here = isinstance(node, Compute) and node.name == "zeros"
    return made_here or _passes(node) is not None


def _without(gone: set[Node], nodes: Nodes) -> Nodes:
    return tuple(node for node in nodes if node not in gone)
