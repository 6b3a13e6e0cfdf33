"""The passes over the device program, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from meshdsl.device.buckets import in_buckets
from meshdsl.device.donated_gradients import donated_gradients
from meshdsl.device.filled_stacks import filled_stacks
from meshdsl.device.grouped_norms import grouped_norms
from meshdsl.device.grouped_updates import grouped_updates
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.overlap import overlapped
from meshdsl.device.reduced_in_loops import reduced_in_loops
from meshdsl.device.reported_last import reported_last
from meshdsl.device.saved_names import saved_names
from meshdsl.device.sums import added_directly, summed_in_place
from meshdsl.device.updates_in_place import updated_in_place
from meshdsl.placed.ir import PlacedProgram

if TYPE_CHECKING:
    from meshdsl.device.stage_local import Stored

Pass = Callable[[DeviceProgram], DeviceProgram]
"""A pure function from program to program."""


def passes(program: PlacedProgram, stored: Stored | None = None) -> tuple[Pass, ...]:
    """The passes over what a placed program is lowered to: those of pipelines where it has stages.

    `stored` says which parameters single devices have, where another program decides that.
    """
    grouped = (
        (grouped_norms, donated_gradients, grouped_updates, filled_stacks)
        if program.updates
        else ()
    )
    moved = _moved() if program.kept else ()
    # What is kept on the host comes back under a name of its own.
    named = (saved_names,) if program.updates and not moved else ()
    last = (updated_in_place, *named, in_buckets, *moved, overlapped, *grouped)
    if program.pipe is None:
        first = (
            (reported_last, summed_in_place, added_directly, reduced_in_loops)
            if program.updates
            else ()
        )
        return (*first, *last)
    from meshdsl.device.async_updates import given_whole
    from meshdsl.device.microbatching import in_micro_batches
    from meshdsl.device.stage_local import on_one_device
    from meshdsl.device.stage_phases import pipelined

    on_stages = (pipelined, partial(on_one_device, stored=stored), added_directly)
    return (in_micro_batches, given_whole, summed_in_place, *on_stages, *last)


def _moved() -> tuple[Pass, ...]:
    from meshdsl.device.offloaded_activations import offloaded_activations

    return (offloaded_activations,)
