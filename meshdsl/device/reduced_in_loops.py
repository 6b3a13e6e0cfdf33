"""Large gradients of layers, each reduced in the iteration that computes it.

They are sent while the devices compute those of other layers, as in DistributedDataParallel (Li et
al. 2020). For one collective after the loop all devices would wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshdsl.device import buckets
from meshdsl.device.ir import Compute, DeviceCollected, DeviceLoop, DeviceProgram, Move, Node, Var
from meshdsl.device.liveness import uses
from meshdsl.device.names import Names, names_of
from meshdsl.ir.program import block_loops, every


def reduced_in_loops(program: DeviceProgram) -> DeviceProgram:
    """The program with such reductions, one for each iteration of the loop that collects them.

    Of slices below `buckets.SMALL` one collective on all of them takes less time. So it does where
    the iterations wait for other collectives on the same axes.
    """
    reads = uses(program)
    moves = {n.source: n for n in program.body if isinstance(n, Move) and _adds_up(n)}
    moves = {var: move for var, move in moves.items() if reads[var] == 1}
    if not any(
        c.outer in moves for n in block_loops(program.body, DeviceLoop) for c in n.collected
    ):
        return program
    reducing = _Reducing(program, moves, reads)
    nodes = [reducing.loop(n) if type(n) is DeviceLoop else n for n in program.body]
    return replace(program, body=tuple(n for n in nodes if n not in reducing.gone))


def _adds_up(node: Move) -> bool:
    return node.step.kind == "all_reduce" and node.into is None and node.rows is None


class _Reducing:
    """`moves` reduce a variable that nothing else reads; those that are `gone` are in loops now."""

    def __init__(
        self, program: DeviceProgram, moves: Mapping[Var, Move], reads: Mapping[Var, int]
    ) -> None:
        self.mesh, self.moves, self.reads = program.mesh, moves, reads
        self.names = Names(names_of(program))
        self.gone: set[Node] = set()

    def loop(self, loop: DeviceLoop) -> DeviceLoop:
        """A loop with the reductions of what it collects."""
        computed = (n for n in loop.body if isinstance(n, Compute) and len(n.outs) == 1)
        makers = {node.out: node for node in computed}
        reduced: dict[Node, list[Move]] = {}
        collected = list(loop.collected)
        busy = {a for n in every(loop.body) if isinstance(n, Move) for a in n.step.axes}
        for index, item in enumerate(collected):
            move, maker = self.moves.get(item.outer), makers.get(item.inside)
            if move is None or maker is None or not self._is_worth(item, loop):
                continue
            if not busy.isdisjoint(move.step.axes):
                continue  # what the iteration waits for would queue after it
            inner = self._of_one(move, maker)
            reduced.setdefault(maker, []).append(inner)
            collected[index] = replace(item, inside=inner.target, outer=move.target)
            self.gone.add(move)
        body = (new for node in loop.body for new in (node, *reduced.get(node, ())))
        return replace(loop, body=tuple(body), collected=tuple(collected))

    def _is_worth(self, item: DeviceCollected, loop: DeviceLoop) -> bool:
        """Whether slices are large, and contiguous in memory, all of them on each device."""
        part, stack = item.inside, item.outer
        is_stack = not item.is_list and item.stack is None and self.reads[part] == 1
        lies = stack.local.names[:1] == (loop.dim.name,) and part.placement == stack.placement
        return is_stack and lies and part.local.bytes >= buckets.SMALL and loop.dim.size > 1

    def _of_one(self, move: Move, maker: Compute) -> Move:
        """The reduction of the slice that an operator makes."""
        (part,), phase = maker.outs, maker.phase
        name, after = self.names.fresh(move.target.name), move.target.placement
        target = replace(part, name=name, placement=after, hint=move.target.hint)
        step = replace(move.step, before=part.placement, after=after)
        move = replace(move, step=step, source=part, target=target, phase=phase)
        return move.counted(self.mesh)
