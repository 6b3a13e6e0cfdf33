"""The placed program as torch DTensor code: `distribute_tensor`, `redistribute`, `Shard(0)`.

Operators are the torch texts of their records, on whole tensors. DTensor's treatment of partial
values was measured with torch 2.13, operator by operator; tests run it and check each variable.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshdsl.backends.peers.notation import entries
from meshdsl.backends.peers.peer import (
    CallPlan,
    Outcome,
    Peer,
    becomes_partial,
    in_mesh_order,
    is_split,
    partial_ops,
)
from meshdsl.backends.peers.peer_call import subscripts
from meshdsl.backends.peers.window_spellings import shifted_copies
from meshdsl.backends.torch.line_breaks import quoted, statement
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.device.ir import Compute, Var
from meshdsl.ops.einsum_text import einsum_text
from meshdsl.ops.opdef import Signature, lookup
from meshdsl.ops.torch_expressions import aligned
from meshdsl.placed.placements import Placement, Split
from meshdsl.placed.sharding_rules import Row

NAMES = "torch init_device_mesh DTensor Partial Replicate Shard distribute_tensor mesh"
REDUCE_OPS = {"sum": "sum", "max": "max", "min": "min", "prod": "product"}

_SUPPORT = {
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
    "window": '''
def window(x, dim, size, before):
    """The elements around each index of a dim, as a new dim behind it."""
    count, margins = x.shape[dim], [0, 0] * (x.ndim - 1 - dim) + [before, size - 1 - before]
    x = torch.nn.functional.pad(x, margins)
    return torch.stack([x.narrow(dim, i, count) for i in range(size)], dim + 1)
''',
    "top_k": '''
def top_k(x, dim, count):
    """The greatest elements and their indices; of equals, the first."""
    values, indices = torch.sort(x, dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, count), indices.narrow(dim, 0, count).int()
''',
    "sort_along": '''
def sort_along(x, dim):
    """The elements in order and their indices; of equals, the first comes first."""
    values, indices = torch.sort(x, dim=dim, stable=True)
    return values, indices.int()
''',
    "check_index": '''
def check_index(ids, dim, size, place, *_):
    """The indices, after a look at those that this device has."""
    local = ids.to_local()
    if local.numel() and (local.min() < 0 or local.max() >= size):
        raise IndexError(f"{place}: an index of {dim} is not in 0 ... {size - 1}")
    return ids
''',
    "squared_norm": '''
def squared_norm(x):
    """The sum of the squares of all elements."""
    return torch.square(x).sum()
''',
    "check_divisor": '''
def check_divisor(divisor, place):
    """The divisor, after a look at what this device has of it."""
    if (divisor.to_local() == 0).any():
        raise ZeroDivisionError(f"{place}: an integer is divided by zero")
    return divisor
''',
}


class DTensorText(Peer):
    """The rendering, with DTensor's placement of every variable."""

    taken = frozenset({*NAMES.split(), *_SUPPORT})
    notation = "dtensor"
    system = "torch DTensor"
    uneven = "DTensor's are the same"
    returns = "The outputs as DTensors; arguments are whole tensors by name."
    support = _SUPPORT

    # --- capabilities of DTensor -----------------------------------------------------------------

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """As measured, by operator and call."""
        name = node.name
        # DTensor gives the wrong shape or values, and no error, for most splits of a convolution.
        if {"window", "size"} & dict(node.attrs).keys():
            return "whole"
        if name in ("split", "merge") and _is_inner(node, row):
            return "whole"
        if "sum" in partial_ops(row) and (not _is_product(node) or _is_batched(node)):
            return "whole"
        if becomes_partial(row) and _flattens(node, row):
            return "whole"
        if name == "gather" and is_split(row) and _shares(node):
            return "whole"
        return super().outcome(node, row)

    def holds(self, p: Placement) -> Placement:
        """Axes of one dim in mesh order."""
        return in_mesh_order(self.mesh, p)

    # --- texts -----------------------------------------------------------------------------------

    def imports(self) -> Iterable[str]:
        """Torch, and the names used from its DTensors."""
        yield "import torch"
        yield "from torch.distributed.device_mesh import init_device_mesh"
        names = "DTensor, Partial, Replicate, Shard, distribute_tensor"
        yield f"from torch.distributed.tensor import {names}"

    def mesh_lines(self) -> Iterable[str]:
        """A mesh of devices of any kind."""
        sizes, names = self.axes()
        yield "def device_mesh(kind):"
        yield '    """The mesh; `kind` is such as "cpu" or "cuda"."""'
        yield from statement(f"return init_device_mesh(kind, {sizes}, mesh_dim_names={names})", 1)

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every device is given the whole tensor, and keeps its shard."""
        return f"distribute_tensor({text}, mesh, {self.spec(var, p)})"

    def number(self, text: str, var: Var, p: Placement) -> str:
        """A literal on every device."""
        tensor = f"torch.tensor({text}, dtype={self.dtype(var)})"
        return self.entered(tensor, var, p)

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`redistribute`; to a partial value there is no public way, hence `as_partial`."""
        new = [a for a in after.partial if a not in before.partial]
        still_partial = tuple(a for a in after.partial if a in before.partial)
        first = Placement(after.splits, still_partial, after.op if still_partial else None)
        if first != before:
            text = f"{text}.redistribute(placements={self.spec(var, first)})"
        for axis in new:
            text = f"as_partial({text}, {quoted(axis)}, {quoted(REDUCE_OPS[after.op or 'sum'])})"
        return text

    def operator(self, node: Compute, args: tuple[str, ...], plan: CallPlan) -> str:
        """The record's torch text on global shapes; a new tensor in it becomes a DTensor."""
        out, p = node.outs[0], plan.yields
        if lookup(node.name).imports:  # DTensor has no rule for a kernel of a package
            self.refuse(node)
        if node.name == "one_hot":
            return self._one_hot(node, args[0], p)
        if node.name == "window":  # `unfold` is no operator of DTensor
            return shifted_copies(self.call(node, args, plan))
        call = self._torch_call(node, args)
        text = self._put(node, call, p) if node.name == "put" else self._torch(node, call)
        if call.used - self.support.keys():
            self.refuse(node)
        if node.name == "transpose" and not p.partial:  # parts and whole keep strides alike
            text += ".contiguous()"
        for line in call.lines:
            self.out.statement(line)
        if all(call.constants):
            return self.entered(text, out, p)
        if _is_spread(node, p):
            text += f".redistribute(placements={self.spec(out, p)})"
        return text

    def _torch_call(self, node: Compute, args: tuple[str, ...]) -> TorchText:
        ins, outs = (tuple(v.type for v in side) for side in (node.ins, node.outs))
        # A mean of parts is a sum of parts here: DTensor would make it a partial average.
        splits = frozenset(d for v in node.ins for d, _ in v.placement.splits)
        return TorchText(
            args=args,
            constants=tuple(v in self.constants for v in node.ins),
            ins=ins,
            outs=outs,
            global_ins=ins,
            global_outs=outs,
            attrs=dict(node.attrs),
            fresh=self.names.fresh,
            place=repr(f"{node.span.file}:{node.span.line}"),
            splits=splits if node.name == "mean" else frozenset(),
        )

    def _torch(self, node: Compute, call: TorchText) -> str:
        if _is_vector(node):  # DTensor gives `vector @ matrix` a dim too many
            return f"torch.einsum({subscripts(call.ins, call.outs[0])}, {', '.join(call.args)})"
        if node.name == "einsum":  # `torch.einsum` treats partial values in a known way
            return einsum_text(call, views=True)
        return lookup(node.name).torch(call)

    def _one_hot(self, node: Compute, index: str, p: Placement) -> str:
        return f"({index}[..., None] == {self._range(node, p)}).to({self.dtype(node.outs[0])})"

    def _range(self, node: Compute, p: Placement) -> str:
        """The indices of the dim that a call is about, split as the result is."""
        dim, type_ = node.attr("dim"), node.outs[0].type
        at = type_.index(dim.name)
        split = (e.position == at for e in entries(type_, self.mesh, p))
        spread = f"[{', '.join('Shard(0)' if s else 'Replicate()' for s in split)}]"
        return f"distribute_tensor(torch.arange({dim.size}), mesh, {spread})"

    def _put(self, node: Compute, call: TorchText, p: Placement) -> str:
        """New values at an index, which for several positions needs more than DTensor has."""
        out, ids, dim = node.outs[0].type, node.ins[2].type, node.attr("dim").name
        if any(not out.has(n) for n in ids.names):
            self.refuse(node)
        positions = aligned(self._range(node, p), (dim,), out.names)
        mask = f"{positions} == {call.aligned(2, out.dims)}"
        return f"torch.where({mask}, {call.aligned(1, out.dims)}, {call.tensor(0)})"

    def spec(self, var: Var, p: Placement) -> str:
        """`[Shard(0), Replicate()]`."""
        words = []
        for entry in entries(var.type, self.mesh, p):
            if entry.position is not None:
                words.append(f"Shard({entry.position})")
            elif entry.op is not None:
                op = "" if entry.op == "sum" else quoted(REDUCE_OPS[entry.op])
                words.append(f"Partial({op})")
            else:
                words.append("Replicate()")
        return f"[{', '.join(words or ['Replicate()'])}]"


def _ranks(node: Compute) -> list[int]:
    return [len(v.type.dims) for v in (*node.ins, *node.outs)]


def _is_spread(node: Compute, p: Placement) -> bool:
    """Whether the result is split along a dim that no operand has: it is made whole, then split."""
    ins, outs = (tuple(v.type for v in side) for side in (node.ins, node.outs))
    loops = lookup(node.name).factors(Signature(ins, outs, dict(node.attrs))).loops
    return any(not any(f.ins) and p.axes_of(str(f.outs[0])) for f in loops)


def _is_product(node: Compute) -> bool:
    """Whether an einsum is written with `@` on matrices; True for other operators."""
    return node.name != "einsum" or len(node.ins) == 1 or min(_ranks(node)) > 1


def _is_batched(node: Compute) -> bool:
    """Whether a product is one of batches: `bmm` passes no partial sum, and splits the batch."""
    if node.name != "einsum" or len(node.ins) < 2:
        return False
    first, second = (v.type.names for v in node.ins)
    return any(n in second and node.outs[0].type.has(n) for n in first)


def _is_vector(node: Compute) -> bool:
    """Whether a product is that of a vector with an operand of more dims."""
    ranks = [len(v.type.dims) for v in node.ins]
    return node.name == "einsum" and len(ranks) == 2 and min(ranks) == 1 < max(ranks)


def _is_inner(node: Compute, row: Row) -> bool:
    """Whether an inner dim of a split or merge is split over devices."""
    key = "into" if node.name == "split" else "dims"
    parts = [d.name for d in node.attr(key)]
    component = (row.outs if node.name == "split" else row.ins)[0]
    return isinstance(component, Split) and component.dim in parts[1:]


def _flattens(node: Compute, row: Row) -> bool:
    """Whether a contraction is over several dims and a split one is not the first of them.

    A dim of one operand only is summed before; then that operand is partial.
    """
    if node.name != "einsum" or len(node.ins) < 2:
        return False
    out = node.outs[0].type
    split = {c.dim for c in row.ins if isinstance(c, Split)}
    first, second = (v.type.names for v in node.ins)
    shared = [
        [n for n in a if n in b and not out.has(n)] for a, b in ((first, second), (second, first))
    ]
    if split.isdisjoint(shared[0]):
        return bool(shared[0]) and not _is_product(node)
    return any(names[0] not in split for names in shared)


def _shares(node: Compute) -> bool:
    """Whether table and indices of a gather have a dim in common."""
    table, ids = (v.type for v in node.ins)
    return any(ids.has(n) for n in table.names)
