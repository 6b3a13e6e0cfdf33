"""The placed program as JAX code with explicit sharding: `PartitionSpec`, `reshard`, `unreduced`.

For jax 0.10. A type there has the split of an array and the axes over which it is not yet reduced,
`f32[8@rows,4]{U:cols}`; few operators take an unreduced operand, and none knows partial maxima.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from meshdsl.backends.peers.operator_tables import broadcast_in_dim
from meshdsl.backends.peers.peer import (
    CallPlan,
    Outcome,
    Peer,
    becomes_partial,
    only_sums,
    partial_ops,
)
from meshdsl.backends.peers.peer_call import Library, PeerCall
from meshdsl.backends.peers.window_spellings import SLIDING, channels, spec_words
from meshdsl.backends.torch.line_breaks import quoted, statement
from meshdsl.device.ir import Compute, Move, Var
from meshdsl.ops.opdef import lookup
from meshdsl.placed.placements import Partial, Placement, Split
from meshdsl.placed.sharding_rules import Row

_SUPPORT = {
    "gelu_grad": '''
def gelu_grad(dy, x, approximate):
    """`dy` times the slope of gelu at `x`."""
    def curve(x):
        return jax.nn.gelu(x, approximate=approximate)

    return dy * jax.jvp(curve, (x,), (jnp.ones_like(x),))[1]
''',
    "layer_norm": '''
def layer_norm(x, axis, scale=1.0, shift=0.0, eps=1e-5):
    """`x` less its mean, divided by its standard deviation."""
    x = x - jnp.mean(x, axis=axis, keepdims=True)
    spread = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(spread + eps) * scale + shift
''',
    "rms_norm": '''
def rms_norm(x, axis, scale=1.0, eps=1e-6):
    """`x` divided by the root of the mean of its squares."""
    mean = jnp.mean(jnp.square(x), axis=axis, keepdims=True)
    return x * jax.lax.rsqrt(mean + eps) * scale
''',
    "window": '''
def window(x, axis, size, before):
    """The elements around each index of an axis, as a new axis behind it."""
    count, widths = x.shape[axis], [(0, 0)] * x.ndim
    widths[axis] = (before, size - 1 - before)
    x = jnp.pad(x, widths)
    parts = [jax.lax.slice_in_dim(x, i, i + count, axis=axis) for i in range(size)]
    return jnp.stack(parts, axis=axis + 1)
''',
    "cross_entropy": '''
def cross_entropy(logits, axis, targets):
    """Minus the logarithm of the softmax at the targets."""
    at = jnp.expand_dims(targets, axis)
    picked = jnp.take_along_axis(logits, at, axis=axis)
    return jax.nn.logsumexp(logits, axis=axis) - jnp.squeeze(picked, axis)
''',
}


class JaxText(Peer):
    """The rendering, with JAX's placement of every variable."""

    taken = frozenset({*"jax jnp AxisType NamedSharding P reshard mesh".split(), *_SUPPORT})
    notation = "jax"
    system = "JAX with explicit sharding"
    returns = "The outputs, under `jax.set_mesh(mesh)`; arguments are whole arrays."
    support = _SUPPORT
    library = Library("jnp", "transpose", "axis=", "keepdims=True", "out_sharding=")

    # --- capabilities of JAX ---------------------------------------------------------------------

    def outcome(self, node: Compute, row: Row) -> Outcome:
        """By the rules of jax 0.10."""
        general = super().outcome(node, row)
        if _is_inner_channel(node, row) or (_has_window(node) and node.name not in SLIDING):
            return "whole"
        if partial_ops(row):
            return "whole" if self._is_bilinear(node, row) else general
        if not becomes_partial(row):
            return general
        if node.name == "gather" and not node.ins[1].type.dims:
            return "whole"  # one index is a dynamic slice
        return "keeps" if general == "keeps" and _is_shared(node, row) else "reduces"

    def holds(self, p: Placement) -> Placement:
        """Sums only."""
        return only_sums(p)

    def windowed(self, node: Move) -> None:
        """Blocks stay: XLA sends the borders that a convolution or a pooling reads."""
        note = f"XLA sends borders of `{node.step.window.dim}` itself: ours {node.wire:,} B"
        before = self.at(node.source)
        self.assign(node.target, self.brought(node.source, before), before, note)

    def _is_bilinear(self, node: Compute, row: Row) -> bool:
        """Whether a product is of two arrays unreduced over different axes: refused."""
        alone = any(not isinstance(c, Partial) for c in row.ins)
        return alone and all(self.at(v).partial for v in node.ins)

    # --- texts -----------------------------------------------------------------------------------

    def imports(self) -> Iterator[str]:
        """JAX, and 64 bits where they are used."""
        yield from ("import jax", "import jax.numpy as jnp")
        yield "from jax.sharding import AxisType, NamedSharding, reshard"
        yield "from jax.sharding import PartitionSpec as P"
        if any(v.type.dtype.name in ("f64", "i64") for v in self.variables()):
            yield from ("", 'jax.config.update("jax_enable_x64", True)')

    def mesh_lines(self) -> Iterator[str]:
        """All axes are explicit."""
        yield "def device_mesh():"
        yield '    """The mesh, over the first devices there are."""'
        sizes, names = self.axes()
        kinds = f"axis_types=(AxisType.Explicit,) * {max(1, len(self.mesh.axes))}"
        yield from statement(f"return jax.make_mesh({sizes}, {names}, {kinds})", 1)

    def entered(self, text: str, var: Var, p: Placement) -> str:
        """Every device gets its shard."""
        return f"jax.device_put({text}, NamedSharding(mesh, {self.spec(var, p)}))"

    def number(self, text: str, var: Var, p: Placement) -> str:
        """A literal as an array."""
        return f"jnp.asarray({text}, dtype={self.dtype(var)})"

    def resharded(self, text: str, var: Var, before: Placement, after: Placement) -> str:
        """`reshard`; one call does not both reduce and make partial."""
        old, new = set(before.partial), set(after.partial)
        if old - new and new - old:
            text = f"reshard({text}, {self.spec(var, Placement(before.splits))})"
        return f"reshard({text}, {self.spec(var, after)})"

    def operator(self, node: Compute, args: tuple[str, ...], plan: CallPlan) -> str:
        """The table's text, but for `a + b` and `a * b` of unreduced arrays."""
        sign = lookup(node.name).infix
        if sign and any(p.partial for p in plan.needs):
            call = self.call(node, args, plan)
            return f" {sign} ".join(self._unreduced(node, call, i) for i in range(len(args)))
        return super().operator(node, args, plan)

    def _unreduced(self, node: Compute, call: PeerCall, index: int) -> str:
        """An operand broadcast explicitly.

        A factor of an unreduced one must be typed `reduced`.
        """
        var = node.ins[index]
        if not self.at(var).partial:
            axes = {a for v in node.ins for a in self.at(v).partial}
            spec = self.spec(var, self.at(var), f"reduced={_set(self.mesh.sorted(axes))}")
            text = f"reshard({call.literals.get(index, call.args[index])}, {spec})"
            return replace(call, args=(text,) * len(node.ins), literals={}).aligned(
                index, full=True
            )
        if call.ins[index].names == call.out.names:
            return call.args[index]
        return broadcast_in_dim(call, index)

    def spec(self, var: Var, p: Placement, more: str = "") -> str:
        """`P("rows", None, unreduced={"cols"})`."""
        words = spec_words(p, var.type.names)
        words += [f"unreduced={_set(p.partial)}"] if p.partial else []
        words += [more] if more else []
        return f"P({', '.join(words)})"


def _set(axes: tuple[str, ...]) -> str:
    return f"{{{', '.join(map(quoted, axes))}}}"


def _has_window(node: Compute) -> bool:
    """Whether our operator reads a window of a block."""
    return any(v.placement.windows for v in node.ins)


def _is_inner_channel(node: Compute, row: Row) -> bool:
    """Whether a dim is split that is not the first of those that are one for a convolution."""
    if node.name not in ("conv", "upconv"):
        return False
    image, kernel = (v.type for v in node.ins)
    split = {c.dim for c in (*row.ins, *row.outs) if isinstance(c, Split)}
    groups = channels(image, kernel, node.outs[0].type, dict(node.attrs))
    return any(split & {*group[1:]} for group in groups)


def _is_shared(node: Compute, row: Row) -> bool:
    """Whether all operands of an einsum have the split dim; that of one only is summed before."""
    return node.name != "einsum" or all(isinstance(c, Split) for c in row.ins)
