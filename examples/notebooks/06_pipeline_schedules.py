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
# # 6. Pipeline schedules
#
# A pipeline gives each device some of the layers, a *stage*. A batch is cut into micro-batches,
# which pass through the stages one after the other. A *schedule* is the order in which each
# device does its passes. It decides how long devices are idle, how many activations they store,
# and, in asynchronous training, which parameters a pass reads. About 20 minutes; no GPU.
#
# `D` is the number of devices and `N` the number of micro-batches.

# %%
from fractions import Fraction

import numpy as np
from course import attempt
from figures import Plot

import meshdsl as md

D, N = 4, 8

# %% [markdown]
# ## One micro-batch at a time
#
# The forward passes go down the devices and the backward passes go up again. A backward pass
# takes twice as long as a forward pass: it computes the gradient of the stage's input (`I`) and
# the gradients of its parameters (`W`). One device works and the other three wait.
#
# `late=True` sends a gradient to the stage before when the whole backward pass is done. That is
# what textbooks count with, and what most implementations do.

# %%
naive = md.schedule("naive", stages=D, micro=2, late=True)
naive

# %% [markdown]
# ## Five better ones, on one time axis
#
# - **GPipe** (Huang et al., 2019): all forward passes, then all backward passes.
# - **1F1B** (one forward, one backward): a backward pass as soon as there is one. The order is
#   PipeDream's (Narayanan et al., 2019); with one update for all micro-batches of a step it is
#   called PipeDream-Flush (*Memory-Efficient Pipeline-Parallel DNN Training*, Narayanan et al.,
#   2021).
# - **Interleaved** (*Efficient Large-Scale Language Model Training on GPU Clusters Using
#   Megatron-LM*, also Narayanan et al., 2021): a device has two stages of half the layers, so that
#   a pass takes half the time.
# - **Zero bubble** (Qi et al., 2023): backward passes in halves. Nobody waits for `W`, so it fills
#   gaps. `zb_h1` stores on each device as much as 1F1B on its first one; `zb_v` gives each device
#   two stages in the form of a V.

# %%
halved = {"F": 0.5, "I": 0.5, "W": 0.5}
drawn = {
    "gpipe": md.schedule("gpipe", stages=D, micro=N, late=True),
    "1F1B": md.schedule("one_f_one_b", stages=D, micro=N, late=True),
    "interleaved": md.schedule("interleaved", stages=D, micro=N, times=halved, late=True),
    "zero bubble H1": md.schedule("zb_h1", stages=D, micro=N),
    "zero bubble V": md.schedule("zb_v", stages=D, micro=N, times=halved),
}
others = {name: each for name, each in drawn.items() if name != "gpipe"}
drawn["gpipe"].beside(**others)

# %% [markdown]
# GPipe and 1F1B take equally long. They differ in the last column: 1F1B stores the activations of
# at most `D - s` micro-batches on device `s`, and GPipe those of all `N`. Interleaving stores
# more, and counts stages of half the size.
#
# ## The bubble against the number of micro-batches
#
# The share of idle time is called the *bubble*. More micro-batches make it smaller, since the
# devices wait only at the beginning and at the end of a step.

# %%
counts = [4, 8, 16, 32, 64]


def bubbles(name, **options):
    """The bubble by the number of micro-batches, in percent."""
    made = {n: md.schedule(name, stages=D, micro=n, **options) for n in counts}
    return {n: 100 * float(each.bubble) for n, each in made.items()}


Plot(
    "idle time, by micro-batches",
    {
        "1F1B, GPipe": bubbles("one_f_one_b", late=True),
        "interleaved": bubbles("interleaved", times=halved, late=True),
        "zero bubble H1": bubbles("zb_h1"),
        "zero bubble V": bubbles("zb_v", times=halved),
    },
    x="micro-batches",
    y="percent",
    log="x",
)

# %% [markdown]
# Each schedule has a law that its authors published. The compiler knows it and compares:

# %%
for name, each in drawn.items():
    for law in each.laws:
        print(f"{name:15} {law['formula']:28} = {law['share']:5} measured {each.bubble}")
assert drawn["gpipe"].bubble == drawn["1F1B"].bubble == Fraction(D - 1, N + D - 1)

# %% [markdown]
# Zero bubble V is the exception: its law, 0, is about the time between a device's first and last
# action. Its devices still start one after the other.
#
# ## Memory by stage
#
# Activations are stored from a micro-batch's forward pass to the end of its backward pass. In
# units of the activations of one micro-batch on one device (a stage of half the layers counts
# half):

# %%
share = {"interleaved": 2, "zero bubble V": 2}
stored = {
    name: {s: n / share.get(name, 1) for s, n in enumerate(each.in_flight)}
    for name, each in drawn.items()
}
Plot("activations stored, by device", stored, x="device", y="micro-batches")

# %% [markdown]
# ## In a layout
#
# A program does not mention stages. Here are eight layers. The layout gives each device two of
# them, divides the batch into eight micro-batches, and names a schedule:

# %%
batch, io, hidden, layers = md.dims(batch=32, io=8, hidden=16, layers=8)


@md.program
def deep(x: md.Tensor[batch, io], target: md.Tensor[batch, io]):
    def block(x):
        w1 = md.param([io, hidden])
        w2 = md.param([hidden, io])
        h = md.relu(md.einsum(x, w1, out=[batch, hidden]))
        return x + md.einsum(h, w2, out=[batch, io])

    y = md.repeat(layers, block, x)
    loss = md.mean((y - target) ** 2)
    md.minimize(loss, md.adam(lr=0.01))
    return loss


rng = np.random.default_rng(0)
data = {name: rng.standard_normal((32, 8)).astype("f4") for name in ("x", "target")}
plans = {"one device": deep.compile()}
for name in ("gpipe", "one_f_one_b", "zb_h1"):
    layout = md.layout(layers="pipe", schedule=md.scheduled(name, batch, micro=N))
    plans[name] = deep.compile({"pipe": D}, layout)
for name, plan in plans.items():
    losses = plan.train(data, steps=20, progress=False).losses
    print(f"{name:12} loss {losses[0]:.5f} … {losses[19]:.5f}  sent {plan.cost().by_kind}")

# %% [markdown]
# The losses are those of one device. What is sent does not depend on the schedule either. A stage
# sends the activations of each micro-batch to the next one, and their gradients to the one before:
# 2 × 8 × 128 bytes from a device in the middle, for micro-batches of four rows of 8 numbers. No
# weight is sent, and no gradient of a weight. (The 6 bytes are for the loss.)
#
# ## Updates that do not wait
#
# A synchronous schedule drains at the end of each step. **PipeDream** (Harlap et al., 2018;
# Narayanan et al., 2019) never drains: each stage updates its parameters after every backward
# pass. Then other micro-batches are on their way, which have read older parameters. So that a
# backward pass reads what its forward pass has read, a stage stores copies (*weight stashing*). The
# picture ends after twelve micro-batches; training would go on with the next ones.

# %%
pipedream = md.schedule("pipedream", stages=D, micro=12)
pipedream

# %% [markdown]
# The last table says how *stale* gradients are: those of stage `s` are `D - 1 - s` updates old
# once the pipeline is full. **2BW** (in the paper of PipeDream-Flush) updates after `D`
# micro-batches and needs two copies on every stage:

# %%
two_bw = md.schedule("two_bw", stages=D, micro=12)
Plot(
    "copies of the parameters, by stage",
    {
        name: {v["stage"]: v["copies"] for v in each.json["versions"]}
        for name, each in {"PipeDream": pipedream, "2BW": two_bw}.items()
    },
    x="stage",
    y="copies",
)

# %% [markdown]
# ## Exercise 1: the law of GPipe
#
# A forward pass takes 1 and a backward pass 2. `D` devices have `N` micro-batches. Count how long
# a device works and how long the whole step takes. Which share of the time is idle?


# %% tags=["exercise"]
def bubble(D, N):
    return Fraction(1, N)


# %% tags=["check"]
def is_the_law(guess):
    """Whether a formula has the share of idle time that schedules of several sizes have."""
    for devices, micro in ((2, 2), (3, 5), (4, 8), (6, 1)):
        made = md.schedule("gpipe", stages=devices, micro=micro, late=True)
        if abs(guess(devices, micro) - made.bubble) > 1e-9:
            return f"Not yet: for {devices} devices and {micro} micro-batches it is another share."
    return "Right!"


with attempt():
    print(is_the_law(bubble))


# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: each device works 3N. The first forward pass reaches the last device after D - 1, the
# last backward pass comes back after 2(D - 1): the step takes 3N + 3(D - 1).
def bubble(D, N):
    return Fraction(D - 1, N + D - 1)


assert is_the_law(bubble) == "Right!"

# %% [markdown]
# ## Exercise 2: a deadlock
#
# A table has a row of actions for each device. In this one the devices wait for each other.
# Change the order, keep the actions.

# %% tags=["exercise"]
rows = [
    "F0 F1 B0 B1",
    "F0 B1 F1 B0",
]


# %% tags=["check"]
def is_repaired(rows):
    """Whether the table has all actions and can be executed."""
    actions = [sorted(row.split()) for row in rows]
    if actions != [["B0", "B1", "F0", "F1"]] * 2:
        return "Not yet: each device has the actions F0, F1, B0 and B1, each once."
    try:
        md.schedule(rows)
    except md.ProgramError as error:
        return f"Not yet: {error.diagnostics[0].message}."
    return "Right!"


with attempt():
    print(is_repaired(rows))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: B1 on device 1 waits for F1, which is behind it in the same row.
rows = ["F0 F1 B0 B1", "F0 B0 F1 B1"]
assert is_repaired(rows) == "Right!"

# %% [markdown]
# ## Exercise 3: beat 1F1B by hand
#
# Three devices and four micro-batches. Below is 1F1B. Write a table that takes less time, and
# stores at most three micro-batches on any device. A backward pass `B2` may be written as its two
# halves, `I2` and `W2`, with other actions between them. `F`, `I` and `W` take 1 each.

# %% tags=["exercise"]
mine = [
    "F0 F1 F2 B0 F3 B1 B2 B3",
    "F0 F1 B0 F2 B1 F3 B2 B3",
    "F0 B0 F1 B1 F2 B2 F3 B3",
]


# %% tags=["check"]
def beats(rows):
    """Whether a table is faster than 1F1B in the memory of three micro-batches."""
    by_the_book = md.schedule("one_f_one_b", stages=3, micro=4)
    try:
        made = md.schedule(rows)
    except md.ProgramError as error:
        return f"Not yet: {error.diagnostics[0].message}."
    if (len(made.rows), made.json["micro_batches"]) != (3, 4):
        return "Not yet: it is another number of devices or of micro-batches."
    if made.json["weights"] is not None:
        return "Not yet: a step has one update, at its end."
    if max(made.in_flight) > 3:
        return f"Not yet: a device stores {max(made.in_flight)} micro-batches."
    if made.makespan >= by_the_book.makespan:
        return f"Not yet: it takes {made.makespan}, and 1F1B {by_the_book.makespan}."
    return "Right!"


with attempt():
    print(beats(mine))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: the gradients of parameters fill the gaps at the end.
mine = [
    "F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 I3 W3",
    "F0 F1 I0 F2 W0 I1 F3 W1 I2 W2 I3 W3",
    "F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3",
]
assert beats(mine) == "Right!"
assert md.schedule("zb_h1", stages=3, micro=4).makespan <= md.schedule(mine).makespan

# %% [markdown]
# ## Exercise 4: what stage 0 of PipeDream reads
#
# Look at device 0 of PipeDream above, and at micro-batch 8. After each backward pass there is an
# update. How many updates are in the parameters that its forward pass reads? How many in those
# that its backward pass reads, with stashing? And how many would be in the latest parameters at
# the time of that backward pass?

# %% tags=["exercise"]
forward_reads = 8
backward_reads = 8
latest_then = 12


# %% tags=["check"]
def versions_are(forward, backward, latest):
    """Which of the three numbers are those of the schedule."""
    stashed = pipedream.json["versions"][0]
    newest = md.schedule(pipedream.rows, weights="latest").json["versions"][0]
    truth = stashed["forward"][8], stashed["backward"][8], newest["backward"][8]
    names = ("forward pass", "backward pass", "latest")
    pairs = zip(names, (forward, backward, latest), truth, strict=True)
    wrong = [name for name, guess, right in pairs if guess != right]
    return f"Not yet: {', '.join(wrong)}." if wrong else "Right!"


print(versions_are(forward_reads, backward_reads, latest_then))

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: F8 runs after the update of micro-batch 4: five updates. B8 reads the stashed copy of
# them. Meanwhile micro-batches 5 to 7 have made three more.
forward_reads, backward_reads, latest_then = 5, 5, 8
assert versions_are(forward_reads, backward_reads, latest_then) == "Right!"

# %% [markdown]
# A layout takes a table of your own, too, in place of a name. `docs/pipelines.md` has all
# schedules, with their pictures and sources.
