"""Legal positions of a collective in a block: behind its source, before the first reader."""

from __future__ import annotations

from collections.abc import Mapping

from meshdsl.device.ir import Collective, Compute, Node, Var, written_into
from meshdsl.device.liveness import overwrites
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import reads_of
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class IssueWindow:
    """A collective may be placed after node `ready` and before node `needed` of its block.

    `ready` is -1 where all sources are from outside the block; `needed` is the number of nodes
    where nothing in the block reads the results.
    """

    ready: int
    needed: int


class BlockAccess:
    """The nodes of a block, and the variables they make, read and overwrite.

    `owners` is the result of `aliases.shared`.
    """

    def __init__(self, nodes: tuple[Node, ...], owners: Mapping[Var, Var]) -> None:
        self.nodes = nodes
        self._owners = owners
        self.made = {v: i for i, node in enumerate(nodes) for v in node.makes}
        self._read: dict[Var, int] = {}
        # By memory, the positions of the nodes that read it, and of those that overwrite it.
        self._seen: dict[Var, list[int]] = {}
        self._overwritten: dict[Var, list[int]] = {}
        for i, node in enumerate(nodes):
            for var in reads_of(node):
                self._read.setdefault(var, i)
                self._seen.setdefault(self._owner(var), []).append(i)
            for var in _overwritten(node):
                self._overwritten.setdefault(self._owner(var), []).append(i)

    def window(self, at: int, node: Collective) -> IssueWindow:
        """The legal positions of node number `at`."""
        ready, needed = -1, len(self.nodes)
        for move in node.moves:
            ready = max(ready, self.made.get(move.source, -1))
            needed = min(needed, self._read.get(move.target, needed))
            # A variable read before it is overwritten stays read before it, and after likewise.
            for i in self._overwritten.get(self._owner(move.source), ()):
                ready, needed = (max(ready, i), needed) if i < at else (ready, min(needed, i))
        for into in written_into(node).values():
            # What reads the memory before it is written to stays before that.
            ready = max(ready, *(i for i in self._seen.get(self._owner(into), ()) if i < at), -1)
        return IssueWindow(ready, needed)

    def _owner(self, var: Var) -> Var:
        return self._owners.get(var, var)


def _overwritten(node: Node) -> list[Var]:
    """The variables that a node, or a node in it, changes in place."""
    inner = tuple(every((node,)))
    changed = [n.ins[i] for n in inner if isinstance(n, Compute) for i in overwrites(n)]
    return changed + [into for n in inner for into in written_into(n).values()]
