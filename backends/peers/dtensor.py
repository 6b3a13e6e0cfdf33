"""The placed program as torch DTensor code: `distribute_tensor`, `redistribute`, `Shard(0)`.

Operators are the torch texts of their records, on whole tensors. What DTensor makes of partial
values was measured with torch 2.13, operator by operator; tests run it and look at each variable.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.backends.peers.peer import (
    Outcome,
    Peer,
    Plan,
    becomes_partial,
    in_mesh_order,
    is_split,
    partial_ops,
)
from meshdsl.backends.peers.walk import entries, subscripts
from meshdsl.backends.torch.call import TorchText
from meshdsl.backends.torch.format import quoted, statement
from meshdsl.device.ir import Compute, Var
from meshdsl.ir.types import TensorType
from meshdsl.ops.einsum_text import einsum_text
from meshdsl.ops.opdef import load_all, lookup
from meshdsl.ops.text import tuple_text
from meshdsl.placed.ir import Program
from meshdsl.placed.rows import Row
from meshdsl.placed.sbp import Placement, Split

NAMES = "torch init_device_mesh DTensor Partial Replicate Shard distribute_tensor mesh as_partial"
REDUCE_OPS = {"sum": "sum", "max": "max", "min": "min", "prod": "product"}

GRADIENTS = frozenset(name for name in load_all() if name.endswith("_grad"))
LOSES_SUMS = GRADIENTS | set(
    "where gather cumsum layer_norm mean rms_norm merge unpick scatter_add".split()
)
"""Operators that do not carry a partial sum on; `einsum` does where it is one matrix product."""
LOSES_EXTREMES = frozenset(
    "add lt le gt ge logical_and logical_or log sqrt softplus where gather layer_norm merge".split()
)
"""Operators that do not carry partial maxima and minima on."""
GATHERS = frozenset({"gather", "any", "all", "scatter_add"})
"""Operators that want whole what we split into partial results."""
SPREAD = frozenset({"broadcast", "unpick", "scatter_add"})
"""Operators whose result is whole along a dim that they make; the split is made afterwards."""

_HELPERS = {
    "as_partial": '''
def as_partial(x, axis, op):
    """`x` as a partial value along an axis: only the first device keeps it, for a sum."""
    local, placements = x.to_local(), list(x.placements)
    if op == "sum" and x.device_mesh.get_local_rank(axis):
        local = torch.zeros_like(local)
    placements[x.device_mesh.mesh_dim_names.index(axis)] = Partial(op)
    return DTensor.from_local(
        local, x.device_mesh, placements, run_check=False, shape=x.shape, stride=x.stride()
    )
''',
    "check_index": '''
def check_index(ids, dim, size, place, *_):
    """The indices, after a look at those that this device has."""
    local = ids.to_local()
    if local.numel() and (local.min() < 0 or local.max() >= size):
        raise IndexError(f"{place}: an index of {dim} is not in 0 ... {size - 1}")
    return ids
''',
}
"""Functions that a text may call."""


def render(program: Program) -> str:
    """The text of a placed program as DTensor code."""
    return DTensorText(program).text()


class DTensorText(Peer):
    """The rendering, with what DTensor holds of every variable."""

    taken = frozenset({*NAMES.split(), "check_index"})
    stack = "torch.stack"
    notation = "dtensor"
    system = "torch DTensor"

    def __init__(self, source: Program) -> None:
        super().__init__(source)
        self.used: set[str] = set()

    # --- what DTensor can do ---------------------------------------------------------------------

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """From what was measured; see the tables above."""
        name, ops = node.name, partial_ops(row)
        if name in ("split", "merge") and _is_inner(node, row):
            return "whole"
        if "sum" in ops:
            return "whole" if name in LOSES_SUMS or not _is_product(node) else "keeps"
        if ops:
            return "whole" if name in LOSES_EXTREMES else "keeps"
        if becomes_partial(row):
            return "whole" if name in GATHERS or _flattens(node, row) else "keeps"
        return "whole" if name == "gather" and is_split(row) and _shares(node) else "keeps"

    def holds(self, p: Placement) -> Placement:
        """Axes of one dim are in mesh order."""
        return in_mesh_order(self.mesh, p)

    # --- texts -----------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole rendering: the function is written first, since it knows what it uses."""
        head, body = super().text().split("\n\n", 1)
        used = [_HELPERS[name].strip("\n") for name in _HELPERS if name in self.used]
        top = "\n".join([head, *_IMPORTS])
        return "\n\n\n".join([top, *used, "\n".join(self._mesh())]) + "\n\n" + body

    def top(self) -> None:
        """The comment, and the head of the function."""
        self.about()
        self.out.add()
        self.out.add()
        self.out.add("def program(mesh, inputs, params):")
        self.out.depth = 1
        self.out.add('"""The outputs as DTensors; arguments are whole tensors by name."""')

    def _mesh(self) -> Iterable[str]:
        sizes = tuple_text([n for _, n in self.mesh.axes] or [1])
        names = tuple_text([quoted(a) for a, _ in self.mesh.axes] or ['"one"'])
        yield "def device_mesh(kind):"
        yield '    """The mesh; `kind` is such as "cpu" or "cuda"."""'
        yield from statement(f"return init_device_mesh(kind, {sizes}, mesh_dim_names={names})", 1)

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every device has the whole tensor, and keeps its part."""
        return f"distribute_tensor({text}, mesh, {self.said(var, p)})"

    def constant(self, var: Var) -> str:
        """A literal on every device."""
        tensor = f"torch.tensor({self.constants[var]}, dtype={var.value.type.dtype.torch})"
        return f"distribute_tensor({tensor}, mesh, {self.said(var, Placement())})"

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`redistribute`; to a partial value there is no public way, hence `as_partial`."""
        new = [a for a in after.partial if a not in before.partial]
        kept = tuple(a for a in after.partial if a in before.partial)
        first = Placement(after.splits, kept, after.op if kept else None)
        if first != before:
            text = f"{text}.redistribute(placements={self.said(var, first)})"
        for axis in new:
            self.used.add("as_partial")
            text = f"as_partial({text}, {quoted(axis)}, {quoted(REDUCE_OPS[after.op or 'sum'])})"
        return text

    def operator(self, node: Compute, args: tuple[str, ...], plan: Plan) -> str:
        """The record's torch text on global shapes; what it makes anew becomes a DTensor."""
        if not node.ins or node.name == "one_hot":
            return self._maker(node, args, plan.yields[0])
        return self._torch(node, args, plan.yields[0])

    def _torch(self, node: Compute, args: tuple[str, ...], p: Placement) -> str:
        ins = tuple(v.value.type for v in node.ins)
        outs = tuple(v.value.type for v in node.outs)
        # A mean of parts is a sum of parts here: DTensor would make it a partial average.
        splits = frozenset(d for v in node.ins for d, _ in v.placement.splits)
        call = TorchText(
            args=args,
            constants=tuple(v in self.constants for v in node.ins),
            ins=ins,
            outs=outs,
            global_ins=ins,
            global_outs=outs,
            attrs=dict(node.attrs),
            fresh=self.fresh.fresh,
            place=repr(f"{node.span.file}:{node.span.line}"),
            splits=splits if node.name == "mean" else frozenset(),
            used=self.used,
        )
        text = lookup(node.name).torch(call)
        if node.name == "einsum":  # of `torch.einsum` we know what becomes of partial values
            text = einsum_text(call, views=True)
        if _is_vector(node):  # DTensor gives `vector @ matrix` a dim too many
            text = f"torch.einsum({subscripts(node)}, {', '.join(call.args)})"
        if node.name == "transpose" and not p.partial:  # parts and whole keep strides alike
            text += ".contiguous()"
        for line in call.lines:
            self.out.statement(line)
        if all(call.constants):
            return f"distribute_tensor({text}, mesh, {self.said(node.outs[0], p)})"
        if node.name in SPREAD and any(not ins[0].has(d) for d, _ in p.splits):
            text += f".redistribute(placements={self.said(node.outs[0], p)})"
        return text

    def _maker(self, node: Compute, args: tuple[str, ...], p: Placement) -> str:
        out = node.outs[0]
        where = self.said(out, p)
        if node.name != "one_hot":
            return f"distribute_tensor({self._made(node)}, mesh, {where})"
        dim = node.attr("dim")
        last = len(out.value.type.dims) - 1
        split = (e.position == last for e in entries(out.value.type, self.mesh, p))
        spread = f"[{', '.join('Shard(0)' if s else 'Replicate()' for s in split)}]"
        own = f"distribute_tensor(torch.arange({dim.size}), mesh, {spread})"
        return f"({args[0]}[..., None] == {own}).to({out.value.type.dtype.torch})"

    def _made(self, node: Compute) -> str:
        out = tuple(v.value.type for v in node.outs)
        call = TorchText((), (), (), out, (), out, dict(node.attrs), self.fresh.fresh)
        return lookup(node.name).torch(call)

    def said(self, var: Var, p: Placement) -> str:
        """`[Shard(0), Replicate()]`."""
        words = []
        for entry in entries(var.value.type, self.mesh, p):
            if entry.position is not None:
                words.append(f"Shard({entry.position})")
            elif entry.op is not None:
                op = "" if entry.op == "sum" else quoted(REDUCE_OPS[entry.op])
                words.append(f"Partial({op})")
            else:
                words.append("Replicate()")
        return f"[{', '.join(words or ['Replicate()'])}]"

    def as_printed(self, type_: TensorType, p: Placement) -> str:
        """`[Shard(dim=0), Partial(sum)]`."""
        words = []
        for entry in entries(type_, self.mesh, p):
            if entry.position is not None:
                words.append(f"Shard(dim={entry.position})")
            elif entry.op is not None:
                words.append(f"Partial({REDUCE_OPS[entry.op]})")
            else:
                words.append("Replicate()")
        return f"[{', '.join(words or ['Replicate()'])}]"


_IMPORTS = (
    "",
    "import torch",
    "from torch.distributed.device_mesh import init_device_mesh",
    "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor",
)


def _ranks(node: Compute) -> list[int]:
    return [len(v.value.type.dims) for v in (*node.ins, *node.outs)]


def _is_product(node: Compute) -> bool:
    """Whether an einsum is written with `@` on matrices; other operators are not asked."""
    return node.name != "einsum" or len(node.ins) == 1 or min(_ranks(node)) > 1


def _is_vector(node: Compute) -> bool:
    """A product of a vector with something of more dims."""
    ranks = [len(v.value.type.dims) for v in node.ins]
    return node.name == "einsum" and len(ranks) == 2 and min(ranks) == 1 < max(ranks)


def _is_inner(node: Compute, row: Row) -> bool:
    """A split or merge of dims of which an inner one is split over devices."""
    key = "into" if node.name == "split" else "dims"
    parts = [d.name for d in node.attr(key)]
    component = (row.outs if node.name == "split" else row.ins)[0]
    return isinstance(component, Split) and component.dim in parts[1:]


def _flattens(node: Compute, row: Row) -> bool:
    """Whether a contraction is over several dims and a split one is not the first of them.

    A dim that only one operand has is summed before; then that operand is partial.
    """
    if node.name != "einsum" or len(node.ins) < 2:
        return False
    out = node.outs[0].value.type
    split = {c.dim for c in row.ins if isinstance(c, Split)}
    first, second = (v.value.type.names for v in node.ins)
    shared = [
        [n for n in a if n in b and not out.has(n)] for a, b in ((first, second), (second, first))
    ]
    if split.isdisjoint(shared[0]):
        return bool(shared[0]) and not _is_product(node)
    return any(names[0] not in split for names in shared)


def _shares(node: Compute) -> bool:
    """Whether table and indices of a gather have a dim in common."""
    table, ids = (v.value.type for v in node.ins)
    return any(ids.has(n) for n in table.names)
