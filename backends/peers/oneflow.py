"""The placed program as OneFlow global-tensor code: `flow.sbp.split(0)`, `to_global(sbp=…)`.

For OneFlow 0.9. Its partial values are sums; the first axis of a placement is the outermost of a
dim split over several; shards are balanced, the first ones larger where a dim does not divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshdsl.backends.peers.notation import entries
from meshdsl.backends.peers.peer import Outcome, Peer, becomes_partial, in_mesh_order, only_sums
from meshdsl.backends.peers.peer_call import Library
from meshdsl.device.ir import Compute, Var
from meshdsl.ops.torch_expressions import tuple_text
from meshdsl.placed.placements import Mesh, Placement, Split
from meshdsl.placed.sharding_rules import Row

_SUPPORT = {
    "rms_norm": '''
def rms_norm(x, dim, scale=1.0, eps=1e-6):
    """`x` divided by the root of the mean of its squares."""
    mean = flow.mean(flow.square(x), dim=dim, keepdim=True)
    return x * flow.rsqrt(mean + eps) * scale
''',
    "logsumexp": '''
def logsumexp(x, dim):
    """The logarithm of the sum of exponentials, without overflow."""
    top = flow.amax(x, dim=dim, keepdim=True)
    return (flow.log(flow.sum(flow.exp(x - top), dim=dim, keepdim=True)) + top).squeeze(dim)
''',
}


class OneFlowText(Peer):
    """The rendering, with OneFlow's placement of every variable."""

    taken = frozenset({"flow", "F", "placement", *_SUPPORT})
    notation = "oneflow"
    system = "OneFlow global tensors"
    uneven = "OneFlow's are balanced, the remainder one each on the first"
    arguments = "inputs, params"
    returns = "The outputs as global tensors; arguments are whole numpy arrays."
    support = _SUPPORT
    library = Library("flow", place="placement=placement, sbp=")

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """By the signatures of OneFlow 0.9; `flow.gather` has no partial result."""
        if becomes_partial(row) and node.name == "gather" and _is_paired(node):
            return "whole"
        if {"window", "size"} & dict(node.attrs).keys() and not _is_first(node, row):
            return "whole"
        return super().outcome(node, row)

    def holds(self, p: Placement) -> Placement:
        """Sums only, and axes of one dim in mesh order."""
        return in_mesh_order(self.mesh, only_sums(p))

    def imports(self) -> Iterator[str]:
        """OneFlow, and the placement of all tensors."""
        yield from ("import oneflow as flow", "import oneflow.nn.functional as F", "")
        yield f'placement = flow.placement("cuda", ranks={_ranks(self.mesh)})'

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every rank is given the whole array, and keeps its shard."""
        return f"flow.tensor({text}, {self.library.place}{self.spec(var, p)})"

    def number(self, text: str, var: Var, p: Placement) -> str:
        """A literal on every rank."""
        return self.entered(f"{text}, dtype={self.dtype(var)}", var, p)

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`to_global`: boxing."""
        return f"{text}.to_global(sbp={self.spec(var, after)})"

    def spec(self, var: Var, p: Placement) -> str:
        """`(flow.sbp.split(0), flow.sbp.broadcast)`."""
        words = []
        for entry in entries(var.type, self.mesh, p):
            if entry.position is not None:
                words.append(f"flow.sbp.split({entry.position})")
            else:
                words.append("flow.sbp.partial_sum" if entry.op else "flow.sbp.broadcast")
        return tuple_text(words or ["flow.sbp.broadcast"])


def _is_first(node: Compute, row: Row) -> bool:
    """Whether the split dim is the first of an image there: only images are kept apart."""
    along = {d.name for key in ("source", "target") for d in node.attr(key)}
    loose = [n for n in node.ins[0].type.names if n not in along]
    if len(node.ins) > 1:
        loose = [n for n in loose if not node.ins[1].type.has(n)]
    return [c.dim for c in row.ins if isinstance(c, Split)] == loose[:1]


def _is_paired(node: Compute) -> bool:
    """Whether the indices of a gather share dims with the table."""
    table, ids = (v.type for v in node.ins)
    return any(table.has(n) for n in ids.names)


def _ranks(mesh: Mesh) -> str:
    """`[[0, 1], [2, 3]]`: the ranks in the shape of the mesh."""
    numbers = itertools.count()

    def nested(sizes: tuple[int, ...]) -> str:
        if not sizes:
            return str(next(numbers))
        return f"[{', '.join(nested(sizes[1:]) for _ in range(sizes[0]))}]"

    return nested(tuple(n for _, n in mesh.axes) or (1,))
