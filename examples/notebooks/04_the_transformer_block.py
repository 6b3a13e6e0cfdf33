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
# # 4. The transformer block: counting bytes
#
# Attention and an MLP, split the way Megatron-LM does it, and then with the residual stream split
# too. You will count what goes over the wire, forward and backward, and hold the counts against
# published formulas. About 20 minutes, after notebook 3.

# %%
from course import example, sent

import meshdsl as md

# %% [markdown]
# ## A transformer, four rules
#
# `examples/transformer.mdsl` is a decoder of four layers (the architecture of Vaswani et al.,
# 2017). It was written with no device in mind. Its layout `megatron` has four rules:
#
# ```
# layout megatron { batch -> data, heads -> tp, hidden -> tp, vocab -> tp }
# ```

# %%
lm = md.load(example("transformer.mdsl"))
plan = lm.compile("square", "megatron")
sent(plan)

# %% [markdown]
# Two all_reduces for each of the four layers, of the stream `x`; one for the embedding; and three
# tiny ones for a softmax and a loss whose vocabulary is split. Where do they come from? Look at
# one half of a layer: each device has some of the heads, so it can do all of attention for them
# alone. The last product sums over `heads`, which is split: case 3 of notebook 2.

# %%
for name in ("attention.q", "attention.wq", "attention.wo", "mlp.w1", "mlp.w2"):
    tensor = plan.tensor(name)
    print(f"{name:13} {', '.join(tensor.dims):28} a device holds {tensor.local_shape}")

# %% [markdown]
# That is Megatron's observation (Shoeybi et al., 2019): split the first weight by columns and the
# second by rows, and one all_reduce at the end does. The paper draws it for the two halves of a
# block; here it follows from `heads -> tp` and `hidden -> tp`.
#
# ## Forward and backward
#
# Now one block, with the gradients of everything for a given gradient `dy` of its output, as in
# the middle of a deep network.

# %%
batch, seq, model, heads, key = md.dims(batch=8, seq=128, model=256, heads=8, key=32)
hidden = md.dim("hidden", 4 * model)
mem = md.dim("mem", like=seq)  # attention has the sequence twice, so it needs two names


def block(x):
    """A pre-norm block without biases: its output and its parameters."""
    g1 = md.param([model], init=md.ones())
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    g2 = md.param([model], init=md.ones())
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    n = md.layer_norm[model](x, g1)
    q = md.einsum(n, wq, out=[batch, heads, seq, key])
    k = md.einsum(n, wk, out=[batch, heads, seq, key])[seq >> mem]
    v = md.einsum(n, wv, out=[batch, heads, seq, key])[seq >> mem]
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])
    r = x + md.einsum(o, wo, out=[batch, seq, model])
    h = md.gelu(md.einsum(md.layer_norm[model](r, g2), w1, out=[batch, seq, hidden]))
    y = r + md.einsum(h, w2, out=[batch, seq, model])
    return y, (g1, wq, wk, wv, wo, g2, w1, w2)


@md.program
def layer(x: md.Tensor[batch, seq, model], dy: md.Tensor[batch, seq, model]):
    y, params = block(x)
    gradients = md.grad(md.sum(y * dy), x, *params)
    return y, *gradients


megatron = md.layout(heads="tp", hidden="tp")
sent(layer.compile({"tp": 4}, megatron))

# %% [markdown]
# Two all_reduces forward and two backward. Each moves a `[batch, seq, model]`, so with the ring's
# 2(t−1)/t it makes 8·b·s·h·(t−1)/t numbers for each layer and device: the formula that is quoted
# for Megatron.

# %%
for t in (2, 4, 8):
    ours = layer.compile({"tp": t}, megatron).cost().wire_bytes / 4  # f32: four bytes a number
    print(f"t = {t}: {ours:>11,.0f} numbers, formula {8 * 8 * 128 * 256 * (t - 1) / t:>11,.0f}")

# %% [markdown]
# ## Two axes
#
# With `batch -> data` beside it, activations are halved on a 2×2 mesh, and the gradients of the
# parameters are added up over `data`, all of them in one go (a *bucket*).

# %%
square = md.mesh(data=2, tp=2)
two_d = md.layout(batch="data", extends=megatron)
sent(layer.compile(square, two_d))

# %% [markdown]
# How do others do on this block? Forward alone, JAX sends 1,048,576 bytes per device. Here, and
# for the whole training step (loss: mean of y²):


# %%
@md.program
def step(x: md.Tensor[batch, seq, model]):
    y, _ = block(x)
    loss = md.mean(y**2)
    md.minimize(loss, md.sgd(lr=1.0))
    return loss


forward = md.load(example("sbp/block.mdsl")).compile("square", "two_d")
print(forward.cost().wire_bytes, "forward")
sent(step.compile(square, two_d))

# %% [markdown]
# | step, measured once with JAX 0.10.2 | bytes per device |
# |---|---|
# | JAX, on a CPU | 4,720,644 |
# | JAX, compiled for a TPU | 3,672,068 |
# | meshdsl | 3,148,292 |
#
# Three all_reduces over `tp`, and not the usual four. Nobody asks for the gradient of `x` here,
# so behind the first norm only the gradient of its scale `g1` is wanted. That is a sum over
# `batch` and `seq` of something that is in parts: the sum can be taken in parts, and 256 numbers
# be added up in place of 131,072. It is the trick of U·V·W again, found by the search, in a place
# where few would look.
#
# ## Sequence parallelism
#
# Between the halves each device holds all of the residual stream, and computes norms and sums on
# all of it, t times over. Korthikanti et al. (2022) split it there by `seq`. An all_reduce is a
# reduce_scatter and then an all_gather (notebook 2), so this sends *nothing more*: the two halves
# just move apart, and what lies between them is split.

# %%
stream = md.layout({f"{name}: seq": "tp" for name in ("x", "r", "dy", "d_x")}, extends=two_d)
sequence = md.layout({"y: seq": "tp"}, extends=stream)
sent(layer.compile(square, sequence))

# %%
memory = [layer.compile(square, layout).memory for layout in (two_d, sequence)]
memory[0].beside(sequence=memory[1])

# %% [markdown]
# A thousand bytes more are sent than under `two_d` (the scales of the norms are added up over
# both axes now), and a sixth less memory is needed. Others were measured without returning `y`,
# whose reduce_scatter then falls away:


# %%
@md.program
def gradients_only(x: md.Tensor[batch, seq, model], dy: md.Tensor[batch, seq, model]):
    y, params = block(x)
    return md.grad(md.sum(y * dy), x, *params)


print(f"{gradients_only.compile(square, stream).cost().wire_bytes:,} bytes sent by each device")

# %% [markdown]
# | | bytes per device |
# |---|---|
# | JAX on a CPU, shardings propagated | 11,284,480 |
# | JAX compiled for a TPU, shardings propagated | 10,755,072 |
# | JAX in explicit mode, every sharding written out | 3,410,944 |
# | meshdsl | 3,410,944 |
#
# Here is the stream. Under `two_d` devices 0 and 1 had copies, and so had 2 and 3:

# %%
layer.compile(square, sequence).tensor("r")

# %% [markdown]
# ## What activations take
#
# Korthikanti et al. count the bytes that one layer keeps for its backward pass, in mixed
# precision and with dropout: s·b·h·(34 + 5·a·s/h), with a heads. Tensor parallelism divides most
# of it, 10 stays; with sequence parallelism everything is divided by t.


# %%
def activations(s, b, h, a, t=1, sequence_parallel=False):
    """Bytes per layer and device."""
    whole = 0 if sequence_parallel or t == 1 else 10
    return s * b * h * (whole + (34 - whole + 5 * a * s / h) / t)


# GPT-2 XL: 48 layers, h = 1600, 25 heads; one sequence of 1024
for t in (1, 5, 25):
    row = [48 * activations(1024, 1, 1600, 25, t, sp) / 1e9 for sp in (False, True)]
    print(f"t = {t:2}: {row[0]:.2f} GB, with sequence parallelism {row[1]:.2f} GB")

# %% [markdown]
# 8.97 GB, as published. Its 1.5·10⁹ parameters take 3 GB in 16 bits.
#
# ## The best mix
#
# Fully sharded parallelism over X sends weights, tensor parallelism over Y activations. With N =
# X·Y chips, which X is best? *How to Scale Your Model* (part 5) answers X = √(B/F · M_X/M_Y · N),
# where M are the mesh axes that each of them may use. For B = 48,000 tokens, F = 32,768, 64
# chips, and two axes for X:


# %%
def gigabytes(tokens, d, f, X, Y):
    """What a device sends over X and Y in the forward pass of an MLP in bf16."""
    tokens, d, f = md.dims(tokens=tokens, d=d, f=f)

    @md.program
    def mlp(x: md.bf16[tokens, d]):
        w1 = md.param([d, f], dtype=md.bf16)
        w2 = md.param([f, d], dtype=md.bf16)
        h = md.relu(md.einsum(x, w1, out=[tokens, f]))
        y = md.einsum(h, w2, out=[tokens, d])
        return y

    rules = ["tokens -> X", "params: d -> X", "f -> Y", "x: d -> Y", "y: d -> Y"]
    by_axis = mlp.compile({"X": X, "Y": Y}, rules).cost().by_axis
    return [by_axis.get(axis, 0) / 1e9 for axis in "XY"]


for X in (1, 2, 4, 8, 16, 32, 64):
    weights, acts = gigabytes(48_000, 8192, 32_768, X, 64 // X)
    time = weights / 2 + acts  # X has twice the links
    print(f"X {X:2} Y {64 // X:2}   {weights:.3f} GB + {acts:.3f} GB   time ∝ {time:.3f}")
print(f"formula: X = {(48_000 / 32_768 * 2 * 64) ** 0.5:.1f}")

# %% [markdown]
# The least is at 16, and the formula says 13.7: the next power of two.¹ And tensor
# parallelism alone? It computes 4BDF/(Y·C) seconds and sends for 4BD/(W·n), so on TPU v5p (C/W =
# 2550) the network is the slower part from Y = n·F/2550 on, here 13 devices for one axis.
#
# ## Exercise 1: how large is LLaMA-2 13B?
#
# L = 40 layers, D = 5120, F = 13,824 (three D×F weights in each layer), 40 heads of 128 (four
# D×heads×128 weights), and a vocabulary of 32,000 (once to embed, once to predict). How many
# parameters?

# %% tags=["exercise"]
llama_13b = 40 * (5120 * 13_824)

# %% tags=["check"]
L, D, F, N, H, V = md.dims(L=40, D=5120, F=13_824, N=40, H=128, V=32_000)


@md.program
def llama(x: md.Tensor[D]):
    layer = [md.param(name, [L, D, F]) for name in ("gate", "up", "down")]
    layer += [md.param(name, [L, D, N, H]) for name in ("wq", "wk", "wv", "wo")]
    ends = [md.param(name, [V, D]) for name in ("embed", "head")]
    return x + sum(md.sum(w) for w in (*layer, *ends))


truth = llama.compile().cost().memory["params"] // 4
# A figure of three digits, as the book's 13.0e9, is right, too.
right = abs(llama_13b - truth) < 0.005 * truth
amount = "few" if llama_13b < truth else "many"
print("Right!" if right else f"Not yet: too {amount}.")

# %% jupyter={"source_hidden": true} tags=["solution"]
llama_13b = 40 * (3 * 5120 * 13_824 + 4 * 5120 * 40 * 128) + 2 * 32_000 * 5120
assert llama_13b == truth
assert f"{llama_13b:.3e}" == "1.302e+10"

# %% [markdown]
# 13.0·10⁹.² In part 6 the book counts LLaMA 3 70B in the same way (80 layers, D =
# 8192, F = 28,672, 64 heads of 128 but only 8 for keys and values, a vocabulary of 128,256),
# rounds the three parts, and adds up 70.4·10⁹. Rounded last it is 70.6:

# %%
attention, vocabulary = 2 * 8192 * (64 + 8) * 128, 2 * 128_256 * 8192
80 * (3 * 8192 * 28_672 + attention) + vocabulary

# %% [markdown]
# ## Exercise 2: what does splitting the summed dim cost?
#
# *How to Scale Your Model*, part 4: `A[B, D] · W[D, F]`, with B over X and D over Y. How many
# FLOPs does one device do for the product, for B=64, D=128, F=256, X=2, Y=4?

# %% tags=["exercise"]
flops = 2 * 64 * 128 * 256

# %% tags=["check"]
B2, D2, F2 = md.dims(B2=64, D2=128, F2=256)


@md.program
def product(a: md.Tensor[B2, D2], w: md.Tensor[D2, F2]):
    c = md.einsum(a, w, out=[B2, F2])
    return c


truth = product.compile({"X": 2, "Y": 4}, {"B2": "X", "D2": "Y"}).cost().flops
amount = "few" if flops < truth else "many"
print("Right!" if flops == truth else f"Not yet: too {amount}.")

# %% jupyter={"source_hidden": true} tags=["solution"]
# Solution: 2·B·D·F / (X·Y). Splitting the summed dim divides the work like any other split.
flops = 2 * 64 * 128 * 256 // (2 * 4)
assert flops == truth

# %% [markdown]
# ## Exercise 3: find the waste
#
# A stack of feed-forward blocks from an assignment of Stanford's CS336 (*communication
# accounting*): D = 16,384, F = 53,248, 126 blocks of two weights. First its size.

# %%
T, D, F, blocks = md.dims(T=8192, D=16_384, F=53_248, blocks=126)


@md.program
def xxl(x: md.bf16[T, D]):
    def feed_forward(x):
        w1 = md.param([D, F], dtype=md.bf16)
        w2 = md.param([F, D], dtype=md.bf16)
        h = md.einsum(x, w1, out=[T, F])
        x = md.einsum(h, w2, out=[T, D])
        return x

    return md.repeat(blocks, feed_forward, x)


parameters = xxl.compile().cost().memory["params"] // 2
print(f"{parameters:,} parameters")
print(f"16 bytes each: {16 * parameters / 2**30:,.0f} GiB, {16 * parameters / 80e9:.2f} × 80 GB")

# %% [markdown]
# 219,848,638,464 parameters, 3,276 GiB and 43.97 devices, as in the solutions one finds. (Do mind
# the units: GiB in one figure, and 80·10⁹ bytes in the other. Of 80 GiB each it would be 40.95
# devices.)
#
# Each device keeps a part of `x` (`x: D -> tp`). Here is a plan for the forward pass that has
# been charged for it. It gathers activations twice in every block. Change the rules, but not the
# first, so that it sends less than half.

# %% tags=["exercise"]
rules = ["x: D -> tp", "w1: F -> tp", "w2: D -> tp"]

# %% tags=["check"]
plan = xxl.compile({"tp": 4}, rules)
sent(plan)
least = 2 * 126 * 3 * (T * D * 2 // 4)
split = plan.tensor("x").local_shape == (8192, 4096)
print("Right!" if plan.cost().wire_bytes == least and split else "Not yet.")

# %% jupyter={"source_hidden": true} tags=["solution"]
# Solution: split *both* weights by F. `h` is then where it is needed; what is sent at the end is a
# reduce_scatter of [T, D], a third of the gather of [T, F] in place of which it stands.
rules = ["x: D -> tp", "F -> tp"]
plan = xxl.compile({"tp": 4}, rules)
assert plan.cost().wire_bytes == least
assert plan.tensor("x").local_shape == (8192, 4096)

# %% [markdown]
# ## Exercise 4: LLaMA 3 70B on 8,192 chips
#
# B = 4·1024·1024 tokens a step, D = 8192, F = 28,672; two mesh axes for fully sharded (X), one
# for tensor parallelism (Y), X·Y = 8192. Which powers of two?

# %% tags=["exercise"]
X = 8192


# %% tags=["check"]
def time(X):
    """Proportional to the seconds that sending takes, X having twice the links."""
    weights, acts = gigabytes(4 * 1024 * 1024, 8192, 28_672, X, 8192 // X)
    return weights / 2 + acts


best = min((2**p for p in range(8, 14)), key=time)
print("Right!" if best == X else f"Not yet: {time(X) / time(best):.2f} times the time of the best.")

# %% jupyter={"source_hidden": true} tags=["solution"]
# Solution: √(B/F · 2 · 8192) = 1548, between 1024 and 2048, and 2048 is the better of the two.
X = 2048
assert best == X

# %% [markdown]
# 2048-way fully sharded and 4-way tensor parallelism: what part 6 of the book arrives at. Next:
# notebook 5, another way to write all this down.
#
# ## Footnotes
#
# ¹ An earlier edition gives 31.7 for the same numbers. That solves another equation: from where on
# sending takes no longer than computing.
#
# ² One edition of the book's part 5 says 13.1, with 0.39·10⁹ for the vocabulary. 2·32,000·5120 is
# 0.33·10⁹.
