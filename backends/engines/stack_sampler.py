"""The activity of a thread, read from its frames; as a script, of another script, into a file.

    python -P stack_sampler.py FOLDER (SCRIPT | -m MODULE) ARGUMENT…

runs a script or module as the main program, and a few times a second writes its activity
into FOLDER. Only the standard library is needed.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

EVERY = 0.2
"""Seconds between two reports of a process."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
WAITING = ("Pending.wait", "Line.receive", "Line.send", "Line.close")
"""The functions of the runtime that wait for other devices, in what is none of Python."""

_FUNCTION = 1
"""The code flag of a function: its variables are its own."""


def device_in(frame: FrameType | None) -> FrameType | None:
    """The frame of an emitted `device` that a thread is in, if any."""
    device_frame = None
    while frame is not None:
        device_frame = frame if frame.f_code.co_name == "device" else device_frame
        frame = frame.f_back
    return device_frame


def is_of_device(code: CodeType) -> bool:
    """Whether code is that of `device` or lies inside it, as each pass of a pipeline does.

    Its place tells, not its name: a schedule may have further kinds of passes.
    """
    name = code.co_qualname
    return name == "device" or name.startswith("device.<locals>.")


def place_in(stack: Iterable[tuple[FrameType, int]]) -> tuple[int | None, dict[str, int]]:
    """The innermost line of `device`, or of a function inside it, and the counters around it.

    A stack is frames and their lines, the outermost first.
    """
    line: int | None = None
    counts: dict[str, int] = {}
    file = ""
    for frame, at in stack:
        code = frame.f_code
        begins = line is None and code.co_name == "device"
        if begins or (code.co_filename == file and is_of_device(code)):
            line, file = at, code.co_filename
            counts |= counters(frame)
    return line, counts


def stand(frame: FrameType | None) -> tuple[int | None, dict[str, int]]:
    """The line of `device` that a thread is in, and its counters."""
    return place_in(reversed(list(traceback.walk_stack(frame)))) if frame else (None, {})


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a running function."""
    local_variables = frame.f_locals
    copies = dict(local_variables)
    if type(local_variables) is dict and frame.f_trace is None:
        local_variables.clear()  # before Python 3.13 the frame keeps what the function has deleted
    return copies


def counters(frame: FrameType) -> dict[str, int]:
    """The integer variables of a function: its loop counters."""
    return {name: value for name, value in variables(frame).items() if type(value) is int}


def fingerprint(frame: FrameType | None) -> int:
    """A hash that changes when a thread advances: its position and our own loop counters."""
    device = device_in(frame)
    text = device.f_code.co_filename if device else ""
    marks: list[Any] = []
    while frame is not None:
        code = frame.f_code
        is_counted = code.co_filename == text or code.co_filename.startswith(_OWN)
        counts = counters(frame) if is_counted and code.co_flags & _FUNCTION else {}
        marks.append((code.co_name, frame.f_lasti, *counts.items()))
        frame = frame.f_back
    return hash(tuple(marks))


def collective_of(frame: FrameType | None) -> str:
    """The collective that a process waits in; empty if it does not wait."""
    waits, inner = "", None
    while frame is not None and not is_of_device(frame.f_code):
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            waits = code.co_name
        elif code.co_qualname in WAITING and inner is None:
            waits = called(frame)
        inner, frame = frame, frame.f_back
    return called(inner) if frame is not None and inner is not None and waits else waits


def called(frame: FrameType) -> str:
    """The function that a program calls: a collective, or the kind of one in flight."""
    name = frame.f_code.co_name
    kind = getattr(variables(frame).get("self"), "kind", name) if name == "wait" else name
    return str(kind)


def outside(frame: FrameType | None, folder: str = _OWN) -> str:
    """The position of a thread outside of `device`: its innermost function of ours, or of all.

    Ours are those of this package and of files in `folder`.
    """
    innermost = frame
    while frame is not None and not _is_own(frame.f_code.co_filename, folder):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "about to begin"
    file = os.path.basename(frame.f_code.co_filename)
    return f"in {frame.f_code.co_name} of {file}, line {frame.f_lineno}"


def _is_own(file: str, folder: str) -> bool:
    return file.startswith((_OWN, folder)) and file != os.path.abspath(__file__)


# --- as a script ---------------------------------------------------------------------------------


def report_of(rank: str | int) -> str:
    """The name of the file to which a process reports its activity."""
    return f"at_work.rank{rank}"


def _tell(folder: str, ident: int) -> None:
    """Write the activity of the main thread repeatedly, until the folder is gone."""
    path = os.path.join(folder, report_of(os.environ["RANK"]))
    for beat in itertools.count():
        frame = sys._current_frames().get(ident)
        line, _ = stand(frame)
        activity = {
            "pid": os.getpid(),
            "beat": beat,
            "mark": fingerprint(frame),
            "line": line,
            "collective": collective_of(frame),
            "outside": outside(frame, folder),
        }
        del frame
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(activity, file)
            os.replace(f"{path}.new", path)
        except FileNotFoundError:
            return
        time.sleep(EVERY)


def main() -> None:
    """Run the script or module of the command line, and report its activity."""
    folder, *sys.argv = sys.argv[1:]
    told = threading.Thread(target=_tell, args=(folder, threading.get_ident()), daemon=True)
    told.start()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
