"""The emitted `device` followed line by line while it runs; other runs pay nothing for it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from meshdsl.disk_cache import from_json

Timed = list[tuple[int, int, int]]
"""Lines that were timed: the line, the beginning and the end."""

Device = Callable[..., dict[str, Any]]


def followed(device: Device, look: Callable[[FrameType, bool], None]) -> Device:
    """`device`, where `look` is called before each line, and at the end.

    So it is for the functions inside it: `look` is given which of them, and whether it ends.
    """
    codes = set(_functions(device.__code__))

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_code in codes else None

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        look(frame, event == "return")
        return line

    def call(*arguments: Any) -> dict[str, Any]:
        before = sys.gettrace()
        sys.settrace(enter)
        try:
            return device(*arguments)
        finally:
            sys.settrace(before)

    return call


def _functions(code: CodeType) -> Iterator[CodeType]:
    """The code of a function, and of those with a name inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType) and not inner.co_name.startswith("<"):
            yield from _functions(inner)


class Timer:
    """Calls `device` and times its lines; `finish` waits for what a line has begun on a GPU.

    `timed` are lines with the nanoseconds at which they began and ended, by a clock that all
    processes of a machine share. What a line costs to be followed lies between lines.
    """

    def __init__(self, device: Device, finish: Callable[[], None]) -> None:
        self.device = followed(device, self._look)
        self.finish = finish
        self.timed: Timed = []
        self._line: int | None = None
        self._began = 0

    def _look(self, frame: FrameType, over: bool) -> None:
        self.finish()
        now = time.monotonic_ns()
        if self._line is not None:
            self.timed.append((self._line, self._began, now))
        self._line, self._began = None if over else frame.f_lineno, time.monotonic_ns()

    def write(self, folder: str, rank: int) -> None:
        """Write what one device has timed."""
        (Path(folder) / f"{rank}.json").write_text(json.dumps(self.timed), encoding="utf-8")


def timer(device: Device, where: Any) -> Timer:
    """A timer of a device, a GPU or not."""
    if str(where).startswith("cuda"):
        import torch

        return Timer(device, torch.cuda.synchronize)
    return Timer(device, lambda: None)


def timed_in(folder: str) -> list[Timed]:
    """What the devices have timed, by rank; nothing where no step was timed."""
    files = sorted(Path(folder).glob("*.json"), key=lambda path: int(path.stem))
    return [from_json(path.read_text("utf-8"), Timed) for path in files]
