"""The training loop of one device: the same in a thread and in a process of its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.line_profiler import timer
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.train.batches import Data
from meshdsl.backends.train.described import describe
from meshdsl.backends.train.evaluation import sums_over
from meshdsl.backends.train.event_log import EventLog
from meshdsl.backends.train.feed import DataRefused, Feed
from meshdsl.backends.train.job import Ending, Event, Job, Tell, Trouble
from meshdsl.backends.train.log import MetricsLog
from meshdsl.backends.train.nan_search import search
from meshdsl.backends.train.peak_memory import PeakMemory
from meshdsl.backends.train.state import ShardedState
from meshdsl.diagnostics import Diagnostic
from meshdsl.records import dataclass

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import LoadedProgram, Programs

TIMED = 3
"""The step of a run that is timed: those before it connect the devices and fill caches."""

PACE = 0.25
"""Seconds between two checks whether the run is to stop."""

Tensors = Mapping[str, "torch.Tensor"]


@dataclass(frozen=True)
class Control:
    """How a run reports and is stopped; used by device 0 only. `begun` is called at every step."""

    tell: Tell
    stopping: Callable[[], bool]
    begun: Callable[[], None] = lambda: None


class Trainer:
    """One device of a training run. All devices make the same calls in the same order."""

    def __init__(
        self, ranks: Ranks, programs: Programs, job: Job, data: Data, control: Control
    ) -> None:
        self.ranks, self.programs, self.job, self.control = ranks, programs, job, control
        self.program = programs.program
        self.groups = ranks.groups(self.program.GROUPS)
        self.held = held = ShardedState(self.program, job, data, ranks)
        self.notes = (*data.notes, *held.begin())
        self.feed = Feed(self.program, data.training, ranks, job.seed)
        self.unit, self.amount = data.training.unit, data.training.amount
        self.held_out = data.held_out
        self.norm = getattr(self.program, "NORM", None)
        outputs = self.program.OUTPUTS.items()
        self.scalars = [n for n, spec in outputs if not spec.dims and n != self.norm]
        self.rate, self.memory = job.rate, PeakMemory(ranks.where)
        self.start = self.step = self.saved = held.step
        self.checkpoint = held.path or None
        self.values: dict[str, Any] = {}
        self.measured: dict[str, Any] = {}
        self.evaluated: dict[str, float] = {}
        self.seconds = 0.0
        self.trouble: Trouble | None = None
        self.refused: DataRefused | None = None
        self.is_zero_known = False
        self._asked = 0
        self._logs: tuple[MetricsLog | EventLog, ...] = ()

    def run(self) -> Ending:
        """Train to the end, until stopped, or until the loss is not finite."""
        if (folder := self.job.checkpoint) is not None:
            sources, is_begun = self.job.described, self.start > 0
            self.ranks.first_does(lambda: describe(folder, sources, is_begun))
        if self.ranks.rank == 0:
            self._logs = tuple(self._opened_logs())
        for note in self.notes:
            self._tell(**_note(note))
        measure = {"amount": self.amount, "unit": self.unit}
        measure |= {"predicted": self.job.predicted, "memory_of": self.memory.of}
        self._tell(kind="begin", start=self.start, steps=self.job.steps, **measure)
        how = "finished"
        while self.step < self.job.steps and self.trouble is None and self.refused is None:
            if self._is_asked_to_stop():
                how = "interrupted"
                break
            try:
                self._train_one()
            except DataRefused as error:
                self.refused = error
        if self.trouble is None:
            self._save()
        for log in self._logs:
            log.close()
        how = "data refused" if self.refused else how
        return self._ending("not finite" if self.trouble else how)

    def _ending(self, how: str) -> Ending:
        return Ending(
            self.start,
            self.step,
            how,
            self.values,
            self.evaluated,
            self.amount * (self.step - self.start),
            self.unit,
            self.seconds,
            self.checkpoint,
            self.trouble,
            self.measured,
            _note(self.refused.diagnostics[0]) if self.refused else {},
        )

    # --- a step --------------------------------------------------------------------------------

    def _train_one(self) -> None:
        """Train one step, with the evaluation, log line and checkpoint due after it."""
        self.control.begun()
        began = time.perf_counter()
        device = self.at(self.step)[1].device
        outputs = self._timed() if self._is_timed() else self.forward(device, self.step)
        self.values = {name: outputs[name].item() for name in self.scalars}
        seconds = time.perf_counter() - began
        self.seconds += seconds
        self.measured = self._measured(outputs)
        self.step += 1
        facts = {"values": self.values, "measured": self.measured}
        self._tell(kind="step", step=self.step, seconds=self.seconds, **facts)
        self._check_gradient()
        loss = self.values[self.program.LOSS]
        evaluated = math.isfinite(loss) and self._evaluate()
        self._write(seconds, evaluated)
        if not math.isfinite(loss):
            self.trouble = search(self, str(loss))
        elif self._due(self.job.checkpoint_every):
            self._save()

    def at(self, step: int) -> tuple[str, LoadedProgram]:
        """The program of the step after so many: its field in `Programs`, and itself."""
        warmup = self.programs.warmup
        if warmup is not None and step < self.job.warmup:
            return "warmup", warmup
        return "program", self.program

    def _measured(self, outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """The measurements of the step that was just done, in the order they are shown."""
        measured: dict[str, Any] = {}
        if self.rate is not None:
            last = (self.step + 1) * self.job.updates - 1  # of the step's updates
            measured["lr"] = self.rate.at(last)
        if self.norm is not None:
            measured["grad_norm"] = outputs[self.norm].item()
        return {**measured, "memory": self.memory.peak}

    def _check_gradient(self) -> None:
        """Note the first step of a run whose gradients are all 0, if there is one."""
        if self.is_zero_known or self.measured.get("grad_norm") != 0:
            return
        self.is_zero_known = True
        note = Diagnostic(
            "MD0507",
            f"every gradient of step {self.step} is 0: no parameter learns from it",
            severity="note",
            help="see that the loss depends on parameters, and that its gradients do not underflow",
        )
        self._tell(**_note(note))

    def forward(self, device: Callable[..., Any], step: int) -> dict[str, torch.Tensor]:
        """Call `device` on the batch of `step`; parameters and states are updated."""
        rank = self.ranks.rank
        batch = self.feed.batch(step)
        held = self.held
        outputs: dict[str, torch.Tensor] = device(
            rank, self.groups, batch, held.params, held.states
        )
        # What is gathered may lie otherwise than what is loaded: products would round otherwise.
        for table in (held.params, held.states):
            table.update({name: tensor.contiguous() for name, tensor in table.items()})
        return outputs

    def _is_timed(self) -> bool:
        """Whether the lines of this step are timed: of the third, or the last before it.

        Steps of the warm-up are not those that the program's costs are of.
        """
        step = min(max(self.start, self.job.warmup) + TIMED, self.job.steps) - 1
        return self.at(step)[0] == "program" and self.job.timed is not None and self.step == step

    def _timed(self) -> dict[str, torch.Tensor]:
        """The outputs of a step whose lines are timed."""
        assert self.job.timed is not None
        timing = timer(self.program.device, self.ranks.where)
        outputs = self.forward(timing.device, self.step)
        timing.write(self.job.timed, self.ranks.rank)
        return outputs

    def _due(self, every: int) -> bool:
        return bool(every) and self.step % every == 0

    def _tell(self, **event: Any) -> None:
        if self.ranks.rank == 0:
            self.control.tell(event)

    def _opened_logs(self) -> Iterator[MetricsLog | EventLog]:
        if self.job.log is not None:
            yield MetricsLog(self.job.log, self.start)
        if self.job.tensorboard is not None:
            yield EventLog(self.job.tensorboard, self.start)

    def _write(self, seconds: float, evaluated: bool) -> None:
        """Write the step's numbers into the logs, on device 0."""
        record: dict[str, Any] = {"step": self.step, **self.values}
        if evaluated:
            record |= {f"eval_{name}": value for name, value in self.evaluated.items()}
        # An output of the program keeps its name.
        columns = {n if n not in self.values else f"train_{n}": v for n, v in self.measured.items()}
        record |= {**columns, "step": self.step, "seconds": seconds}
        record[f"{self.unit}_per_s"] = self.amount / seconds
        for log in self._logs:
            log.write(record)

    # --- evaluation ----------------------------------------------------------------------------

    def _evaluate(self) -> bool:
        """Average the scalar outputs over the held-out batches, when due."""
        every = self.job.eval_every
        if not self._due(every) and not (every and self.step == self.job.steps):
            return False
        try:
            self.evaluated = self._averages()
        except DataRefused as error:  # the step itself is done
            self.refused = error
            return False
        self._tell(kind="eval", step=self.step, values=self.evaluated)
        return True

    def _averages(self) -> dict[str, float]:
        program = self.programs.evaluation
        assert program is not None
        assert self.held_out is not None
        params = self._params_of(program)
        return sums_over(program, params, self.held_out, self.ranks, self.job.seed).averages

    def _params_of(self, program: LoadedProgram) -> Tensors:
        """The parameters, resharded to the layout of the evaluating `program`."""
        from meshdsl.backends.engines.in_process import moved_away, torch_dtype

        held = self.held
        mine, trained_specs = held.values(), held.param_specs
        away = {name for name, spec in program.PARAMS.items() if spec.away}
        there = {name for name in away if program.PARAMS[name] == trained_specs[name]}
        params: dict[str, torch.Tensor] = {name: held.params[name] for name in there}
        for name, spec in program.PARAMS.items():
            if name in there:
                continue
            stored, block = self.held.value_specs[name], mine[name]
            if spec.split != stored.split:
                part = self.ranks.part(spec)
                block = self.ranks.whole(stored, block)[part].contiguous()
            params[name] = block.to(torch_dtype(spec.dtype))
        moved_away({n: s for n, s in program.PARAMS.items() if n not in there}, [params])
        return params

    # --- checkpoints and stopping --------------------------------------------------------------

    def _save(self) -> None:
        """Write a checkpoint of this step, if there is a folder for one and it has none yet.

        A parameter that is not finite is trouble, also where only the results of a run are kept.
        """
        if self.saved == self.step:
            return
        if self.ranks.total(not self.held.is_finite()):
            self.trouble = search(self, "")
            return
        if self.job.checkpoint is None:
            return
        self.held.save(self.step)
        self.saved, self.checkpoint = self.step, f"{self.job.checkpoint}/step-{self.step}"
        self._tell(kind="checkpoint", step=self.step, path=self.checkpoint)

    def _is_asked_to_stop(self) -> bool:
        """Whether device 0 is to stop; all devices learn of it before the same step.

        The check costs a collective, so it is made about every `PACE` seconds: device 0 sends in
        how many steps the next one is due.
        """
        if self.step < self._asked:
            return False
        answer = 0
        if self.ranks.rank == 0:
            done = self.step - self.start
            steps = int(PACE * done / self.seconds) if self.seconds else 1
            answer = 0 if self.control.stopping() else max(1, min(steps, 10_000))
        answer = self.ranks.first(answer)
        self._asked = self.step + answer
        return answer == 0


def _note(note: Diagnostic) -> Event:
    """The event of a note."""
    known = {"code": note.code, "severity": note.severity, "help": note.help}
    return {"kind": "note", "text": note.message, **known}
