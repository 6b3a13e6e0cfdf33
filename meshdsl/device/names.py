"""Names of a device program's variables: any two differ. A backend may use names of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from meshdsl.device.ir import DeviceProgram
from meshdsl.ir.program import every
from meshdsl.ir.rewrite import defined


class Giver(Protocol):
    """A source of names."""

    def fresh(self, hint: str) -> str:
        """A name like `hint` that is not in use."""


class Names:
    """Hands out names, none of which is in `taken`."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._used = set(taken)
        self._last: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """`hint` itself if it is free, otherwise with a number after it."""
        base = re.sub(r"\W", "_", hint)
        name, number = base, self._last.get(base, 1)
        while name in self._used:
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        self._last[base] = number
        return name


def names_of(program: DeviceProgram) -> frozenset[str]:
    """Every name in a device program."""
    entries = (*program.inputs, *program.params, *program.states)
    names = {v.name for v in entries} | set(program.coordinates.values())
    for node in every(program.body):
        names.update(node.other_names)
        names.update(v.name for v in (*defined(node), *(s.inside for s in node.slices)))
    return frozenset(names)
