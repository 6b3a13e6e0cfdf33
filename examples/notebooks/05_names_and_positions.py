# ---
# jupyter:
#   jupytext:
#     custom_cell_magics: mdsl
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     name: python3
# ---

# %% [markdown]
# # 5. Names and positions
#
# Most libraries do not write layouts as you did so far. Can you read theirs, and which notation
# should you prefer? There are two kinds:
#
# - By *name*: one map from dims to mesh axes for the whole program (Mesh-TensorFlow, 2018).
# - By *position*: an annotation for every tensor, in which a dim is known by its number. SBP, of
#   OneFlow (Yuan et al., 2021), has one entry per mesh axis. `S(i)` says that dim number i is
#   split, `B` that each device has a copy, and `P` that values are partial sums.
#
# The compiler takes names and SBP. So you can give one program both, compare what is sent, and
# decide. About 20 minutes. At the end there is a broken layout to repair.
#
# ## One placement, five notations
#
# A weight `w1[io, hidden]` on a mesh with the axes `data` and `tp`, in this order. Every device
# along `data` has a copy, and `hidden` is split over `tp`:
#
# | library | written | one entry for each |
# |---|---|---|
# | meshdsl | `hidden -> tp` | dim of the program |
# | Mesh-TensorFlow | `hidden:tp` | dim of the program |
# | OneFlow | `(B, S(1))` | mesh axis |
# | PyTorch DTensor | `[Replicate(), Shard(1)]` | mesh axis |
# | JAX | `PartitionSpec(None, 'tp')` | dim of the tensor |
#
# The last three say by position what the first two say by name. JAX has the entries in the order of
# the tensor's dims, and each names mesh axes. OneFlow and DTensor have them in the order of the
# mesh axes, and each numbers a dim. Exercise 1 is to translate.

# %%
import itertools
import math

import numpy as np
from course import attempt, check
from figures import Plot

import meshdsl as md

line = md.mesh(tp=4)
square = md.mesh(row=2, col=2)

# %% [markdown]
# ## One rule, or three signatures
#
# Megatron's MLP. By name, one rule: whatever has the dim `hidden` is split. By position each
# parameter has its own annotation, since `hidden` is dim 1 of `w1`, dim 0 of `b1` and dim 0 of
# `w2`.

# %%
batch, io = md.dims(batch=64, io=512)
hidden = md.dim("hidden", 4 * io)


@md.program
def mlp(x: md.Tensor[batch, io]):
    w1 = md.param([io, hidden])
    b1 = md.param([hidden], init=md.normal(0.1))
    w2 = md.param([hidden, io])
    h = md.relu(md.einsum(x, w1, out=[batch, hidden]) + b1)
    y = md.einsum(h, w2, out=[batch, io])
    return y


by_name = mlp.compile(line, {"hidden": "tp"})
by_position = mlp.compile(line, sbp={"w1": "S(1)", "b1": "S(0)", "w2": "S(0)"})
print(by_name.cost() == by_position.cost())
by_name.compare()

# %% [markdown]
# `compare` shows a layout beside the same layout by position, and beside another policy of when to
# add up. The first two have the same bytes and the same collectives. When they run, they compute
# the same numbers:

# %%
inputs = by_name.sample()
np.array_equal(by_name(**inputs).y, by_position(**inputs).y)


# %% [markdown]
# ## A point for names
#
# A position is bound to the order of dims in memory. Let somebody store `w2` the other way round,
# which changes nothing about the computation:


# %%
@md.program
def transposed_mlp(x: md.Tensor[batch, io]):
    w1 = md.param([io, hidden])
    b1 = md.param([hidden], init=md.normal(0.1))
    w2 = md.param([io, hidden])
    h = md.relu(md.einsum(x, w1, out=[batch, hidden]) + b1)
    y = md.einsum(h, w2, out=[batch, io])
    return y


before, after = {}, {}
for program, sent in ((mlp, before), (transposed_mlp, after)):
    sent["by name"] = program.compile(line, {"hidden": "tp"}).cost().wire_bytes
    sbp = {"w1": "S(1)", "b1": "S(0)", "w2": "S(0)"}
    sent["by position"] = program.compile(line, sbp=sbp).cost().wire_bytes
print("before:", before)
print("after: ", after)

# %% [markdown]
# The name `hidden` still means the same dim. The signature `S(0)` now splits another one. The
# result is right, twice the bytes are sent, and there is no error. Here is `w2` by position, before
# and after:

# %%
mlp.compile(line, sbp=sbp).tensor("w2")

# %%
transposed_mlp.compile(line, sbp=sbp).tensor("w2")

# %% [markdown]
# ## A point for positions
#
# A matrix product on a grid, all three matrices in blocks: SUMMA (van de Geijn and Watts, 1997).
# By position it is the same line three times, (S(0), S(1)).

# %%
m, n, k = md.dims(m=64, n=64, k=64)


@md.program
def summa(a: md.Tensor[m, k], b: md.Tensor[k, n]):
    c = md.einsum(a, b, out=[m, n])
    return c


blocks = summa.compile(square, sbp={"a": "S(0), S(1)", "b": "S(0), S(1)", "c": "S(0), S(1)"})
blocks.placements

# %% [markdown]
# One map cannot say this: `k` lies along `col` in `a` and along `row` in `b`. Try, and you get a
# refusal:

# %%
try:
    summa.compile(square, {"m": "row", "n": "col", "k": "col"})
except md.ProgramError as error:
    print(error)

# %% [markdown]
# Names need more words here: a rule for a single tensor (exercise 2), or two names for the two
# uses of `k`.
#
# ## A point for neither: moving between placements
#
# A tensor that is placed in one way and needed in another must be moved, and there are many ways
# to do it. The table has eight such moves on a 2×2 mesh. The numbers are the bytes that all four
# devices send, divided by the bytes of the tensor: as we measured for OneFlow 0.9.0 (eager mode,
# once), the least that we can think of, and what a search over sequences of collectives finds here.
# (`benchmarks/bytes.py` keeps the record.)

# %%
i, j = md.dims(i=32, j=32)


@md.program
def move(t: md.Tensor[i, j]):
    u = md.name("u", t)
    return u


changes = (
    ("S(0), S(0)", "S(0), S(1)", 4.01, 0.5),
    ("S(0), S(1)", "S(1), S(0)", 4.01, 0.5),
    ("B, S(0)", "S(0), S(0)", 2.01, 0.5),
    ("S(0), P", "S(0), S(0)", 6.01, 1.0),
    ("P, S(0)", "S(0), S(0)", 3.01, 1.5),
    ("S(0), P", "S(0), B", 2.01, 2.0),
    ("P, S(1)", "B, S(1)", 2.01, 2.0),
    ("S(0), S(1)", "B, B", 4.01, 3.0),
)
print(f"{'from':13}{'to':13}{'OneFlow':>8}{'least':>8}{'here':>8}")
for start, end, oneflow, least in changes:
    cost = move.compile(square, sbp={"t": start, "u": end}).cost()
    print(f"{start:13}{end:13}{oneflow:8.2f}{least:8.2f}{cost.cluster_wire_bytes / 4096:8.2f}")

# %% [markdown]
# In the first row, pairs of devices exchange halves of their blocks. To gather everything and cut
# it up again is eight times as much. No notation prevents that. A compiler has to look at both axes
# together, and a report has to show the bytes.
#
# ## "Any annotation is correct"
#
# It is said in favour of positions that you can write any annotation, and the system inserts the
# collectives that it needs. Is that true, and is it good? Here are all ways to place the three
# matrices of relu(A·B) on two devices. The numbers are small and whole, so that results are equal
# to the bit.


# %%
@md.program
def small(a: md.Tensor[i, j], b: md.Tensor[j, k]):
    h = md.relu(md.einsum(a, b, out=[i, k]))
    return h


rng = np.random.default_rng(0)
arrays = {"a": rng.integers(-3, 4, (32, 32)), "b": rng.integers(-3, 4, (32, 64))}
arrays = {name: array.astype("f4") for name, array in arrays.items()}
truth = np.maximum(arrays["a"] @ arrays["b"], 0)

sent, right = [], 0
for a, b, h in itertools.product(
    ("S(0)", "S(1)", "B", "P"), ("S(0)", "S(1)", "B", "P"), ("S(0)", "S(1)", "B")
):
    plan = small.compile({"x": 2}, sbp={"a": a, "b": b, "h": h})
    right += np.array_equal(plan(**arrays).h, truth)
    sent.append(plan.cost().wire_bytes)
print(f"{len(sent)} annotations, {right} of them right; nothing is sent in {sent.count(0)}")
how_many = {size / 1024: sent.count(size) for size in sorted(set(sent))}
Plot(
    "All annotations of relu(A·B)",
    {"48 annotations": how_many},
    x="KiB a device sends",
    y="annotations",
)

# %% [markdown]
# All are right. But some send nothing and others several times the matrices, and the annotation
# does not show which one you have. The report does.
#
# There is also a limit: relu cannot read partial sums, since relu(p₁) + relu(p₂) is not
# relu(p₁ + p₂).


# %%
@md.program
def too_late(a: md.Tensor[i, j], b: md.Tensor[j, k]):
    t = md.einsum(a, b, out=[i, k])
    h = md.relu(t)
    return h


try:
    too_late.compile({"x": 2}, sbp={"t at h": "P"})
except md.ProgramError as error:
    print(error)

# %% [markdown]
# `docs/comparison.md` takes the claims of this debate one by one, each with a program that was
# run. Its conclusion: inside, a component per axis with dims *by name* serves both.
#
# ## Exercise 1: read a JAX program
#
# On a mesh with the axes `data` and `tp`, in this order, a JAX program annotates an MLP so:
#
# | tensor | `PartitionSpec` |
# |---|---|
# | `x[batch, io]` | `('data', None)` |
# | `w1[io, hidden]` | `('data', 'tp')` |
# | `w2[hidden, io]` | `('tp', 'data')` |
#
# Write the same by SBP. (DTensor's lists are the same in other words.)
#
# <details><summary>A hint</summary>
# For each mesh axis, in the order of the mesh: which dim of the tensor names it?
# </details>

# %% tags=["exercise"]
as_sbp = {"x": "S(0), S(1)", "w1": "S(0), S(1)", "w2": "S(0), S(1)"}

# %% tags=["check"]
JAX = {"x": ("data", None), "w1": ("data", "tp"), "w2": ("tp", "data")}
DIMS = {"x": ("batch", "io"), "w1": ("io", "hidden"), "w2": ("hidden", "io")}


@md.program
def annotated(x: md.Tensor[batch, io]):
    w1 = md.param([io, hidden])
    w2 = md.param([hidden, io])
    h = md.relu(md.einsum(x, w1, out=[batch, hidden]))
    y = md.einsum(h, w2, out=[batch, io])
    return y


with attempt():
    plan = annotated.compile({"data": 2, "tp": 2}, sbp=as_sbp)
    wrong = []
    for tensor, spec in JAX.items():
        split = {axis: dim for axis, dim in zip(spec, DIMS[tensor], strict=True) if axis}
        asked = {axis: f"S({split[axis]})" if axis in split else "B" for axis in ("data", "tp")}
        wrong += [tensor] if plan.tensor(tensor).placement != asked else []
    print(f"Not yet: look at {', '.join(wrong)}." if wrong else "Right!")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: dim 0 of `w2` is split over `tp`, which is the second axis of the mesh. By name it is
# `batch -> data, hidden -> tp, params: io -> data`: Megatron's MLP, fully sharded.
as_sbp = {"x": "S(0), B", "w1": "S(0), S(1)", "w2": "S(1), S(0)"}
rules = ["batch -> data", "hidden -> tp", "params: io -> data"]
named = annotated.compile({"data": 2, "tp": 2}, rules)
plan = annotated.compile({"data": 2, "tp": 2}, sbp=as_sbp)
assert all(named.tensor(t).placement == plan.tensor(t).placement for t in JAX)

# %% [markdown]
# ## Exercise 2: SUMMA by names
#
# Write a layout (rules for single tensors are allowed) that places `a`, `b` and `c` of `summa` as
# `blocks` does, and sends no more.
#
# <details><summary>A hint</summary>
# A rule for a single tensor is written with a colon, as in notebook 2: <code>a: k -> …</code>
# </details>

# %% tags=["exercise"]
layout = ["m -> row", "n -> col"]

# %% tags=["check"]
with attempt():
    mine = summa.compile(square, layout)
    for name in "abc":
        here, there = (plan.tensor(name).placement for plan in (mine, blocks))
        print(name, "is placed right" if here == there else "is not placed as in `blocks`")
    same = all(mine.tensor(t).placement == blocks.tensor(t).placement for t in "abc")
    print("Right!" if same and mine.cost().wire_bytes <= blocks.cost().wire_bytes else "Not yet.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: `k` is told apart by the tensor.
layout = ["m -> row", "n -> col", "a: k -> col", "b: k -> row"]
mine = summa.compile(square, layout)
assert all(mine.tensor(t).placement == blocks.tensor(t).placement for t in "abc")
assert mine.cost() == blocks.cost()

# %% [markdown]
# ## Exercise 3: positions for a block of attention
#
# In attention the heads are dim 1 of `wq`, `wk` and `wv`, and dim 0 of `wo`. Annotate the four by
# position, on `line`, so that each is split and one all_reduce of the result is all that is sent.

# %% tags=["exercise"]
signatures = {"wq": "S(0)", "wk": "S(0)", "wv": "S(0)", "wo": "S(0)"}

# %% tags=["check"]
seq, model, heads, key = md.dims(seq=32, model=64, heads=8, key=8)
mem = md.dim("mem", like=seq)


@md.program
def attention(x: md.Tensor[seq, model]):
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    q = md.einsum(x, wq, out=[heads, seq, key])
    k = md.einsum(x, wk, out=[heads, seq, key])[seq >> mem]
    v = md.einsum(x, wv, out=[heads, seq, key])[seq >> mem]
    s = md.softmax[mem](md.einsum(q, k, out=[heads, seq, mem]) / md.sqrt(key))
    o = md.einsum(s, v, out=[heads, seq, key])
    y = md.einsum(o, wo, out=[seq, model])
    return y


least = attention.compile(line, {"heads": "tp"}).cost()
with attempt():
    cost = attention.compile(line, sbp=signatures).cost()
    if cost.memory["params"] > least.memory["params"]:
        print("Not yet: each device stores a quarter of the four.")
    elif cost.wire_bytes > least.wire_bytes:
        print(f"Not yet: {cost.wire_bytes:,} bytes are too many.")
    else:
        print("Right!")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution. By name it is `heads -> tp`.
signatures = {"wq": "S(1)", "wk": "S(1)", "wv": "S(1)", "wo": "S(0)"}
cost = attention.compile(line, sbp=signatures).cost()
assert cost.wire_bytes == least.wire_bytes
assert cost.memory["params"] == least.memory["params"]

# %% [markdown]
# ## Exercise 4: a broken layout
#
# Here is a program, and what its layout `hurry` should do:

# %%
MEANT = """
dim batch = 8, seq = 128, model = 256, hidden = 1024
mesh square = { data: 2, tp: 2 }

program mlp(x[batch, seq, model]) {
  param w1[model, hidden]
  param w2[hidden, model]
  h = gelu(einsum(x, w1 -> [batch, seq, hidden]))
  y = einsum(h, w2 -> [batch, seq, model])
  return y
}

expect hurry on square {
  x: [batch@data, seq, model]
  h: [batch@data, seq, hidden@tp]
  all_reduce over tp: 1
  wire_bytes: batch * seq * model * 4 / 2
}
"""

# %% [markdown]
# Somebody wrote the layout in a hurry. There are three mistakes in it: a misspelt dim, an axis that
# the mesh does not have, and two dims of one tensor on one axis. Read what the check says, and
# repair it.

# %% tags=["exercise"]
hurry = "layout hurry { batch -> date, hiden -> tp, model -> tp, hidden -> tp }"

# %% tags=["check"]
with attempt():
    print("\nRight!" if check(hurry + MEANT) else "\nNot yet.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: Megatron's two rules.
hurry = "layout hurry { batch -> data, hidden -> tp }"
assert check(hurry + MEANT)

# %% [markdown]
# ## Exercise 5: better than promised
#
# The layout above sends batch·seq·model·4/2 bytes. Suppose whoever reads `y` next can do with a
# part of `seq` on each device of `tp`. Which rule halves what is sent? (The program is the one
# above, now as a cell of the language.)
#
# <details><summary>A hint</summary>
# Which collective is the first half of an all_reduce, and which dim does it split here?
# </details>

# %%
# %load_ext meshdsl

# %% language="mdsl"
# dim batch = 8, seq = 128, model = 256, hidden = 1024
# mesh square = { data: 2, tp: 2 }
# layout megatron { batch -> data, hidden -> tp }
#
# program feed_forward(x[batch, seq, model]) {
#   param w1[model, hidden]
#   param w2[hidden, model]
#   h = gelu(einsum(x, w1 -> [batch, seq, hidden]))
#   y = einsum(h, w2 -> [batch, seq, model])
#   return y
# }
#
# expect megatron on square { wire_bytes: batch * seq * model * 4 / 2 }

# %% tags=["exercise"]
rule = "y: model -> tp"

# %% tags=["check"]
promised = math.prod((8, 128, 256)) * 4 // 2
with attempt():
    plan = feed_forward.compile("square", ["batch -> data", "hidden -> tp", rule])
    if plan.cost().wire_bytes != promised // 2:
        print(f"Not yet: {plan.cost().wire_bytes / promised:g} times the bytes are sent.")
    elif plan.tensor("y").local_shape != (4, 64, 256):
        print("Not yet: so many bytes, but the reader needs another part of `y`.")
    else:
        print("Right!")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: the sum is scattered over `seq` as it is added up. (Over `model` it would be as cheap,
# but the reader cannot do with that.)
rule = "y: seq -> tp"
plan = feed_forward.compile("square", ["batch -> data", "hidden -> tp", rule])
assert plan.cost().by_kind == {"reduce_scatter": promised // 2}
assert plan.tensor("y").local_shape == (4, 64, 256)

# %% [markdown]
# That was the first week. Next: notebook 6, pipelines. `examples/sbp` has more programs for this
# notebook, `docs/explain.md` and `docs/compare.md` say how to read the reports, and `plan.code` is
# the torch program that `torchrun` runs on real devices.
