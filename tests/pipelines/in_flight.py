"""What is in flight on each device while a program runs, counted by what its passes keep."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar

from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.pipeline import Compilation

KEPT = re.compile(r"^    (kept|kept_weights) = \{\}$", re.MULTILINE)


class Kept(dict[Any, Any]):
    """What passes keep for later ones; it counts for its device, with others of the same."""

    now: ClassVar[Counter[int]] = Counter()
    most: ClassVar[Counter[int]] = Counter()

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def __setitem__(self, key: Any, value: Any) -> None:
        assert key not in self, "kept twice"
        super().__setitem__(key, value)
        self.now[self.rank] += 1
        self.most[self.rank] = max(self.most[self.rank], self.now[self.rank])

    def pop(self, key: Any, *default: Any) -> Any:
        """Let go of what is needed no more."""
        self.now[self.rank] -= 1
        return super().pop(key, *default)


def counted(made: Compilation) -> tuple[LocalRun, tuple[int, ...]]:
    """A step on threads, and the most micro-batches in flight on each device."""
    text, count = KEPT.subn(r"    \1 = Kept(rank)", made.text)
    assert count
    Kept.now.clear()
    Kept.most.clear()
    begin = text.index("import argparse")
    run = run_local(f"{text[:begin]}from {__name__} import Kept\n{text[begin:]}", seed=4)
    assert not any(Kept.now.values()), "something is kept for ever"
    return run, tuple(Kept.most[rank] for rank in range(made.device.mesh.devices))
