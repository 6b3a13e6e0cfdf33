"""Programs whose gradients others were measured on, and the bytes that those and the best send.

Wire bytes per device, f32, ring algorithms; `benchmarks/bytes.py` prints them beside ours. The
figures of JAX 0.10.2 (on a CPU, and compiled for a TPU) and of torch 2.13's DTensor were measured
once. A row without a returned loss lacks the 4 to 8 bytes of its all_reduce.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.bytes import Known

MLP = """
dim batch = 64, d = 256, f = 1024
mesh four = { x: 4 }
mesh square = { x: 2, y: 2 }
layout data_parallel { batch -> x }
layout megatron { f -> x }
layout two_d { batch -> x, f -> y }
layout scattered { batch -> x, grads: d -> x }
layout fully_sharded { batch -> x, params: d -> x }
layout kept { batch -> x, params: d -> x keep }

program mlp(x[batch, d]) {
  param w1[d, f]
  param w2[f, d]
  h = relu(einsum(x, w1 -> [batch, f]))
  y = einsum(h, w2 -> [batch, d])
  d1, d2 = grad(mean(y^2), w1, w2)
  return d1, d2
}"""
WIDE_BATCH = MLP.replace("batch = 64", "batch = 4096")

_BLOCK = """
dim batch = 8, seq = 128, mem = seq, model = 256, heads = 8, key = 32, hidden = 1024
mesh square = {{ data: 2, tp: 2 }}
layout two_d {{ batch -> data, heads -> tp, hidden -> tp }}
layout sequence extends two_d {{ {residual} }}

program block(x[batch, seq, model]{cotangent}) {{
  param g1[model] = ones()
  param g2[model] = ones()
  param wq[model, heads, key]
  param wk[model, heads, key]
  param wv[model, heads, key]
  param wo[heads, key, model]
  param w1[model, hidden]
  param w2[hidden, model]
  n = layer_norm[model](x, g1)
  q = einsum(n, wq -> [batch, heads, seq, key])
  k = einsum(n, wk -> [batch, heads, seq, key])[seq -> mem]
  v = einsum(n, wv -> [batch, heads, seq, key])[seq -> mem]
  s = einsum(q, k -> [batch, heads, seq, mem]) / sqrt(key)
  o = einsum(softmax[mem](s), v -> [batch, heads, seq, key])
  r = x + einsum(o, wo -> [batch, seq, model])
  h = gelu(einsum(layer_norm[model](r, g2), w1 -> [batch, seq, hidden]))
  y = r + einsum(h, w2 -> [batch, seq, model])
  {goal}
}}"""
_RESIDUAL = "x: seq -> tp, r: seq -> tp, y: seq -> tp, ct: seq -> tp, dx: seq -> tp"
_STEP = "loss = mean(y^2)\n  return loss\n  minimize loss with sgd(lr=1.0)"
_GRADS = "dx, dg1, dg2, dwq, dwk, dwv, dwo, dw1, dw2"
_PRODUCTS = f"""{_GRADS} = grad(sum(y * ct), x, g1, g2, wq, wk, wv, wo, w1, w2)
  return {_GRADS}"""
BLOCK_STEP = _BLOCK.format(residual=_RESIDUAL, cotangent="", goal=_STEP)
BLOCK_PRODUCTS = _BLOCK.format(
    residual=_RESIDUAL, cotangent=", ct[batch, seq, model]", goal=_PRODUCTS
)

# Five micro-batches, their gradients added up in a loop.
MICRO = """
dim micro = 5, batch = 8, d = 256, e = d, layers = 3
mesh four = { x: 4 }
layout data_parallel { batch -> x }
program micro_batches(x[micro, batch, d]) {
  param w[layers, d, e]
  total = zeros[layers, d, e]()
  repeat micro {
    h = x
    repeat layers { h = tanh(einsum(h, w -> [batch, e]))[e -> d] }
    total = total + grad(sum(h^2), w)
  }
  return total
}"""
# The same as a training step: `accumulate=5`.
ACCUMULATED = """
dim batch = 8, d = 256, e = d, layers = 3
mesh four = { x: 4 }
layout data_parallel { batch -> x }
program accumulated(x[batch, d]) {
  h = x
  repeat layers {
    param w[d, e]
    h = tanh(einsum(h, w -> [batch, e]))[e -> d]
  }
  loss = mean(h^2)
  return loss
  minimize loss with sgd(lr=0.1, accumulate=5)
}"""

_WRITTEN = "JAX with unreduced types by hand: 1,179,648"

GRADIENTS = (
    Known("MLP, data parallel", MLP, "data_parallel", 3_145_728, 3_145_734, 3_145_734, 3_145_728),
    Known("MLP, Megatron", MLP, "megatron", 98_304, 98_304, 98_304, 98_304),
    Known("MLP, 2-D", MLP, "two_d", 1_081_344, 1_081_348, 1_081_348),
    Known("MLP, gradients split", MLP, "scattered", 1_572_864, 3_145_734, 1_572_864),
    Known("MLP, fully sharded, kept", WIDE_BATCH, "kept", 3_145_728, None, 3_145_728),
    Known("MLP, fully sharded", WIDE_BATCH, "fully_sharded", 3_145_728, 4_718_592, None),
    Known("block and its loss, 2-D", BLOCK_STEP, "two_d", 3_148_292, 4_720_644, 3_672_068),
    Known(
        "block, sequence parallel", BLOCK_PRODUCTS, "sequence", 3_410_944, 11_284_480, 10_755_072,
        note="JAX in explicit mode: 3,410,944",
    ),
    Known("5 micro-batches, a loop", MICRO, "data_parallel", 1_179_648, 5_898_240, 5_898_240),
    Known(
        "5 micro-batches, a step", ACCUMULATED, "data_parallel", 1_179_648 + 6, 5_898_240,
        5_898_240, note=_WRITTEN,
    ),
)  # fmt: skip


# --- two layers: a formula --------------------------------------------------------------------

TWO_LAYERS = """
dim batch = 64, io = 32, hidden = 128
program two_layers(x[batch, io], ct[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, io])
  dx, dw, dv = grad(sum(y * ct), x, w, v)
  return y, dx, dw, dv
}"""
"""Mesh-TensorFlow's example, forward and backward."""


@dataclass(frozen=True, slots=True)
class TwoLayers:
    """A layout of it, and what Mesh-TensorFlow was counted to do.

    `reduced` are the elements that one device all-reduces, `held` those it has of x, w and h.
    """

    mesh: str
    rules: str
    reduced: int
    held: int

    @property
    def formula(self) -> int:
        """2·([batch split]·i·h + [hidden split]·b·i + [io split]·b·h), of sizes on one device."""
        axes = dict(part.split(":") for part in self.mesh.split(","))
        rules = dict(part.split(":") for part in self.rules.split(",")) if self.rules else {}
        sizes = {"batch": 64, "io": 32, "hidden": 128}
        local = {dim: n // int(axes.get(rules.get(dim, ""), 1)) for dim, n in sizes.items()}
        batch, io, hidden = local.values()
        products = {"batch": io * hidden, "hidden": batch * io, "io": batch * hidden}
        return 2 * sum(product for dim, product in products.items() if dim in rules)


LAYOUTS = (
    TwoLayers("all:4", "", 0, 14336),
    TwoLayers("all:4", "batch:all", 8192, 6656),
    TwoLayers("all:4", "hidden:all", 4096, 5120),
    TwoLayers("all:4", "io:all", 16384, 9728),
    TwoLayers("r:2,c:4", "batch:r,hidden:c", 4096, 3072),
    TwoLayers("r:2,c:4", "io:r,hidden:c", 6144, 3584),
    TwoLayers("r:2,c:4", "batch:r,io:c", 10240, 5376),
    TwoLayers("x:2,y:4,z:2", "batch:x,hidden:y,io:z", 4096, 2048),
)
