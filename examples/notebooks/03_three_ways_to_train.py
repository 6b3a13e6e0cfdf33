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
# # 3. Three ways to train, one program
#
# Data parallelism, tensor parallelism, fully sharded parallelism: usually three libraries. Here
# they are three layouts of the same program. You will see where the famous all_reduce of the
# gradients comes from (nobody puts it there), and get ZeRO's memory table out of four rules.
# About 20 minutes, after notebook 2.

# %%
import numpy as np
from course import attempt
from figures import Plot

import meshdsl as md

four = md.mesh(x=4)
batch, d, f = md.dims(batch=64, d=256, f=1024)

# %% [markdown]
# ## A gradient is a program too
#
# The gradient of `y = einsum(x, w -> [batch, d])` by `w` is again an einsum: of `x` and the
# gradient of `y`, over what is left, `batch`. So a backward pass is placed, reduced and counted
# like any other computation. `md.grad` writes it.


# %%
def mlp_gradients(batch):
    """Two layers, and the gradients of a loss by both weights."""

    @md.program
    def mlp(x: md.Tensor[batch, d]):
        w1 = md.param([d, f])
        w2 = md.param([f, d])
        h = md.relu(md.einsum(x, w1, out=[batch, f]))
        y = md.einsum(h, w2, out=[batch, d])
        d1, d2 = md.grad(md.mean(y**2), w1, w2)
        return d1, d2

    return mlp


mlp = mlp_gradients(batch)
data = mlp.compile(four, {"batch": "x"})
data.explain()

# %% [markdown]
# Look at what is sent, and open a line with ⇒ to read why. The gradient of a weight sums over
# `batch`, and the layout splits `batch`. That is case 3 of notebook 2: each device has a partial
# sum. The program returns the gradient, so the partial sums are added up: an all_reduce. There is
# nothing special about data parallelism. It is what `batch -> x` means.
#
# The other two, side by side with it:

# %%
tensor = {"f": "x"}
fully_sharded = ["batch -> x", "params: d -> x", "grads: d -> x"]
data.compare(tensor, fully_sharded)

# %% [markdown]
# * **Tensor parallelism** (`f -> x`; Megatron-LM, Shoeybi et al., 2019): each device has some of
#   the hidden units, of all samples. Weights and their gradients are never sent. The *activation*
#   `y` is partial, since it sums over `f`.
# * **Fully sharded** (`params: d -> x`; ZeRO, Rajbhandari et al., 2020; FSDP, Zhao et al., 2023):
#   computed as in data parallelism, but each device *keeps* only a part of each weight, and
#   fetches the rest when it is needed. `params:`, `grads:` and `state:` narrow a rule to where
#   parameters, gradients and the optimizer's numbers are stored.
#
# Which block of `w1` does device 0 store? Under data parallelism all of it. Tensor parallelism
# splits it by columns, for storage and computing. Fully sharded parallelism splits it here by rows,
# for storage only:

# %%
mlp.compile(four, tensor).tensor("w1")

# %%
mlp.compile(four, fully_sharded).tensor("w1")

# %% [markdown]
# The product of notebook 1, OneFlow's example, has the first two of these splits. Only data
# parallelism all_reduces the gradient of `w`:

# %%
rows, inner, cols = md.dims(rows=4, inner=5, cols=8)


@md.program
def matmul(x: md.Tensor[rows, inner], dy: md.Tensor[rows, cols]):
    w = md.param([inner, cols])
    y = md.einsum(x, w, out=[rows, cols])
    dw = md.grad(md.sum(y * dy), w)
    return y, dw


for dim in ("rows", "cols"):
    plan = matmul.compile({"device": 2}, {dim: "device"})
    print(f"{dim} split: y {plan.tensor('y').local_shape}, sent {plan.cost().by_kind}")

# %% [markdown]
# And all three layouts of the MLP compute the same gradients:

# %%
inputs = data.sample()
reference = data.reference(**inputs)
for layout in ({"batch": "x"}, tensor, fully_sharded):
    out = mlp.compile(four, layout)(**inputs)
    close = all(np.allclose(out[n], reference[n], rtol=1e-4, atol=1e-8) for n in out.keys())
    print(f"{layout!s:52} {close}")

# %% [markdown]
# ## Which sends least?
#
# Data parallelism sends gradients of weights, tensor parallelism activations. So it depends on the
# batch:

# %%
layouts = {
    "data parallel": ["batch -> x"],
    "tensor parallel": ["f -> x"],
    "fully sharded": ["batch -> x", "params: d -> x", "grads: d -> x"],
}
curves = {name: {} for name in layouts}
for size in (64, 256, 1024, 4096, 16_384):
    program = mlp_gradients(md.dim("batch", size))
    for name, rules in layouts.items():
        curves[name][size] = program.compile(four, rules).cost().wire_bytes / 1024
Plot("Four devices", curves, x="batch", y="KiB a device sends", log="xy")

# %% [markdown]
# Small batches favour tensor parallelism, large ones data parallelism. Exercise 2 asks where they
# cross. Fully sharded parallelism sends as much as data parallelism here (the curves coincide): the
# all_reduce of a gradient becomes a reduce_scatter, and its other half is an all_gather of the
# weight. In a deeper network the weight is fetched once more for the backward pass, as ZeRO's table
# below shows.
#
# ## Two layers, one formula
#
# The two-layer network is the example of Mesh-TensorFlow's paper. Forward and backward, with the
# gradient of the input, and reduced at once, each device all_reduces
#
# > 2 · ([batch split] · i · h + [h split] · batch · i + [i split] · batch · h) numbers,
#
# where batch, i and h are sizes on one device. Does the compiler agree, on three meshes? The last
# column is what a device stores.

# %%
b, i, h = md.dims(b=64, i=32, h=128)


@md.program
def two_layers(x: md.Tensor[b, i], dy: md.Tensor[b, i]):
    w = md.param([i, h])
    v = md.param([h, i])
    a = md.relu(md.einsum(x, w, out=[b, h]))
    y = md.einsum(a, v, out=[b, i])
    dx, dw, dv = md.grad(md.sum(y * dy), x, w, v)
    return y, dx, dw, dv


cases = {
    "all:4": (None, "b:all", "h:all", "i:all"),
    "r:2,c:4": ("b:r,h:c", "i:r,h:c", "b:r,i:c"),
    "x:2,y:4,z:2": ("b:x,h:y,i:z",),
}
for mesh, rules in cases.items():
    for layout in rules:
        plan = two_layers.compile(mesh, layout, reduce="immediate")
        reduced = sum(c["payload_bytes"] // 4 for c in plan.explain().json["collectives"])
        held = sum(np.prod(plan.tensor(n).local_shape) for n in ("x", "w", "a"))
        (nb, ni), (_, nh) = plan.tensor("x").local_shape, plan.tensor("w").local_shape
        formula = 2 * ((nb < 64) * ni * nh + (nh < 128) * nb * ni + (ni < 32) * nb * nh)
        print(f"{layout!s:12} reduced {reduced:6}  formula {formula:6}  x+w+a {held:6}")

# %% [markdown]
# ## Train
#
# `md.minimize` makes a training step of a program: forward pass, gradients, update. `plan.train`
# takes steps. The layout decides how, and not what is learned.

# %%
n_batch, n_in, n_hidden = md.dims(n_batch=64, n_in=8, n_hidden=32)


@md.program
def fit(x: md.Tensor[n_batch, n_in], target: md.Tensor[n_batch]):
    w = md.param([n_in, n_hidden])
    b = md.param([n_hidden], init=md.zeros())
    v = md.param([n_hidden])
    h = md.tanh(md.einsum(x, w, out=[n_batch, n_hidden]) + b)
    loss = md.mean((md.einsum(h, v, out=[n_batch]) - target) ** 2)
    md.minimize(loss, md.adam(lr=0.01))
    return loss


samples = np.random.default_rng(0).standard_normal((64, 8)).astype("f4")
dataset = {"x": samples, "target": np.sin(samples[:, 0]) * samples[:, 1]}

for rules in ("n_batch:x", "n_hidden:x", ["n_batch -> x", "params: n_hidden -> x"]):
    losses = fit.compile(four, rules).train(dataset, steps=100, progress=False).losses
    print(f"{rules!s:41} loss {losses[0]:.3f} … {losses[49]:.3f} … {losses[99]:.3f}")

# %% [markdown]
# ## ZeRO's table
#
# Mixed precision training with Adam holds 16 bytes for every parameter: 2 for it in bf16, 2 for
# its gradient, and 12 of optimizer state, which are a copy in f32 and two moments. Data
# parallelism keeps all of that N times. ZeRO's observation: nobody needs N copies of the state,
# since each device could update a part of the parameters. Then likewise gradients and parameters.
#
# Here are 7.5 billion parameters on 64 devices, the paper's example (7.516, scaled in the table).
# Nothing of this runs; a plan knows its memory.

# %%
tokens, model, hidden, layers = md.dims(tokens=4096, model=4096, hidden=16384, layers=56)


@md.program
def stack(x: md.Tensor[tokens, model], target: md.Tensor[tokens, model]):
    def block(x):
        w1 = md.param([model, hidden])
        w2 = md.param([hidden, model])
        h = md.relu(md.einsum(x, w1, out=[tokens, hidden]))
        return x + md.einsum(h, w2, out=[tokens, model])

    y = md.repeat(layers, block, x)
    loss = md.mean((y - target) ** 2)
    md.minimize(loss, md.adam(lr=1e-4, compute="bf16"))
    return loss


many = md.mesh(data=64)
zero0 = md.layout(tokens="data")
zero1 = md.layout("state: model -> data", extends=zero0)
zero2 = md.layout("grads: model -> data", extends=zero1)
zero3 = md.layout("params: model -> data", extends=zero2)
kept = md.layout("params: model -> data keep", extends=zero2)
stages = {"data parallel": zero0, "ZeRO 1": zero1, "ZeRO 2": zero2, "ZeRO 3": zero3, "kept": kept}

# %%
parameters = 2 * 4096 * 16384 * 56
all_reduce = 2 * 63 / 64 * (2 * parameters)


def zero_row(layout):
    """GB held for 7.5e9 parameters: of parameters, gradients, state, all; and what is sent."""
    plan = stack.compile(many, layout)
    held = [plan.memory[part] / parameters * 7.5 for part in ("params", "grads", "state")]
    return [*held, sum(held), plan.cost().wire_bytes / all_reduce]


print(f"{'':14}{'params':>8}{'grads':>8}{'state':>8}{'GB':>8}{'sent':>8}")
for name, layout in stages.items():
    print(f"{name:14}" + "".join(f"{x:8.1f}" for x in zero_row(layout)))

# %% [markdown]
# 120, 31.4, 16.6 and 1.9 GB, and sent, in units of the all_reduce of data parallelism, 1, 1, 1
# and 1.5: the table of the paper (Rajbhandari et al., *ZeRO: Memory Optimizations Toward Training
# Trillion Parameter Models*, 2020, figure 1 and section 7). The paper derives it with a page of
# reasoning for each stage. Here a rule moves an all_reduce apart into a reduce_scatter and an
# all_gather, and the bytes follow. The half that ZeRO 3 sends more is the second fetch of the
# parameters, for the backward pass. `keep` spares it, and holds them all meanwhile, as the
# activations and workspace in these bars show:

# %%
bars = {name: stack.compile(many, layout).memory for name, layout in stages.items()}
bars.pop("data parallel").beside(**bars)

# %% [markdown]
# ## Exercise 1: find the misprint
#
# A book on training at scale lists the gradients of `Tmp[B, F] = In[B, D] · W_in[D, F]`. One
# edition has, for the weight, `dW_in = dTmp[B, F] *_B Tmp[B, F]`. Write it with names. What does
# the compiler think? Put it right.


# %% tags=["exercise"]
def weight_gradient(d_tmp, tmp, x):
    return md.einsum(d_tmp, tmp, out=[d, f])


# %% tags=["check"]
@md.program
def backward(d_tmp: md.Tensor[batch, f], tmp: md.Tensor[batch, f], x: md.Tensor[batch, d]):
    dw = weight_gradient(d_tmp, tmp, x)
    return dw


try:
    arrays = backward.compile().sample()
    truth = arrays["x"].T @ arrays["d_tmp"]
    dw = backward.compile()(**arrays).dw
    # Stored as `[f, d]` it is the same gradient: a dim is known by its name.
    dw = dw.T if dw.shape == truth.T.shape else dw
    right = dw.shape == truth.shape and np.allclose(dw, truth, atol=1e-3)
    print("Right!" if right else "Not yet: other numbers.")
except md.ProgramError as error:
    print("Not yet:", error)


# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: the gradient of the weight takes the *input* of the product, which has the dim `d`.
def weight_gradient(d_tmp, tmp, x):
    return md.einsum(x, d_tmp, out=[d, f])


backward.retrace()
arrays = backward.compile().sample()
assert np.allclose(backward.compile()(**arrays).dw, arrays["x"].T @ arrays["d_tmp"], atol=1e-3)

# %% [markdown]
# That is appendix B of part 5 of *How to Scale Your Model*, in the edition we have. With letters
# for sizes the slip is easy to overlook; with names it cannot be written down.
#
# ## Exercise 2: the turning point
#
# For `mlp_gradients` on four devices, data parallelism sends 2·(n−1)/n·(2·d·f) numbers and tensor
# parallelism 2·(n−1)/n·(batch·d). For which batch are they equal? (The figure above shows about
# where.)

# %% tags=["exercise"]
turning_point = 64


# %% tags=["check"]
def both(size):
    """Bytes that data and tensor parallelism send for a batch of this size."""
    plans = (mlp_gradients(md.dim("batch", size)).compile(four, {d: "x"}) for d in ("batch", "f"))
    return [plan.cost().wire_bytes for plan in plans]


with attempt():
    by_batch, by_f = both(int(turning_point))
    right = by_batch == by_f and turning_point == int(turning_point)
    print("Right!" if right else f"Not yet: {by_batch:,.0f} and {by_f:,.0f} bytes.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: 2·d·f = batch·d, so batch = 2·f.
turning_point = 2 * 1024
assert len(set(both(turning_point))) == 1

# %% [markdown]
# ## Exercise 3: only as much as needed
#
# Your GPUs have 80 GB, and you have eight. You want to train the 7.5e9 parameters, leave 20 GB
# for activations, and send no more than data parallelism does. Which of `zero0` to `zero3`?
#
# <details><summary>A hint</summary>
# On eight devices, how much of the 16 bytes does each stage divide by eight?
# </details>

# %% tags=["exercise"]
choice = zero0


# %% tags=["check"]
def fits(layout):
    """GB held on eight devices for 7.5e9 parameters, and times the bytes of data parallelism."""
    plan, base = (stack.compile({"data": 8}, rules) for rules in (layout, zero0))
    held = sum(plan.memory[part] for part in ("params", "grads", "state")) / parameters * 7.5
    return held, plan.cost().wire_bytes / base.cost().wire_bytes


with attempt():
    held, times = fits(choice)
    right = held <= 60 and times < 1.01
    print("Right!" if right else f"Not yet: {held:.1f} GB, {times:.1f} times the bytes.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: ZeRO 1 and ZeRO 2 both do; ZeRO 3 sends more, and plain data parallelism does not fit.
choice = zero2
assert all(fits(z)[0] <= 60 and fits(z)[1] < 1.01 for z in (zero1, zero2))
assert fits(zero3)[1] > 1.4

# %% [markdown]
# ## Exercise 4: how large a batch does data parallelism need?
#
# *How to Scale Your Model*, part 5. In the backward pass a device spends 8·B·D·F/(X·C) seconds on
# an MLP of two D×F weights with B tokens on X chips, and 8·D·F/(W·axes) on the all_reduce of
# their gradients in bf16. TPU v5p: C = 4.59·10¹⁴ FLOP/s, W = 2·9·10¹⁰ bytes/s. From how many
# tokens *per chip* (B/X) on is computing the longer of the two, with one mesh axis? And with
# three?

# %% tags=["exercise"]
tokens_one_axis = 1000
tokens_three_axes = 1000

# %% tags=["check"]
C, W = 4.59e14, 2 * 9e10


def seconds(tokens_per_chip, axes, D=8192, F=28672):
    """Computing, and sending."""
    return 8 * tokens_per_chip * D * F / C, 8 * D * F / (W * axes)


for guess, axes in ((tokens_one_axis, 1), (tokens_three_axes, 3)):
    computing, sending = seconds(guess, axes)
    right = np.isclose(computing, sending, rtol=2e-3)
    print(f"axes: {axes}.", "Right!" if right else f"Not yet: {computing:.1e} and {sending:.1e} s.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: B/X = C/(W·axes), which depends on neither D nor F: 2550 and 850, as published.
tokens_one_axis, tokens_three_axes = C / W, C / W / 3
assert np.isclose(*seconds(tokens_one_axis, 1))
assert np.isclose(*seconds(tokens_three_axes, 3))
assert (round(tokens_one_axis), round(tokens_three_axes)) == (2550, 850)

# %% [markdown]
# The book's part 6 trains LLaMA 3 70B with 4·1024·1024 tokens a step on 8,960 chips. That is 468
# tokens for each chip: fewer than you found. So data or fully sharded parallelism alone would wait
# for the network, and one mixes it with tensor parallelism. That is notebook 4.
