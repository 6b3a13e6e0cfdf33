"""`meshdsl run`: the compiled program on made-up or given values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.cli import common, traces
from meshdsl.cli.options import (
    AsData,
    File,
    Force,
    PlacingOptions,
    flag,
    opt,
    option,
    pipeline_options,
    refuse_unknown,
    weights,
)
from meshdsl.diagnostics import Diagnostic, Diagnostics
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.output_files import refuse_writing
from meshdsl.pipeline import Compilation

if TYPE_CHECKING:
    from meshdsl.backends.engines.against_reference import TensorComparison
    from meshdsl.backends.engines.execution import InputSource, Result


@option
class RunOptions(PlacingOptions, Force, AsData):
    """Options of `run`."""

    engine: str = opt("--engine", "E", "The engine: local, torchrun or reference.", "local")
    inputs: str | None = opt("--inputs", "F", "Inputs: .npz or .safetensors.")
    params: str | None = opt(
        "--params", "F", "Parameters: a file, or the folder of a checkpoint or model."
    )
    weights: str | None = weights("The `weights` block to load a model with.")
    seed: int = opt("--seed", "S", "The seed of inputs and parameters that are not given.", 0)
    out: Path | None = opt("--out", "F.npz", "Write the full outputs.")
    step: bool = flag("--step", "Take one training step, with gradients and update.")
    trace: Path | None = opt(
        "--trace", "F.json", "Write the time of each statement, for Perfetto (torchrun)."
    )
    verify: bool = flag("--verify", "Compare with the unsharded float64 reference.")


def command(file: File, given: RunOptions) -> None:
    """Run a program and print its outputs."""
    with common.reporting(given.json) as diagnostics:
        check_engine(given)
        chosen = replace(pipeline_options(given), evaluate=not given.step)
        if given.out is not None:
            _check_out(given.out, given.force)
        with traces.timed(given.trace, given.engine, given.force) as folder:
            compilation = asked(common.compiled(file, chosen, diagnostics, "device"), given)
            result, checked = run(compilation, given, diagnostics, folder)
            if given.trace is not None:
                traces.write_measured(given.trace, compilation, folder)
        if given.out is not None:
            _write(given.out, result.outputs)
        _show(compilation, given, result, checked)


def asked(made: Compilation, given: RunOptions) -> Compilation:
    """The training step of a program under `--step`, else its outputs alone.

    Raises MD0510 where there is nothing to train.
    """
    from meshdsl.backends.train.training_run import check_trainable

    if not given.step:
        return made.forward
    check_trainable(made)
    return made


def check_engine(given: RunOptions) -> None:
    """Raise MD0602 for an unknown engine."""
    from meshdsl.backends.engines.execution import ENGINES

    refuse_unknown("engine", given.engine, ENGINES, "no engine is called so")


def _check_out(out: Path, force: bool) -> None:
    if out.suffix != ".npz":
        fix = give("--out", str(common.with_suffix(out, ".npz", "outputs")))
        refuse("MD0602", f"`--out {out}`: outputs are written as .npz", fix)
    common.check_output(out, force)


def run(
    made: Compilation, given: RunOptions, diagnostics: Diagnostics, timed: str | None = None
) -> tuple[Result, Sequence[TensorComparison]]:
    """The result of the engine, and its comparison with the reference under `--verify`.

    The devices time their lines into the folder `timed`.

    Raises:
        DiagnosticError: the run fails (MD07xx).
    """
    from meshdsl.backends.engines import execution as engines
    from meshdsl.backends.weights.params import params_file

    if given.weights is not None and given.params is None:
        message = f"`--as {given.weights}` without `--params`: there is no model to read"
        fix = leave_out("--as", safe=False)
        refuse("MD0601", message, fix, "name the model: `--params FOLDER`")
    names = tuple(str(p.value.name) for p in made.named.params)
    with params_file(given.params, made, names, given.weights, diagnostics) as params:
        values = engines.InputSource(given.inputs, params, given.seed, timed)
        return _run(made, given, values, diagnostics)


def _run(
    made: Compilation, given: RunOptions, values: InputSource, diagnostics: Diagnostics
) -> tuple[Result, Sequence[TensorComparison]]:
    from meshdsl.backends.data.wrong_data import rounded_note
    from meshdsl.backends.engines import execution as engines
    from meshdsl.backends.engines.against_reference import problems

    result = engines.run(made, given.engine, values)
    for note in result.notes:
        diagnostics.add(rounded_note(note))
    for text in result.disagreements:
        diagnostics.add(Diagnostic("MD0707", text))
    yielded = (result.outputs, result.updated)
    checked = engines.verify(made, values, *yielded) if given.verify else ()
    diagnostics.add(*problems(checked))
    return result, checked


def _show(
    made: Compilation, given: RunOptions, result: Result, checked: Sequence[TensorComparison]
) -> None:
    from meshdsl.report.running import run_as_json, run_report
    from meshdsl.report.terminal import print_document

    if given.json:
        common.print_json(run_as_json(made, given.engine, result, checked))
        return
    print_document(tuple(run_report(made, given.engine, result, checked)))
    for path in filter(None, (given.out, given.trace)):
        common.say(f"wrote {path}")


def _write(out: Path, outputs: Mapping[str, Any]) -> None:
    from meshdsl.backends.runtime.array_files import write_npz

    try:
        write_npz(str(out), dict(outputs))
    except OSError as error:
        refuse_writing(out, error)
