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
# # 2. Four matrix products, and partial sums
#
# A product `a[i, j] · b[j, k]` has three dims. What must devices send each other if one of them is
# split? There are only four cases. One of them leaves every device with a *partial sum*. When to
# add partial sums up is the most useful question of this course. About 20 minutes, after notebook
# 1.

# %%
import numpy as np
from course import attempt, example, sent
from figures import Ring

import meshdsl as md

four = md.mesh(x=4)
i, j, k = md.dims(i=64, j=128, k=256)


@md.program
def product(a: md.Tensor[i, j], b: md.Tensor[j, k]):
    y = md.einsum(a, b, out=[i, k])
    return y


# %% [markdown]
# ## Case 1: the summed dim is whole
#
# Split `i` and each device has its own rows of `a`, all of `b`, and computes its own rows of `y`.
# (Splitting `k` is the mirror image.) Nothing is sent.

# %%
case1 = product.compile(four, {"i": "x"})
sent(case1)
case1.placements

# %% [markdown]
# ## Case 2: the summed dim is split in one operand only
#
# A rule `j -> x` would split both operands, for names know no operands. To have only `a` split,
# narrow the rule to that tensor: `a: j -> x`. A device has 32 of the 128 columns of `a` and
# cannot multiply them with all of `b`. One way out: fetch the other columns. That is an
# *all_gather*.

# %%
case2 = product.compile(four, ["a: j -> x"])
sent(case2)
case2.collectives

# %% [markdown]
# Four devices hold 64·32 numbers of 4 bytes each, 8,192 bytes. Everyone passes on the block that
# came in last, three times: 3·8,192. In general (n−1)·b for n devices that hold b bytes.
#
# There is another way: each device cuts the rows of `b` that go with its columns of `a`, which
# costs nothing. That is case 3.
#
# ## Case 3: the summed dim is split in both
#
# Each device multiplies its columns of `a` with its rows of `b`. The result has the full shape of
# `y`, but it is not `y`: it is a summand of it.

# %%
rng = np.random.default_rng(0)
a = rng.integers(-4, 5, (64, 128)).astype("f4")
b = rng.integers(-4, 5, (128, 256)).astype("f4")

parts = [a[:, 32 * d : 32 * (d + 1)] @ b[32 * d : 32 * (d + 1)] for d in range(4)]
print("shape of a part:", parts[0].shape)
print("a part is y:    ", np.array_equal(parts[0], a @ b))
print("their sum is y: ", np.array_equal(sum(parts), a @ b))

# %% [markdown]
# Such a value is called *partial*. It is a third way for a tensor to lie on an axis, beside
# *split* and *whole*. OneFlow (Yuan et al., 2021) made it a type with a letter of its own, `P`,
# in its S(plit) B(roadcast) P(artial). *How to Scale Your Model* writes `{U_X}` and JAX
# `unreduced={'x'}`.
#
# Adding the parts up so that everyone gets the sum is an *all_reduce*.

# %%
case3 = product.compile(four, {"j": "x"})
sent(case3)
print("equal:", np.array_equal(case3(a=a, b=b).y, a @ b))
case3.collectives

# %% [markdown]
# If each device needs only its own rows of the sum, it can be had for half: a *reduce_scatter*.

# %%
sent(product.compile(four, ["j -> x", "y: i -> x"]))

# %% [markdown]
# ## Case 4: both split, each on a dim of its own, over one axis
#
# `i` and `k` both over `x`: device 0 would compute block (0, 0) of `y`, device 1 block (1, 1),
# and nobody the others. Not a layout; the compiler refuses. *How to Scale Your Model* says:
# gather one of the two first. So take `k` of `y` (or `i`) off the axis.

# %%
try:
    product.compile(four, {"i": "x", "k": "x"})
except md.ProgramError as error:
    print(error)

# %%
for rule in ("y: i -> none", "y: k -> none"):
    print(rule)
    sent(product.compile(four, ["i -> x", "k -> x", rule]))

# %% [markdown]
# The second rule has a surprise. `y` is to be split by `i`, so one would gather `b`, and 3·32,768
# bytes would be sent. The compiler gathers `a`, which is smaller, computes `y` split by `k`, and
# swaps the split of the result (*all_to_all*). It looks for the fewest bytes and not for the
# textbook's move.
#
# | case | split | needs | each device sends |
# |---|---|---|---|
# | 1 | `i` or `k` | nothing | 0 |
# | 2 | `j` of one operand | all_gather of it | (n−1)·b |
# | 3 | `j` of both | all_reduce, or reduce_scatter | 2(n−1)/n·b, or (n−1)/n·b |
# | 4 | `i` and `k` on one axis | not possible; gather one | (n−1)·b |
#
# The four cases are those of *How to Scale Your Model* ([part
# 3](https://jax-ml.github.io/scaling-book/sharding/)). b is what one device holds before.
# `meshdsl rows einsum` prints the legal placements of a product, and `meshdsl rows softmax` those
# of any other operator.
#
# ## Where 2(n−1)/n comes from
#
# If every device sends its part to every other one, it sends (n−1)·b. The ring algorithm (Patarasuk
# and Yuan, 2009; in deep learning since Baidu's and Horovod's allreduce of 2017) cuts the part in n
# chunks and passes chunks round a ring. After n−1 steps each device has the sum of one chunk: that
# is the reduce_scatter. In n−1 more steps the sums go round: that is an all_gather.


# %%
def ring_all_reduce(parts, history=None):
    """Add arrays up along a ring of devices; the sums, and the bytes that each device sent.

    `history` gets the first number of each chunk of each device, after each step.
    """
    n = len(parts)
    chunks = [np.split(part.ravel().copy(), n) for part in parts]
    sent = 0
    for step in range(2 * (n - 1)):
        moving = [(d, (d - step) % n) for d in range(n)]  # who sends, and which chunk
        messages = [chunks[d][c].copy() for d, c in moving]
        sent += messages[0].nbytes
        for (d, c), message in zip(moving, messages, strict=True):
            receiver = chunks[(d + 1) % n]
            receiver[c] = receiver[c] + message if step < n - 1 else message
        if history is not None:
            history.append([[int(chunk[0]) for chunk in device] for device in chunks])
    return [np.concatenate(c).reshape(parts[0].shape) for c in chunks], sent


sums, bytes_sent = ring_all_reduce(parts)
print(all(np.array_equal(s, a @ b) for s in sums), f"{bytes_sent:,} bytes")

# %% [markdown]
# These are the 98,304 bytes that the plan announced. With parts that are all ones, each number says
# how many devices have been added up in it:

# %%
history = [np.ones((4, 4), int).tolist()]
ring_all_reduce([np.ones(4)] * 4, history)
Ring(history)

# %% [markdown]
# In each step a device gets one chunk from the device before it in the ring: it is framed. No
# algorithm sends fewer bytes (Patarasuk and Yuan prove it), and 2(n−1)/n hardly grows with n: that
# is why data parallelism with thousands of devices is possible at all. Notebook 9 turns bytes into
# seconds.
#
# ## When to add up: U·V·W
#
# Now two products in a row, and the sum inside the first is split:

# %%
m, c = md.dims(m=256, c=128)


def chain(columns, results):
    """U·V·W: 256×128 times 128×columns times columns×results."""
    wide, narrow = md.dims(wide=columns, narrow=results)

    @md.program
    def uvw(u: md.Tensor[m, c], v: md.Tensor[c, wide], w: md.Tensor[wide, narrow]):
        t = md.einsum(u, v, out=[m, wide])
        y = md.einsum(t, w, out=[m, narrow])
        return y

    return uvw


for policy in ("immediate", "deferred", "optimal"):
    print(policy)
    sent(chain(1024, 16).compile(four, {"c": "x"}, reduce=policy))

# %% [markdown]
# `t` is partial:

# %%
chain(1024, 16).compile(four, {"c": "x"}, reduce="deferred").tensor("t")

# %% [markdown]
# Since (t₁ + t₂)·W = t₁·W + t₂·W, the parts may be multiplied first and added up later. Over all
# n devices, adding up `t` sends 2(n−1)·m·wide numbers, and adding up `y` 2(n−1)·m·narrow. Here
# that is a factor of 64. This is what others send:
#
# | system | bytes per device |
# |---|---|
# | JAX 0.10.2, on a CPU and compiled for a TPU | 1,572,864 |
# | torch 2.13 DTensor, if every step is written by hand | 24,576 |
# | meshdsl, `optimal` | 24,576 |
#
# (Measured once, at these sizes; `benchmarks/bytes.py` keeps the record.) GShard adds up at once,
# and so does JAX, unless `unreduced` is written. Mesh-TensorFlow waits only where partial sums are
# added to each other. OneFlow's paper gives this example as the reason for `P`.
#
# But waiting is no law. Swap the sizes, and adding up at once is the better choice:

# %%
for policy in ("immediate", "deferred", "optimal"):
    plan = chain(64, 256).compile(four, {"c": "x"}, reduce=policy)
    print(f"{policy:10} {plan.cost().wire_bytes:>9,}")

# %% [markdown]
# That is why `optimal`, the default, makes a rule of neither: it states the choice as a small
# integer program over the whole computation and has it solved exactly. Two more examples where it
# pays, from `examples/sbp`: a sum of two products, A·B + C·D, is reduced once and not twice, and
# of sum(A·B) only one number per device is sent.

# %%
for name, layout in (("sums", "contractions"), ("total", "contraction")):
    program = md.load(example(f"sbp/{name}.mdsl"))
    for policy in ("immediate", "optimal"):
        cost = program.compile("four", layout, reduce=policy).cost()
        print(f"{name:6} {policy:10} {cost.wire_bytes:>8,} bytes, collectives: {cost.collectives}")

# %% [markdown]
# ## Exercise 1: predict before you run
#
# `product` on *eight* devices with `j` split. How many bytes does each device send? (`y` has
# 64×256 numbers of 4 bytes.)

# %% tags=["exercise"]
prediction = 98_304

# %% tags=["check"]
eight = product.compile(md.mesh(x=8), {"j": "x"}).cost().wire_bytes
hint = "Not yet. What is n in 2(n−1)/n, and how many bytes has a part?"
print("Right!" if prediction == eight else hint)

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 2(n−1)/n·b with n = 8. Twice the devices, and only a sixth more.
prediction = 2 * 7 * (64 * 256 * 4) // 8
assert prediction == eight == 114_688

# %% [markdown]
# ## Exercise 2: who lets a partial value through?
#
# A function f may be applied to the parts if the parts of the result add up to the right thing:
# f(p₁ + p₂) = f(p₁) + f(p₂). Put into the set the names of those below for which this holds.
#
# <details><summary>A hint</summary>
# What does linear mean? Try p₁ = 1 and p₂ = −1.
# </details>

# %% tags=["exercise"]
passes = {"negate", "relu"}

# %% tags=["check"]
functions = {
    "negate": lambda p: -p,
    "double": lambda p: 2 * p,
    "relu": lambda p: np.maximum(p, 0),
    "square": lambda p: p * p,
    "transpose": lambda p: p.T,
    "add one": lambda p: p + 1,
    "sum of rows": lambda p: p.sum(axis=1),
    "maximum of rows": lambda p: p.max(axis=1),
}
holds = {
    name
    for name, f in functions.items()
    if np.array_equal(f(parts[0] + parts[1]), f(parts[0]) + f(parts[1]))
}
wrong = set(passes) ^ holds
few = f"Not yet: {len(wrong)} of the {len(functions)} are where they should not be."
print("Right!" if not wrong else few)

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: exactly the linear ones. (Adding one works too, if only one of the devices adds it.)
passes = {"negate", "double", "transpose", "sum of rows"}
assert passes == holds

# %% [markdown]
# This is not a matter of taste, so the compiler does not leave it to you: each operator states in
# which operands it is linear, and the tests prove that statement by running it on parts.
#
# ## Exercise 3: the turning point
#
# In `chain(64, results)`: up to which `results` (a multiple of 4) does waiting send fewer bytes
# than adding up at once?

# %% tags=["exercise"]
largest = 16


# %% tags=["check"]
def waiting_pays(results):
    """Whether waiting sends fewer bytes than adding up at once."""
    uvw, policies = chain(64, int(results)), ("deferred", "immediate")
    costs = [uvw.compile(four, {"c": "x"}, reduce=p).cost().wire_bytes for p in policies]
    return costs[0] < costs[1]


with attempt():
    if largest < 4 or largest % 4:
        print("Not yet: a multiple of 4 is asked for.")
    else:
        for size in (largest, largest + 4):
            print(f"at {size:2} waiting {'pays' if waiting_pays(size) else 'does not pay'}")
        print("Right!" if waiting_pays(largest) and not waiting_pays(largest + 4) else "Not yet.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 2(n−1)·m·results < 2(n−1)·m·64, so less than 64, and the next multiple of 4 is 60.
largest = 60
assert waiting_pays(60)
assert not waiting_pays(64)

# %% [markdown]
# ## Exercise 4: gather the weight, or add up the output?
#
# *How to Scale Your Model*, part 3, question 4. `A[B, D] · W[D_X, F]`, bf16, on TPU v5p: C =
# 4.59·10¹⁴ FLOP/s, W = 2·9·10¹⁰ bytes/s. Either gather the weight and compute 2·B·D·F FLOPs on
# every device, which takes 2BDF/C seconds (the computation is the slower part). Or multiply what
# is there, and all_reduce the output, which takes 4BF/W seconds (the sending is). From which D on
# is the second better?

# %% tags=["exercise"]
least_d = 2550

# %% tags=["check"]
C, W = 4.59e14, 2 * 9e10
B, F = 4096, 32768
gathering, reducing = 2 * B * least_d * F / C, 4 * B * F / W
right = np.isclose(gathering, reducing, rtol=1e-3)
print("Right!" if right else f"Not yet: {gathering:.2e} s and {reducing:.2e} s.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 4BF/W = 2BDF/C, so D = 2C/W = 5100, as published.
least_d = 2 * C / W
gathering, reducing = 2 * B * least_d * F / C, 4 * B * F / W
assert np.isclose(gathering, reducing)
assert round(least_d) == 5100

# %% [markdown]
# Footnote 1 is about a slip in the published answer. Question 9 of the same part compares *bytes*
# only: the product in parts and a reduce_scatter of the result `[N, K]`, against gathering the
# operand `[N, M]` first. Our case 2 and the reduce_scatter of case 3 are these two, with M = 128
# and K = 256:

# %%
gather_first = product.compile(four, ["a: j -> x"]).cost().wire_bytes
scatter_after = product.compile(four, ["j -> x", "y: i -> x"]).cost().wire_bytes
print(gather_first / scatter_after, 128 / 256)

# %% [markdown]
# The ratio is M/K, as the book says.
#
# ## Exercise 5: an all_gather on a ring
#
# Device `d` of `n` has block `d`. In each of n − 1 steps, 0 to n − 2, every device sends one block
# that it has to the next device, `(d + 1) % n`. In the end every device has all blocks. Which block
# does device `d` send in a step?
#
# <details><summary>A hint</summary>
# In step 0 a device has its own block only. In step 1 it can pass on what came in.
# </details>


# %% tags=["exercise"]
def block_to_send(d, step, n):
    return d


# %% tags=["check"]
def gathers(choose, n):
    """What is wrong with a choice of blocks on n devices; nothing, if all get all."""
    has = [{d} for d in range(n)]
    for step in range(n - 1):
        blocks = [choose(d, step, n) for d in range(n)]
        for d, block in enumerate(blocks):
            if block not in has[d]:
                return f"in step {step} device {d} of {n} does not have block {block}"
        for d, block in enumerate(blocks):
            has[(d + 1) % n].add(block)
    least = min(map(len, has))
    return f"a device has {least} of {n} blocks in the end" if least < n else ""


with attempt():
    faults = [fault for n in (2, 4, 7) if (fault := gathers(block_to_send, n))]
    print(f"Not yet: {faults[0]}." if faults else "Right!")


# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: first its own block, then always the one that came in last, from the device before it.
def block_to_send(d, step, n):
    return (d - step) % n


assert not any(gathers(block_to_send, n) for n in (2, 4, 7))

# %% [markdown]
# `ring_all_reduce` above does the same in its second half, beginning with the chunk that a device
# has added up. Next: notebook 3, where the parts are gradients.
#
# ## Footnotes
#
# ¹ On the way to the answer to question 4, one edition of the book writes the bytes of the gather
# as 2BD. It is the weight that is gathered, so they are 2DF. The result does not depend on it.
