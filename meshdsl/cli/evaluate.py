"""`meshdsl evaluate`: the outputs of a program, averaged over all samples of a file."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from meshdsl.cli import common
from meshdsl.cli.options import (
    AsData,
    DataOptions,
    File,
    PlacingOptions,
    opt,
    option,
    pipeline_options,
    refuse_unknown,
    weights,
)
from meshdsl.diagnostics import Diagnostics

if TYPE_CHECKING:
    from meshdsl.backends.train.evaluation import Evaluation
    from meshdsl.pipeline import Compilation


@option
class EvaluateOptions(DataOptions, PlacingOptions, AsData):
    """Options of `evaluate`."""

    params: str = opt(
        "--params", "F", "Parameters: a file, or the folder of a checkpoint or model.", ...
    )
    weights: str | None = weights("The `weights` block to load a model with.")
    engine: str = opt("--engine", "E", "The engine: local, torchrun or reference.", "local")
    batches: int | None = opt("--batches", "N", "Evaluate at most N batches. [default: all]", min=1)


def command(file: File, given: EvaluateOptions) -> None:
    """Average loss, perplexity and accuracy over all samples."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.backends.train.tokenized import check_options
        from meshdsl.backends.train.training_run import ENGINES

        refuse_unknown("engine", given.engine, ENGINES, "not one of those there are")
        check_options(given.files(), given.texts)
        chosen = replace(pipeline_options(given), evaluate=True)
        compilation = common.compiled(file, chosen, diagnostics, "device")
        result = _evaluate(compilation, given, diagnostics)
        _show(compilation, given, result)


def _evaluate(made: Compilation, given: EvaluateOptions, diagnostics: Diagnostics) -> Evaluation:
    from meshdsl.backends.train.evaluation import EvaluationJob, evaluate, known_vocabulary
    from meshdsl.backends.train.tokenized import tokenized
    from meshdsl.backends.weights.params import params_file

    names = [str(p.value.name) for p in made.named.params]
    files = replace(given.files(), vocabulary=known_vocabulary(given.params))
    with (
        params_file(given.params, made, names, given.weights, diagnostics) as params,
        tokenized(files, given.texts, all_of_it=True) as data,
    ):
        job = EvaluationJob(data, params, given.batches)
        return evaluate(made, given.engine, job, diagnostics)


def _show(made: Compilation, given: EvaluateOptions, result: Evaluation) -> None:
    from meshdsl.report.running import headline
    from meshdsl.report.training_progress import evaluation_as_json, evaluation_lines

    if given.json:
        common.print_json(evaluation_as_json(made, given.engine, result))
        return
    for line in (headline(made, given.engine), *evaluation_lines(result)):
        common.say(line)
