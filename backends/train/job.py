"""The job of a training run and its outcome: plain data, the same in every engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

from meshdsl.backends.data.token_files import TokenFile
from meshdsl.named.optimizers import LearningRate
from meshdsl.named.weights import WeightMap
from meshdsl.records import dataclass

ORDERS = ("random", "shuffled", "sequential")
"""The orders of samples: drawn anew for each step, each once in every pass, or as they lie."""

DOCUMENTS = ("stream", "rows")
"""How documents are taken: as one stream of tokens, or each in padded rows of its own."""

RESUME = "with `--checkpoint DIR`, `--resume` goes on from the last whole checkpoint"


@dataclass(frozen=True, slots=True)
class DataFiles:
    """The source of samples.

    `held_out` is a file of samples to evaluate on; without one, the last `fraction` of `path` is
    kept for that. `batch` names the dim that samples are drawn along; `tokens` says how a text is
    read (`chars`, the default, or `bytes`), or the dtype of a raw file of tokens; `text_inputs` are
    the inputs for them; None: as the program suggests. `order` is one of `ORDERS`; None: `random`
    for tokens, `shuffled` for arrays. `vocabulary` has the characters of a run that is resumed.
    `accumulate` is the dim that inputs gain where a step takes several batches.

    What a tokenizer has made of texts is in the files `stored` and `stored_held_out`; `sources`
    are the files that it read. Documents end with the token `end`, where it is known; with `rows`
    each row of a batch is one.
    """

    path: str
    held_out: str | None = None
    fraction: float = 0.0
    batch: str | None = None
    tokens: str | None = None
    text_inputs: tuple[str, ...] | None = None
    vocabulary: str | None = None
    accumulate: str | None = None
    order: str | None = None
    stored: tuple[TokenFile, ...] = ()
    stored_held_out: tuple[TokenFile, ...] = ()
    sources: tuple[str, ...] = ()
    end: int | None = None
    rows: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a training run: its last step, its data, and the files it writes.

    `about` describes the program to readers of a checkpoint, and files of the sources `described`
    the model that it begins with. `rate` is the schedule of the learning
    rate, of which a step makes so many `updates`; the first steps are of the `warmup` where the
    program has a step for them. `predicted` is the memory per device in bytes
    as `explain` has it. With `weights`, `out` is written as another program's model.
    The folder `tensorboard` gets an event file. In the folder `timed` each device writes how long
    the lines of one step took.
    """

    data: DataFiles
    steps: int
    seed: int = 0
    eval_every: int = 0
    params: str | None = None
    out: str | None = None
    weights: WeightMap | None = None
    log: str | None = None
    tensorboard: str | None = None
    checkpoint: str | None = None
    checkpoint_every: int = 0
    resume: bool = False
    described: tuple[str, ...] = ()
    about: Mapping[str, Any] = field(default_factory=dict)
    rate: LearningRate | None = None
    updates: int = 1
    warmup: int = 0
    predicted: int = 0
    timed: str | None = None


@dataclass(frozen=True, slots=True)
class Trouble:
    """A non-finite loss: seen after step `seen`, begun in step `step`.

    There, the statement on `line` of the emitted text (None where it was not found) wrote NaN or
    infinity (`value`) into tensor `name` on `device`; `given`: it is an input, which had it
    already. The search for it may have been `stopped`.
    """

    seen: int
    loss: str
    step: int | None = None
    line: int | None = None
    name: str = ""
    value: str = ""
    device: int = 0
    given: bool = False
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class Ending:
    """The outcome of a run: the step it began and ended at, its last numbers, its last checkpoint.

    `evaluated` are the last averages over the held-out batches, `amount` the samples or tokens
    (`unit`) that were trained on, in `seconds`. `how` is `finished`, `interrupted`, `not finite`
    or `data refused`: a batch has values that the program does not take, of which `refused` is the
    event. `measured` is what the last `step` event has of it.
    """

    start: int
    step: int
    how: str
    values: Mapping[str, Any]
    evaluated: Mapping[str, float]
    amount: int
    unit: str
    seconds: float
    checkpoint: str | None = None
    trouble: Trouble | None = None
    measured: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, Any] = field(default_factory=dict)


Event = Mapping[str, Any]
"""An event of a run in progress: `kind` is one of these.

`begin` (start, steps, amount, unit, the predicted memory per device, and what the measured one is
`memory_of`), `step` (step, values, measured, seconds of training so far), `eval` (step, values),
`checkpoint` (step, path), `watch` (first, last: steps that are rerun), `note` (code, text,
severity, help).
`measured` has `lr`, `grad_norm` (the norm of the whole gradient
before clipping) and `memory` (the peak so far in bytes, of the process or of GPU 0).
"""

Tell = Callable[[Event], None]
