"""AlexNet and U-Net: what they send at the sizes of the literature, and one step of them, small.

Nothing of the large ones is held: they are only placed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.report.explanation import explain
from tests.compiling import compile_text
from tests.project import ROOT

EXAMPLES = ROOT / "examples"
TORCHVISION = {
    "n": 1024, "tower": 1, "c1": 64, "c2": 192, "c3": 384, "c4": 256, "c5": 256, "wide": 4096,
    "classes": 1000, "h": 224, "w": 224, "h1": 55, "w1": 55, "h2": 27, "w2": 27, "h3": 13,
    "w3": 13, "h6": 6, "w6": 6,
}  # fmt: skip
"""AlexNet as torchvision has it: one tower, 61,100,840 parameters; 128 images for each of 8."""

ISBI = {"n": 1, "a": 64, "h": 512, "w": 512}


def collectives(example: str, layout: str, **options: Any) -> list[Any]:
    text = options.pop("text", None) or (EXAMPLES / f"{example}.mdsl").read_text("utf-8")
    program = compile_text(text, layout=layout, **options).device
    assert program is not None
    return list(explain(program)["collectives"])


@pytest.mark.parametrize(
    ("layout", "sent"), [("data_parallel", 427_705_887), ("weird_trick", 141_415_967)]
)
def test_one_weird_trick(layout: str, sent: int) -> None:
    """Of data parallel all gradients; of the trick activations where weights are large."""
    found = collectives("alexnet", layout, mesh="gpu:8", set_dims=TORCHVISION)
    assert sum(c["wire_bytes"] for c in found) == sent


def test_towers_meet_in_the_third_convolution() -> None:
    text = (EXAMPLES / "alexnet.mdsl").read_text("utf-8").splitlines()
    sending = {text[c["line"] - 1] for c in collectives("alexnet", "towers")}
    convolutions = [line for line in text if "conv[" in line]
    assert len(convolutions) == 5
    assert [line in sending for line in convolutions] == [False, False, True, False, False]


def test_u_net_sends_two_rows_for_each_convolution() -> None:
    """To and from a device between two others; of the image itself no gradient is wanted."""
    found = collectives("unet", "rows_of_images", mesh="d:8", set_dims=ISBI)
    halos = [c for c in found if c["kind"] == "halo"]
    sent = {p: [c["wire_bytes"] for c in halos if c["phase"] == p] for p in ("forward", "backward")}
    assert (len(sent["forward"]), sum(sent["forward"])) == (18, 4_984_832)
    assert sum(sent["backward"]) + 2 * 512 * 64 * 4 == 4_718_592
    assert {c["kind"] for c in found if c["phase"] in sent} == {"halo"}


@pytest.mark.parametrize(
    ("example", "layout", "sizes"),
    [
        ("alexnet", "towers", {"n": 2}),
        ("alexnet", "weird_trick", {"n": 2}),
        ("unet", "rows_of_images", {"h": 32, "w": 16}),
        ("vgg", "quarters", {"n": 8}),
    ],
)
def test_it_learns_from_its_first_batch(
    example: str, layout: str, sizes: dict[str, int], tmp_path: Path
) -> None:
    """A batch shown again and again: devices and one device alone agree, and the loss falls."""
    program = md.load(EXAMPLES / f"{example}.mdsl", dims=sizes)
    plan = program.compile(layout=layout)
    batch = plan.sample()
    if example == "unet":
        batch["mask"] = (batch["image"][:, 0] > 0).astype(np.int32)
    np.testing.assert_allclose(plan(**batch).loss, plan.reference(**batch).loss, rtol=1e-4)
    before = float(plan(**batch).loss)
    plan.train(batch, 12)
    assert float(plan(**batch).loss) < 0.9 * before
