"""`meshdsl weights`: a first block of weights for a program and a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli import common
from meshdsl.cli.options import File, opt, option, settings, sizes, which_program
from meshdsl.pipeline import Options


@option
class WeightsOptions:
    """Options of `weights`."""

    name: str = opt("--name", "W", "The name of the block.", "hf")
    program: str | None = which_program()
    settings: list[str] | None = settings()


def command(
    file: File,
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="The model: a folder or a file of tensors.", show_default=False
        ),
    ],
    given: WeightsOptions,
) -> None:
    """Draft a `weights` block for a program and a model."""
    with common.reporting() as diagnostics:
        from meshdsl.backends.weights.draft import draft
        from meshdsl.backends.weights.params import read_model

        given_sizes = sizes(given.settings or [])
        chosen = Options(
            program=given.program, set_dims=given_sizes.sizes, set_in=given_sizes.places
        )
        compilation = common.compiled(file, chosen, diagnostics, "named")
        types = {str(p.value.name): p.value.type for p in compilation.named.params}
        sys.stdout.write(draft(given.name, types, read_model(str(model))))
