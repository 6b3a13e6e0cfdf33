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
# # 1. Names, meshes and layouts
#
# One small matrix product, and the question of where its numbers lie. You will give dims names,
# spread the product over two and four devices that all live in this one process, and see that the
# answer never changes. About 15 minutes; no GPU. Matrix products as you know them from a first
# course are enough.
#
# Every exercise is three cells: one to change, one that says whether it is right yet, and a
# solution that is folded away. Do open it when you are stuck.

# %%
import numpy as np
from course import attempt, check

import meshdsl as md

# %% [markdown]
# ## Dims have names
#
# In numpy, `x @ w` sums over the last dim of `x` and the first of `w`. That is a convention, and
# with four dims it takes some care to remember it. Einstein got tired of writing sums too: in a
# paper of 1916 he left the sign out and summed over every index that occurs twice.
# `numpy.einsum("ij,jk->ik", x, w)` is that idea, with letters.
#
# Here a dim is more than a letter. It has a name and a size, the same in the whole program.

# %%
rows, inner, cols = md.dims(rows=4, inner=5, cols=8)


@md.program
def matmul(x: md.Tensor[rows, inner], w: md.Tensor[inner, cols]):
    y = md.einsum(x, w, out=[rows, cols])
    return y


matmul

# %% [markdown]
# `[ ]` holds dims. What is not in `out` is summed, here `inner`. A *program* says what is
# computed and nothing else: no device appears in it. `compile` makes a *plan* of it. With nothing
# said about devices, that is a plan for one.

# %%
x = np.arange(20.0, dtype="f4").reshape(4, 5)
w = np.arange(40.0, dtype="f4").reshape(5, 8) % 7

plan = matmul.compile()
(y,) = plan(x=x, w=w)
np.array_equal(y, x @ w)

# %% [markdown]
# The shapes, x 4×5 and w 5×8, are those by which OneFlow's documentation introduces parallelism
# (docs.oneflow.org). We use them all through this notebook.
#
# Names make two things easy. First, order is a matter of storage and not of meaning: ask for
# `[cols, rows]` and you get the transpose, without a word about which axis goes where.


# %%
@md.program
def transposed(w: md.Tensor[inner, cols], x: md.Tensor[rows, inner]):
    return md.einsum(w, x, out=[cols, rows])


(y_t,) = transposed.compile()(w=w, x=x)
np.array_equal(y_t, (x @ w).T)


# %% [markdown]
# Second, a mistake has a name as well. numpy would happily multiply two 4×4 matrices the wrong
# way round. A name that is nowhere to be found is an error, with the place of it.


# %%
@md.program
def slip(x: md.Tensor[rows, inner], w: md.Tensor[inner, cols]):
    return md.einsum(x, x, out=[rows, cols])


try:
    slip.compile()
except md.ProgramError as error:
    print(error)

# %% [markdown]
# ## A mesh is a grid of devices
#
# A mesh names the directions of a grid. The last axis runs fastest when devices are numbered: on
# `square`, devices 0 and 1 are neighbours along `b`, devices 0 and 2 along `a`.

# %%
pair = md.mesh(device=2)
square = md.mesh(a=2, b=2)
square

# %% [markdown]
# ## A layout maps dims to mesh axes
#
# Now the idea of this whole project, from Mesh-TensorFlow (Shazeer et al., NeurIPS 2018): since
# dims have names, *one* small map says how every tensor of a program is split. A rule `rows ->
# device` splits each tensor that has the dim `rows`; a tensor without it is copied to every
# device.

# %%
by_rows = matmul.compile(pair, {"rows": "device"})
by_rows.explain()

# %% [markdown]
# Read `rows@device 4→2` as: the dim `rows` of size 4 is split over the mesh axis `device`, and
# one device holds 2 of it. `w` has no dim `rows`, so both devices have all of it. Nothing is
# sent: each device has what it needs for its half of `y`. In numpy by hand:

# %%
halves = [x[:2] @ w, x[2:] @ w]
print([half.shape for half in halves])
np.array_equal(np.concatenate(halves, axis=0), x @ w)

# %% [markdown]
# If `rows` are samples and `w` a weight, this is *data parallelism*: each device has its own
# samples and a copy of the weight. It holds a 2×8 part of `y`, as OneFlow's documentation says.
#
# Split `cols` instead and you have *model parallelism*: the weight is cut, `x` goes to everyone,
# and each device holds 4×4 of `y`. The program does not change, only the map.

# %%
by_cols = matmul.compile(pair, {"cols": "device"})
by_cols.explain()


# %% [markdown]
# A picture says it faster. Colours are devices; `0 = 1` means that both hold a copy of the block.

# %%
by_cols.tensor("x")

# %%
by_cols.tensor("y")

# %% [markdown]
# ## Two axes
#
# A mesh of two axes takes two rules. With `rows -> a` and `cols -> b` each of the four devices
# computes a 2×4 tile of `y`.

# %%
tiles = matmul.compile(square, {"rows": "a", "cols": "b"})
tiles.placements

# %% [markdown]
# One dim may also lie over both axes, outer first: `rows -> (a, b)` gives every device one of the
# four rows. What may not be is two dims of one tensor on the *same* axis: a device would hold
# some rows and some cols, and nobody would hold the other blocks. The compiler says so and knows
# ways out.

# %%
print(matmul.compile(square, {"rows": ("a", "b")}).tensor("y").local_shape)

try:
    matmul.compile(pair, {"rows": "device", "cols": "device"})
except md.ProgramError as error:
    print(error)

# %% [markdown]
# ## Any layout, the same numbers
#
# Is that really so? There are few enough layouts of `rows` and `cols` on `square` to try all.
# (`inner` has size 5, which does not divide over 2. It is the dim that is summed, and splitting
# that is another story: notebook 2.) Here each plan runs on all its devices, inside this process,
# and we compare with numpy.

# %%
choices = [None, "a", "b", ("a", "b"), ("b", "a")]
for row_axes in choices:
    for col_axes in choices:
        taken = [axis for axes in (row_axes, col_axes) for axis in axes or ()]
        if len(taken) != len(set(taken)):
            continue  # two dims on one axis
        plan = matmul.compile(square, {"rows": row_axes, "cols": col_axes})
        same = np.array_equal(plan(x=x, w=w).y, x @ w)
        held = plan.tensor("y").local_shape
        print(f"rows -> {row_axes!s:11} cols -> {col_axes!s:11} each has {held} of y: {same}")

# %% [markdown]
# So a layout is about speed and memory, never about the result. That is why programs and layouts
# are kept apart here, and why you can try a layout without fear. (The numbers here are small
# integers, so the results are bit-identical. In general devices may add a sum in another order, and
# the last digits differ.)

# %% [markdown]
# ## The same in a file
#
# Programs, meshes and layouts can also be written in a language of their own. In a notebook that
# is a cell that begins with `%%mdsl`; what it defines is known to later cells, and to Python.

# %%
# %load_ext meshdsl

# %% language="mdsl"
# dim rows = 4, inner = 5, cols = 8
#
# mesh square = { a: 2, b: 2 }
# layout tiles { rows -> a, cols -> b }
#
# program product(x[rows, inner], w[inner, cols]) {
#   y = einsum(x, w -> [rows, cols])
#   return y
# }
#
# expect tiles on square {
#   y: [rows@a, cols@b]
#   wire_bytes: 0
# }

# %%
product.compile("square", "tiles").tensor("y")

# %% [markdown]
# An `expect` says what must be true of a layout: where tensors lie, what is sent. `meshdsl check`
# holds a file to it, and so does the cell.
#
# ## Exercise 1: tall tiles
#
# Choose a layout on `square` under which every device holds a 4×2 part of `y`: all rows, two
# cols.
#
# <details><summary>A hint</summary>
# Eight cols are cut into four blocks. Which axes does that take, and what is left for the rows?
# </details>

# %% tags=["exercise"]
tall = {"rows": "a", "cols": "b"}

# %% tags=["check"]
with attempt():
    found = matmul.compile(square, tall).tensor("y").local_shape
    print("Right!" if found == (4, 2) else f"Not yet: a device holds {found} of y.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: `cols` over both axes; no rule for `rows`.
tall = {"cols": ("a", "b")}
assert matmul.compile(square, tall).tensor("y").local_shape == (4, 2)


# %% [markdown]
# ## Exercise 2: how many bytes?
#
# From *How to Scale Your Model* (Austin et al., 2025, [part
# 3](https://jax-ml.github.io/scaling-book/sharding/)): an array of int8, 128×2048, lies on a mesh
# {X: 2, Y: 8, Z: 2} with its first dim split over X and Y. How many bytes are on each device, and
# how many on all devices together? (An int8 takes one byte. So does our `bool`, which stands in
# for it below.)

# %% tags=["exercise"]
bytes_each = 128 * 2048
bytes_in_all = 128 * 2048

# %% tags=["check"]
i, j = md.dims(i=128, j=2048)
cube = md.mesh(X=2, Y=8, Z=2)


@md.program
def holder(array: md.bool[i, j]):
    return ~array


held = holder.compile(cube, {"i": ("X", "Y")}).tensor("array").local_shape
truth = held[0] * held[1]
print(
    "each:  ",
    "Right!" if bytes_each == truth else "Not yet. Into how many blocks is the first dim cut?",
)
print("in all:", "Right!" if bytes_in_all == truth * cube.devices else "Not yet. Think of Z.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 128 / (2 · 8) = 8 rows of 2048 bytes on each of 32 devices; those along Z are copies.
# So 16,384 bytes and 512 KiB, as the book has it.
bytes_each = 8 * 2048
bytes_in_all = bytes_each * 32
assert bytes_each == truth == 16_384
assert bytes_in_all == truth * cube.devices == 512 * 1024

# %% [markdown]
# ## Exercise 3: copies
#
# Same source, question 1: `A[I, J, K]` is split over X only, on a mesh {X: 4, Y: 8, Z: 2}. Divide
# the bytes on all devices by the bytes of one array. What is the ratio?

# %% tags=["exercise"]
ratio = 1

# %% tags=["check"]
mesh = md.mesh(X=4, Y=8, Z=2)
array = holder.compile(mesh, {"i": "X"}).tensor("array")
size, local = np.prod(array.shape), np.prod(array.local_shape)
right = ratio * size == local * mesh.devices
print("Right!" if right else "Not yet. How many devices hold the same block?")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: every device has a quarter, and there are 64 devices: as many copies as Y · Z.
ratio = 64 // 4
assert ratio * size == local * mesh.devices
assert ratio == 16

# %% [markdown]
# ## Exercise 4: keep a promise
#
# Here is the rest of a file. Its `expect` says how the tensors should be placed.

# %%
PROMISE = """
dim rows = 4, inner = 5, cols = 8
mesh square = { a: 2, b: 2 }

program product(x[rows, inner], w[inner, cols]) {
  y = einsum(x, w -> [rows, cols])
  return y
}

expect mine on square {
  x: [rows@b, inner]
  y: [rows@b, cols@a]
  wire_bytes: 0
}
"""

# %% [markdown]
# The layout below comes before it. With it the check fails. Change the layout until the check
# passes.
#
# <details><summary>A hint</summary>
# Read the message of the check: it says where <code>x</code> is and where it should be.
# </details>

# %% tags=["exercise"]
layout = "layout mine { rows -> a }"

# %% tags=["check"]
with attempt():
    print("Right!" if check(layout + PROMISE) else "\nNot yet.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: one rule more, and `rows` over the other axis.
layout = "layout mine { rows -> b, cols -> a }"
assert check(layout + PROMISE)

# %% [markdown]
# That is all there is to a layout: names on one side, axes on the other. In notebook 2 the summed
# dim is split as well, and something has to be sent.
