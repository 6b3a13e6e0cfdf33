"""One palette: a colour means one thing on a terminal, in pictures, on pages and in notebooks.

`PARTS` tell devices and parts of tensors apart. `WORK` says what a device does, and `MEMORY` what
it holds: what a kind of work makes or uses has its hue, such as activations that of the forward
pass. `INK` is legible on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from meshdsl.report.document import Style

BACK, EDGE, INK, SOFT = "#fbfbfc", "#c9ced6", "#1b1f24", "#57606a"
"""The background of a picture, its lines, its text, and text of less weight."""

IDLE = "#e6e9ee"
"""The time in which a device does nothing."""

PHASES = {"warm-up": "#4fb0a8", "steady": "#8d99a8", "cool-down": "#d97fa8"}
"""Before the first backward pass of a device, until its last forward pass, and after that."""

CURVE = "#1f5fbf"
"""The line of a curve."""

PARTS = (
    "#9ecae9",
    "#ffd28f",
    "#a8d8a0",
    "#d7bde2",
    "#f5b7b1",
    "#cfd4da",
    "#f0e68c",
    "#9fdcd6",
)
"""Fills of devices, parts of tensors, and groups of devices."""

Pass = Literal["forward", "backward", "weights", "update"]
"""What a device computes; `weights` are gradients of parameters, apart from those of inputs."""

Work = Pass | Literal["sending", "waiting", "more iterations"]
"""What a stream does."""

WORK: Mapping[Work, str] = {
    "forward": "#7fb2e5",
    "backward": "#f2b155",
    "weights": "#8ccf7e",
    "update": "#c79be0",
    "sending": "#ef8f86",
    "waiting": "#ffffff",
    "more iterations": "#e6e9ee",
}

ON_A_TERMINAL: dict[Style, str] = {
    "forward": "black on bright_blue",
    "backward": "black on bright_yellow",
    "weights": "black on bright_green",
    "update": "black on bright_magenta",
}
"""The hues of `WORK` as every terminal has them."""

MEMORY: Mapping[str, str] = {
    "params": "#ddce6a",
    "grads": WORK["weights"],
    "state": "#e0cbef",
    "inputs": "#b8c0ca",
    "gathered": WORK["sending"],
    "new_grads": "#bfe5b6",
    "updates": WORK["update"],
    "buffers": BACK,
    "activations": WORK["forward"],
}
"""The fill of each of `memory_kinds.KINDS`."""


DARK: Mapping[str, str] = {
    BACK: "#1a1d21",
    EDGE: "#3d444d",
    INK: "#f2f4f7",
    SOFT: "#9aa4b0",
    CURVE: "#79b0ff",
    IDLE: "#30363d",
    "#ffffff": "#1a1d21",
    **dict(
        zip(
            PARTS,
            (
                "#2f5f85",
                "#805a17",
                "#376b32",
                "#634a78",
                "#84433c",
                "#4d5560",
                "#6d6615",
                "#22655f",
            ),
            strict=True,
        )
    ),
    "#7fb2e5": "#2d6aa8",
    "#f2b155": "#8f6010",
    "#8ccf7e": "#2f7a35",
    "#c79be0": "#7a4a98",
    "#ef8f86": "#9c423c",
    "#ddce6a": "#74680f",
    "#e0cbef": "#5b4270",
    "#b8c0ca": "#565f6b",
    "#bfe5b6": "#2b5a2b",
    "#4fb0a8": "#3f958e",
    "#8d99a8": "#76818f",
    "#d97fa8": "#b0608a",
}
"""Each colour as it is on a dark page; the dark `INK` is legible on the dark fills."""


def colour(number: int) -> str:
    """The fill of a device or a part. Numbers that are 8 or 64 apart differ as well."""
    total = 0
    while number:
        number, digit = divmod(number, len(PARTS))
        total += digit
    return PARTS[total % len(PARTS)]
