"""What a device holds, as bars: parameters, gradients, states, inputs, activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshdsl.notebook.look import BLOCKS, INK, SOFT, card, width_of, words
from meshdsl.notebook.svg import Attribute, Markup, join, tag
from meshdsl.notebook.views import View

Json = dict[str, Any]
KINDS = {
    "params": "parameters",
    "grads": "gradients",
    "state": "state",
    "inputs": "inputs",
    "activations": "activations",
}
FILLS = dict(zip(KINDS, (BLOCKS[0], BLOCKS[1], BLOCKS[2], BLOCKS[5], BLOCKS[3]), strict=True))
WIDTH, HEIGHT, STEP = 380.0, 20.0, 30.0


class Memory(View):
    """Bytes that one device holds, by kind; of several plans a row for each.

    `json` maps a title to what `explain` says of memory; `memory["params"]` is of the first.
    """

    def __init__(self, json: Mapping[str, Json]) -> None:
        self.json = dict(json)

    def __getitem__(self, kind: str) -> int:
        return int(next(iter(self.json.values()))[kind])

    def beside(self, **others: Memory) -> Memory:
        """This one (the first row), and others below it under the names given."""
        rows = {name: next(iter(other.json.values())) for name, other in others.items()}
        return Memory({**self.json, **rows})

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that any row has."""
        return tuple(k for k in KINDS if any(row.get(k) for row in self.json.values()))

    def table(self) -> list[list[str]]:
        """A head and a line for each row: every kind, and all together."""
        from meshdsl.report.figures import human

        head = ["held per device", *(KINDS[k] for k in self.kinds), "at most"]
        return [head] + [
            [title, *(human(row[k]) for k in self.kinds), human(row["peak"])]
            for title, row in self.json.items()
        ]

    def __str__(self) -> str:
        from meshdsl.notebook.tensor import aligned

        return "\n".join(aligned(self.table()))

    def html(self) -> str:
        """Bars to one scale."""
        from meshdsl.notebook.svg import image

        return image(picture(self), str(self))


def picture(memory: Memory) -> Markup:
    """A bar for each row, to one scale, its total behind it."""
    from meshdsl.report.figures import human

    left = max(width_of(title) for title in memory.json) + 10
    most = max(1, *(row["peak"] for row in memory.json.values()))
    top = 24.0
    parts = [_legend(memory)]
    for number, (title, row) in enumerate(memory.json.items()):
        y = top + number * STEP
        parts.append(words(0, y + 14, title))
        parts.append(_bar(memory, row, left, y, WIDTH / most))
        end = left + WIDTH * row["peak"] / most + 8
        parts.append(words(end, y + 14, human(row["peak"]), fill=SOFT))
    return card(left + WIDTH + 80, top + STEP * len(memory.json), *parts)


def _bar(memory: Memory, row: Json, left: float, y: float, scale: float) -> Markup:
    found, x = [], left
    for kind in memory.kinds:
        width = row[kind] * scale
        frame: dict[str, Attribute] = {"stroke": INK, "stroke_width": 0.6}
        found.append(tag("rect", x=x, y=y, width=width, height=HEIGHT, fill=FILLS[kind], **frame))
        x += width
    return join(*found)


def _legend(memory: Memory) -> Markup:
    found, x = [], 0.0
    for kind in memory.kinds:
        frame: dict[str, Attribute] = {"stroke": INK, "stroke_width": 0.6}
        found.append(tag("rect", x=x, y=1, width=11, height=11, fill=FILLS[kind], **frame))
        found.append(words(x + 16, 11, KINDS[kind], font_size=11))
        x += 16 + width_of(KINDS[kind], 11) + 14
    return join(*found)


def of_columns(compared: Json) -> Memory:
    """The memory of every column of a comparison that compiled."""
    return Memory(
        {f"{c['letter']}: {c['title']}": c["memory"] for c in compared["columns"] if "memory" in c}
    )
