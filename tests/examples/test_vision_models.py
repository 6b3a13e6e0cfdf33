"""Published models of images, on weights as their publishers' code names and lays them out.

What is compared with is written in torch's own modules and functions.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional

import meshdsl as md
from tests.project import ROOT

TOLERANCE = {"f32": 1e-5, "f64": 1e-12}
DTYPES = {"f32": torch.float32, "f64": torch.float64}


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, middle: int, stride: int, projects: bool) -> None:
        super().__init__()
        outputs = 4 * middle
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(middle), nn.BatchNorm2d(middle)
        self.bn3 = nn.BatchNorm2d(outputs)
        if projects:
            strided = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(strided, nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        short = self.downsample(x) if hasattr(self, "downsample") else x
        return torch.relu(self.bn3(self.conv3(y)) + short)


class ResNet(nn.Module):
    """As torchvision has it: bottlenecks whose stride is in the convolution of 3 x 3."""

    def __init__(self, width: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, count in enumerate(blocks):
            middle, layer = 2 * 2**stage, nn.Sequential()
            for n in range(count):
                layer.append(Bottleneck(inputs, middle, 2 if stage and n == 0 else 1, n == 0))
                inputs = 4 * middle
            setattr(self, f"layer{stage + 1}", layer)
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        scores: torch.Tensor = self.fc(x.mean((2, 3)))
        return scores


RESNET = {
    "batch": 8, "h0": 32, "w0": 32, "c0": 4, "c1": 8, "classes": 5,
    "more1": 2, "more2": 1, "more3": 1, "more4": 1,
}  # fmt: skip
GRIDS = {
    "data_parallel": {"data": 2}, "zero3": {"data": 2},
    "rows_of_images": {"data": 2, "part": 2}, "channels": {"data": 2, "part": 2},
}  # fmt: skip


def resnet(dtype: str) -> tuple[ResNet, torch.Tensor]:
    """A network whose averages and scales say something, and images."""
    torch.manual_seed(0)
    network = ResNet(4, (3, 2, 2, 2), 5).to(DTYPES[dtype])
    for name, tensor in network.state_dict().items():
        if tensor.ndim == 1 and tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5)
        if name.endswith(("running_mean", "bn1.bias")):
            tensor.sub_(1)
    return network, torch.randn(8, 3, 32, 32, dtype=DTYPES[dtype])


def planned(layout: str, dtype: str, program: str) -> md.Plan:
    path = ROOT / "examples" / "models" / "resnet50.mdsl"
    loaded = md.load(path, program=program, dims=RESNET)
    return loaded.compile(GRIDS[layout], layout, dtype=dtype, reduce="deferred")


@pytest.mark.parametrize("layout", GRIDS)
def test_a_resnet_says_what_torch_says_of_images(tmp_path, layout):
    """By the averages in its file; in f32 as well under one layout."""
    for dtype in ("f64", "f32") if layout == "channels" else ("f64",):
        network, images = resnet(dtype)
        torch.save(network.state_dict(), tmp_path / "resnet.pth")
        plan = planned(layout, dtype, "classify")
        plan.load_weights(tmp_path / "resnet.pth")
        found = plan(images=images.numpy()).logits
        with torch.no_grad():
            wanted = network.eval()(images).numpy()
        assert np.abs(found - wanted).max() < TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize("layout", GRIDS if "MESHDSL_CASES" in os.environ else ["data_parallel"])
def test_a_step_of_a_resnet_is_that_of_torch(tmp_path, layout):
    """Momentum's first step is the gradient itself; the averages move, by the unbiased variance."""
    network, images = resnet("f64")
    labels = torch.arange(8) % 5
    torch.save(network.state_dict(), tmp_path / "resnet.pth")
    plan = planned(layout, "f64", "resnet50")
    plan.load_weights(tmp_path / "resnet.pth")
    given = {"images": images.numpy(), "labels": labels.numpy().astype(np.int32)}
    before = {n: t.clone() for n, t in network.state_dict().items()}
    rate = 0.1 / 25_000
    step = torch.optim.SGD(network.parameters(), rate, momentum=0.9, weight_decay=1e-4)
    functional.cross_entropy(network.train()(images), labels).backward()
    step.step()
    plan.train(given, 1)
    plan.save_weights(tmp_path / "after.pth")
    after = torch.load(tmp_path / "after.pth")
    wanted = network.state_dict()
    assert after.keys() == {n for n in wanted if not n.endswith("num_batches_tracked")}
    for name, tensor in after.items():
        moved = wanted[name] - before[name]
        most = 1e-11 * (1 if "running" in name else rate)
        assert (tensor - before[name] - moved).abs().max() < max(most, 1e-15), name
        assert moved.abs().max() > 1e-9, name
    network.load_state_dict(after)


# --- CLIP ----------------------------------------------------------------------------------------

CLIP = {
    "batch": 8, "key": 4, "embed": 8, "height": 12, "width": 12, "down": 4, "right": 4,
    "vmodel": 24, "vheads": 6, "vhidden": 48, "vlayers": 2, "vocab": 40, "seq": 7, "context": 9,
    "model": 16, "heads": 4, "hidden": 32, "layers": 3,
}  # fmt: skip
TOWERS = {
    "data_parallel": {"data": 4}, "zero3": {"data": 4},
    "megatron": {"data": 2, "tp": 2}, "megatron_zero3": {"data": 2, "tp": 2},
}  # fmt: skip
State = dict[str, torch.Tensor]


def clip_state(dtype: str) -> State:
    """Random tensors under the names of the files."""
    shapes: dict[str, list[int]] = {"logit_scale": []}
    for tower, model, layers in (("vision", 24, 2), ("text", 16, 3)):
        for layer in range(layers):
            h = f"{tower}_model.encoder.layers.{layer}"
            for name in ("q", "k", "v", "out"):
                shapes[f"{h}.self_attn.{name}_proj.weight"] = [model, model]
                shapes[f"{h}.self_attn.{name}_proj.bias"] = [model]
            sizes = {"mlp.fc1": [2 * model, model], "mlp.fc2": [model, 2 * model]}
            for name, size in {**sizes, "layer_norm1": [model], "layer_norm2": [model]}.items():
                shapes[f"{h}.{name}.weight"], shapes[f"{h}.{name}.bias"] = size, size[:1]
        shapes["visual_projection.weight" if tower == "vision" else "text_projection.weight"] = [
            8, model,
        ]  # fmt: skip
    for name, model in {
        "vision_model.pre_layrnorm": 24, "vision_model.post_layernorm": 24,
        "text_model.final_layer_norm": 16,
    }.items():  # fmt: skip
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = [model]
    e = "vision_model.embeddings"
    shapes |= {f"{e}.class_embedding": [24], f"{e}.patch_embedding.weight": [24, 3, 4, 4]}
    shapes |= {f"{e}.position_embedding.weight": [10, 24]}
    e = "text_model.embeddings"
    shapes |= {f"{e}.token_embedding.weight": [40, 16], f"{e}.position_embedding.weight": [9, 16]}
    torch.manual_seed(0)
    return {n: 0.3 * torch.randn(s, dtype=DTYPES[dtype]) + 0.5 for n, s in shapes.items()}


def clip_logits(state: State, images: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """How like each image is to each text."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.layer_norm(
            x, x.shape[-1:], state[f"{name}.weight"], state[f"{name}.bias"]
        )

    def encoded(x: torch.Tensor, tower: str, layers: int, causal: bool) -> torch.Tensor:
        for layer in range(layers):
            h = f"{tower}.encoder.layers.{layer}"
            y = norm(x, f"{h}.layer_norm1")
            q, k, v = (
                linear(y, f"{h}.self_attn.{n}_proj").unflatten(-1, (-1, 4)).transpose(1, 2)
                for n in "qkv"
            )
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
            x = x + linear(o.transpose(1, 2).flatten(-2), f"{h}.self_attn.out_proj")
            up = linear(norm(x, f"{h}.layer_norm2"), f"{h}.mlp.fc1")
            x = x + linear(up * torch.sigmoid(1.702 * up), f"{h}.mlp.fc2")
        return x

    e = "vision_model.embeddings"
    patches = functional.conv2d(images, state[f"{e}.patch_embedding.weight"], stride=4)
    first = state[f"{e}.class_embedding"].expand(len(images), 1, -1)
    x = torch.cat((first, patches.flatten(2).mT), dim=1) + state[f"{e}.position_embedding.weight"]
    x = encoded(norm(x, "vision_model.pre_layrnorm"), "vision_model", 2, causal=False)
    image = linear(norm(x[:, 0], "vision_model.post_layernorm"), "visual_projection")
    e = "text_model.embeddings"
    y = state[f"{e}.token_embedding.weight"][ids]
    y = y + state[f"{e}.position_embedding.weight"][: ids.shape[1]]
    y = norm(encoded(y, "text_model", 3, causal=True), "text_model.final_layer_norm")
    text = linear(y[torch.arange(len(ids)), (ids == 39).int().argmax(dim=1)], "text_projection")
    image, text = (functional.normalize(t, dim=-1) for t in (image, text))
    return state["logit_scale"].exp() * image @ text.T


def images_and_texts(dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts end with token 39, some of them early."""
    torch.manual_seed(1)
    ids = torch.randint(3, 39, (8, 7))
    ids[:, -2:] = 39
    ids[3, 2:] = 39
    return torch.randn(8, 3, 12, 12, dtype=DTYPES[dtype]), ids


def clip_plan(layout: str, dtype: str, state: State, path: Path) -> md.Plan:
    loaded = md.load(ROOT / "examples" / "models" / "clip.mdsl", dims=CLIP)
    plan = loaded.compile(TOWERS[layout], layout, dtype=dtype, reduce="deferred")
    safetensors.torch.save_file(state, path)
    plan.load_weights(path)
    return plan


@pytest.mark.parametrize("layout", TOWERS)
def test_clip_compares_as_its_formulas_do(tmp_path, layout):
    for dtype in ("f64", "f32") if layout == "megatron" else ("f64",):
        state, (images, ids) = clip_state(dtype), images_and_texts(dtype)
        plan = clip_plan(layout, dtype, state, tmp_path / "clip.safetensors")
        found = plan(images=images.numpy(), tokens=ids.numpy().astype(np.int32)).logits
        wanted = clip_logits(state, images, ids).numpy()
        assert np.abs(found - wanted).max() < TOLERANCE[dtype] * np.abs(wanted).max()


def test_a_step_of_clip_is_that_of_torch(tmp_path):
    state, (images, ids) = clip_state("f64"), images_and_texts("f64")
    plan = clip_plan("megatron_zero3", "f64", state, tmp_path / "clip.safetensors")
    plan.train({"images": images.numpy(), "tokens": ids.numpy().astype(np.int32)}, 1)
    plan.save_weights(tmp_path / "after.safetensors")
    after = safetensors.torch.load_file(tmp_path / "after.safetensors")
    before = {n: t.clone() for n, t in state.items()}
    rate = 5e-4 / 2000
    step = torch.optim.AdamW(
        [t.requires_grad_() for t in state.values()], rate, (0.9, 0.98), 1e-6, weight_decay=0.2
    )
    logits, pairs = clip_logits(state, images, ids), torch.arange(8)
    loss = functional.cross_entropy(logits, pairs) + functional.cross_entropy(logits.T, pairs)
    (loss / 2).backward()
    step.step()
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        moved = tensor.detach() - before[name]
        assert (after[name] - before[name] - moved).abs().max() < 1e-11 * (1 + rate), name
        assert moved.abs().max() > 1e-8, name
