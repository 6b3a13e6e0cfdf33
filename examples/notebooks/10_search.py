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
# # 10. Search
#
# In nine notebooks you chose the layout. Can a program choose it, and how do you know that nothing
# better is left? A search has four parts: a *space* of layouts, a *cost* for each, a *method* that
# looks through the space, and a *proof*, or none. You will write two searches, compare the methods
# of well-known papers on one problem, and beat a searcher. About 35 minutes, after notebook 9. A
# lesson of 25 minutes leaves out the section on ColocRL, and exercise 4.

# %%
import json
import tempfile
from collections import Counter
from functools import cache
from itertools import pairwise, product
from pathlib import Path

from course import attempt, command, example
from figures import Plot

import meshdsl as md

# %% [markdown]
# ## A search in ten lines
#
# The program is an MLP in training, the mesh has two axes. A layout gives each axis one of the
# three dims, or none. Where it splits tokens, the optimizer's state may be sharded over the same
# axes, or parameters, gradients and state, or nothing.

# %% tags=["used"]
tokens, model, hidden = md.dims(tokens=8192, model=8192, hidden=32_768)
mesh = md.mesh(x=2, y=4)


@md.program
def mlp(x: md.Tensor[tokens, model], target: md.Tensor[tokens, model]):
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    h = md.relu(md.einsum(x, w1, out=[tokens, hidden]))
    y = md.einsum(h, w2, out=[tokens, model])
    loss = md.mean((y - target) ** 2)
    md.minimize(loss, md.adam(lr=1e-3, compute="bf16"))
    return loss


@cache
def cost(*rules):
    """Milliseconds of a step on H100, and the most gigabytes of a device."""
    step = mlp.compile(mesh, list(rules)).simulate("h100")
    return 1e3 * step.seconds, step.peak[0] / 1e9


# %%
def space():
    """All layouts: tuples of rules."""
    for dims in product(("tokens", "model", "hidden", None), repeat=2):
        axes = {d: [a for a, of in zip("xy", dims, strict=True) if of == d] for d in dims if d}
        rules = [f"{d} -> ({', '.join(a)})" for d, a in axes.items()]
        yield tuple(rules)
        if "tokens" in axes and "model" not in axes:
            over = ", ".join(axes["tokens"])
            yield (*rules, f"state: model -> ({over})")
            yield (*rules, *(f"{kind}: model -> ({over})" for kind in ("params", "grads", "state")))


costs = {rules: cost(*rules) for rules in space()}
best = min(costs, key=costs.get)
print(f"{len(costs)} layouts. The fastest takes {costs[best][0]:.2f} ms:")
print("\n".join(best))

# %% [markdown]
# Time is one goal, memory is another. A layout is on the *front* (Pareto front) if no other one is
# both faster and smaller. All others can be forgotten, whatever you weigh more.


# %%
def beaten(mine):
    """Whether some layout is better in one of the two and not worse in the other."""
    return any(a <= mine[0] and b <= mine[1] and (a, b) != mine for a, b in costs.values())


front = {pair: rules for rules, pair in costs.items() if not beaten(pair)}
steps = dict(sorted(front))
for (time, memory), rules in sorted(front.items()):
    print(f"{time:6.2f} ms {memory:5.2f} GB  {'; '.join(rules)}")

every = [pair for pair in costs.values() if pair not in front]
labels = {"nothing split": costs[()], "data parallel": cost("tokens -> (x, y)")}
Plot("Layouts", {"front": steps}, labels, x="ms a step", y="GB on a device", dots=every)

# %% [markdown]
# The front is short here: three layouts in the corner at the left. Here is the corner:

# %%
corner = [(time, memory) for time, memory in every if time < 7 and memory < 3]
Plot("Near the front", {"front": steps}, x="ms a step", y="GB on a device", dots=corner)

# %% [markdown]
# ## The searcher, and its reasons
#
# `prog.search` looks through such a space, and has a few more rules for storage. Behind each rule
# it says what leaving it out would cost:

# %%
found = mlp.search(mesh, cluster="h100", front=True)
found

# %% [markdown]
# The best layout is the one from above; the state follows the gradients. Two statements about
# proof follow the layout:
#
# - *No other layout of this space is better*: all were tried, or have a bound that is worse. A
#   bound is cheap: a layout that computes for 5 ms takes at least 5 ms.
# - *No per-tensor plan is faster than …*: a larger space gives each tensor a placement of its own.
#   It is too large to try all. The same problem with fewer constraints (a *relaxation*) is quickly
#   solved, and no plan is faster than its solution.
#
# ## One problem, two splits
#
# AlexNet (Krizhevsky, Sutskever and Hinton, 2012) has five convolutions, then three dense layers.
# On eight devices each layer is split in one of two ways, by images (`data`) or by output channels
# (`tensor`). That is a graph with costs:
#
# - A node has the time to add up gradients, if it is split by images.
# - An edge has the time to bring the activations from one layer's split to that of the next.
#
# Computing takes the same time in both ways, so it is left out. For such graphs `meshdsl search
# --graph` has the methods of several papers.

# %% tags=["used"]
LAYERS = {  # parameters, and the numbers of one image that come in
    "conv1": (11 * 11 * 3 * 96, 3 * 224 * 224),
    "conv2": (5 * 5 * 96 * 256, 96 * 27 * 27),
    "conv3": (3 * 3 * 256 * 384, 256 * 13 * 13),
    "conv4": (3 * 3 * 384 * 384, 384 * 13 * 13),
    "conv5": (3 * 3 * 384 * 256, 384 * 13 * 13),
    "fc6": (9216 * 4096, 9216),
    "fc7": (4096 * 4096, 4096),
    "fc8": (4096 * 1000, 4096),
}
DEVICES, LINK = 8, 12e9  # bytes/s


def alexnet(batch):
    """The graph of AlexNet on so many images, as `meshdsl search --graph` reads it."""
    share = (DEVICES - 1) / DEVICES
    nodes = [
        {
            "name": name,
            "choices": ["data", "tensor"],
            "cost": [2 * share * 4 * parameters / LINK, 0.0],
        }
        for name, (parameters, _) in LAYERS.items()
    ]
    edges = []
    for before, after in pairwise(LAYERS):
        whole = 2 * share * 4 * batch * LAYERS[after][1] / LINK  # forward and backward
        swap = whole / DEVICES  # an all_to_all
        # Rows: the split before. A layer that is split by channels needs whole inputs.
        edges.append({"between": [before, after], "cost": [[0.0, whole], [swap, whole]]})
    return {"kind": "placement", "nodes": nodes, "edges": edges}


@cache
def solved(text, *options):
    """The answer of `meshdsl search --graph` for a graph as text."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.json"
        path.write_text(text)
        return command("search", "--graph", str(path), *options)


# %% [markdown]
# 2⁸ choices can be tried one by one. With 100 layers that is hopeless, and not needed. Say the best
# choices up to a layer are known, one list for each way to split that layer. The next layer only
# asks how the one before it is split. So two lists are enough from layer to layer, and the work
# grows with the number of layers and not with that of choices. This is *dynamic programming*:


# %% tags=["used"]
def best_chain(graph):
    """Seconds and the choice of each layer, the best of all: for layers in a chain."""
    first, *others = graph["nodes"]
    best = [(cost, (choice,)) for cost, choice in zip(first["cost"], (0, 1), strict=True)]
    for node, edge in zip(others, graph["edges"], strict=True):
        best = [
            min((s + edge["cost"][old][new] + own, (*c, new)) for old, (s, c) in enumerate(best))
            for new, own in enumerate(node["cost"])
        ]
    seconds, choices = min(best)
    return seconds, [node["choices"][c] for node, c in zip(graph["nodes"], choices, strict=True)]


# %%
seconds, choices = best_chain(alexnet(batch=1024))
every = solved(json.dumps(alexnet(batch=1024)), "--method", "exhaustive")
print(f"dynamic programming sends for {1e3 * seconds:.1f} ms")
print(f"all {every['combinations']} choices: {1e3 * every['cost']:.1f} ms")
print(", ".join(f"{name} {split}" for name, split in zip(LAYERS, choices, strict=True)))

# %% [markdown]
# Images are split in the convolutions, channels in the dense layers. How does this compare with one
# split for all layers, and does it depend on the batch?


# %%
def alike(graph, choice):
    """Seconds if all layers make the same choice."""
    edges = sum(edge["cost"][choice][choice] for edge in graph["edges"])
    return edges + sum(node["cost"][choice] for node in graph["nodes"])


curves = {"all by images": {}, "all by channels": {}, "the best mix": {}}
for images in (16, 64, 256, 1024, 4096, 16_384):
    graph = alexnet(images)
    times = (alike(graph, 0), alike(graph, 1), best_chain(graph)[0])
    for curve, time in zip(curves.values(), times, strict=True):
        curve[images] = 1e3 * time
Plot("AlexNet on eight devices", curves, x="images", y="ms of sending", log="xy")

# %% [markdown]
# Gradients have the same size for any number of images, so the first curve is flat. Activations
# grow with the images. The mix is below both, up to some thousand images, and then all by images.
# Krizhevsky (2014) found it by thinking, and called it *one weird trick*. Exercise 2 asks why it
# works. In `examples/alexnet.mdsl` the trick is a layout of four rules. Here it is at full size,
# with the bytes that each device sends:

# %%
FULL = {"n": 1024, "classes": 1000, "tower": 1, "other": 1, "h": 224, "w": 224}
FULL |= {"h1": 55, "w1": 55, "h2": 27, "w2": 27, "h3": 13, "w3": 13, "h6": 6, "w6": 6}
FULL |= {"c1": 96, "c2": 256, "c3": 384, "c4": 384, "c5": 256, "wide": 4096, "wide2": 4096}
full = md.load(example("alexnet.mdsl"), dims=FULL)
for layout in ("data_parallel", "weird_trick"):
    plan = full.compile({"gpu": 8}, layout)
    print(f"{layout:14}{plan.cost().wire_bytes / 1e6:6.1f} MB")

# %% [markdown]
# ## Methods compared
#
# AlexNet is easy, since nothing ties its layers together but the next layer. Here is a harder
# graph, from Galvatron's profile of LLaMA-2 7B on eight A100. The model has 32 layers. Each has
# several choices: ZeRO 2 or 3, tensor parallelism, and activations that are stored or computed
# again. All together have to fit into 28 GB, so what one layer takes is missing for the others.

# %%
PAPERS = {
    "greedy": "one layer after the other (Besag, 1986)",
    "mcmc": "random changes, as FlexFlow (Jia et al., 2019)",
    "elimination": "dynamic programming, as OptCNN (Jia et al., 2018)",
    "ilp": "an integer program, as Alpa (Zheng et al., 2022)",
}
llama = example("search/galvatron_llama2_7b.json")
answers = {m: command("search", "--graph", llama, "--method", m) for m in PAPERS}
for method, paper in PAPERS.items():
    proof = "proven" if answers[method]["proven"] else "      "
    print(f"{method:12}{answers[method]['cost']:6.3f} s {proof}  {paper}")
print(f"{answers['ilp']['combinations']:.0e} choices. What the layers take:")
for method in ("greedy", "ilp"):
    taken = Counter(answers[method]["choices"].values()).most_common()
    print(f"{method:12}" + ", ".join(f"{count} × {choice}" for choice, count in taken))

# %% [markdown]
# Greedy ends where no single change helps: layers that store too much are in each other's way.
# Random changes come near the best, and cannot know it. Elimination is exact without a limit of
# memory; with one it is not. The integer program proves its answer.
#
# **Tofu** (Wang et al., 2019) has a space of its own: it splits one mesh axis at a time, the outer
# ones first. That is quick, and here it misses the best. For our MLP:

# %%
tofu = mlp.search(mesh, cluster="h100", method="tofu")
for name, answer in {"Tofu": tofu, "all layouts": found}.items():
    print(f"{name:12}{1e3 * answer.json['plans'][0]['step_seconds']:6.2f} ms")

# %% [markdown]
# ## Between operators: stages
#
# So far each operator was on all devices: *intra-operator* parallelism. *Inter-operator*
# parallelism cuts the network into stages. Where? Here is PipeDream's profile of VGG-16. A cut
# sends the activations there. A stage on several devices sends the gradients of its parameters:

# %%
vgg = json.loads(Path(example("search/pipedream_vgg16.json")).read_text())["layers"]
curves = {
    kind: {n: layer[key] / 1e6 for n, layer in enumerate(vgg, 1) if layer[key] > 4096}
    for kind, key in (("activations", "output"), ("parameters", "parameters"))
}
Plot("VGG-16, layer by layer", curves, x="layer", y="MB", log="y")

# %% [markdown]
# Early layers have large activations and few parameters, the last ones the reverse. **PipeDream**
# (Narayanan et al., 2019) finds the cut and the number of devices of each stage by dynamic
# programming. The slowest stage sets the pace:

# %%
for network in ("vgg16", "alexnet", "resnet50"):
    graph = example(f"search/pipedream_{network}.json")
    answer = command("search", "--graph", graph, "--devices", "16", "--cluster", "v100-p3")
    for stage in answer["stages"]:
        ends = f"{stage['layers'][0]} … {stage['layers'][-1]}"
        print(f"{network:9}{stage['devices']:3} devices: {ends}")

# %% [markdown]
# VGG-16 is cut after the large activations and before the large parameters: the weird trick again.
# The convolutions before the cut are on 15 devices with data parallelism. The dense layers are on
# one device, so that their gradients are not sent. AlexNet is alike. ResNet-50 has few parameters,
# so data parallelism is enough. For VGG-16 and ResNet-50 these are the published answers. For
# AlexNet 15-1 is published, which takes longer by the published profile.¹
#
# **Alpa** (Zheng et al., 2022) does both: a dynamic program cuts into stages and gives each a
# submesh, and an integer program finds the layout within each. Here is its mixture of experts of
# 10 billion parameters on 16 V100:

# %%
on = ["--devices", "16", "--cluster", "v100-p3", "--method", "alpa"]
answer = command("search", "--graph", example("search/alpa_moe_10b.json"), *on)
for stage in answer["stages"]:
    first, last = stage["groups"]
    where = f"{stage['submesh'][0]} × {stage['submesh'][1]} devices"
    print(f"groups {first} to {last - 1} on {where}, (data, tensor, expert) = {stage['mesh']}")

# %% [markdown]
# ## Operators on devices: ColocRL
#
# ColocRL (Mirhoseini et al., 2017) trained a policy that puts each group of operators on one
# device. For a recurrent language model its table says: the expert's placement on two GPUs takes
# 3.81 s a step, and one GPU 1.57 s, which is also what the policy learned. Why is one GPU best?
#
# The file has the model's four groups, with the seconds of one GPU shared out by FLOPs. The time
# to begin a transfer is chosen such that the expert's placement takes the published 3.81 s. We
# solve it for this and for shorter times:

# %% tags=["used"]
COLOC = json.loads(Path(example("search/colocrl_rnnlm.json")).read_text())
ONE_GPU = 1.57


def two_gpus(transfer, method):
    """The step on two GPUs if a transfer takes so many seconds to begin."""
    text = json.dumps({**COLOC, "transfer": transfer})
    options = ("--devices", "2", "--bandwidth", "12GB/s", "--method", method)
    return solved(text, *options)


# %%
for transfer in (COLOC["transfer"], 20e-6):
    step = two_gpus(transfer, "exhaustive")
    groups = ", ".join(f"{group}: {gpu}" for group, gpu in step["places"].items())
    print(
        f"{1e3 * transfer:5.2f} ms a transfer: best of all 16 is {step['seconds']:.2f} s, {groups}"
    )

transfers = (0, 0.004, 0.009, 0.016, 0.03, COLOC["transfer"])
curves = {
    "expert, two GPUs": {1e3 * t: two_gpus(t, "expert")["seconds"] for t in transfers},
    "one GPU": {1e3 * t: ONE_GPU for t in transfers},
}
Plot("A step of the language model", curves, x="ms to begin a transfer", y="seconds")

# %% [markdown]
# A recurrent network sends a small message for each of its 40 time steps, forward and backward.
# While a transfer is shorter than the work of a time step, it hides behind that work. At 47 ms,
# the overhead of the software of 2016, transfers are all that counts, and no placement on two GPUs
# is worth it. With 20 µs, which PCI Express takes, two GPUs win. The policy was right about its
# machine. Its table says more about that software than about placement.
#
# ## Exercise 1: how large is the space?
#
# A program has four dims, which all meet in one tensor. The mesh has three axes. Each axis splits
# one of the dims, or none. How many layouts are there? And how many *per-tensor* plans, if 20
# tensors with four dims each are placed independently?
#
# <details><summary>A hint</summary>
# Count the choices of one axis first. Axes choose independently: two may split the same dim.
# </details>

# %% tags=["exercise"]
layouts = 12
plans = 240

# %% tags=["check"]
counted = sum(1 for _ in product(("a", "b", "c", "d", None), repeat=3))
right = abs(plans / counted**20 - 1) < 1e-9
print("layouts:", "Right!" if layouts == counted else "Not yet. What can one axis do?")
print("plans:  ", "Right!" if right else "Not yet. Each tensor chooses for itself.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: five choices for each axis; and all of them again for each tensor. The second number has
# 42 digits. That is why such spaces need dynamic programming, integer programs or chance.
layouts = 5**3
plans = layouts**20
assert layouts == counted == 125
assert plans == counted**20

# %% [markdown]
# ## Exercise 2: why AlexNet mixes
#
# A layer that is split by images adds up the gradients of its parameters. One that is split by
# channels gathers its input, and adds up the gradient of it. Fill in a function that says for a
# layer which of the two sends fewer bytes. It gets the number of parameters, the numbers of one
# image that come in, and the number of images.
#
# <details><summary>A hint</summary>
# In <code>alexnet</code>, compare the cost of a node with the <code>whole</code> of the edge before
# it. What do the two have in common?
# </details>


# %% tags=["exercise"]
def better(parameters, inputs, images):
    return "data"


# %% tags=["check"]
def decides(rule):
    """Whether a rule names the cheaper split of a layer alone, at several batches."""
    for images in (64, 128, 1024, 8192, 65_536):
        whole = {e["between"][1]: e["cost"][0][1] for e in alexnet(images)["edges"]}
        added = {n["name"]: n["cost"][0] for n in alexnet(images)["nodes"]}
        for name, (parameters, inputs) in LAYERS.items():
            if name in whole:
                cheapest = "data" if added[name] < whole[name] else "tensor"
                if added[name] != whole[name] and rule(parameters, inputs, images) != cheapest:
                    return f"Not yet: look at {name} with {images:,} images."
    return "Right!"


with attempt():
    print(decides(better))


# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: both send as much as an all_reduce, of the parameters or of the inputs of all images. A
# dense layer has inputs × outputs parameters. So `tensor` is better while there are fewer images
# than outputs: 4,096 for `fc6` and `fc7`. A convolution uses its parameters at each place of the
# image, and is better split by images from a few images on.
def better(parameters, inputs, images):
    return "data" if parameters < inputs * images else "tensor"


assert decides(better) == "Right!"

# %% [markdown]
# ## Exercise 3: beat the searcher
#
# The searcher's best layout of the MLP is below. Its space has rules for dims and for storage, but
# none for single tensors. Write a layout that takes at least 2 % less time, in no more memory.
#
# <details><summary>A hint</summary>
# After the second product <code>y</code> is partial over axis y. Must every device have all of it
# to compute the loss? Notebook 4 has the idea, with another name.
# </details>

# %% tags=["exercise"]
mine = [
    "tokens -> x",
    "hidden -> y",
    "params: model -> x",
    "grads: model -> x",
]

# %% tags=["check"]
searched = cost("tokens -> x", "hidden -> y", "params: model -> x", "grads: model -> x")
with attempt():
    time, memory = cost(*([mine] if isinstance(mine, str) else mine))
    if time > 0.98 * searched[0]:
        print(f"Not yet: it takes {time / searched[0]:.3f} times as long.")
    else:
        print("Right!" if memory <= searched[1] * 1.001 else "Not yet: it needs more memory.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: `y` is partial over axis y. Each device takes a share of the sum, by a reduce_scatter in
# place of an all_reduce, and computes the loss of it alone.
mine = [
    "tokens -> x",
    "hidden -> y",
    "params: model -> x",
    "grads: model -> x",
    "y: model -> y",
    "target: model -> y",
]
assert cost(*mine)[0] < 0.96 * searched[0]
assert cost(*mine)[1] <= searched[1]

# %% [markdown]
# That is sequence parallelism's idea. `--per-tensor` searches such rules, too; it takes long.
#
# ## Exercise 4: when do two GPUs win?
#
# In ColocRL's model: how many milliseconds may a transfer take to begin, at most, such that the
# expert's placement on two GPUs is not slower than one GPU? One percent is close enough.
#
# <details><summary>A hint</summary>
# Read it off the figure, then refine it with <code>two_gpus(seconds, "expert")["seconds"]</code>.
# </details>

# %% tags=["exercise"]
milliseconds = 47

# %% tags=["check"]
with attempt():
    ratio = two_gpus(max(milliseconds, 0) / 1e3, "expert")["seconds"] / ONE_GPU
    right = abs(ratio - 1) < 0.01
    print("Right!" if right else f"Not yet: two GPUs take {ratio:.2f} times as long as one.")

# %% jupyter={"source_hidden": true} tags=["solution", "hide-input"]
# Solution: on the right the curve is straight. 40 transfers forward and 40 backward follow one
# another, so it falls by 80 s for each second that a transfer is shorter.
slow = two_gpus(COLOC["transfer"], "expert")["seconds"]
milliseconds = 1e3 * (COLOC["transfer"] - (slow - ONE_GPU) / (2 * 40))
assert abs(two_gpus(milliseconds / 1e3, "expert")["seconds"] / ONE_GPU - 1) < 0.01

# %% [markdown]
# What to take along: a search is as good as its space and its cost. A method can prove that its
# answer is the best of the space. That the space has what you need, and that the cost is that of
# your machine, no method can prove. Measure the first three plans before you train for a month.
#
# This was the last notebook. `docs/search.md` has all options of the search, `docs/graphs.md` the
# graphs, and `docs/published.md` how predictions compare with what others measured.
#
# ## Footnotes
#
# ¹ By PipeDream's profile of AlexNet in its own repository, 14-1-1 takes 30 % less time than 15-1.
# The paper's table is from measurements on machines that we do not have.
