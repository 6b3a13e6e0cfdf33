"""Parameters and states of a training run on one device: initialised, saved and restored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.failures import HELP
from meshdsl.backends.engines.in_process import full_disk, store_of
from meshdsl.backends.runtime.values import Spec
from meshdsl.backends.train.checkpoint import Checkpoint, Checkpoints
from meshdsl.backends.train.data import fingerprints
from meshdsl.diagnostics import Diagnostic, counted, fail

if TYPE_CHECKING:
    import torch

    from meshdsl.backends.engines.in_process import LoadedProgram
    from meshdsl.backends.engines.ranks import Ranks
    from meshdsl.backends.train.batches import Data
    from meshdsl.backends.train.job import Job

Tensors = dict[str, "torch.Tensor"]


class ShardedState:
    """Parameters and optimizer states of one device.

    A step reads and overwrites `params` and `states`; `step` is the number of steps done. `meta` is
    written into every checkpoint.
    """

    def __init__(self, program: LoadedProgram, job: Job, data: Data, ranks: Ranks) -> None:
        self.ranks, self.job = ranks, job
        self.param_specs, self.state_specs = program.PARAMS, program.STATES
        self.specs: dict[str, Spec] = {**program.PARAMS, **program.STATES}
        # A parameter of a narrow dtype has a wider copy among the states: that one is its value.
        self.finest = {spec.key: state for state, spec in program.STATES.items() if spec.key}
        self.value_specs = {n: self.specs[self.finest.get(n, n)] for n in program.PARAMS}
        self.meta: dict[str, Any] = {"seed": job.seed, "size": data.size}
        self.meta |= {"vocabulary": data.vocabulary, "tokens": job.data.tokens}
        if job.checkpoint is not None:
            hashes = fingerprints(job.data)
            one = next(iter(hashes.values()))
            self.meta["data"] = one if len(hashes) == 1 else hashes
            self.meta["order"] = job.data.order
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
        checkpoint = ranks.first_does(checkpoints.latest) if checkpoints and self._ours else None
        if checkpoint is None:
            self._first()
            return ()
        assert checkpoints is not None
        self._take(checkpoints.load(checkpoint, self.specs, ranks.mesh, ranks.rank))
        self.step, self.path = checkpoint.step, str(checkpoint.path)
        return (
            *checkpoint.warnings,
            *self._other_data(checkpoint.meta.get("size"), checkpoint.meta.get("data")),
            *self._other_order(checkpoint.meta),
            *self._other_plan(checkpoint),
        )

    def _other_order(self, before: Mapping[str, Any]) -> Iterator[Diagnostic]:
        """A note where the samples come in another order than before the interruption."""
        old, new = before.get("order"), self.meta["order"]
        if "order" in before and old != new:
            names = (f"`--order {name}`" if name else "no `--order`" for name in (old, new))
            message = "the run was begun with {}, and goes on with {}".format(*names)
            help = "the batches to come are others than without the interruption"
            yield Diagnostic("MD0517", message, severity="note", help=help)

    def _other_data(self, size: int | None, data: Any) -> Iterator[Diagnostic]:
        """A note where the run was begun on other data than it resumes with.

        Of a checkpoint that has no fingerprint of the data only their number is known.
        """
        if size in (None, self.meta["size"]) and data not in (None, self.meta["data"]):
            changed = _changed(data, self.meta["data"]) or f"{self.job.data.path} has"
            message = f"{changed} other content than when the run was saved"
            help = "name the file it began with, if the run is to go on as without the interruption"
            yield Diagnostic("MD0517", message, severity="note", help=help)
        if size not in (None, self.meta["size"]):
            message = (
                f"there are {self.meta['size']} samples to train on, the run began with {size}"
            )
            help = "the batches to come are others than without the interruption"
            yield Diagnostic("MD0517", message, severity="note", help=help)

    def _other_plan(self, found: Checkpoint) -> Iterator[Diagnostic]:
        """A note where devices followed another plan before the interruption."""
        before, now = found.meta, self.meta
        if before.get("plan") in (None, now.get("plan")):
            return
        parts = {"layout": "layout {}", "mesh": "mesh {}", "meshdsl": "meshdsl {}"}
        other = [k for k in parts if k in before and before[k] != now.get(k)]
        saved, here = (", ".join(parts[k].format(meta[k]) for k in other) for meta in (before, now))
        message = f"{found.path.name} was saved under another plan"
        message += f": {saved}; now it is {here}" if other else ", of the same layout and mesh"
        old, new = (meta.get("rule", "one update a step") for meta in (before, now))
        help = "the values are the same; sums in another order may differ in their last digits"
        if old != new:
            help = f"it goes on from the same values by other steps: {new}; before, {old}"
        yield Diagnostic("MD0519", message, severity="note", help=help)

    def _first(self) -> None:
        """Set the values of step 0: of `--params`, or drawn; states follow their parameters."""
        from meshdsl.backends.engines.in_process import local_tensors
        from meshdsl.backends.runtime.array_files import read_arrays

        arrays = read_arrays(self.job.params, proven=True) if self.job.params else {}
        mesh, seed, ranks = self.ranks.mesh, self.job.seed, [self.ranks.rank]

        def blocks() -> Iterator[tuple[str, torch.Tensor]]:
            for name, spec in self.specs.items():
                yield from local_tensors(mesh, {name: spec}, arrays, seed, ranks)[0].items()

        self._take(blocks())
        self.step, self.path = 0, ""

    def _take(self, blocks: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Hold these blocks; those that lie elsewhere are moved there one by one. Raises MD0545."""
        from meshdsl.backends.runtime.main import is_counter

        self.params, self.states = {}, {}

        def place() -> None:
            store = store_of(self.specs)
            for name, block in blocks:
                table = self.params if name in self.param_specs else self.states
                held: Any = store.keep(block) if self.specs[name].away else block
                stays = is_counter(self.specs[name])
                table[name] = held if stays else held.to(self.ranks.where)

        try:
            self.ranks.all_do(place)
        except OSError as error:
            fail("MD0545", full_disk(error), help=HELP["MD0545"])

    def save(self, step: int) -> None:
        """Write a checkpoint, together with the other devices. Raises DiagnosticError."""
        assert self._checkpoints is not None, "there is no folder for checkpoints"
        blocks = {self.ranks.rank: {**self.params, **self.states}}
        self._checkpoints.save(step, blocks, self.specs, {**self.meta, "step": step}, self.ranks)
        self.step, self._ours = step, True

    def values(self) -> Mapping[str, torch.Tensor]:
        """The parameters in the widest dtype that is kept, as in `value_specs`.

        Those that lie elsewhere are read when they are asked for.
        """
        return _Values(self)

    def is_finite(self) -> bool:
        """Whether all parameters are finite."""
        values = (
            tensor.cpu() if self.specs[name].away else tensor
            for name, tensor in self.params.items()
        )
        return all(bool(x.isfinite().all().item()) for x in values if x.is_floating_point())


def _changed(before: Any, now: Any) -> str:
    """The first file of several that has changed, and how many others: the head of a sentence."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return ""
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    others = len(names) - 1
    return f"{names[0]} and {counted(others, 'other file')} have" if others else f"{names[0]} has"


class _Values(Mapping[str, "torch.Tensor"]):
    """The parameters of a device by name, in the widest dtype that is kept."""

    def __init__(self, held: ShardedState) -> None:
        self.held = held

    def __getitem__(self, name: str) -> torch.Tensor:
        held, key = self.held, self.held.finest.get(name, name)
        value = {**held.params, **held.states}[key]
        return value.cpu().to(held.ranks.where) if held.specs[key].away else value

    def __iter__(self) -> Iterator[str]:
        return iter(self.held.param_specs)

    def __len__(self) -> int:
        return len(self.held.param_specs)
