"""A checkpoint that was found, and whether its tensors are those of a program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.backends.runtime.files import show_table
from meshdsl.backends.runtime.values import Spec
from meshdsl.diagnostics import Diagnostic, counted, fail

MOST_ROWS = 20
"""Differing tensors that are shown; the others are counted."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor as the manifest lists it."""

    dtype: str
    dims: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(f'{dim}={size}' for dim, size in self.dims)}]"

    @classmethod
    def of(cls, spec: Spec) -> Stored:
        """A tensor of a program, however it is split."""
        return cls(spec.dtype, tuple(spec.dims.items()))

    @classmethod
    def from_table(cls, entry: Mapping[str, Any]) -> Stored:
        """An entry of the manifest."""
        return cls(entry["dtype"], tuple((dim, size) for dim, size in entry["dims"]))

    def as_table(self) -> dict[str, Any]:
        """The entry of the manifest; a list of dims, for their order counts."""
        return {"dtype": self.dtype, "dims": [list(dim) for dim in self.dims]}

    @property
    def names(self) -> list[str]:
        """The names of its dims, in order."""
        return [dim for dim, _ in self.dims]


@dataclass(frozen=True, slots=True)
class Found:
    """A whole checkpoint: where it is, its step, what was said at the save, and its tensors.

    `skipped` has a sentence for every newer one that is damaged.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    tensors: dict[str, Stored]
    skipped: tuple[str, ...] = ()

    @property
    def warnings(self) -> tuple[Diagnostic, ...]:
        """What was skipped, as it is shown to the user."""
        help = f"`{self.path.name}` is used, the newest whole one"
        return tuple(Diagnostic("MD0542", t, severity="warning", help=help) for t in self.skipped)


def check_same(found: Found, specs: Mapping[str, Spec]) -> None:
    """Raise MD0541 with a table of what differs, where tensors are not those of `specs`."""
    rows: list[tuple[str, ...]] = [
        (name, str(wanted or "-"), str(held or "missing"), difference(wanted, held))
        for name, wanted, held in _pairs(found, specs)
        if wanted != held
    ]
    if not rows:
        return
    head = ("tensor", "program", "checkpoint", "")
    program = found.meta.get("program")
    of = f", `{program}`" if program else ""
    message = f"the checkpoint `{found.path.name}` is of another program{of}: "
    message += f"{counted(len(rows), 'tensor')} {'differs' if len(rows) == 1 else 'differ'}"
    more = [f"  and {len(rows) - MOST_ROWS} more"] if len(rows) > MOST_ROWS else []
    fail(
        "MD0541",
        "\n".join([message, show_table([head, *rows[:MOST_ROWS]]), *more]),
        help=_way_out(found, specs),
    )


def _pairs(
    found: Found, specs: Mapping[str, Spec]
) -> Iterator[tuple[str, Stored | None, Stored | None]]:
    """Every tensor of the program, then those it does not have: as wanted and as stored."""
    program = {name: Stored.of(spec) for name, spec in specs.items()}
    for name in dict.fromkeys([*program, *found.tensors]):
        yield name, program.get(name), found.tensors.get(name)


def difference(wanted: Stored | None, held: Stored | None) -> str:
    """In a few words how a stored tensor differs from the program's."""
    if wanted is None:
        return "the program has no such tensor"
    if held is None:
        return "not saved"
    if wanted.names != held.names:
        return f"has dims [{', '.join(held.names)}]"
    for (dim, size), (_, stored) in zip(wanted.dims, held.dims, strict=True):
        if stored != size:
            return f"dim {dim} is {stored}, not {size}"
    return f"is {held.dtype}, not {wanted.dtype}"


def _way_out(found: Found, specs: Mapping[str, Spec]) -> str:
    """Other sizes, where they are all that differs; else the other program or another folder."""
    sizes: dict[str, int] = {}
    for _, wanted, held in _pairs(found, specs):
        if (
            wanted is None
            or held is None
            or (wanted.dtype, wanted.names) != (held.dtype, held.names)
        ):
            return "go on with the program it was saved from, or train this one in another folder"
        sizes |= dict(set(held.dims) - set(wanted.dims))
    return f"it was saved under `--set {' '.join(f'{d}={n}' for d, n in sizes.items())}`"
