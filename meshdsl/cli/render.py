"""`meshdsl render`: the placed program in another system's notation."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from meshdsl.backends.peers.renderings import RENDERINGS, render
from meshdsl.cli import common
from meshdsl.cli.options import File, Force, PlacingOptions, flag, opt, option, pipeline_options
from meshdsl.output_files import write_whole

Notation = StrEnum("Notation", {name: name for name in RENDERINGS})  # type: ignore[misc]


@option
class Render(PlacingOptions, Force):
    """Options of `render`."""

    notation: Notation = opt("--as", "|".join(RENDERINGS), "The notation to write.", ...)
    output: Path | None = opt(
        "-o --output", "FILE", "The file to write. [default: standard output]"
    )
    step: bool = flag("--step", "With `minimize`: write gradients and update, too.")


def command(file: File, given: Render) -> None:
    """Write the sharded program in another system's notation.

    Without --step a training program is written without gradients: other systems derive them.
    """
    with common.reporting() as diagnostics:
        chosen = replace(pipeline_options(given), evaluate=not given.step, fused=False)
        if given.output is not None:
            common.check_output(given.output, given.force, file)
        compilation = common.compiled(file, chosen, diagnostics, "placed")
        text = render(compilation.placed, str(given.notation))
        if given.output is None:
            sys.stdout.write(text)
            return
        write_whole(given.output, text)
        common.say(f"wrote {given.output}")
