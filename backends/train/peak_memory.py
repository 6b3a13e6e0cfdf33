"""The peak of the memory of a training run."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACE = 0.25
"""The least seconds between two readings of the memory."""


class PeakMemory:
    """The peak of the memory so far, in bytes, of a GPU or else of this process.

    Of a GPU it is what torch has allocated; of a process, everything that lay in physical memory.
    """

    def __init__(self, where: torch.device | str) -> None:
        self.where, self._on_gpu = where, str(where).startswith("cuda")
        self._peak, self._due = 0, 0.0

    @property
    def of(self) -> str:
        """The owner of the memory."""
        return "GPU 0" if self._on_gpu else "the process of device 0, torch included"

    @property
    def peak(self) -> int:
        """The peak; read anew at most every `PACE` seconds, since that takes a system call."""
        now = time.monotonic()
        if now >= self._due:
            self._peak, self._due = self._read(), now + PACE
        return self._peak

    def _read(self) -> int:
        if self._on_gpu:
            import torch

            return torch.cuda.max_memory_allocated(self.where)
        return peak_of_process()


def peak_of_process() -> int:
    """The peak of the resident memory of this process, in bytes."""
    import resource

    try:
        # `ru_maxrss` may be that of the process that started this one.
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            status = next(line for line in file if line.startswith("VmHWM:"))
        return int(status.split()[1]) << 10
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10
