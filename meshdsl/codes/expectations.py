"""MD04xx: expectations."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = ()
