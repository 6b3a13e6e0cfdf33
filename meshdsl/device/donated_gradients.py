"""Gradients that are donated to their update, which overwrites them: nothing reads them after it.

So a gradient is scaled and decayed in place, and no copy of it is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from meshdsl.device.aliases import shared
from meshdsl.device.ir import Compute, DeviceLoop, DeviceProgram, Node, Pipeline, Var
from meshdsl.device.liveness import is_constant, kept_after, shows_operand
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import makes_of, reads_of
from meshdsl.ops.opdef import lookup

DONATED = ("donated", True)
"""The attribute of an update whose gradient nothing reads after it."""


def donated_gradients(program: DeviceProgram) -> DeviceProgram:
    """The program with updates that overwrite their gradients, where they copied them before."""
    finder = _DonationFinder(program)
    return replace(program, body=finder.block(program.body, kept_after(program)))


class _DonationFinder:
    def __init__(self, program: DeviceProgram) -> None:
        self.owners = shared(program)
        self.groups: dict[Var, set[Var]] = defaultdict(set)
        for var, owner in self.owners.items():
            self.groups[owner] |= {var, owner}
        nodes = [node for node in every(program.body) if isinstance(node, Compute)]
        self.numbers = {n.out: n.attr("value") for n in nodes if is_constant(n)}
        # A view may have many elements in one place, and a constant has no memory.
        views = {v for node in nodes if shows_operand(node) for v in node.outs}
        entries = {*program.inputs, *program.params, *program.states}
        self.others = views | entries | self.numbers.keys()

    def block(
        self, nodes: tuple[Node, ...], ends: Collection[Var], is_loop: bool = False
    ) -> tuple[Node, ...]:
        """The statements of a program or a loop; `ends` are read after them.

        In a loop, a gradient is made in the same iteration, in memory of its own.
        """
        last_read = {v: at for at, node in enumerate(nodes) for v in reads_of(node)}
        last_read |= dict.fromkeys(ends, len(nodes))
        makes = {v for node in nodes for v in makes_of(node)} - self.owners.keys()
        new: list[Node] = []
        for at, node in enumerate(nodes):
            if isinstance(node, Compute):
                grad = self._copied(node)
                group = self.groups.get(self.owners.get(grad, grad), {grad}) if grad else set()
                alone = bool(group) and all(last_read.get(v, -1) <= at for v in group)
                is_donated = alone and self.others.isdisjoint(group)
                is_donated = is_donated and (not is_loop or grad in makes)
                new.append(replace(node, attrs=(*node.attrs, DONATED)) if is_donated else node)
            elif isinstance(node, DeviceLoop) and not isinstance(node, Pipeline):
                new.append(replace(node, body=self.block(node.body, node.ends, is_loop=True)))
            else:
                new.append(node)
        return tuple(new)

    def _copied(self, node: Compute) -> Var | None:
        """The gradient that an update copies, in its own dtype; None of any other operator."""
        record = lookup(node.name)
        if record.each < 2 or record.scratch is None:
            return None
        w, grad, *_ = node.ins
        numbers = {i: self.numbers[v] for i, v in enumerate(node.ins) if v in self.numbers}
        fits = w.local.dtype == grad.local.dtype
        return grad if fits and record.scratch(node.local, numbers) else None
