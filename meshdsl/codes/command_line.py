"""MD06xx: the command line."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = ()
