"""Published models of images, on weights as their publishers' code names and lays them out.

What is compared with is written in torch's own modules and functions.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
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
        for n, channels in enumerate((middle, middle, outputs), 1):
            setattr(self, f"bn{n}", nn.BatchNorm2d(channels))
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
        return self.fc(x.mean((2, 3)))


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
