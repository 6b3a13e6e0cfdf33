"""MD09xx: what is not supported yet."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = ()
