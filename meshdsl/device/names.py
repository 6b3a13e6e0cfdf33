"""Names of variables in the emitted program: the user's own where they are safe and free."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterator

from meshdsl.device.ir import Loop, Program, Start
from meshdsl.ir.program import every

MODULE_NAMES = frozenset(
    """np torch dist main device rank groups inputs params states argparse os sys math json struct
    pathlib MESH GROUPS INPUTS PARAMS STATES OUTPUTS LOSS Spec F""".split()
)
"""Names that mean something in the emitted module."""


class Names:
    """Hands out identifiers: no keyword, no builtin, no name of the module, none twice."""

    def __init__(self, taken: frozenset[str] = frozenset()) -> None:
        self._used = set(taken) | MODULE_NAMES | set(dir(builtins))
        self._last: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """`hint` itself if it is safe and free, otherwise with a number after it."""
        base = re.sub(r"\W", "_", hint, flags=re.ASCII).strip("_") or "t"
        if base[0].isdigit() or keyword.iskeyword(base) or keyword.issoftkeyword(base):
            base = f"t_{base}"
        name, number = base, self._last.get(base, 1)
        while name in self._used or name.startswith("__"):
            number += 1
            name = f"{base}_{number}"
        self._used.add(name)
        self._last[base] = number
        return name


def identifiers(program: Program) -> frozenset[str]:
    """Every identifier that a device program gives a meaning to."""
    entries = (*program.inputs, *program.params, *program.states)
    found = {v.name for v in entries} | set(program.coordinates.values())
    for node in every(program.body):
        found.update(v.name for v in node.makes)
        if isinstance(node, Start):
            found.add(node.work)
        elif isinstance(node, Loop):
            found.update(_of_loop(node))
    return frozenset(found)


def _of_loop(node: Loop) -> Iterator[str]:
    yield node.index
    yield from (c.inside.name for c in node.carries)
    yield from (s.inside.name for s in node.slices)
    for ahead in node.ahead:
        yield ahead.work
