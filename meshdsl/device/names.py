"""Names of a device program's variables: any two differ. A backend may use names of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from meshdsl.device.ir import DeviceLoop, DeviceProgram, Start
from meshdsl.ir.program import every


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
        names.update(v.name for v in node.makes)
        if isinstance(node, Start):
            names.add(node.work)
        elif isinstance(node, DeviceLoop):
            names.update(_of_loop(node))
    return frozenset(names)


def _of_loop(node: DeviceLoop) -> Iterator[str]:
    yield node.index
    yield from (c.inside.name for c in node.carries)
    yield from (s.inside.name for s in node.slices)
    for ahead in node.ahead:
        yield ahead.work
