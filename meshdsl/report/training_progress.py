"""Progress of a training run, a bar on a terminal and lines elsewhere, and its ending."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from meshdsl.carets import safe
from meshdsl.diagnostics import counted
from meshdsl.report.document import human

if TYPE_CHECKING:
    from rich.console import Console

    from meshdsl.backends.train.evaluation import Evaluation
    from meshdsl.backends.train.job import Ending, Event
    from meshdsl.pipeline import Compilation
    from meshdsl.report.loss_plot import LossPlot

LINES = 10
"""The number of progress lines of a run without a terminal …"""

SILENCE = 15.0
"""… and the seconds after which one is printed anyway."""

REFRESH = 0.1
"""Seconds between two changes of the bar."""

WINDOW = 3.0
"""The least seconds of training over which the speed is averaged."""


@contextmanager
def progress(
    title: str, quiet: bool = False, stderr: bool = False
) -> Iterator[Callable[[Event], None]]:
    """A function that shows the events of a run; none of them if `quiet`."""
    from rich.console import Console

    if quiet:
        yield lambda event: None
        return
    console = Console(highlight=False, stderr=stderr, force_jupyter=False)
    shown = Bar(console, title) if console.is_terminal else PlainLines(console, title)
    try:
        yield shown.tell
    finally:
        shown.close()


class PlainLines:
    """The run as plain lines: about ten steps of it, every evaluation and checkpoint."""

    def __init__(self, console: Console, title: str) -> None:
        self.console, self.title = console, title
        self.begun = self.spoken = time.monotonic()
        self.start = self.steps = self.due = 0
        self.amount, self.unit = 1, "samples"
        # Steps and seconds at the beginning of the window, at its middle, and now.
        self.window = [(0, 0.0)] * 3

    def tell(self, event: Event) -> None:
        """Show an event, steps only now and then."""
        kind = event["kind"]
        if kind == "begin":
            self._begin(event)
        elif kind == "step":
            self._step(event)
        elif kind == "eval":
            self.say(f"step {event['step']}: held out: {numbers(event['values'])}")
        elif kind == "checkpoint":
            self.say(f"step {event['step']}: wrote {event['path']}")
        elif kind == "watch":
            first, last = event["first"], event["last"]
            self.say(f"not a number: running steps {first} to {last} again to find where it began")

    def say(self, text: str) -> None:
        """Print a line."""
        self.console.print(safe(text), markup=False, soft_wrap=True)

    def close(self) -> None:
        """Do nothing: lines leave nothing open."""

    def _begin(self, event: Event) -> None:
        self.start, self.steps = event["start"], event["steps"]
        self.amount, self.unit = event["amount"], event["unit"]
        self.say(self.title)
        if self.start:
            self.say(f"going on after step {self.start}")
        if event["predicted"]:
            predicted = f"{human(event['predicted'])} predicted per device"
            self.say(f"memory: {predicted}; measured is the peak of {event['memory_of']}")
        self.begun = self.spoken = time.monotonic()
        self.window = [(self.start, 0.0)] * 3

    def _step(self, event: Event) -> None:
        self.measure(event)
        now, step = time.monotonic(), event["step"]
        if step >= self.due or step == self.steps or now - self.spoken > SILENCE:
            every = max(1, (self.steps - self.start) // LINES)
            self.due = step + every - (step - self.start) % every
            self.spoken = now
            self.say(f"step {step}/{self.steps}: {found(event)}, {self.speed(step)}")

    def measure(self, event: Event) -> None:
        """Add a step to the window of the speed."""
        first, middle, _ = self.window
        now = (event["step"], event["seconds"])
        if now[1] - middle[1] > WINDOW:
            first, middle = middle, now
        self.window = [first, middle, now]

    def speed(self, step: int) -> str:
        """The samples or tokens per second, and the remaining time."""
        done = max(1, step - self.start)
        left = (time.monotonic() - self.begun) / done * (self.steps - step)
        (before, began), _, (after, ended) = self.window
        rate = self.amount * (after - before) / max(ended - began, 1e-9)
        return f"{rate:,.0f} {self.unit}/s, {clock(left)} left"


class Bar(PlainLines):
    """The run as a bar that moves; messages appear above it."""

    def __init__(self, console: Console, title: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        super().__init__(console, title)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[said]}"))
        self.bar = Progress(*columns, console=console, transient=True)
        self.task = self.bar.add_task("training", total=1, said="")
        self.drawn = 0.0

    def close(self) -> None:
        """Remove the bar."""
        self.bar.stop()

    def _begin(self, event: Event) -> None:
        super()._begin(event)
        self.bar.start()
        self.bar.update(self.task, total=self.steps, completed=self.start)

    def _step(self, event: Event) -> None:
        self.measure(event)
        now, step = time.monotonic(), event["step"]
        if now - self.drawn > REFRESH or step == self.steps:
            self.drawn = now
            said = f"{step}/{self.steps}  {found(event)}, {self.speed(step)}"
            self.bar.update(self.task, completed=step, said=said)


def found(event: Event) -> str:
    """The outputs and the measurements of a step."""
    return ", ".join((numbers(event["values"]), *measurements(event["measured"])))


def measurements(measured: Mapping[str, Any]) -> Iterator[str]:
    """The texts `lr 0.001`, `grad norm 1.234` and `memory 312 MiB` of those there are."""
    if "lr" in measured:
        yield f"lr {measured['lr']:.3g}"
    if "grad_norm" in measured:
        yield f"grad norm {measured['grad_norm']:.4g}"
    if "memory" in measured:
        yield f"memory {human(measured['memory'])}"


def numbers(values: Mapping[str, Any]) -> str:
    """The text `loss 1.234, accuracy 0.9`."""
    shown = (f"{v:.4g}" if isinstance(v, float) else str(v) for v in values.values())
    return ", ".join(f"{name} {text}" for name, text in zip(values, shown, strict=True))


def clock(seconds: float) -> str:
    """`1:02:03`, or `2:03` below an hour."""
    rounded = int(seconds + 0.5)
    hours, minutes = divmod(rounded // 60, 60)
    return f"{hours}:{minutes:02}:{rounded % 60:02}" if hours else f"{minutes}:{rounded % 60:02}"


def print_ending(ending: Ending, out: str | None, plot: LossPlot) -> None:
    """Print the ending of a run, for people."""
    from rich.console import Console

    console = Console(highlight=False)
    for line in (*plot.lines(), *_lines(ending, out)):
        console.print(safe(line), markup=False, soft_wrap=True)


def _lines(ending: Ending, out: str | None) -> Iterator[str]:
    steps = ending.step - ending.start
    if not steps:
        yield f"nothing to do: step {ending.step} was reached before"
    else:
        rate = ending.amount / ending.seconds
        yield (
            f"trained {counted(steps, 'step')} in {ending.seconds:.1f} s: "
            f"{rate:,.0f} {ending.unit}/s; {numbers(ending.values)}"
        )
    if ending.evaluated:
        yield f"held out: {numbers(ending.evaluated)}"
    if out is not None:
        yield f"wrote {out}"


def evaluation_lines(result: Evaluation) -> Iterator[str]:
    """What an evaluation has found, for people."""
    yield numbers(result.values)
    batches = counted(result.batches, "batch")
    last = f", the last of {counted(result.rest, 'sample')}" if result.rest else ""
    yield f"averages over {result.amount:,} {result.unit} in {batches}{last}"


def _identity(made: Compilation, engine: str) -> dict[str, object]:
    """The version of the data, and which program ran where: what the data of a run begin with."""
    program = made.device
    return {
        "version": 1,
        "program": program.placed.named.name,
        "mesh": dict(program.mesh.declared),
        "layout": program.placed.layout,
        "engine": engine,
    }


def evaluation_as_json(made: Compilation, engine: str, result: Evaluation) -> dict[str, object]:
    """An evaluation, as data."""
    return {
        **_identity(made, engine),
        "values": dict(result.values),
        "batches": result.batches,
        "samples": result.samples,
        result.unit: result.amount,
        "seconds": result.seconds,
    }


def ending_as_json(
    made: Compilation, engine: str, ending: Ending, files: Mapping[str, str | None]
) -> dict[str, object]:
    """The ending of a run, as data. `files` are the written ones, by kind."""
    return {
        **_identity(made, engine),
        "ended": ending.how,
        "start": ending.start,
        "steps": ending.step,
        "values": dict(ending.values),
        "measured": dict(ending.measured),
        "eval": dict(ending.evaluated),
        "seconds": ending.seconds,
        ending.unit: ending.amount,
        "checkpoint": ending.checkpoint,
        **files,
    }
