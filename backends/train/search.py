"""The search for the statement that first made a number that is none: the last steps run again."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from meshdsl.backends.engines.failures import Failure, first_failure
from meshdsl.backends.train.job import Trouble
from meshdsl.backends.train.watch import Finding, Watch

if TYPE_CHECKING:
    from meshdsl.backends.train.loop import Trainer

WATCHED = 20
"""Steps before the failed one that are watched statement by statement, which takes longer."""


def search(trainer: Trainer, loss: str) -> Trouble:
    """Run again from the last checkpoint, or from the beginning, and find where it went wrong.

    All devices take part. `loss` is what was seen, empty where the loss was a number and a
    parameter was none.
    """
    seen = trainer.step
    step, found = _again(trainer, seen, max(0, seen - WATCHED))
    if step is not None and step < seen - WATCHED:
        step, found = _again(trainer, seen, step - 1)
    if step is None or found is None:
        stopped = _is_stopped(trainer)
        return Trouble(seen, loss, None if step is None else step + 1, stopped=stopped)
    known = {key: found[key] for key in ("line", "name", "value", "given")}
    return Trouble(seen, loss, step + 1, device=found["at"], **known)


def _again(trainer: Trainer, seen: int, watched_from: int) -> tuple[int | None, Any]:
    """The first step (from 0) that went wrong, and the first statement in it, if it was watched."""
    team, held = trainer.team, trainer.held
    team.barrier()
    if team.leads:
        held.begin()
    team.barrier()
    if team.rank == 0:
        event = {"kind": "watch", "first": held.step + 1, "last": seen}
        trainer.control.tell(event)
    watch = Watch(trainer.program, trainer.texts.text)
    for step in range(held.step, seen):
        trainer.control.begun()
        watched = step >= watched_from
        outputs = trainer.forward(watch.device if watched else trainer.program.device, step)
        loss = outputs[trainer.program.LOSS].item()
        sound = math.isfinite(loss) and held.is_finite(team.rank)
        if team.total(not sound):
            return step, _earliest(trainer, watch.first() if watched else None)
        watch.went_well()
        if _is_stopped(trainer):
            break
    return None, None


def _is_stopped(trainer: Trainer) -> bool:
    """Whether device 0 has been asked to stop."""
    team = trainer.team
    return bool(team.first(int(trainer.control.stopping()) if team.rank == 0 else 0))


def _earliest(trainer: Trainer, mine: Finding | None) -> dict[str, Any] | None:
    """The first of all devices' findings in the order of the program."""
    told = trainer.team.everyone(asdict(mine) if mine else None)
    found = [{**finding, "at": rank} for rank, finding in enumerate(told) if finding]
    if not found:
        return None
    failures = [Failure(f["at"], "", "", f["line"], f["loops"]) for f in found]
    first = first_failure(trainer.texts.text, failures)
    return next(finding for finding in found if finding["at"] == first.device)
