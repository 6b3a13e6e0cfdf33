"""The placed program as OneFlow global-tensor code: `flow.sbp.split(0)`, `to_global(sbp=…)`.

For OneFlow 0.9. Its partial values are sums; the first axis of a placement is the outermost of a
dim split over several; shards are balanced, the first ones larger where a dim does not divide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from meshdsl.backends.peers.oneflow_table import ONEFLOW, dtype_text, helpers
from meshdsl.backends.peers.peer import (
    Outcome,
    Peer,
    Plan,
    becomes_partial,
    in_mesh_order,
    only_sums,
    partial_ops,
)
from meshdsl.backends.peers.walk import entries
from meshdsl.device.ir import Compute, Var
from meshdsl.ir.types import TensorType
from meshdsl.ops.text import tuple_text
from meshdsl.placed.ir import Program
from meshdsl.placed.rows import Row
from meshdsl.placed.sbp import Mesh, Placement

NAMES = "flow F placement rms_norm logsumexp"

KEEPS_SUMS = frozenset(
    "einsum add sub mul div cast sum mean identity stop_gradient rename transpose split merge "
    "concat slice pick pad gather".split()
)
"""Operators with a signature for partial sums; `-x` has none, where `x * -1` has."""
GIVES_SUMS = frozenset({"einsum", "sum", "mean", "gather"})
"""Operators whose result may be a partial sum."""


def render(program: Program) -> str:
    """The text of a placed program as OneFlow code. Raises MD0910."""
    return OneFlowText(program).text()


class OneFlowText(Peer):
    """The rendering, with what OneFlow holds of every variable."""

    taken = frozenset(NAMES.split())
    stack = "flow.stack"
    notation = "oneflow"
    system = "OneFlow global tensors"

    # --- what OneFlow can do ---------------------------------------------------------------------

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """By the signatures of OneFlow 0.9."""
        if partial_ops(row):
            return "keeps" if node.name in KEEPS_SUMS else "whole"
        if becomes_partial(row):
            return "keeps" if node.name in GIVES_SUMS and not _is_paired(node) else "whole"
        return "keeps"

    def holds(self, p: Placement) -> Placement:
        """Sums only, and axes of one dim in mesh order."""
        return in_mesh_order(self.mesh, only_sums(p))

    # --- texts -----------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole rendering: the function is written first, since it knows what it uses."""
        head, body = super().text().split("\n\n", 1)
        top = "\n".join([head, "", *self._imports()])
        return "\n\n\n".join([top, *helpers(body)]) + "\n\n" + body

    def top(self) -> None:
        """The comment, and the head of the function."""
        self.about()
        self.out.add()
        self.out.add()
        self.out.add("def program(inputs, params):")
        self.out.depth = 1
        self.out.add('"""The outputs as global tensors; arguments are whole numpy arrays."""')

    def _imports(self) -> Iterator[str]:
        yield from ("import oneflow as flow", "import oneflow.nn.functional as F", "")
        yield f'placement = flow.placement("cuda", ranks={_ranks(self.mesh)})'

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every rank has the whole array, and keeps its part."""
        return f"flow.tensor({text}, {self.where(var, p)})"

    def constant(self, var: Var) -> str:
        """A literal that every rank has."""
        text = f"{self.constants[var]}, dtype={dtype_text(var.value.type.dtype)}"
        return f"flow.tensor({text}, {self.where(var, Placement())})"

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`to_global`: boxing."""
        return f"{text}.to_global(sbp={self.sbp(var, after)})"

    def operator(self, node: Compute, args: tuple[str, ...], plan: Plan) -> str:
        """The table's text."""
        if node.name not in ONEFLOW:
            self.refuse(node)
        call = self.call(node, args, self.where(node.outs[0], plan.yields[0]))
        text = call.write(ONEFLOW[node.name])
        if not text:
            self.refuse(node)
        if node.ins and all(call.constants):
            return f"flow.tensor({text}, dtype={dtype_text(call.out.dtype)}, {call.where})"
        return text

    def as_printed(self, type_: TensorType, p: Placement) -> str:
        """`(oneflow.sbp.split(dim=0), oneflow.sbp.broadcast)`."""
        words = []
        for entry in entries(type_, self.mesh, p):
            if entry.position is not None:
                words.append(f"oneflow.sbp.split(dim={entry.position})")
            else:
                words.append(f"oneflow.sbp.{'partial_sum' if entry.op else 'broadcast'}")
        return tuple_text(words or ["oneflow.sbp.broadcast"])

    def where(self, var: Var, p: Placement) -> str:
        """`placement=placement, sbp=(…)`."""
        return f"placement=placement, sbp={self.sbp(var, p)}"

    def sbp(self, var: Var, p: Placement) -> str:
        """`(flow.sbp.split(0), flow.sbp.broadcast)`."""
        words = []
        for entry in entries(var.value.type, self.mesh, p):
            if entry.position is not None:
                words.append(f"flow.sbp.split({entry.position})")
            else:
                words.append("flow.sbp.partial_sum" if entry.op else "flow.sbp.broadcast")
        return tuple_text(words or ["flow.sbp.broadcast"])


def _is_paired(node: Compute) -> bool:
    """A gather whose indices share dims with the table: `flow.gather` has no partial result."""
    if node.name != "gather":
        return False
    table, ids = (v.value.type for v in node.ins)
    return any(table.has(n) for n in ids.names)


def _ranks(mesh: Mesh) -> str:
    """`[[0, 1], [2, 3]]`: the ranks in the shape of the mesh."""
    numbers = itertools.count()

    def nested(sizes: tuple[int, ...]) -> str:
        if not sizes:
            return str(next(numbers))
        return f"[{', '.join(nested(sizes[1:]) for _ in range(sizes[0]))}]"

    return nested(tuple(n for _, n in mesh.axes) or (1,))
