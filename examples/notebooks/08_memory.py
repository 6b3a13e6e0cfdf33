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
# # 8. Memory
#
# A model that does not fit is not trained. This notebook is about what a device stores during a
# step, and about five ways to store less: ZeRO, recomputation, sequence parallelism, accumulation
# and offload. Nothing here runs a model: a plan knows its memory. About 20 minutes, after
# notebook 4; no GPU. GB are 10⁹ bytes, and GiB 2³⁰.

# %%
from functools import cache

from course import attempt
from figures import MemoryOverTime, Plot

import meshdsl as md

# %% [markdown]
# ## A step over time
#
# Here is a transformer with 16-bit arithmetic and Adam. Only its sizes and a few choices change
# below: whether layers are computed again (`again`), and the optimizer.


# %%
def gpt(layers=8, b=4, s=2048, h=2048, a=16, again=False, optimizer=None):
    """A transformer of `layers`: b sequences of s tokens, a hidden size of h, a heads."""
    b, s, h, a, layer, vocab = md.dims(b=b, s=s, h=h, a=a, layer=layers, vocab=32_000)
    k, f, mem = md.dim("k", h // a), md.dim("f", 4 * h), md.dim("mem", like=s)

    def inside(x):
        wq, wk, wv = (md.param(name, [h, a, k]) for name in ("wq", "wk", "wv"))
        wo = md.param([a, k, h])
        w1 = md.param([h, f])
        w2 = md.param([f, h])
        n = md.rms_norm[h](x)
        q = md.einsum(n, wq, out=[b, a, s, k])
        key = md.einsum(n, wk, out=[b, a, s, k])[s >> mem]
        value = md.einsum(n, wv, out=[b, a, s, k])[s >> mem]
        o = md.attention[k, mem](q, key, value, md.iota[s] >= md.iota[mem])
        x = md.name("x", x + md.dropout(md.einsum(o, wo, out=[b, s, h]), 0.1))
        u = md.einsum(md.rms_norm[h](x), w1, out=[b, s, f])
        x = md.name("x", x + md.dropout(md.einsum(md.gelu(u), w2, out=[b, s, h]), 0.1))
        return x

    def block(x):
        if not again:
            return inside(x)
        with md.recompute():
            return inside(x)

    @md.program
    def model(ids: md.i32[b, s], target: md.i32[b, s]):
        embed = md.param([vocab, h])
        x = embed.gather(vocab, ids)
        x = md.repeat(layer, block, x)
        logits = md.einsum(x, embed, out=[b, s, vocab])
        loss = md.mean(md.cross_entropy[vocab](logits, target))
        md.minimize(loss, optimizer or md.adam(lr=1e-4, compute="bf16"))
        return loss

    return model


small = gpt().compile()
MemoryOverTime(stored=small)

# %% [markdown]
# - **Parameters**, in 16 bits, and the **state** of Adam: a copy of the parameters in 32 bits, and
#   means of the gradient and of its square. They are there all the time.
# - **Activations** are stored on the way up, since the backward pass reads them, and freed on the
#   way down. The peak is where the last layers meet the loss.
# - **Gradients** begin with the backward pass and stay until the update.
#
# So each kind has its own remedy.
#
# ## State, gradients, parameters: ZeRO
#
# With Adam in mixed precision a parameter takes 16 bytes: 2, and 2 for its gradient, and 12 of
# state. Data parallelism stores all of them on every device. ZeRO (Rajbhandari et al., 2020) splits
# first the state, then also the gradients, then also the parameters. Notebook 3 has the rules and
# why they work. Here is the paper's example again, 7.5 billion parameters on 64 devices:

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


split = ["tokens -> data", "state: model -> data", "grads: model -> data", "params: model -> data"]
parameters = 2 * 4096 * 16384 * 56
plans = [stack.compile({"data": 64}, split[: 1 + stage]) for stage in range(4)]
all_reduce = plans[0].cost().wire_bytes
for stage, plan in enumerate(plans):
    stored = sum(plan.memory[kind] for kind in ("params", "grads", "state")) / parameters * 7.5
    print(f"ZeRO {stage}: {stored:5.1f} GB, sent {plan.cost().wire_bytes / all_reduce:.2f}")

# %% [markdown]
# 120, 31.4, 16.6 and 1.9 GB, and 1, 1, 1 and 1.5 times the bytes: the figures of the paper. (This
# stack has 7.516 billion parameters; the figures are scaled.) ZeRO does nothing about activations:
# a device has those of its own tokens in each case. Here are all four over time, for the
# transformer on four devices with one sequence each:

# %%
rules = ["b -> data", "state: h -> data", "grads: h -> data", "params: h -> data"]
zero = {f"ZeRO {n}": gpt().compile({"data": 4}, rules[: 1 + n]) for n in range(4)}
MemoryOverTime(**zero)

# %% [markdown]
# ZeRO 3 gathers the parameters of a layer before it is computed, and again in the backward pass.
# That is what it sends more.
#
# ## Activations: compute them again
#
# With *recomputation* (Chen et al., 2016) only the input of each layer is stored. In the backward
# pass the layer is computed once more. `md.recompute()` says so for what is inside of it:

# %%
again = gpt(again=True).compile()
more = again.cost().flops / small.cost().flops - 1
print(f"{100 * more:.0f} % more FLOPs")
MemoryOverTime(stored=small, recomputed=again)

# %% [markdown]
# A forward pass is a third of the work of a step, so at most 33 % come on top. Here it is less:
# what comes after the last layer is not computed again.
#
# ## How much does a layer store?
#
# Korthikanti et al. (2022) count the bytes of activations of a transformer layer in 16 bits, with
# dropout: s·b·h·(34 + 5·a·s/h). The second term is of the attention scores. Our transformer uses
# fused attention, which never stores them. On t devices, with tensor parallelism (`tp`), most is
# split and 10 are not; *sequence parallelism* (`sp`) splits these along the sequence. Recomputation
# leaves 2. What the compiler stores is the difference between five layers and four:

# %%
tp = ["a -> tp", "f -> tp", "vocab -> tp"]
sp = [*tp, "x: s -> tp", "activations: gather = again"]


def stored_per_layer(t, rules, again=False):
    """Bytes of activations of a layer on each of t devices, in units of s·b·h."""
    two = (
        gpt(n, again=again, optimizer=md.sgd(lr=0.1)).compile({"tp": t}, rules, dtype="bf16")
        for n in (4, 5)
    )
    four, five = (plan.memory["activations"] for plan in two)
    return (five - four) / (2048 * 4 * 2048)


cases = {
    "one device": (1, tp, False, 34),
    "tensor parallelism": (4, tp, False, 10 + 24 / 4),
    "and sequence parallelism": (4, sp, False, 34 / 4),
    "one device, recomputed": (1, tp, True, 2),
}
for name, (t, layout, is_again, formula) in cases.items():
    print(f"{name:25} {stored_per_layer(t, layout, is_again):6.2f}   formula {formula:5.2f}")

# %% [markdown]
# We store 2 less than the formula, and 0.5 with sequence parallelism: the masks of the two dropouts
# behind attention and MLP, one byte for each element. Instead of a mask, the seed that draws it
# again is kept. (The 0.03 are what fused attention keeps of its softmax: a number for each head and
# token.)
#
# ## Smaller batches, and other memory
#
# *Accumulation* computes the gradients of several small batches one after the other, and updates
# once. *Offload* stores what is not needed at the moment in the memory of the host. Both leave the
# numbers of a step as they are, up to rounding. A batch of four sequences, at once and one by one,
# and with the state on the host:

# %%
one_by_one = md.adam(lr=1e-4, compute="bf16", accumulate=4)
offloaded = gpt().compile({"gpu": 1}, ["state: memory = host"])
MemoryOverTime(
    at_once=small, accumulated=gpt(b=1, optimizer=one_by_one).compile(), offloaded=offloaded
)

# %% [markdown]
# The update with offload takes long here: it waits for the link between host and device. On a
# larger batch this time is a smaller share of the step.
#
# ## Exercise 1: how many devices?
#
# A model has 7.5 billion parameters. Your devices have 48 GB (48·10⁹ bytes), and activations take
# 11 of them. What is the least number of devices for ZeRO 1, for ZeRO 2 and for ZeRO 3?
#
# <details><summary>A hint</summary>
# Of the 16 bytes of a parameter, how many does each stage divide by the number of devices?
# </details>

# %% tags=["exercise"]
zero_1, zero_2, zero_3 = 64, 64, 64


# %% tags=["check"]
@cache
def gigabytes(stage, devices):
    """What a device stores of parameters, gradients and state, for 7.5 billion parameters."""
    memory = stack.compile({"data": devices}, split[: 1 + stage]).memory
    return sum(memory[kind] for kind in ("params", "grads", "state")) / parameters * 7.5


def are_least(*counts):
    """Whether these are the least numbers of devices for ZeRO 1, 2 and 3."""
    for stage, devices in enumerate(counts, 1):
        if devices != int(devices) or not 1 < devices <= 4096:
            return f"Not yet: ZeRO {stage} needs a whole number of devices, and more than one."
        if gigabytes(stage, int(devices)) > 48 - 11:
            return f"Not yet: for ZeRO {stage} they are too few."
        if gigabytes(stage, int(devices) - 1) <= 48 - 11:
            return f"Not yet: for ZeRO {stage} fewer are enough."
    return "Right!"


with attempt():
    print(are_least(zero_1, zero_2, zero_3))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: with 7.5 GB for each byte of a parameter, N devices store 7.5·(4 + 12/N), 7.5·(2 + 14/N)
# and 7.5·16/N GB. That is at most 37 from N = 90/7 = 12.9, 105/22 = 4.8 and 120/37 = 3.2 on.
zero_1, zero_2, zero_3 = 13, 5, 4
assert are_least(zero_1, zero_2, zero_3) == "Right!"

# %% [markdown]
# What is not split sets a limit that no number of devices gets under.
#
# ## Exercise 2: √n checkpoints
#
# Instead of each layer, put a segment of several layers into `recompute`. Then only the input of
# each segment is stored; while a segment is computed again, what its layers store is there, too: of
# a layer in this stack two tensors of the size of its input. A stack has 64 layers. How many layers
# should a segment have?


# %%
@cache
def segmented(length):
    """GB of activations at the worst moment, with segments of `length` of 64 layers."""
    rows, width = md.dims(rows=4096, width=4096)
    outer, inner, to = *md.dims(outer=64 // length, inner=length), md.dim("to", like=width)

    def layer(x):
        w = md.param([width, to])
        return md.tanh(md.einsum(x, w, out=[rows, to])[to >> width])

    def segment(x):
        with md.recompute():
            return md.repeat(inner, layer, x)

    @md.program
    def deep(x: md.Tensor[rows, width]):
        loss = md.mean(md.repeat(outer, segment, x) ** 2)
        md.minimize(loss, md.sgd(lr=0.1))
        return loss

    return deep.compile().memory["activations"] / 1e9


for length in (1, 64):
    print(f"{64 // length} segments of length {length}: {segmented(length):.2f} GB")

# %% tags=["exercise"]
length = 64


# %% tags=["check"]
def is_least(length):
    """Whether segments of this length store least."""
    if length < 1 or 64 % length:
        return "Not yet: 64 layers have no segments of this length."
    size = segmented(int(length))
    if size > min(segmented(each) for each in (2, 4, 8, 16, 32)):
        return f"Not yet: {size:.2f} GB, and another length stores less."
    return "Right!"


with attempt():
    print(is_least(length))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: n/k inputs of segments, and two tensors of each of the k layers in one: n/k + 2k is
# least where k = √(n/2) = 5.7, and as much for 4 as for 8. (Chen et al. count one: √n = 8.) Either
# way the memory grows like √n, and not like n.
length = 8
assert is_least(length) == is_least(4) == "Right!"
lengths = (1, 2, 4, 8, 16, 32, 64)
by_length = {"64 layers": {k: segmented(k) for k in lengths}}
Plot("activations, by length of a segment", by_length, x="layers in a segment", y="GB", log="x")

# %% [markdown]
# ## Exercise 3: 7 billion parameters on one device, in three ways
#
# With 32 layers and h = 4,096 the transformer has 6.6 billion parameters, which take 16 bytes each
# with Adam. Even recomputed and with one sequence it does not fit into 80 GB. Find three ways to
# make it fit. Each is an optimizer and rules; another learning rate is no other way.
# `"state: memory = host"` and `"params: memory = host"` store on the host. `md.sgd`, `md.momentum`
# and `md.adafactor` have less state than Adam.

# %% tags=["exercise"]
ways = [
    (md.adam(lr=1e-4, compute="bf16"), []),
    (md.momentum(lr=1e-4), []),
    (md.adam(lr=1e-4, compute="bf16"), ["params: memory = host"]),
]


# %% tags=["check"]
@cache
def stored(optimizer, *rules):
    """GB at the worst moment of a step."""
    large = gpt(32, b=1, h=4096, a=32, again=True, optimizer=optimizer)
    return large.compile({"gpu": 1}, list(rules)).cost().peak_memory / 1e9


def are_three(ways):
    """Whether three different ways fit."""
    kinds = set()
    for optimizer, rules in ways:
        try:
            size = stored(optimizer, *rules)
        except md.ProgramError as error:
            return f"Not yet: {error.diagnostics[0].message}."
        if size > 80:
            return f"Not yet: {optimizer} with {rules or 'no rules'} stores {size:.0f} GB."
        kinds.add((str(optimizer).partition("(")[0], size))
    if len(kinds) < 3:
        return "Not yet: three different ways are asked for."
    return "Right!"


with attempt():
    print(are_three(ways))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: the state on the host; all on the host; an optimizer with little state.
adam = md.adam(lr=1e-4, compute="bf16")
ways = [
    (adam, ["state: memory = host"]),
    (adam, ["params: memory = host", "state: memory = host"]),
    (md.adafactor(lr=1e-4, compute="bf16"), []),
]
assert are_three(ways) == "Right!"
for optimizer, rules in ways:
    print(f"{stored(optimizer, *rules):3.0f} GB  {optimizer} {', '.join(rules)}")

# %% [markdown]
# Another way is to train fewer parameters: with LoRA the model is frozen, and has neither gradients
# nor state (`docs/howto/finetune.md`). Which way is fastest is a question of seconds: notebook 9.
