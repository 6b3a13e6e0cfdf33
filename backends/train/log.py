"""`--log metrics.jsonl`: one JSON object per step, without gaps or repeats after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from meshdsl.backends.runtime.user_files import regular, write_file


class MetricsLog:
    """The log of one run. Lines beyond step `start`, where the run begins, are cut off."""

    def __init__(self, path: str, start: int) -> None:
        kept = list(_lines_until(Path(path), start))
        write_file(path, "".join(kept))
        # Line-buffered: the line of a step is on its way to the disk before the next step begins.
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1, opener=regular)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append the numbers of one step; JSON has none for NaN and infinity: `null`."""
        self._file.write(json.dumps({k: _finite(v) for k, v in record.items()}) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


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
        known = isinstance(record, dict) and isinstance(record.get("step"), int)
        if known and record["step"] <= step and line.endswith("\n"):
            yield line
