"""The placed program as JAX code with explicit sharding: `PartitionSpec`, `reshard`, `unreduced`.

For jax 0.10. A type there says how an array is split and over which axes it is not yet reduced,
`f32[8@rows,4]{U:cols}`; few operators take an unreduced operand, and none knows partial maxima.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.backends.peers.call import PeerCall
from meshdsl.backends.peers.jax_table import JAX, dtype_text, helpers
from meshdsl.backends.peers.peer import (
    Outcome,
    Peer,
    Plan,
    becomes_partial,
    only_sums,
    partial_ops,
)
from meshdsl.backends.torch.format import quoted, statement
from meshdsl.device.ir import Compute, Var
from meshdsl.ir.types import TensorType
from meshdsl.ops.opdef import lookup
from meshdsl.ops.text import tuple_text
from meshdsl.placed.ir import Program
from meshdsl.placed.rows import Row
from meshdsl.placed.sbp import Placement, Split

UNREDUCED = ("add", "mul")
"""Operators that are written otherwise where an operand is unreduced."""
NAMES = "jax jnp AxisType NamedSharding P reshard mesh layer_norm rms_norm cross_entropy gelu_grad"

KEEPS_SUMS = frozenset(
    "add mul cast stop_gradient identity rename transpose split merge pick slice sum concat pad "
    "shift".split()
)
"""Operators with a rule for unreduced operands; the others raise."""
GIVES_SUMS = frozenset({"einsum", "sum", "gather"})
"""Operators whose result may be asked for unreduced."""


def render(program: Program) -> str:
    """The text of a placed program as JAX code. Raises MD0910."""
    return JaxText(program).text()


class JaxText(Peer):
    """The rendering, with what JAX holds of every variable."""

    taken = frozenset(NAMES.split())
    transpose = "transpose"
    stack = "jnp.stack"
    notation = "jax"
    system = "JAX with explicit sharding"

    # --- what JAX can do -------------------------------------------------------------------------

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """By the rules of jax 0.10."""
        name = node.name
        if partial_ops(row):
            return "keeps" if name in KEEPS_SUMS and not self._is_bilinear(node) else "whole"
        if becomes_partial(row) and name == "gather" and not node.ins[1].value.type.dims:
            return "whole"  # one index is a dynamic slice
        if becomes_partial(row):
            return "keeps" if name in GIVES_SUMS and _is_shared(node, row) else "reduces"
        return "keeps"

    def holds(self, p: Placement) -> Placement:
        """Sums only."""
        return only_sums(p)

    def _is_bilinear(self, node: Compute) -> bool:
        """A product of two unreduced arrays, over different axes: refused."""
        return node.name == "mul" and all(self.at(v).partial for v in node.ins)

    # --- texts -----------------------------------------------------------------------------------

    def text(self) -> str:
        """The whole rendering: the function is written first, since it knows what it uses."""
        head, body = super().text().split("\n\n", 1)
        top = "\n".join([head, "", *self._imports()])
        return "\n\n\n".join([top, *helpers(body), "\n".join(self._mesh())]) + "\n\n" + body

    def top(self) -> None:
        """The comment, and the head of the function."""
        self.about()
        self.out.add()
        self.out.add()
        self.out.add("def program(mesh, inputs, params):")
        self.out.depth = 1
        self.out.add('"""The outputs, under `jax.set_mesh(mesh)`; arguments are whole arrays."""')

    def _imports(self) -> Iterator[str]:
        yield from ("import jax", "import jax.numpy as jnp")
        yield "from jax.sharding import AxisType, NamedSharding, reshard"
        yield "from jax.sharding import PartitionSpec as P"
        if any(v.value.type.dtype.name in ("f64", "i64") for v in self.variables()):
            yield from ("", 'jax.config.update("jax_enable_x64", True)')

    def _mesh(self) -> Iterator[str]:
        sizes = tuple_text([n for _, n in self.mesh.axes] or [1])
        names = tuple_text([quoted(a) for a, _ in self.mesh.axes] or ['"one"'])
        yield "def device_mesh():"
        yield '    """The mesh, over the first devices there are."""'
        kinds = f"axis_types=(AxisType.Explicit,) * {max(1, len(self.mesh.axes))}"
        yield from statement(f"return jax.make_mesh({sizes}, {names}, {kinds})", 1)

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every device gets its part."""
        return f"jax.device_put({text}, NamedSharding(mesh, {self.spec(var, p)}))"

    def constant(self, var: Var) -> str:
        """A literal as an array that every device has."""
        return f"jnp.asarray({self.constants[var]}, dtype={dtype_text(var.value.type.dtype)})"

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`reshard`; one call does not both reduce and make partial."""
        old, new = set(before.partial), set(after.partial)
        if old - new and new - old:
            text = f"reshard({text}, {self.spec(var, Placement(before.splits))})"
        return f"reshard({text}, {self.spec(var, after)})"

    def operator(self, node: Compute, args: tuple[str, ...], plan: Plan) -> str:
        """The table's text."""
        if node.name not in JAX:
            self.refuse(node)
        if node.name == "einsum":
            args = tuple(self._array(v, a) for v, a in zip(node.ins, args, strict=True))
        call = self.call(node, args, self.spec(node.outs[0], plan.yields[0]))
        if node.name in UNREDUCED and any(p.partial for p in plan.needs):
            return self._unreduced(node, call)
        text = call.write(JAX[node.name])
        return self._array_of(node, text)

    def _unreduced(self, node: Compute, call: PeerCall) -> str:
        """`a + b` and `a * b` of unreduced arrays, for which nothing is broadcast by itself.

        What an unreduced factor is multiplied with must be typed `reduced`.
        """
        axes = {a for v in node.ins for a in self.at(v).partial}
        parts = []
        for i, var in enumerate(node.ins):
            names = call.ins[i].names
            if not self.at(var).partial:
                text = self._reduced(var, axes, call.args[i])
                parts.append(replace(call, args=(text,) * len(node.ins)).full(i, call.out.names))
            elif names == call.out.names:
                parts.append(call.args[i])
            else:
                parts.append(_broadcast(call, i))
        return f" {lookup(node.name).infix} ".join(parts)

    def _array(self, var: Var, text: str) -> str:
        return self.constant(var) if var in self.constants else text

    def _array_of(self, node: Compute, text: str) -> str:
        """A result of literals alone as an array."""
        if node.ins and all(v in self.constants for v in node.ins):
            return f"jnp.asarray({text}, dtype={dtype_text(node.outs[0].value.type.dtype)})"
        return text

    def _reduced(self, var: Var, axes: set[str], text: str) -> str:
        p = self.at(var)
        if p.partial:
            return text
        spec = self.spec(var, p, f"reduced={_set(self.mesh.sorted(axes))}")
        return f"reshard({self._array(var, text)}, {spec})"

    def as_printed(self, type_: TensorType, p: Placement) -> str:
        """`float32[8@rows,4]{U:cols}`."""
        dims = ",".join(f"{d.size}{_at(p.axes_of(d.name))}" for d in type_.dims)
        tail = f"{{U:{_joined(p.partial)}}}" if p.partial else ""
        dtype = dtype_text(type_.dtype).removeprefix("jnp.").removesuffix("_")
        return f"{dtype}[{dims}]{tail}"

    def spec(self, var: Var, p: Placement, more: str = "") -> str:
        """`P("rows", None, unreduced={"cols"})`."""
        words = [_axes(p.axes_of(n)) for n in var.value.type.names]
        words += [f"unreduced={_set(p.partial)}"] if p.partial else []
        words += [more] if more else []
        return f"P({', '.join(words)})"


def _axes(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return quoted(axes[0]) if len(axes) == 1 else tuple_text([quoted(a) for a in axes])


def _joined(axes: tuple[str, ...]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"


def _at(axes: tuple[str, ...]) -> str:
    return f"@{_joined(axes)}" if axes else ""


def _set(axes: tuple[str, ...]) -> str:
    return f"{{{', '.join(map(quoted, axes))}}}"


def _broadcast(call: PeerCall, index: int) -> str:
    """An operand with the shape and the type of the result."""
    names = tuple(n for n in call.out.names if call.ins[index].has(n))
    text = call.permuted(call.args[index], call.ins[index].names, names)
    at = tuple_text([call.out.index(n) for n in names])
    shape = tuple_text(call.out.shape)
    return f"jax.lax.broadcast_in_dim({text}, {shape}, {at}, out_sharding={call.where})"


def _is_shared(node: Compute, row: Row) -> bool:
    """Whether every operand of an einsum has the split dim; what only one has is summed before."""
    return node.name != "einsum" or all(isinstance(c, Split) for c in row.ins)
