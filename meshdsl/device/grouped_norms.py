"""The sum of the squares of several tensors as one operator, as a norm of all gradients is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshdsl.device.ir import Compute, DeviceProgram, Move, Node, Var, Wait
from meshdsl.device.liveness import kept_after, uses
from meshdsl.ir.rewrite import reads_of
from meshdsl.ops.opdef import lookup
from meshdsl.records import dataclass


def grouped_norms(program: DeviceProgram) -> DeviceProgram:
    """The program with one operator for sums of squares that are added up.

    Only of tensors that are read again behind it, as gradients are by their updates: none is kept
    for it. The squares are added in the same order; another number among them comes last. Where
    that is one device's and zeros on the others, it becomes so right before it is added.
    """
    sums = _sums(program)
    reads = uses(program)
    moves = (n for n in program.body if isinstance(n, Move) and _is_number_of_one(n))
    filled = {move.target: move for move in moves if reads[move.target] == 1}
    of = {each.nodes[-1]: each for each in sums}
    gone: set[Node] = {node for each in sums for node in each.nodes[:-1]}
    gone |= {filled[each.other] for each in sums if each.other in filled}
    remaining = (node for node in program.body if node not in gone)
    body = [new for n in remaining for new in (of[n].together(filled) if n in of else (n,))]
    return replace(program, body=tuple(_waiting_later(body))) if sums else program


def _waiting_later(nodes: list[Node]) -> Iterator[Node]:
    """The nodes, and what waits for an all_reduce right before its first reader again.

    That was one of those additions, and comes after the other squares now.
    """
    waiting: list[Wait] = []
    for node in nodes:
        if isinstance(node, Wait) and not node.late and node.collective.step.kind == "all_reduce":
            waiting.append(node)
            continue
        read = reads_of(node)
        yield from (wait for wait in waiting if not set(wait.makes).isdisjoint(read))
        waiting = [wait for wait in waiting if set(wait.makes).isdisjoint(read)]
        yield node
    yield from waiting


def _is_number_of_one(move: Move) -> bool:
    """Whether a move makes zeros of a number, but on one device."""
    return move.step.kind == "zero_fill" and not move.target.local.dims


@dataclass(frozen=True, slots=True)
class _SumOfSquares:
    """Operators that add up the squares of tensors; the last one has the result.

    `other` is a number that they add as well.
    """

    nodes: tuple[Compute, ...]
    other: Var | None = None

    @property
    def tensors(self) -> tuple[Var, ...]:
        """What is squared, in order."""
        return tuple(n.ins[0] for n in self.nodes if n.name == self.nodes[0].name)

    def together(self, filled: Mapping[Var, Move]) -> tuple[Node, ...]:
        """One operator in the place of the last one, and the addition of the other number.

        `filled` are the moves that make such numbers.
        """
        first, last = self.nodes[0], self.nodes[-1]
        cost = sum(node.flops for node in self.nodes if node.name == first.name)
        where = last if self.other is None else replace(first, span=last.span)
        squares = replace(where, name=first.name, ins=self.tensors, attrs=first.attrs, flops=cost)
        if self.other is None:
            return (squares,)
        moves = (filled[self.other],) if self.other in filled else ()
        return squares, *moves, replace(last, ins=(first.out, self.other))


def _sums(program: DeviceProgram) -> list[_SumOfSquares]:
    """The sums of the squares of two tensors or more, the longest ones."""
    reads, sums = uses(program), dict[Var, _SumOfSquares]()
    last = {v: at for at, node in enumerate(program.body) for v in reads_of(node)}
    last.update(dict.fromkeys(kept_after(program), len(program.body)))
    for at, node in enumerate(program.body):
        if not isinstance(node, Compute):
            continue
        if lookup(node.name).adds_up:
            sums[node.out] = _SumOfSquares((node,))
        elif node.name == "add" and node.onto is None and not node.out.local.dims:
            total = _added(node, [sums.get(v) for v in node.ins])
            if total is None or not _is_in_one_place(total.tensors):
                continue
            added = [v for v in node.ins if v in sums]
            if all(last[v] > at for v in total.tensors) and all(reads[v] == 1 for v in added):
                for var in added:
                    del sums[var]
                sums[node.out] = total
    return [each for each in sums.values() if len(each.tensors) > 1]


def _is_in_one_place(tensors: tuple[Var, ...]) -> bool:
    """Whether the same devices have all of some tensors: stages may have some for themselves."""
    return len({var.on for var in tensors}) == 1


def _added(node: Compute, operands: list[_SumOfSquares | None]) -> _SumOfSquares | None:
    """The sum that an addition makes of those of its operands, in the order of these."""
    first, second = operands
    if first is not None and second is not None:
        is_next = len(second.nodes) == 1 and second.nodes[0].name == first.nodes[0].name
        return _SumOfSquares((*first.nodes, *second.nodes, node), first.other) if is_next else None
    for mine, other in ((first, node.ins[1]), (second, node.ins[0])):
        if mine is not None and mine.other is None:
            return _SumOfSquares((*mine.nodes, node), other)
    return None
