"""MD05xx: inputs, outputs, files."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = ()
