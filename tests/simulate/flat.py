"""A cluster of any size whose devices are all beside each other, and programs to simulate on it."""

from __future__ import annotations

from dataclasses import replace

from meshdsl.cluster.profile import UNBOUNDED, Cluster, Level, load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceProgram
from meshdsl.pipeline import Options
from tests.device.steps import LAYOUTS, TEXT, with_overlap
from tests.device.steps import plain as lowered

DEVICE = load("h100").device
LINKS = Level(UNBOUNDED, "switch", 5e-6, 100e9, 100e9)


def flat(
    program: DeviceProgram,
    slowdown: float = 1.2,
    link: Level = LINKS,
    launch: float = DEVICE.launch,
) -> Timing:
    """The timing of a program: any mesh fits."""
    device = replace(DEVICE, overlap_slowdown=slowdown, launch=launch)
    return Timing(Cluster("flat", device, (link,)), program.mesh)


def layered(layout: str, layers: int, overlapping: bool = True) -> DeviceProgram:
    """A training step of some layers; collectives in flight early, or not."""
    text = TEXT.replace("layers = 3", f"layers = {layers}")
    made = lowered(layout, "deferred", text)
    return with_overlap(made) if overlapping else made


__all__ = ["LAYOUTS", "Options", "flat", "layered"]
