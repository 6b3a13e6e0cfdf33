"""`meshdsl compile`: the standalone program of every device."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import fail


def command(
    file: common.File,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PROG.py", help="Where to (standard output)."),
    ] = None,
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
    """Write the program as plain torch with explicit collectives, to be run by torchrun."""
    with common.reporting() as diagnostics:
        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        if output is not None:
            check_output(output, force)
        made = common.compiled(file, chosen, diagnostics, "device")
        text = made.text
        if output is None:
            sys.stdout.write(text)
            return
        write_whole(output, text)
        devices = made.device.mesh.devices
        typer.echo(f"wrote {output}; run it: torchrun --nproc-per-node {devices} {output}")


def check_output(path: Path, force: bool) -> None:
    """Refuse, before any work, a file that cannot be written or would be overwritten."""
    if path.is_dir():
        fail("MD0502", f"{path} is a folder", help=f"name a file in it: {path / 'prog.py'}")
    if os.path.exists(path) and not os.path.isfile(path):
        fail("MD0502", f"{path} is no regular file", help="name a file, or one that is not there")
    if not path.parent.is_dir():
        fail("MD0502", f"there is no folder {path.parent}", help=f"make it: mkdir -p {path.parent}")
    if path.exists() and not force:
        fail("MD0503", f"{path} exists", help="--force overwrites it")
    if not os.access(path.parent, os.W_OK):
        help = "choose another folder, or change its permissions"
        fail("MD0502", f"the folder {path.parent} cannot be written to", help=help)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    from meshdsl.backends.runtime.files import regular

    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "w", encoding="utf-8", newline="\n", opener=regular) as file:
            file.write(text)
        os.replace(beside, path)
    except OSError as error:
        help = "check the space and the permissions there"
        fail("MD0501", f"{path} cannot be written: {error.strerror}", help=help)
