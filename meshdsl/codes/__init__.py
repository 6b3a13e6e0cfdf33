"""Every diagnostic code that the project reports, with what it means and the way out.

A code never changes its meaning and is never used again. To add one, write its record into the
section it belongs to, in order; a test finds codes without a record and records without a use.
"""

from __future__ import annotations

from meshdsl.codes import (
    checkpoints,
    command_line,
    expectations,
    files,
    gradients,
    module,
    names,
    placement,
    python,
    running,
    runs_training,
    syntax,
    training,
    types,
    unsupported,
    values,
)
from meshdsl.codes.record import Code


def _in_order(records: tuple[Code, ...]) -> tuple[Code, ...]:
    """Records of several files, sorted by code."""
    return tuple(sorted(records, key=lambda record: record.code))


SECTIONS: dict[str, tuple[str, tuple[Code, ...]]] = {
    "MD00": ("reading and syntax", syntax.CODES),
    "MD01": ("names and declarations", names.CODES),
    "MD02": ("types, dims and gradients", types.CODES + training.CODES + gradients.CODES),
    "MD03": ("layouts, placement, divisibility", placement.CODES),
    "MD04": ("expectations", expectations.CODES),
    "MD05": (
        "inputs, outputs, files, checkpoints",
        files.CODES + runs_training.CODES + checkpoints.CODES + module.CODES,
    ),
    "MD06": ("the command line", command_line.CODES),
    "MD07": ("running", _in_order(running.CODES + runs_training.RUNNING)),
    "MD08": ("values at run time, and programs in Python", values.CODES + python.CODES),
    "MD09": ("not supported yet", unsupported.CODES),
}
"""Title and records of every section, by the first four characters of its codes."""

CODES: dict[str, Code] = {
    record.code: record for _, records in SECTIONS.values() for record in records
}
"""Every record by its code."""

__all__ = ["CODES", "SECTIONS", "Code"]
