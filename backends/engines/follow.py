"""The emitted `device` followed line by line while it runs; other runs pay nothing for it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

Device = Callable[..., dict[str, Any]]


def followed(device: Device, look: Callable[[FrameType], None]) -> Device:
    """`device`, where `look` is called before each line, and at the end."""
    code = device.__code__

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code is code else None

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        look(frame)
        return line

    def call(*arguments: Any) -> dict[str, Any]:
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            return device(*arguments)
        finally:
            sys.settrace(before)

    return call


class Timer:
    """Calls `device` and times its lines; `finish` waits for what a line has begun on a GPU.

    `timed` are lines with the nanoseconds at which they began and ended, by a clock that all
    processes of a machine share. What a line costs to be followed lies between lines.
    """

    def __init__(self, device: Device, finish: Callable[[], None]) -> None:
        self.device = followed(device, self._look)
        self.finish = finish
        self.timed: list[tuple[int, int, int]] = []
        self._line: int | None = None
        self._began = 0

    def _look(self, frame: FrameType) -> None:
        self.finish()
        now = time.monotonic_ns()
        if self._line is not None:
            self.timed.append((self._line, self._began, now))
        self._line, self._began = frame.f_lineno, time.monotonic_ns()

    def write(self, folder: str, rank: int) -> None:
        """Write what one device has timed."""
        (Path(folder) / f"{rank}.json").write_text(json.dumps(self.timed), encoding="utf-8")


def timer(device: Device, where: Any) -> Timer:
    """A timer of a device, a GPU or not."""
    if str(where).startswith("cuda"):
        import torch

        return Timer(device, torch.cuda.synchronize)
    return Timer(device, lambda: None)


def timed_in(folder: str) -> list[list[tuple[int, int, int]]]:
    """What the devices have timed, by rank; nothing where no step was timed."""
    files = sorted(Path(folder).glob("*.json"), key=lambda path: int(path.stem))
    return [[tuple(line) for line in json.loads(path.read_text("utf-8"))] for path in files]
