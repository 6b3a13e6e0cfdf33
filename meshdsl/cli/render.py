"""`meshdsl render`: the placed program in another system's notation."""

from __future__ import annotations

import sys
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.backends.peers.renderings import RENDERINGS, render
from meshdsl.cli import common
from meshdsl.cli.compile import check_output, write_whole

Notation = StrEnum("Notation", {name: name for name in RENDERINGS})  # type: ignore[misc]


def command(
    file: common.File,
    notation: Annotated[
        Notation, typer.Option("--as", metavar="|".join(RENDERINGS), help="Whose notation.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="Where to (standard output)."),
    ] = None,
    step: Annotated[
        bool, typer.Option("--step", help="With `minimize`: the gradients and the update too.")
    ] = False,
    program: common.Program = None,
    mesh: common.Mesh = None,
    layout: common.Layout = None,
    sbp: common.Sbp = None,
    reduce: common.Reduce = common.POLICY,
    message_bytes: common.MessageBytes = common.MESSAGE,
    no_cache: common.NoCache = False,
    settings: common.Set = None,
    dtype: common.DType = None,
    strict: common.Strict = False,
    force: common.Force = False,
) -> None:
    """Write the placed program as another system would write it.

    Of one with `minimize`, what it computes: other systems make gradients themselves.
    """
    with common.reporting() as diagnostics:
        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        if output is not None:
            check_output(output, force)
        chosen = replace(chosen, evaluate=not step)
        made = common.compiled(file, chosen, diagnostics, "placed")
        text = render(made.placed, str(notation))
        if output is None:
            sys.stdout.write(text)
            return
        write_whole(output, text)
        typer.echo(f"wrote {output}")
