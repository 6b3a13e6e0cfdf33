"""What a thread is doing, from its frames. Run as a script: another one, and a file that tells.

    python -P at_work.py FOLDER (SCRIPT | -m MODULE) ARGUMENT…

runs a script or module as the main program, and a few times a second writes into FOLDER what it is
doing. Only the standard library is needed.
"""

from __future__ import annotations

import itertools
import json
import os
import runpy
import sys
import threading
import time
from types import FrameType
from typing import Any

EVERY = 0.2
"""Seconds between two reports of a process."""

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_FUNCTION = 1
"""The flag of code whose variables are its own: that of a function."""


def device_in(frame: FrameType | None) -> FrameType | None:
    """The frame of an emitted `device`, if a thread is in one."""
    found = None
    while frame is not None:
        found = frame if frame.f_code.co_name == "device" else found
        frame = frame.f_back
    return found


def variables(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs."""
    found = frame.f_locals
    kept = dict(found)
    if type(found) is dict and frame.f_trace is None:
        found.clear()  # before Python 3.13 the frame would hold what the function has let go
    return kept


def counters(frame: FrameType) -> dict[str, int]:
    """The variables of a function that are whole numbers: what its loops count."""
    return {name: value for name, value in variables(frame).items() if type(value) is int}


def fingerprint(frame: FrameType | None) -> int:
    """A number that changes when a thread gets on: where it is, and what our own loops count."""
    device = device_in(frame)
    text = device.f_code.co_filename if device else ""
    marks: list[Any] = []
    while frame is not None:
        code = frame.f_code
        own = code.co_filename == text or code.co_filename.startswith(_OWN)
        counts = counters(frame) if own and code.co_flags & _FUNCTION else {}
        marks.append((code.co_name, frame.f_lasti, *counts.items()))
        frame = frame.f_back
    return hash(tuple(marks))


def collective_of(frame: FrameType | None) -> str:
    """The collective that a process waits in; empty where it does something else."""
    waits, inner = "", None
    while frame is not None and frame.f_code.co_name != "device":
        code = frame.f_code
        if code.co_filename.endswith("distributed_c10d.py"):
            waits = code.co_name
        elif code.co_qualname == "Pending.wait" and inner is None:
            waits = called(frame)
        inner, frame = frame, frame.f_back
    return called(inner) if frame is not None and inner is not None and waits else waits


def called(frame: FrameType) -> str:
    """What a program calls: a collective, or of one under way what it is."""
    name = frame.f_code.co_name
    kind = getattr(variables(frame).get("self"), "kind", name) if name == "wait" else name
    return str(kind)


def outside(frame: FrameType | None, folder: str = _OWN) -> str:
    """Where a thread is that is in no `device`: in the innermost function of ours, or of all.

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
    """The name of the file in which a process says what it is doing."""
    return f"at_work.rank{rank}"


def _tell(folder: str, ident: int) -> None:
    """Write what the main thread is doing, again and again, until the folder is gone."""
    path = os.path.join(folder, report_of(os.environ["RANK"]))
    for beat in itertools.count():
        frame = sys._current_frames().get(ident)
        device = device_in(frame)
        found = {
            "pid": os.getpid(),
            "beat": beat,
            "mark": fingerprint(frame),
            "line": device.f_lineno if device else None,
            "collective": collective_of(frame),
            "outside": outside(frame, folder),
        }
        del frame, device
        try:
            with open(f"{path}.new", "w", encoding="utf-8") as file:
                json.dump(found, file)
            os.replace(f"{path}.new", path)
        except FileNotFoundError:
            return
        time.sleep(EVERY)


def main() -> None:
    """Run what the command line names, and tell what it is doing."""
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
