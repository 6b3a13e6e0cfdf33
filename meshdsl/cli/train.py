"""`meshdsl train`: steps of a program with `minimize`, on data from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from meshdsl.cli import common, traces
from meshdsl.cli.options import (
    AsData,
    DataOptions,
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
from meshdsl.diagnostics import Diagnostic, Diagnostics, advice
from meshdsl.option_edits import give, leave_out, refuse
from meshdsl.pipeline import Options

if TYPE_CHECKING:
    from meshdsl.backends.train.job import DataFiles, Ending, Event, Job


@option
class Train(DataOptions, PlacingOptions, Force, AsData):
    """Options of `train`."""

    steps: int = opt("--steps", "N", "Train up to step N.", ..., min=1)
    engine: str = opt("--engine", "E", "The engine: local, torchrun or reference.", "local")
    seed: int | None = opt("--seed", "S", "The seed of initial values and order. [default: 0]")
    order: str | None = opt(
        "--order",
        "O",
        "The order of samples: random, shuffled or sequential. "
        "[default: random for tokens, shuffled for arrays]",
    )
    eval_every: int = opt("--eval-every", "K", "Evaluate every K steps.", 0, min=0)
    eval_data: Path | None = opt("--val --eval-data", "F", "The held-out samples.")
    eval_fraction: float = opt(
        "--eval-fraction",
        "P",
        "Without --val: hold out this last part of --data.",
        0.1,
        min=0.0,
        max=1.0,
    )
    log: Path | None = opt("--log", "F.jsonl", "Write one JSON object per step.")
    tensorboard: Path | None = opt("--tensorboard", "DIR", "Write event files for TensorBoard.")
    checkpoint: Path | None = opt("--checkpoint", "DIR", "Write checkpoints to this folder.")
    checkpoint_every: int = opt(
        "--checkpoint-every", "K", "Write one every K steps; 0: only at the end.", 0, min=0
    )
    resume: bool = flag("--resume", "Resume from the last checkpoint.")
    params: Path | None = opt(
        "--params", "F", "Initial values: a file, or the folder of a checkpoint or model."
    )
    out: Path | None = opt("--out", "F", "Write the full parameters.")
    weights: str | None = weights("The `weights` block of the model; `hf:bf16` writes bf16.")
    trace: Path | None = opt(
        "--trace", "F.json", "Write the time of each statement of a step (torchrun)."
    )


def command(file: File, given: Train) -> None:
    """Train a program that has `minimize`."""
    with common.reporting(given.json) as diagnostics:
        from meshdsl.backends.train.training_run import own_folder

        chosen = replace(pipeline_options(given), measured=True)
        job = _job(given)
        _check(job, given)
        written = [
            str(path) for path in (given.log, given.trace, given.tensorboard) if path is not None
        ]
        with (
            own_folder(job.checkpoint, job.resume, given.force, written),
            traces.timed(given.trace, given.engine, given.force) as folder,
        ):
            ending = _train(file, chosen, replace(job, timed=folder), given, diagnostics)
    if ending.how == "interrupted":
        raise typer.Exit(130)


def _files(given: Train) -> DataFiles:
    """The files of samples."""
    fraction = given.eval_fraction if given.eval_every and not given.eval_data else 0.0
    held_out = _text(given.eval_data)
    return replace(given.files(), held_out=held_out, fraction=fraction, order=given.order)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def _job(given: Train) -> Job:
    """The training job, with its seed not yet chosen."""
    from meshdsl.backends.train.described import sources_of
    from meshdsl.backends.train.job import Job

    return Job(
        _files(given),
        given.steps,
        eval_every=given.eval_every,
        params=_text(given.params),
        out=_text(given.out),
        log=_text(given.log),
        tensorboard=_text(given.tensorboard),
        checkpoint=_text(given.checkpoint),
        checkpoint_every=given.checkpoint_every,
        resume=given.resume,
        described=sources_of(_text(given.params), given.tokenizer),
    )


def _check(job: Job, given: Train) -> None:
    """Refuse options that contradict each other, and outputs that cannot be written."""
    from meshdsl.backends.train.tokenized import check_options
    from meshdsl.backends.train.training_run import ENGINES, check_together

    refuse_unknown("engine", given.engine, ENGINES, "not one of those there are")
    check_options(job.data, given.texts)
    check_together(job)
    if job.resume and job.params is not None:
        message = "`--params` and `--resume`: a resumed run has its values in the checkpoint"
        fixes = [leave_out(option, safe=False) for option in ("--params", "--resume")]
        refuse("MD0516", message, fixes)
    if given.weights is not None and job.out is None and job.params is None:
        message = f"`--as {given.weights}` without `--params` or `--out`: there is no model"
        other = "name one: `--params FOLDER` to read it, `--out FOLDER` to write it"
        refuse("MD0516", message, leave_out("--as", safe=False), other)
    _check_outputs(job, given)


def _check_outputs(job: Job, given: Train) -> None:
    force = given.force
    if job.out is not None:
        common.check_params_output(Path(job.out), given.weights, force)
    if job.log is not None:
        common.check_output(Path(job.log), force or job.resume)
    if job.tensorboard is not None:
        from meshdsl.backends.train.event_log import check_events

        check_events(job.tensorboard, job.resume, force)


def _train(file: Path, chosen: Options, job: Job, given: Train, diagnostics: Diagnostics) -> Ending:
    """Compile, train, and show the ending."""
    from meshdsl.backends.train import training_run as train_run
    from meshdsl.backends.train.described import description
    from meshdsl.backends.train.tokenized import tokenized
    from meshdsl.backends.weights.params import params_file, written_as
    from meshdsl.backends.weights.writing import check_writable, copy_description, model_dtype
    from meshdsl.named.training_step import loss_name
    from meshdsl.report import running, training_progress
    from meshdsl.report.loss_plot import LossPlot

    until = "placed" if given.engine == "reference" else "device"
    asked = common.compiled(file, chosen, diagnostics, until)
    train_run.check_trainable(asked)
    plan = train_run.planned(asked, given.engine, evaluated=job.eval_every > 0)
    compilation = plan.made
    data = replace(job.data, accumulate=train_run.accumulate_dim(compilation))
    job = train_run.prepared(plan, replace(job, data=data), given.seed)
    names = [str(p.value.name) for p in compilation.named.params]
    block, as_model = written_as(compilation, given.weights)
    if as_model is not None and job.out is not None:
        diagnostics.add(*check_writable(as_model, compilation.named))
    job = replace(job, weights=as_model)
    title = running.headline(compilation, given.engine)
    plot = LossPlot(loss_name(compilation.named))
    with (
        tokenized(job.data, given.texts) as tokens,
        params_file(job.params, compilation, names, block, diagnostics) as params,
        training_progress.progress(title, quiet=given.json) as show,
    ):

        def tell(event: Event) -> None:
            if event["kind"] == "note":
                diagnostics.add(_note(event))
            show(event)
            plot.hear(event)

        job = replace(job, params=params, data=tokens)
        ending = train_run.train(plan.emitted, given.engine, job, tell, compilation.source)
    if ending.how == "interrupted":
        diagnostics.add(_interrupted(ending))
    if job.out is not None and as_model is not None and given.params is not None:
        copy_description(
            description(str(given.params)), job.out, model_dtype(as_model, compilation.named)
        )
    written = given.trace is not None and traces.write_measured(given.trace, compilation, job.timed)
    if given.json:
        files = {"log": job.log, "tensorboard": job.tensorboard, "out": job.out}
        common.print_json(
            training_progress.ending_as_json(compilation, given.engine, ending, files)
        )
    else:
        training_progress.print_ending(ending, job.out, plot)
        if written:
            common.say(f"wrote {given.trace}")
    return ending


def _note(event: Mapping[str, Any]) -> Diagnostic:
    severity = event["severity"]
    return Diagnostic(event["code"], event["text"], severity=severity, help=event["help"])


def _interrupted(ending: Ending) -> Diagnostic:
    """A note on how to resume a run that was interrupted."""
    message = f"stopped after step {ending.step}"
    if ending.checkpoint is None:
        help = "nothing was kept: `--checkpoint DIR` would have kept it"
        return Diagnostic("MD0722", message, severity="note", help=help)
    fixes = (give("--resume", safe=False),)
    told = advice(fixes, "the same command then goes on from there")
    message = f"{message}: {ending.checkpoint}"
    return Diagnostic("MD0722", message, severity="note", help=told, fixes=fixes)
