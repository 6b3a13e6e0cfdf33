"""`--log metrics.jsonl`: one JSON object per step, without gaps or repeats after a resume."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from meshdsl.backends.runtime.user_files import regular, write_file
from meshdsl.backends.train.job import RESUME
from meshdsl.diagnostics import fail


class MetricsLog:
    """The log of one run. Lines beyond step `start`, where the run begins, are cut off.

    All of it raises MD0501 where the file cannot be written.
    """

    def __init__(self, path: str, start: int) -> None:
        self._path = path
        with _written(path):
            lines = list(_lines_until(Path(path), start))
            write_file(path, "".join(lines))
            # Line-buffered: the line of a step goes to the disk before the next step begins.
            self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1, opener=regular)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one step; JSON has none for NaN and infinity: `null`."""
        line = json.dumps({k: _finite(v) for k, v in record.items()}) + "\n"
        with _written(self._path):
            try:
                self._file.write(line)
            except OSError:
                with contextlib.suppress(OSError):  # it tries to write the line again
                    self._file.close()
                raise

    def close(self) -> None:
        """Close the file."""
        with _written(self._path):
            self._file.close()


@contextlib.contextmanager
def _written(path: str) -> Iterator[None]:
    """Raise MD0501 where the system refuses to write the log."""
    try:
        yield
    except OSError as error:
        help = f"free some space there, or name another file; {RESUME}"
        why = error.strerror or error
        fail("MD0501", f"the log {path} cannot be written: {why}", help=help)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _lines_until(path: Path, step: int) -> Iterator[str]:
    """The lines of a log up to a step; a last line that was cut short is left out."""
    if step == 0 or not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace", opener=regular) as file:
        lines = file.read().splitlines(keepends=True)
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        is_record = isinstance(record, dict) and isinstance(record.get("step"), int)
        if is_record and record["step"] <= step and line.endswith("\n"):
            yield line
