"""The passes over the device program, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meshdsl.device.async_updates import given_whole
from meshdsl.device.buckets import in_buckets
from meshdsl.device.grouped_updates import grouped_updates
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.microbatching import in_micro_batches
from meshdsl.device.overlap import overlapped
from meshdsl.device.stage_local import Stored, on_one_device
from meshdsl.device.stage_phases import pipelined
from meshdsl.device.sums import summed_in_place
from meshdsl.device.updates_in_place import updated_in_place
from meshdsl.placed.ir import PlacedProgram

Pass = Callable[[DeviceProgram], DeviceProgram]
"""A pure function from program to program."""


def passes(program: PlacedProgram, stored: Stored | None = None) -> tuple[Pass, ...]:
    """The passes over what a placed program is lowered to: those of pipelines where it has stages.

    `stored` says which parameters single devices have, where another program decides that.
    """
    has_stages = program.pipe is not None
    sums = (summed_in_place,) if has_stages or program.updates else ()
    return (
        *((in_micro_batches, given_whole) if has_stages else ()),
        *sums,
        *((pipelined, partial(on_one_device, stored=stored)) if has_stages else ()),
        updated_in_place,
        in_buckets,
        overlapped,
        grouped_updates,
    )
