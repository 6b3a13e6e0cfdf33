"""`meshdsl train`: steps of a program with `minimize`, on data from a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshdsl.cli import common
from meshdsl.diagnostics import Diagnostic, Diagnostics, did_you_mean, fail

if TYPE_CHECKING:
    from meshdsl.backends.train.job import DataFiles, Ending, Event, Job

WRITTEN = (".npz", ".safetensors")

_Data = Annotated[
    Path, typer.Option("--data", metavar="F", help="Samples: .npz, .safetensors, or a text.")
]
_Steps = Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Train up to this step.")]
_Engine = Annotated[str, typer.Option("--engine", metavar="E", help="local or torchrun.")]
_Seed = Annotated[
    int | None, typer.Option("--seed", metavar="S", help="For initial values and the order (0).")
]
_Batch = Annotated[
    str | None,
    typer.Option("--batch", metavar="DIM", help="The dim of samples (first of the first input)."),
]
_Tokens = Annotated[
    str, typer.Option("--tokens", metavar="T", help="A text is read as chars or bytes.")
]
_TextInputs = Annotated[
    str | None,
    typer.Option("--text-inputs", metavar="A,B", help="Inputs for tokens and for what follows."),
]
_EvalEvery = Annotated[
    int, typer.Option("--eval-every", metavar="K", min=0, help="Evaluate after every K steps.")
]
_EvalData = Annotated[
    Path | None, typer.Option("--eval-data", metavar="F", help="Samples that are held out.")
]
_EvalFraction = Annotated[
    float,
    typer.Option(
        "--eval-fraction", metavar="P", min=0.0, max=1.0, help="Without it, this last part."
    ),
]
_Log = Annotated[
    Path | None, typer.Option("--log", metavar="F.jsonl", help="Write a JSON object per step.")
]
_Checkpoint = Annotated[
    Path | None, typer.Option("--checkpoint", metavar="DIR", help="Write checkpoints there.")
]
_CheckpointEvery = Annotated[
    int,
    typer.Option("--checkpoint-every", metavar="K", min=0, help="After every K steps (the last)."),
]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint.")]
_Params = Annotated[
    Path | None, typer.Option("--params", metavar="F", help="Initial values of parameters.")
]
_Out = Annotated[
    Path | None, typer.Option("--out", metavar="F", help="Write the parameters, whole.")
]


def command(
    file: common.File,
    data: _Data,
    steps: _Steps,
    engine: _Engine = "local",
    seed: _Seed = None,
    batch: _Batch = None,
    tokens: _Tokens = "chars",
    text_inputs: _TextInputs = None,
    eval_every: _EvalEvery = 0,
    eval_data: _EvalData = None,
    eval_fraction: _EvalFraction = 0.1,
    log: _Log = None,
    checkpoint: _Checkpoint = None,
    checkpoint_every: _CheckpointEvery = 0,
    resume: _Resume = False,
    params: _Params = None,
    out: _Out = None,
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
    """Train a program that says what to minimize, and keep what it has learned."""
    with common.reporting(json) as diagnostics:
        from meshdsl.backends.train.run import own_folder

        chosen = common.options(
            program, mesh, layout, sbp, reduce, settings, dtype, strict, message_bytes, no_cache
        )
        held_out = (eval_data, eval_fraction if eval_every and not eval_data else 0.0)
        files = _files(data, held_out, batch, tokens, text_inputs)
        paths = {"params": params, "out": out, "log": log, "checkpoint": checkpoint}
        job = _job(files, steps, paths, eval_every, checkpoint_every, resume)
        _check(job, engine, force)
        with own_folder(job.checkpoint, job.resume, force):
            ending = _train(file, chosen, engine, job, seed, diagnostics, json)
    if ending.how == "interrupted":
        raise typer.Exit(130)


def _files(
    data: Path,
    held_out: tuple[Path | None, float],
    batch: str | None,
    tokens: str,
    text_inputs: str | None,
) -> DataFiles:
    """Where samples come from, as the options say."""
    from meshdsl.backends.train.job import DataFiles

    path, fraction = held_out
    names = tuple(text_inputs.split(",")) if text_inputs else None
    return DataFiles(str(data), str(path) if path else None, fraction, batch, tokens, names)


def _job(
    files: DataFiles,
    steps: int,
    paths: Mapping[str, Path | None],
    eval_every: int,
    checkpoint_every: int,
    resume: bool,
) -> Job:
    """What is to be done, as the options say; the seed is not known yet."""
    from meshdsl.backends.train.job import Job

    known = {option: None if path is None else str(path) for option, path in paths.items()}
    return Job(
        files,
        steps,
        eval_every=eval_every,
        params=known["params"],
        out=known["out"],
        log=known["log"],
        checkpoint=known["checkpoint"],
        checkpoint_every=checkpoint_every,
        resume=resume,
    )


def _check(job: Job, engine: str, force: bool) -> None:
    """Refuse options that contradict each other, and outputs with no place to go."""
    from meshdsl.backends.train.data import TOKENS
    from meshdsl.backends.train.run import ENGINES

    for option, value, known in (("engine", engine, ENGINES), ("tokens", job.data.tokens, TOKENS)):
        if value not in known:
            help = did_you_mean(value, list(known)) or f"there are {', '.join(known)}"
            fail("MD0602", f"`--{option} {value}`: not one of those there are", help=help)
    _check_together(job)
    _check_outputs(job, force)


def _check_together(job: Job) -> None:
    """Refuse options without those that they need."""
    needs = {
        "--resume": (job.resume, "--checkpoint DIR", job.checkpoint),
        "--checkpoint-every": (job.checkpoint_every, "--checkpoint DIR", job.checkpoint),
        "--eval-data": (job.data.held_out, "--eval-every K", job.eval_every),
    }
    for option, (given, needed, there) in needs.items():
        if given and not there:
            fail("MD0516", f"`{option}` without `{needed}`", help=f"add `{needed}`")
    if job.resume and job.params is not None:
        help = "leave one of them out: a run that is resumed has its values in the checkpoint"
        fail("MD0516", "`--params` and `--resume` both say what to begin with", help=help)


def _check_outputs(job: Job, force: bool) -> None:
    from meshdsl.cli.compile import check_output

    if job.out is not None:
        out = Path(job.out)
        if out.suffix not in WRITTEN:
            help = f"--out {out.stem}.npz"
            fail("MD0602", f"`--out {out.name}`: written are .npz and .safetensors", help=help)
        check_output(out, force)
    if job.log is not None:
        check_output(Path(job.log), force or job.resume)


def _train(
    file: Path,
    chosen: Any,
    engine: str,
    job: Job,
    seed: int | None,
    diagnostics: Diagnostics,
    json: bool,
) -> Ending:
    """Compile, train, and show how it ended."""
    from meshdsl.backends.engines.run import refuse_too_large
    from meshdsl.backends.train import run as train_run
    from meshdsl.report import training

    made = common.compiled(file, chosen, diagnostics, "device")
    train_run.check_trainable(made)
    refuse_too_large(made, engine, None)
    data = replace(job.data, accumulate=train_run.accumulate_dim(made))
    job = train_run.prepared(made, replace(job, data=data), seed)
    emitted = train_run.emit_both(made, evaluated=job.eval_every > 0)
    with training.progress(training.headline(made, engine), quiet=json) as show:

        def tell(event: Event) -> None:
            if event["kind"] == "note":
                diagnostics.add(_note(event))
            show(event)

        ending = train_run.train(emitted, engine, job, tell, made.source)
    if ending.how == "interrupted":
        diagnostics.add(_interrupted(ending))
    if json:
        files = {"log": job.log, "out": job.out}
        common.print_json(training.ending_as_json(made, engine, ending, files))
    else:
        training.print_ending(ending, job.out)
    return ending


def _note(event: Mapping[str, Any]) -> Diagnostic:
    severity = event["severity"]
    return Diagnostic(event["code"], event["text"], severity=severity, help=event["help"])


def _interrupted(ending: Ending) -> Diagnostic:
    """A note on where a run that was stopped goes on."""
    message = f"stopped after step {ending.step}"
    if ending.checkpoint is None:
        help = "nothing was kept: `--checkpoint DIR` would have kept it"
        return Diagnostic("MD0722", message, severity="note", help=help)
    help = "the same command with `--resume` goes on from there"
    return Diagnostic("MD0722", f"{message}: {ending.checkpoint}", severity="note", help=help)
