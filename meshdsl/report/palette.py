"""One palette: a colour means one thing on a terminal, in pictures, on pages and in notebooks.

`PARTS` tell devices and parts of tensors apart. `WORK` says what a device does, and `MEMORY` what
it holds: what a kind of work makes or uses has its hue, such as activations that of the forward
pass. `INK` is legible on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from meshdsl.report.document import Style

DARK: dict[str, str] = {}
"""Each colour as it is on a dark page; the dark `INK` is legible on the dark fills."""


def _on_pages(light: str, dark: str) -> str:
    """A colour on light pages, by which `DARK` knows the one that it is on dark pages."""
    DARK[light] = dark
    return light


BACK = _on_pages("#fbfbfc", "#1a1d21")
EDGE = _on_pages("#c9ced6", "#3d444d")
INK = _on_pages("#1b1f24", "#f2f4f7")
SOFT = _on_pages("#57606a", "#9aa4b0")
"""The background of a picture, its lines, its text, and text of less weight."""

BLANK = _on_pages("#ffffff", "#1a1d21")
"""The fill of what has only an outline, and the ground below a fill that is not opaque."""

IDLE = _on_pages("#e6e9ee", "#30363d")
"""The time in which a device does nothing."""

PHASES = {
    "warm-up": _on_pages("#4fb0a8", "#3f958e"),
    "steady": _on_pages("#8d99a8", "#76818f"),
    "cool-down": _on_pages("#d97fa8", "#b0608a"),
}
"""Before the first backward pass of a device, until its last forward pass, and after that."""

CURVE = _on_pages("#1f5fbf", "#79b0ff")
"""The line of a curve."""

PARTS = (
    _on_pages("#9ecae9", "#2f5f85"),
    _on_pages("#ffd28f", "#805a17"),
    _on_pages("#a8d8a0", "#376b32"),
    _on_pages("#d7bde2", "#634a78"),
    _on_pages("#f5b7b1", "#84433c"),
    _on_pages("#cfd4da", "#4d5560"),
    _on_pages("#f0e68c", "#6d6615"),
    _on_pages("#9fdcd6", "#22655f"),
)
"""Fills of devices, parts of tensors, and groups of devices."""

Pass = Literal["forward", "backward", "weights", "update"]
"""What a device computes; `weights` are gradients of parameters, apart from those of inputs."""

Work = Pass | Literal["sending", "waiting", "more iterations"]
"""What a stream does."""

WORK: Mapping[Work, str] = {
    "forward": _on_pages("#7fb2e5", "#2d6aa8"),
    "backward": _on_pages("#f2b155", "#8f6010"),
    "weights": _on_pages("#8ccf7e", "#2f7a35"),
    "update": _on_pages("#c79be0", "#7a4a98"),
    "sending": _on_pages("#ef8f86", "#9c423c"),
    "waiting": BLANK,
    "more iterations": IDLE,
}

ON_A_TERMINAL: dict[Style, str] = {
    "forward": "black on bright_blue",
    "backward": "black on bright_yellow",
    "weights": "black on bright_green",
    "update": "black on bright_magenta",
}
"""The hues of `WORK` as every terminal has them."""

MEMORY: Mapping[str, str] = {
    "params": _on_pages("#ddce6a", "#74680f"),
    "grads": WORK["weights"],
    "state": _on_pages("#e0cbef", "#5b4270"),
    "inputs": _on_pages("#b8c0ca", "#565f6b"),
    "gathered": WORK["sending"],
    "new_grads": _on_pages("#bfe5b6", "#2b5a2b"),
    "updates": WORK["update"],
    "buffers": BACK,
    "activations": WORK["forward"],
}
"""The fill of each of `memory_kinds.KINDS`."""


def colour(number: int) -> str:
    """The fill of a device or a part. Numbers that are 8 or 64 apart differ as well."""
    total = 0
    while number:
        number, digit = divmod(number, len(PARTS))
        total += digit
    return PARTS[total % len(PARTS)]
