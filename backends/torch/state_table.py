"""The table of the optimizer's states: one entry a parameter, where states are alike in all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from meshdsl.backends.torch.line_breaks import INDENT, MANY, quoted
from meshdsl.records import dataclass

Rows = Callable[[Sequence[tuple[str, str]]], list[str]]
"""Writes a dict of texts, an entry a line."""


@dataclass(frozen=True, slots=True)
class StateRow:
    """A state: its name, the text of its spec, and the name of its parameter, if it has one."""

    name: str
    spec: str
    param: str = ""

    @property
    def kind(self) -> str:
        """What follows the name of the parameter."""
        return self.name.removeprefix(f"{self.param}.")


def state_table(rows: Sequence[StateRow], params: Mapping[str, str], write: Rows) -> list[str]:
    """The lines that assign `STATES`.

    `params` are the specs that states like the parameters would have. By parameter, states of one
    parameter follow one another, each as there are kinds.
    """
    of_params = [row for row in rows if row.param and row.name != row.kind]
    specs = {row.param: row.spec for row in of_params}
    kinds = list(dict.fromkeys(row.kind for row in of_params))
    others = [(row.name, row.spec) for row in rows if row not in of_params]
    by_param = [StateRow(f"{n}.{k}", spec, n) for n, spec in specs.items() for k in kinds]
    if len(specs) < MANY or len(kinds) < 2 or by_param != of_params:
        return write([(row.name, row.spec) for row in rows])
    lines = ['f"{name}.{state}": spec.partition(" = ")[0] + " = zeros()"']
    lines.append("for name, spec in PARAMS.items()")
    without = [name for name in params if name not in specs]
    if list(specs.items()) != [item for item in params.items() if item[0] in specs]:
        _, *entries, _ = write(list(specs.items()))
        lines = ['f"{name}.{state}": spec', "for name, spec in {", *entries, "}.items()"]
    elif without:
        lines += ["if name", "not in {", *(f"{INDENT}{quoted(name)}," for name in without), "}"]
    lines.append(f"for state in ({', '.join(map(quoted, kinds))})")
    head = write(others)
    head = [f"{head[0]}{head[1].strip().removesuffix(',')}}}"] if len(head) == 3 else head
    return [*head, "STATES |= {", *(f"{INDENT}{line}" for line in lines), "}"]
