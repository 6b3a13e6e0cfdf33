"""`meshdsl compile`: the standalone program of every device."""

from __future__ import annotations

import sys
from pathlib import Path

from meshdsl.cli import common
from meshdsl.cli.options import File, Force, PlacingOptions, flag, opt, option, pipeline_options
from meshdsl.output_files import write_whole


@option
class Compile(PlacingOptions, Force):
    """Options of `compile`."""

    output: Path | None = opt(
        "-o --output", "PROG.py", "The file to write. [default: standard output]"
    )
    bare: bool = flag(
        "--bare",
        "Write only what a device does, to be read: its function, and the schedule of a pipeline.",
    )


def command(file: File, given: Compile) -> None:
    """Write the standalone torch program, to run with torchrun."""
    with common.reporting() as diagnostics:
        chosen = pipeline_options(given)
        if given.output is not None:
            common.check_output(given.output, given.force, file)
        compilation = common.compiled(file, chosen, diagnostics, "device")
        text = compilation.bare if given.bare else compilation.text
        if given.output is None:
            sys.stdout.write(text)
            return
        write_whole(given.output, text)
        run = (
            f"; run it: torchrun --nproc-per-node {compilation.device.mesh.devices} {given.output}"
        )
        common.say(f"wrote {given.output}{'' if given.bare else run}")
