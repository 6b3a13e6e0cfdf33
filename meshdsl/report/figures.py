"""Words and numbers of reports: bytes, FLOPs and counts as people read them, and lines of text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable

UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNIT = re.compile(r"(?<=\d) (?=[KMGTP]?i?B\b)")
"""The space between a number and its unit, where no line is broken."""


def human(size: int) -> str:
    """Bytes to three digits in a unit that reads well: `4 B`, `64 KiB`, `6.76 MiB`."""
    value, unit = float(size), 0
    while value >= 1023.5 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_digits(value)} {UNITS[unit]}"


def exact(size: int) -> str:
    """`64 KiB (65,536 B)`; bytes alone where there are few."""
    return f"{size:,} B" if size < 1024 else f"{human(size)} ({size:,} B)"


def scaled(flops: int, precise: bool = False) -> str:
    """FLOPs to three digits: `67.2 MFLOP`, with all digits behind them where `precise`."""
    value, unit = float(flops), 0
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    while value >= 999.5 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    tail = f" ({flops:,})" if precise and unit else ""
    return f"{_digits(value)} {units[unit]}{tail}"


def _digits(value: float) -> str:
    places = 2 if value < 10 else 1 if value < 100 else 0
    text = f"{value:.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def counted(number: int, noun: str) -> str:
    """`1 device`, `3,072 devices`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def wrapped(text: str, width: int, style: str = "", hang: int = 0) -> Iterable[tuple[str, str]]:
    """Lines of `text`, at least one, all but the first `hang` deep."""
    lines = textwrap.wrap(
        UNIT.sub("\u00a0", text),
        max(width, 24),
        subsequent_indent=" " * hang,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [(line.replace("\u00a0", " "), style) for line in lines or [""]]
