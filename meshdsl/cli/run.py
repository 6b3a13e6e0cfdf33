"""`meshdsl run`: the compiled program on made-up or given values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean, fail
from meshdsl.pipeline import Compilation


def command(
    file: common.File,
    engine: Annotated[
        str, typer.Option("--engine", metavar="E", help="local, torchrun or reference.")
    ] = "local",
    inputs: Annotated[
        str | None, typer.Option("--inputs", metavar="F", help="Inputs: .npz or .safetensors.")
    ] = None,
    params: Annotated[
        str | None, typer.Option("--params", metavar="F", help="Parameters, likewise.")
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="S", help="For values that are not given.")
    ] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="F.npz", help="Write the outputs, whole.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare with the float64 reference.")
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
    json: common.Json = False,
) -> None:
    """Run the program: all devices in this process, on real processes, or as the reference."""
    with common.reporting(json) as diagnostics:
        from meshdsl.backends.engines.run import ENGINES, Given

        if engine not in ENGINES:
            help = did_you_mean(engine, list(ENGINES)) or f"there are {', '.join(ENGINES)}"
            fail("MD0602", f"`--engine {engine}`: no engine is called so", help=help)
        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        if out is not None:
            _check_out(out, force)
        made = common.compiled(file, chosen, diagnostics, "device")
        _run(made, engine, Given(inputs, params, seed), diagnostics, verify, out, json)
    code = common.exit_code(diagnostics.errors)
    if code:
        raise typer.Exit(code)


def _check_out(out: Path, force: bool) -> None:
    from meshdsl.cli.compile import check_output

    if out.suffix != ".npz":
        fail("MD0602", f"`--out {out}`: outputs are written as .npz", help=f"--out {out.stem}.npz")
    check_output(out, force)


def _run(
    made: Compilation,
    engine: str,
    given: Any,
    diagnostics: Diagnostics,
    verify: bool,
    out: Path | None,
    json: bool,
) -> None:
    from meshdsl.backends.engines import run as engines
    from meshdsl.backends.engines.verify import problems
    from meshdsl.report.running import run_as_json, run_report
    from meshdsl.report.terminal import print_document

    result = engines.run(made, engine, given)
    for note in result.notes:
        diagnostics.add(Diagnostic("MD0506", note, severity="note"))
    for text in result.disagreements:
        diagnostics.add(Diagnostic("MD0707", text))
    checked = engines.verify(made, given, result.outputs, result.updated) if verify else ()
    diagnostics.add(*problems(checked))
    if out is not None:
        _write(out, result.outputs)
    if json:
        common.print_json(run_as_json(made, engine, result, checked))
    else:
        print_document(tuple(run_report(made, engine, result, checked)))
        if out is not None:
            typer.echo(f"wrote {out}")


def _write(out: Path, outputs: Mapping[str, Any]) -> None:
    from meshdsl.backends.runtime.files import Refused, write_npz

    try:
        write_npz(str(out), dict(outputs))
    except Refused as refused:
        fail("MD0501", str(refused), help="check the space and the permissions there")
