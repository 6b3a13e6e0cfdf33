"""MD02xx: types and dims."""

from __future__ import annotations

from meshdsl.codes.record import Code

CODES: tuple[Code, ...] = ()
