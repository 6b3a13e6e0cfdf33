"""`meshdsl export`: parameters in another form, such as a checkpoint as a model of others."""

from __future__ import annotations

from pathlib import Path

from meshdsl.cli import common
from meshdsl.cli.options import File, Force, Sizes, opt, option, sizes, weights, which_program
from meshdsl.diagnostics import Diagnostics
from meshdsl.pipeline import Compilation, Options


@option
class Export(Sizes, Force):
    """Options of `export`."""

    params: str = opt(
        "--params", "F", "Parameters: a file, or the folder of a checkpoint or model.", ...
    )
    out: Path = opt("--out", "F", "The file or folder to write.", ...)
    weights: str | None = weights("The `weights` block of the model; `hf:bf16` writes bf16.")
    program: str | None = which_program(
        "The program with the parameters. [default: the one that trains]"
    )
    applied: str | None = which_program(
        "First run this program, without inputs, for its `:=`.", "--apply"
    )


def command(file: File, given: Export) -> None:
    """Convert a checkpoint to one file or a published format."""
    with common.reporting() as diagnostics:
        common.check_params_output(given.out, given.weights, given.force)
        given_sizes = sizes(given.settings or [])
        chosen = Options(
            program=given.program,
            set_dims=given_sizes.sizes,
            set_in=given_sizes.places,
            dtype=given.dtype,
        )
        compilation = common.compiled(file, chosen, diagnostics, "declarations")
        _export(compilation, given, diagnostics)
        common.say(f"wrote {given.out}")


def _export(made: Compilation, given: Export, diagnostics: Diagnostics) -> None:
    from meshdsl.backends.data.wrong_data import rounded_note
    from meshdsl.backends.engines.execution import read_checked
    from meshdsl.backends.engines.reference import whole_specs
    from meshdsl.backends.train.described import description
    from meshdsl.backends.train.exported_params import export_params
    from meshdsl.backends.weights.applied import ExportedTensors, assigned, assigning, on_one_device
    from meshdsl.backends.weights.params import params_file, written_as
    from meshdsl.backends.weights.writing import check_writable, copy_description, model_dtype

    on_one = on_one_device(made)
    block, model = written_as(on_one, given.weights)
    if model is not None:
        diagnostics.add(*check_writable(model, on_one.named))
    program = None if given.applied is None else assigning(on_one, given.applied)
    specs = whole_specs(on_one.named, {})[1]
    with params_file(given.params, on_one, list(specs), block, diagnostics) as params:
        assert params is not None
        arrays, notes = read_checked(params, specs, "parameters")
        diagnostics.add(*map(rounded_note, notes))
        new = {} if program is None else assigned(program, arrays)
        values = ExportedTensors(specs, {**arrays, **new})
        if model is None:
            values.check_complete(given.params)
        export_params({0: values}, str(given.out), specs, {}, model)
    if model is not None:
        dtype = model_dtype(model, on_one.named)
        copy_description(description(given.params), str(given.out), dtype)
