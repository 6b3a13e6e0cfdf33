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
# # 9. Seconds and hybrids
#
# Until now we counted bytes. A user waits for seconds. This notebook turns FLOPs and bytes into
# seconds with two small models, the roofline and α–β. Then it asks which kind of parallelism
# belongs on which link of a cluster, and ends with a trillion parameters on 3,072 GPUs. About 25
# minutes, after notebooks 4 and 6. No GPU is needed: a cluster is a file of measured numbers.

# %%
import math
from functools import cache
from itertools import permutations

from course import HERE, attempt, command, example
from figures import Plot

import meshdsl as md

# %% [markdown]
# ## The roofline of one device
#
# To do an operation, a device moves operands from its memory to its arithmetic units, and results
# back. Both happen at the same time, so the slower one counts. An H100 does at most C = 989·10¹²
# FLOPs a second in bf16, and moves at most M = 3.35·10¹² bytes a second (its data sheet).
#
# What decides is the *intensity* of an operation: its FLOPs for each byte that it moves. Below C/M
# = 295 FLOPs for each byte, memory is the limit; above it, arithmetic. The curve of what can be
# reached looks like a roof (Williams, Waterman and Patterson, 2009).
#
# Here is one product, `x[rows, 8192] · w[8192, 8192]`, for several numbers of rows. Each dot is a
# simulated time, which also includes what real products fall short of the data sheet, and the 7 µs
# that it takes to start a kernel.

# %% tags=["used"]
C, M = 989e12, 3.35e12
D = 8192


def work(rows):
    """The FLOPs of the product, and the bytes that it moves: two for each number."""
    return 2 * rows * D * D, 2 * (rows * D + D * D + rows * D)


@cache
def product_seconds(rows):
    """The simulated time of the product on one H100."""
    b, d, f = md.dims(b=rows, d=D, f=D)

    @md.program
    def product(x: md.bf16[b, d], w: md.bf16[d, f]):
        y = md.einsum(x, w, out=[b, f])
        return y

    return product.compile().simulate("h100").seconds


def intensity(rows):
    flops, moved = work(rows)
    return flops / moved


# %%
dots = {
    f"{rows:,} rows": (intensity(rows), work(rows)[0] / product_seconds(rows) / 1e12)
    for rows in (1, 8, 64, 256, 4096)
}
roof = {x: min(C, M * x) / 1e12 for x in (0.5, C / M, 4000)}
labels = {"x": "FLOPs for each byte", "y": "TFLOP/s"}
Plot("The roof of an H100", {"C or M · intensity": roof}, dots, log="xy", **labels)

# %% [markdown]
# One row is a product of a vector with a matrix. It reads 134 MB to do 134 MFLOP, so it uses two
# thousandths of what the device can do. That is why text is generated for many users at once. In
# training a batch has thousands of rows, and products are bound by arithmetic.
#
# ## Sending: α and β
#
# A message of b bytes takes about α + b/β seconds: α is the *latency*, which a message of any size
# takes, and β the *bandwidth*. A collective over n devices is several messages, one after the
# other. An all_gather on a ring takes (n − 1)·(α + b/β), where b is the bytes of one device
# before. An all_reduce takes 2·(n − 1)·(α + b/(n·β)): twice as many messages of an nth.
#
# Here is an all_reduce on eight H100 in one machine, and on 64 in eight machines. Inside a machine
# the measured β is 359 GB/s. Between machines it is 48 GB/s.


# %%
def all_reduce_seconds(size, devices):
    """The time to add up `size` bytes on so many H100."""
    n = md.dim("n", size // 2)

    @md.program
    def add_up(parts: md.bf16[n]):
        total = md.name("total", parts)
        return total

    added = {"parts": "P", "total": "B"}
    plan = add_up.compile({"x": devices}, sbp=added, cluster="h100", reduce="deferred")
    return sum(c["seconds"] for c in plan.explain().json["collectives"])


sizes = [2**power for power in range(10, 32, 3)]
curves = {
    f"{devices} devices": {size: 1e6 * all_reduce_seconds(size, devices) for size in sizes}
    for devices in (8, 64)
}
Plot("An all_reduce", curves, x="bytes on each device", y="µs", log="xy")

# %% [markdown]
# On the left the curve is flat: small messages take the latency, whatever their size. So a
# thousand small all_reduces are slow, and frameworks put gradients into *buckets*. On the right
# the bandwidth counts, and eight machines take twice as long as one: each GPU has a part of the
# sum, after the reduce_scatter inside, and only that part leaves the machine.
#
# ## Which axis on which link
#
# A mesh is numbered row by row. The devices of its last axis are neighbours, so the last axis gets
# the fastest links. Take 64 H100, eight for each machine, and eight layers of an MLP that are
# trained with fully sharded data parallelism on one axis and tensor parallelism on the other.
# First with tensor parallelism inside the machines:


# %% tags=["used"]
def network(sequences, layers=8):
    """A stack of MLPs of LLaMA 3 70B's sizes that is trained on so many sequences of 2,048."""
    batch, seq, depth = md.dims(batch=sequences, seq=2048, depth=layers)
    model, hidden = md.dims(model=8192, hidden=28_672)

    @md.program
    def stack(x: md.Tensor[batch, seq, model], target: md.Tensor[batch, seq, model]):
        def block(x):
            w1 = md.param([model, hidden])
            w2 = md.param([hidden, model])
            h = md.relu(md.einsum(x, w1, out=[batch, seq, hidden]))
            return x + md.einsum(h, w2, out=[batch, seq, model])

        y = md.repeat(depth, block, x)
        loss = md.mean((y - target) ** 2)
        md.minimize(loss, md.adam(lr=1e-3, compute="bf16"))
        return loss

    return stack


# %%
split = ["params: model -> data", "grads: model -> data", "state: model -> data"]
sharded = ["batch -> data", *split]
hybrid = ["hidden -> tp", *sharded]
inside = network(128).compile({"data": 8, "tp": 8}, hybrid).simulate("h100")
inside

# %% [markdown]
# The upper row is what the device computes, the others are what it sends over each axis. A
# collective below a computation costs nothing. One below a gap is *exposed*: the device waits. The
# grey boxes stand for five layers more.
#
# Half of what tensor parallelism sends is exposed. In the forward pass the next product needs the
# result. In the backward pass the gradients of the weights can be computed meanwhile. Nearly all
# that fully sharded data parallelism sends is hidden. The parameters of a layer are fetched, and
# its gradients added up, while other layers are computed. Now the same with the axes exchanged:

# %%
outside = network(128).compile({"tp": 8, "data": 8}, hybrid).simulate("h100")
outside

# %%
for name, run in {"tensor parallel inside": inside, "data parallel inside": outside}.items():
    waits = ", ".join(f"{axis} {1e3 * seconds:.0f} ms" for axis, seconds in run.exposed.items())
    print(f"{name:22} {1e3 * run.seconds:4.0f} ms a step, exposed: {waits}")

# %% [markdown]
# More than twice the time, with the same program, layout and number of bytes. Rules of thumb
# follow from it:
#
# | axis | sends | can it wait? | link |
# |---|---|---|---|
# | tensor | activations, several times a layer | no | the fastest: inside a machine |
# | data | gradients and parameters of a layer | while other layers are computed | the network |
# | pipeline | activations, once a micro-batch | a little, and they are few | the network |
# | experts | tokens, twice a layer | no | as fast as possible |
#
# ## Scaling curves
#
# *Strong scaling* gives the same batch to more and more devices. Ideally twice the devices take
# half the time. Below, 128 sequences are trained by fully sharded data parallelism, and by the
# hybrid with eight-way tensor parallelism. The curves are the model FLOPs utilisation (MFU), the
# part of all devices' peak that the step needs.

# %%
counts = (8, 16, 32, 64, 128, 256, 512)


def utilisation(mesh, layout):
    """The MFU of a step of 128 sequences, in percent."""
    return 100 * network(128).compile(mesh, layout).simulate("h100").mfu


data_only = {n: utilisation({"data": n}, sharded) for n in counts if n <= 128}
mixed = {n: utilisation({"data": n // 8, "tp": 8}, hybrid) for n in counts}
curves = {"fully sharded": data_only, "with 8 × tensor": mixed}
Plot("128 sequences on more and more H100", curves, x="devices", y="MFU in %", log="x")

# %% [markdown]
# Fully sharded parallelism is better as long as a device has enough to compute. It sends the same
# parameters however small its part of the batch is. At 128 devices each has one sequence. Then
# there is nothing left to split, and only a hybrid goes on.
#
# ## 6 × 8 × 64
#
# The best known hybrid trained a model of 10¹² parameters on 3,072 A100 (Narayanan et al., 2021,
# table 1): 6 pipelines side by side, 8 devices for each product, 64 stages. The sizes follow from
# what we know:
#
# - **Tensor 8**: a machine has eight GPUs. Wider would leave it.
# - **Pipeline 64**: 16 bytes for each of 10¹² parameters are 16 TB. On 8 × 64 devices they are
#   31.5 GB on each, of 80 GB. That leaves room for activations.
# - **Data 6**: what remains, 3,072 / (8 · 64).
#
# Here is the search over all divisions of 3,072 devices, with its best plans. Nothing was fitted
# to the paper's answer.

# %% tags=["used"]
sized = ["--devices", "3072", "--cluster", "a100-dgx"]
divisions = command("search", "--graph", example("search/gpt_1t.json"), *sized)["plans"]
for plan in divisions[:5]:
    ways = f"tensor {plan['tensor']:2} pipeline {plan['pipeline']:3} data {plan['data']}"
    how = f"{plan['micro']} sequences a micro-batch, {plan['chunks']} chunks"
    print(f"{ways}  {how}: {plan['seconds']:.0f} s, {plan['memory'] / 1e9:.0f} GB")

# %%
fastest = {}
for plan in divisions:  # the fastest comes first
    name = f"{plan['data']} × {plan['tensor']} × {plan['pipeline']}"
    fastest.setdefault(name, (plan["seconds"], plan["memory"] / 1e9))
title = "data × tensor × pipeline on 3,072 A100"
Plot(title, {}, fastest, x="seconds a step", y="GB on a device")

# %% [markdown]
# And here is the paper's plan, written as a program of 50 lines and simulated. The device's 512
# micro-batches in 128 layers are too many to draw, so this is the account of the step in numbers.

# %%
gpt = md.load(example("large/gpt_3072.mdsl"))
step = gpt.compile("all", "staged", dtype="bf16").simulate("a100-dgx")
idle = step.seconds - step.compute - sum(step.exposed.values())
for name, seconds in {"computing": step.compute, "idle": idle, **step.exposed}.items():
    print(f"{name:12} {seconds:6.2f} s  {seconds / step.seconds:6.1%}")
print(f"{'a step':12} {step.seconds:6.2f} s, {step.peak[0] / 1e9:.1f} GB at most")

# The paper's count of FLOPs (its equation 3), and its 163 TFLOP/s for each GPU
layers, h, seq, vocab, batch = 128, 25_600, 2048, 51_200, 3072
shares = 1 + seq / (6 * h) + vocab / (16 * layers * h)
flops = 96 * batch * seq * layers * h**2 * shares
print(f"measured: {flops / (163e12 * 3072):.0f} s")

# %% [markdown]
# The simulation is ten percent too fast. It knows nothing of data loading, stragglers and
# fragmented memory.
#
# ## Exercise 1: under the roof
#
# For the product `x[rows, 8192] · w[8192, 8192]` above, with C and M of the data sheet: from how
# many rows on does arithmetic take at least as long as memory? (All three matrices are moved.)

# %% tags=["exercise"]
rows_needed = 295


# %% tags=["check"]
def is_the_ridge(rows):
    """Whether arithmetic and memory take equally long for a number of rows, to one row."""

    def ratio(rows):
        flops, moved = work(rows)
        return (moved / M) / (flops / C)

    if rows > 1 and ratio(rows - 1) > 1 >= ratio(rows + 1):
        return "Right!"
    return f"Not yet: for so many rows memory takes {ratio(max(rows, 1)):.3f} times as long."


with attempt():
    print(is_the_ridge(rows_needed))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 2·r·D²/C = 2·(2·r·D + D²)/M. For C/M = 295 alone the bytes of x and y are left out.
rows_needed = math.ceil((C / M) / (1 - 2 * (C / M) / D))
assert rows_needed == 319
assert is_the_ridge(rows_needed) == "Right!"

# %% [markdown]
# ## Exercise 2: three collectives
#
# *How to Scale Your Model* (Austin et al., 2025), [part
# 3](https://jax-ml.github.io/scaling-book/sharding/), question 2. An array of B = 1024, D = 4096
# in bf16 is split `[B_X, D_Y]` on 4×4×4 TPU v4p. How many microseconds take an all_gather over X,
# an all_gather over X and Y, and an all_reduce over Z (of an array that is partial there)? The
# book's rule: the bytes of the result on one device, over W = 9·10¹⁰ bytes/s for each axis that is
# used. An all_reduce takes twice that.¹

# %% tags=["exercise"]
gather_x, gather_xy, reduce_z = 100, 100, 100

# %% tags=["check"]
SBP = {  # Y splits the first dim in the second row, so that one collective gathers both
    "all_gather over X": ("S(0), S(1), B", "B, S(1), B"),
    "all_gather over X and Y": ("S(0), S(0), B", "B, B, B"),
    "all_reduce over Z": ("S(0), S(1), P", "S(0), S(1), B"),
}


@cache
def microseconds(name):
    """The time of one of them on the cluster of the file `tpu_v4p.toml`."""
    B, D = md.dims(B=1024, D=4096)

    @md.program
    def move(t: md.bf16[B, D]):
        u = md.name("u", t)
        return u

    mesh, (before, after) = md.mesh(X=4, Y=4, Z=4), SBP[name]
    plan = move.compile(mesh, sbp={"t": before, "u": after}, cluster=tpu, reduce="deferred")
    return 1e6 * sum(c["seconds"] for c in plan.explain().json["collectives"])


tpu = str(HERE / "tpu_v4p.toml")
for name, guess in zip(SBP, (gather_x, gather_xy, reduce_z), strict=True):
    with attempt():
        truth = microseconds(name)
        hint = "Which block of the array does a device have before, and which after?"
        if 1e-7 < guess / truth < 0.01:
            hint = "The answer is asked for in microseconds."
        right = math.isclose(guess, truth, rel_tol=0.03)
        print(f"{name}: {'Right!' if right else f'Not yet. {hint}'}")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: the results are B·D/4, B·D and B·D/16 numbers of two bytes. Over two axes, two links.
link, array = 9e10, 2 * 1024 * 4096
gather_x = 1e6 * array / 4 / link
gather_xy = 1e6 * array / (2 * link)
reduce_z = 1e6 * 2 * array / 16 / link
for name, time in zip(SBP, (gather_x, gather_xy, reduce_z), strict=True):
    assert math.isclose(time, microseconds(name), rel_tol=0.01)
assert [round(t, 1) for t in (gather_x, gather_xy, reduce_z)] == [23.3, 46.6, 11.7]

# %% [markdown]
# ## Exercise 3: how far does one kind of parallelism go?
#
# The same book, parts 5 and 6. LLaMA 3 70B (F = 28,672) trains on 4·1024·1024 tokens a step, on
# TPU v5p: C = 4.59·10¹⁴ FLOP/s, and W = 1.8·10¹¹ bytes/s for each axis of the torus. Of an MLP
# with weights D×F, a chip computes and sends in the forward pass, in seconds,
#
# - fully sharded on X chips over three axes: 4·B·D·F/(X·C) and 4·D·F/(3·W),
# - tensor parallel on Y chips over one axis: 4·B·D·F/(Y·C) and 4·B·D/W.
#
# How many chips can each of them use before sending takes longer than computing?

# %% tags=["exercise"]
most_x = 8960
most_y = 8

# %% tags=["check"]
C_v5p, W, B, F = 4.59e14, 1.8e11, 4 * 1024 * 1024, 28_672


def of_sharded(chips):
    """The time of sending over that of computing, fully sharded."""
    return (4 * D * F / (3 * W)) / (4 * B * D * F / (chips * C_v5p))


def of_tensor(chips):
    """The same, tensor parallel."""
    return (4 * B * D / W) / (4 * B * D * F / (chips * C_v5p))


for name, ratio, guess in (("X", of_sharded, most_x), ("Y", of_tensor, most_y)):
    with attempt():
        right = guess % 1 == 0 and ratio(guess) <= 1 < ratio(guess + 1)
        said = f"for {guess:,} chips sending takes {ratio(guess):.4f} of computing"
        said += ", but one chip more can be used" if ratio(guess) <= 1 else ""
        said = "chips are counted in whole numbers" if guess % 1 else said
        print(f"{name}: {'Right!' if right else f'Not yet: {said}.'}")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: X = 3·B·W/C and Y = F·W/C, where C/W = 2550 on one axis and 850 on three.
most_x = int(3 * B * W / C_v5p)
most_y = int(F * W / C_v5p)
assert (most_x, most_y) == (4934, 11)
assert of_sharded(most_x) <= 1 < of_sharded(most_x + 1)
assert of_tensor(most_y) <= 1 < of_tensor(most_y + 1)

# %% [markdown]
# The book trains on 8,960 chips. Each has 468 tokens, and fully sharded parallelism alone needs
# 850. Exercise 5 of notebook 4 finds the mix, 2048 × 4.
#
# ## Exercise 4: three axes
#
# 256 H100, eight for each machine. The stack from above is trained with a pipeline of 4 stages,
# data parallelism 8 and tensor parallelism 8. Order the axes, outermost first, so that a step is
# fastest.

# %% tags=["used"]
ways = {"pipe": 4, "data": 8, "tp": 8}


@cache
def step_seconds(order):
    """The time of a step of 256 sequences with the axes of the mesh in this order."""
    batch = md.dim("batch", 256)
    schedule = md.scheduled("one_f_one_b", batch, micro=16)
    layout = md.layout(["batch -> data", "hidden -> tp", "depth -> pipe"], schedule=schedule)
    plan = network(256).compile({axis: ways[axis] for axis in order}, layout)
    return plan.simulate("h100").seconds


# %% tags=["exercise"]
order = ["tp", "data", "pipe"]

# %% tags=["check"]
if sorted(order) != sorted(ways):
    print("Not yet: the axes are pipe, data and tp, each once.")
else:
    least = min(map(step_seconds, permutations(ways)))
    ratio = step_seconds(tuple(order)) / least
    print("Right!" if ratio < 1.001 else f"Not yet: {ratio:.2f} times the time of the best.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: tensor parallelism has to be inside. Of the other two, either may be the outermost.
order = ["pipe", "data", "tp"]
assert step_seconds(("pipe", "data", "tp")) == step_seconds(("data", "pipe", "tp"))
assert step_seconds(tuple(order)) == min(map(step_seconds, permutations(ways)))

# %% [markdown]
# ## Exercise 5: the bubble of 6 × 8 × 64
#
# A step has 3,072 sequences. Each of the six pipelines takes its share of them in micro-batches of
# one sequence. Which share of the time are devices idle under 1F1B? And how small can it be with
# the interleaved schedule, where a device has several chunks of layers? (The model has 128 layers.
# The laws are in notebook 6.)

# %% tags=["exercise"]
under_1f1b = 0.5
interleaved = 0.5

# %% tags=["check"]
known = {
    plan["chunks"]: plan["bubble"]
    for plan in divisions
    if (plan["tensor"], plan["pipeline"], plan["micro"]) == (8, 64, 1)
}
for name, guess, chunks in (
    ("1F1B", under_1f1b, min(known)),
    ("interleaved", interleaved, max(known)),
):
    with attempt():
        right = math.isclose(guess, known[chunks], rel_tol=0.005)
        hint = "How many micro-batches has a pipeline, and how many chunks of layers a device?"
        hint = hint if guess < 1 else "A share is less than 1."
        print(f"{name}: {'Right!' if right else f'Not yet. {hint}'}")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 512 micro-batches, 64 stages; 128 layers are at most two chunks of one layer each.
under_1f1b = 63 / (512 + 63)
interleaved = 63 / (2 * 512 + 63)
assert math.isclose(under_1f1b, known[1])
assert math.isclose(interleaved, known[2])
assert (round(under_1f1b, 4), round(interleaved, 4)) == (0.1096, 0.058)

# %% [markdown]
# Next: notebook 10, where the computer chooses the layout.
#
# ## Footnotes
#
# ¹ One edition of the book answers 190 µs to the third question. That is the time for the whole
# array. X and Y split it, so that a device has a sixteenth of it. The book's rule leaves out the
# factor (n − 1)/n and the latency, and so does the file `tpu_v4p.toml`.
