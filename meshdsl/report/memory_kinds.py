"""What the memory of a device is for, in words, and how much of each there is at the peak."""

from __future__ import annotations

from collections.abc import Mapping

KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "state": "state",
    "inputs": "inputs",
    "gathered": "gathered parameters",
    "new_grads": "unfinished gradients",
    "updates": "temporaries of the update",
    "buffers": "workspace",
    "activations": "activations",
}
"""The kinds of `device.memory.memory`, in the order in which they are shown."""


def at_peak(memory: Mapping[str, int]) -> dict[str, int]:
    """The bytes of each kind at its peak: without gradients that are made later."""
    kinds = {kind: memory[kind] for kind in KINDS}
    return {**kinds, "grads": memory["grads"] - memory["grads_later"]}
