"""Parameters and states of a training run on one device: initialised, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.checkpoint import Checkpoints, Found
from meshdsl.diagnostics import Diagnostic

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import Program
    from meshdsl.backends.engines.ranks import Ranks
    from meshdsl.backends.train.data import Data
    from meshdsl.backends.train.job import Job

Tensors = dict[str, "torch.Tensor"]


class Held:
    """Parameters and optimizer states of one device.

    A step reads and overwrites `params` and `states`; `step` is the number of steps done. `meta` is
    written into every checkpoint.
    """

    def __init__(self, program: Program, job: Job, data: Data, ranks: Ranks) -> None:
        self.ranks, self.job = ranks, job
        self.param_specs, self.state_specs = program.PARAMS, program.STATES
        self.specs: dict[str, Spec] = {**program.PARAMS, **program.STATES}
        # A parameter of a narrow dtype has a wider copy among the states: that one is its value.
        self._finest = {spec.key: state for state, spec in program.STATES.items() if spec.key}
        self.value_specs = {n: self.specs[self._finest.get(n, n)] for n in program.PARAMS}
        self.meta = {"seed": job.seed, "size": data.size, "vocabulary": data.vocabulary}
        self.meta |= job.about
        self.params: Tensors = {}
        self.states: Tensors = {}
        self.step, self.path = 0, ""
        # A folder may have checkpoints of an earlier run, which is begun anew: not ours to read.
        self._ours = job.resume
        self._checkpoints = None if job.checkpoint is None else Checkpoints(job.checkpoint)

    def begin(self) -> tuple[Diagnostic, ...]:
        """Load the run's last whole checkpoint, or the initial values where there is none.

        All devices call this. Returns warnings about checkpoints that are damaged.
        """
        ranks, checkpoints = self.ranks, self._checkpoints
        found = ranks.first_does(checkpoints.latest) if checkpoints and self._ours else None
        if found is None:
            self._first()
            return ()
        assert checkpoints is not None
        self._take(checkpoints.load(found, self.specs, ranks.mesh, [ranks.rank])[ranks.rank])
        self.step, self.path = found.step, str(found.path)
        return (
            *found.warnings,
            *self._other_data(found.meta.get("size")),
            *self._other_plan(found),
        )

    def _other_data(self, size: int | None) -> Iterator[Diagnostic]:
        """A note where the run was begun on other data than it resumes with."""
        if size not in (None, self.meta["size"]):
            message = (
                f"there are {self.meta['size']} samples to train on, the run began with {size}"
            )
            help = "the batches to come are others than without the interruption"
            yield Diagnostic("MD0517", message, severity="note", help=help)

    def _other_plan(self, found: Found) -> Iterator[Diagnostic]:
        """A note where devices followed another plan before the interruption."""
        before, now = found.meta, self.meta
        if before.get("plan") in (None, now.get("plan")):
            return
        parts = {"layout": "layout {}", "mesh": "mesh {}", "meshdsl": "meshdsl {}"}
        other = [k for k in parts if k in before and before[k] != now.get(k)]
        saved, here = (", ".join(parts[k].format(meta[k]) for k in other) for meta in (before, now))
        message = f"{found.path.name} was saved under another plan"
        message += f": {saved}; now it is {here}" if other else ", of the same layout and mesh"
        help = "the values are the same; sums in another order may differ in their last digits"
        yield Diagnostic("MD0519", message, severity="note", help=help)

    def _first(self) -> None:
        """Set the values of step 0: of `--params`, or drawn; states follow their parameters."""
        from meshdsl.backends.engines.in_process import local_tensors
        from meshdsl.backends.runtime.files import read_arrays

        given = read_arrays(self.job.params) if self.job.params else {}
        ranks = [self.ranks.rank]
        (blocks,) = local_tensors(self.ranks.mesh, self.specs, given, self.job.seed, ranks)
        self._take(blocks)
        self.step, self.path = 0, ""

    def _take(self, blocks: Mapping[str, torch.Tensor]) -> None:
        held = {name: blocks[name].to(self.ranks.where) for name in self.specs}
        self.params = {name: held[name] for name in self.param_specs}
        self.states = {name: held[name] for name in self.state_specs}

    def save(self, step: int) -> None:
        """Write a checkpoint, together with the other devices. Raises DiagnosticError."""
        assert self._checkpoints is not None, "there is no folder for checkpoints"
        blocks = {self.ranks.rank: {**self.params, **self.states}}
        self._checkpoints.save(step, blocks, self.specs, {**self.meta, "step": step}, self.ranks)
        self.step, self._ours = step, True

    def values(self) -> Tensors:
        """The parameters in the widest dtype that is kept, as in `value_specs`."""
        held = {**self.params, **self.states}
        return {name: held[self._finest.get(name, name)] for name in self.param_specs}

    def is_finite(self) -> bool:
        """Whether all parameters are finite."""
        return all(
            bool(tensor.isfinite().all().item())
            for tensor in self.params.values()
            if tensor.is_floating_point()
        )
