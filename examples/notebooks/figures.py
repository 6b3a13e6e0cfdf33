"""The pictures of the notebooks that the package does not draw. `save` writes one as SVG."""

from html import escape
from itertools import pairwise
from math import ceil, floor, log10
from pathlib import Path
from typing import Any

from meshdsl import Plan

LINES = ("#1f5fbf", "#b3541e", "#2e7d4f", "#7a3fa0", "#8a6d00")
"""The colours of curves."""


DEVICES = ("#9ecae9", "#ffd28f", "#a8d8a0", "#d7bde2")
"""The colours of devices, as in the pictures of plans; lines from a device are in `LINES`."""

LEFT, TOP, WIDTH, HEIGHT = 64, 30, 430, 230
"""The pixels left of the axes, above them, and of the box between them."""

Curve = dict[float, float]


class Figure:
    """A picture that a notebook shows and that slides take: `save` writes it."""

    def _repr_svg_(self) -> str:
        raise NotImplementedError

    def save(self, path: str) -> None:
        """Write the picture as an SVG file, as `.save` of what the package draws."""
        if not path.lower().endswith(".svg"):
            raise ValueError(f"a figure is saved as SVG: write a name in .svg, not {path!r}")
        Path(path).write_text(self._repr_svg_(), encoding="utf-8", newline="\n")


def drawn(width: float, height: float, parts: list[str]) -> str:
    """A picture of so many pixels, with a margin and a background."""
    total = width + 16, height + 16
    frame = f'width="{total[0]}" height="{total[1]}" viewBox="-8 -8 {total[0]} {total[1]}"'
    back = f'<rect x="-8" y="-8" width="{total[0]}" height="{total[1]}" fill="#ffffff"/>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>{back}{"".join(parts)}</svg>'


class Axis:
    """Where a value is along an axis, from 0 to 1, and which values get a number."""

    def __init__(self, values: list[float], log: bool) -> None:
        self.log = log
        least, most = min(values), max(values)
        if log:
            self.ends = (log10(least), log10(most))
            self.ticks = decades(sorted(set(values)))
            return
        base = least if least > most / 2 else 0.0
        step = 10.0 ** floor(log10(most - base or 1))
        step = next(s for s in (step / 5, step / 2, step, 2 * step) if (most - base) / s <= 7)
        step = max(step, 1.0) if all(value == round(value) for value in values) else step
        first, last = floor(base / step + 1e-9), ceil(most / step - 1e-9)
        self.ends = (first * step, last * step)
        self.ticks = [n * step for n in range(first, last + 1)]

    def __call__(self, value: float) -> float:
        """The share of the axis that is before a value."""
        first, last = self.ends
        return ((log10(value) if self.log else value) - first) / (last - first)


def decades(values: list[float]) -> list[float]:
    """The numbers at a logarithmic axis: few values themselves, else powers of ten, or 1, 2, 5."""
    if len(values) <= 8 and all(b > 1.5 * a for a, b in pairwise(values)):
        return values
    least, most = values[0], values[-1]
    powers = [10.0**e for e in range(floor(log10(least)), ceil(log10(most)) + 1)]
    whole = [p for p in powers if least <= p <= most]
    if len(whole) < 3:
        whole = [m * p for p in powers for m in (1, 2, 5) if least <= m * p <= most]
    return whole[:: max(1, len(whole) // 6)] if len(whole) > 8 else whole


class Plot(Figure):
    """Curves and labelled points. `log` says which axes are logarithmic: "", "x", "y" or "xy".

    Curves are `y` by `x`, points `(x, y)` by label, and dots points without one. The y axis
    reaches `most`, where it is given. As text a plot is a list of the numbers.
    """

    def __init__(
        self,
        title: str,
        curves: dict[str, Curve],
        points: dict[str, tuple[float, float]] | None = None,
        x: str = "",
        y: str = "",
        log: str = "",
        dots: list[tuple[float, float]] | None = None,
        most: float | None = None,
    ) -> None:
        self.title, self.curves, self.points = title, curves, points or {}
        self.dots, self.most = dots or [], most
        self.x, self.y, self.log = x, y, log

    def __repr__(self) -> str:
        head = f"{self.title} ({self.x}: {self.y})"
        rows = [
            f"{name}: " + ", ".join(f"{x:.4g}: {y:.4g}" for x, y in each.items())
            for name, each in self.curves.items()
        ]
        rows += [f"{name}: {x:.4g}: {y:.4g}" for name, (x, y) in self.points.items()]
        rows += [f"{len(self.dots)} dots"] if self.dots else []
        return "\n".join([head, *rows])

    def hidden(self, curve: Curve, index: int) -> list[tuple[tuple[float, float], ...]]:
        """The segments of a curve that a later one is drawn over: they are wide, to be seen."""
        later = list(self.curves.values())[index + 1 :]
        over = {segment for each in later for segment in pairwise(each.items())}
        return [segment for segment in pairwise(curve.items()) if segment in over]

    def _repr_svg_(self) -> str:
        every = [pair for each in self.curves.values() for pair in each.items()]
        every += [*self.points.values(), *self.dots]
        across = Axis([x for x, _ in every], "x" in self.log)
        ends = [] if self.most is None else [self.most]
        up = Axis([*(y for _, y in every), *ends], "y" in self.log)

        def at(x: float, y: float) -> tuple[float, float]:
            return LEFT + across(x) * WIDTH, TOP + HEIGHT - up(y) * HEIGHT

        right, bottom = LEFT + WIDTH, TOP + HEIGHT
        parts = [text(LEFT, 16, self.title, "start", "#222222", "bold")]
        for tick in across.ticks:
            x = LEFT + across(tick) * WIDTH
            parts.append(f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="#e4e4e4"/>')
            parts.append(text(x, bottom + 16, number(tick), "middle"))
        for tick in up.ticks:
            y = bottom - up(tick) * HEIGHT
            parts.append(f'<path d="M{LEFT} {y:.1f}H{right}" stroke="#e4e4e4"/>')
            parts.append(text(LEFT - 6, y + 4, number(tick), "end"))
        box = f'x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"'
        parts.append(f'<rect {box} fill="none" stroke="#888888"/>')
        parts.append(text(LEFT + WIDTH / 2, bottom + 34, self.x, "middle"))
        turned = f'<g transform="translate(14 {TOP + HEIGHT / 2}) rotate(-90)">'
        parts.append(f"{turned}{text(0, 0, self.y, 'middle')}</g>")
        for a, b in (at(*dot) for dot in self.dots):
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="#9a9a9a"/>')
        for index, (name, each) in enumerate(self.curves.items()):
            colour = LINES[index % len(LINES)]
            corners = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in each.items()))
            for start, end in self.hidden(each, index):
                (a, b), (c, d) = at(*start), at(*end)
                look = f'stroke="{colour}" stroke-width="10" stroke-opacity="0.35"'
                parts.append(f'<path d="M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" {look}/>')
            stroke = f'fill="none" stroke="{colour}" stroke-width="2"'
            parts.append(f'<polyline points="{corners}" {stroke}/>')
            for a, b in (at(x, y) for x, y in each.items()):
                parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>')
            parts.append(text(right + 12, TOP + 14 + 18 * index, name, "start", colour))
        for name, place in self.points.items():
            a, b = at(*place)
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="#222222"/>')
            late = across(place[0]) > 0.8
            parts.append(text(a - 8 if late else a + 8, b + 4, name, "end" if late else "start"))
        wide = right + 24 + max((7 * len(name) for name in self.curves), default=0)
        return drawn(wide, bottom + 44, parts)


def text(
    x: float, y: float, words: str, anchor: str, colour: str = "#222222", weight: str = "normal"
) -> str:
    """A text of a picture."""
    look = f'text-anchor="{anchor}" fill="{colour}" font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(words)}</text>'


UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """A number on an axis: 2k, 0.5."""
    if value == int(value) and value < 1e5 and value % 100:
        return f"{value:,.0f}"
    for size, unit in UNITS:
        if value >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"


class Routes(Figure):
    """The slots of experts that tokens are sent to. As text it is a table of how many go where.

    `dispatch[device, token, expert, slot]` is 1 where a token is in a slot of an expert, else 0.
    Device `i` has the tokens `dispatch[i]` and expert `i`. A token has so many `choices`.
    """

    def __init__(self, dispatch: Any, choices: int) -> None:
        self.dispatch, self.choices = dispatch, choices

    def __repr__(self) -> str:
        sent = self.dispatch.sum(axis=(1, 3)).astype(int)
        dropped = self.choices * self.dispatch.shape[1] - sent.sum(axis=1)
        head = "".join(f"  expert {e}" for e in range(sent.shape[1]))
        rows = [
            f"device {d} sends to{''.join(f'{n:10}' for n in row)}{dropped[d]:9}"
            for d, row in enumerate(sent)
        ]
        return "\n".join([f"{'':17}{head}  dropped", *rows])

    def _repr_svg_(self) -> str:
        devices, tokens, experts, slots = self.dispatch.shape
        row, gap, right, top = 17, 16, 370, 22
        places = devices * slots
        height = max(tokens, places) * row + gap
        parts = [
            f'<text x="{x}" y="12" font-weight="bold">{said}</text>'
            for x, said in ((0, "tokens of a device"), (right, "slots of its expert"))
        ]
        boxes, lines = [], []
        for d in range(devices):
            down = top + d * height + (height - gap - tokens * row) / 2
            parts.append(f'<text x="0" y="{down + tokens * row / 2 + 4:.0f}">device {d}</text>')
            for t in range(tokens):
                y = down + t * row
                lost = int(self.choices - self.dispatch[d, t].sum())
                boxes.append(_box(140, y, DEVICES[d], str(t)))
                if lost:
                    said = f"{lost} dropped"
                    boxes.append(f'<text x="74" y="{y + 12:.0f}" fill="#b00020">{said}</text>')
                for e, s in zip(*self.dispatch[d, t].nonzero(), strict=True):
                    to = top + e * height + (height - gap - places * row) / 2
                    to += (d * slots + s) * row + row / 2
                    dash = ' stroke-dasharray="3 3"' if d == e else ""
                    start, bend = y + row / 2, (168 + right) / 2
                    way = f"M168 {start:.0f} C{bend:.0f} {start:.0f}"
                    way += f" {bend:.0f} {to:.0f} {right} {to:.0f}"
                    look = f'fill="none" stroke="{LINES[d]}" stroke-width="1.4"{dash}'
                    lines.append(f'<path d="{way}" {look}/>')
        for e in range(experts):
            down = top + e * height + (height - gap - places * row) / 2
            for d in range(devices):
                for s in range(slots):
                    there = self.dispatch[d, :, e, s].nonzero()[0]
                    fill, said = (DEVICES[d], str(there[0])) if len(there) else ("#ffffff", "")
                    boxes.append(_box(right, down + (d * slots + s) * row, fill, said))
            used = int(self.dispatch[:, :, e].sum())
            y = down + places * row / 2
            parts.append(f'<text x="{right + 40}" y="{y:.0f}">device {e}, expert {e}:</text>')
            parts.append(f'<text x="{right + 40}" y="{y + 16:.0f}">{used} of {places} slots</text>')
        said = (
            "dashed: stays on its device; white: an empty slot, which is sent and multiplied, too"
        )
        bottom = top + devices * height
        parts.append(f'<text x="0" y="{bottom + 8}" fill="#57606a">{said}</text>')
        return drawn(right + 160, bottom + 16, [*parts, *lines, *boxes])


def _box(x: float, y: float, fill: str, said: str) -> str:
    """A token or a slot, with its number."""
    look = f'width="28" height="14" fill="{fill}" stroke="#57606a" stroke-width="0.8"'
    number = (
        f'<text x="{x + 14}" y="{y + 11.5:g}" text-anchor="middle" font-size="11">{said}</text>'
    )
    return f'<rect x="{x}" y="{y + 1:g}" {look}/>{number}'


KINDS = {
    "params": ("parameters", "#ddce6a"),
    "state": ("state", "#e0cbef"),
    "grads": ("gradients", "#8ccf7e"),
    "new_grads": ("unfinished gradients", "#bfe5b6"),
    "gathered": ("gathered parameters", "#ef8f86"),
    "activations": ("activations", "#7fb2e5"),
    "updates": ("temporaries of the update", "#c79be0"),
    "buffers": ("workspace", "#fbfbfc"),
}
"""The kinds of memory from the bottom of a picture to its top: name and colour."""


class MemoryOverTime(Figure):
    """A picture of the memory of a device in a step, by kind, for plans by name. As text a table.

    Times are those of a simulated step on a cluster. Plans have one scale of time and one of bytes.
    """

    def __init__(self, cluster: str = "h100", **plans: Plan) -> None:
        steps = {name: plan.simulate(cluster, unroll=True) for name, plan in plans.items()}
        self.samples = {
            name: [(1e3 * at, {k: kinds[k] for k in KINDS}) for at, kinds in step.memory]
            for name, step in steps.items()
        }

    def __repr__(self) -> str:
        rows = [["MB at the peak", *(name for name, _ in KINDS.values()), "total"]]
        for name, samples in self.samples.items():
            most = max((each for _, each in samples), key=lambda each: sum(each.values()))
            amounts = [*most.values(), sum(most.values())]
            rows.append([name, *(f"{n / 1e6:,.0f}" for n in amounts)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows
        )

    def _repr_svg_(self) -> str:
        left, width, height, step = 120, 520, 90, 122
        ends = [samples[-1][0] for samples in self.samples.values()]
        sums = [sum(each.values()) for s in self.samples.values() for _, each in s]
        across, up = width / max(ends), height / max(sums)
        parts, x, y = [], 0.0, 0.0
        there = [k for k in KINDS if any(e[k] for s in self.samples.values() for _, e in s)]
        for kind in there:
            wide = 28 + 6 * len(KINDS[kind][0])
            if x + wide > left + width + 10:
                x, y = 0.0, y + 18
            parts.append(f'<rect x="{x:g}" y="{y:g}" width="11" height="11" {_look(kind)}/>')
            said = f'<text x="{x + 15:g}" y="{y + 10:g}" font-size="11">{KINDS[kind][0]}</text>'
            parts.append(said)
            x += wide
        top = y + 24
        for number, (name, samples) in enumerate(self.samples.items()):
            bottom = top + number * step + height
            most = max(sum(each.values()) for _, each in samples)
            said = f"{most / 1e6:,.0f} MB at most"
            parts.append(f'<text x="0" y="{bottom - height + 12}">{escape(name)}</text>')
            small = 'font-size="11" fill="#57606a"'
            parts.append(f'<text x="0" y="{bottom - height + 28}" {small}>{said}</text>')
            columns: dict[int, dict[str, int]] = {}
            for at, each in samples:  # in each pixel the moment with the most
                column = int(at * across)
                before = columns.get(column, {})
                if sum(each.values()) >= sum(before.values()):
                    columns[column] = each
            for kind in reversed(there):
                below = list(KINDS)[: list(KINDS).index(kind) + 1]
                line = f"M{left} {bottom}"
                for column, each in sorted(columns.items()):
                    y = bottom - up * sum(each[k] for k in below)
                    line += f" H{left + column} V{y:.1f}"
                end = left + samples[-1][0] * across
                parts.append(f'<path d="{line} H{end:.1f} V{bottom} Z" {_look(kind)}/>')
            parts.append(f'<path d="M{left} {bottom} h{width}" stroke="#57606a"/>')
            took = f"{samples[-1][0]:.1f} ms"
            at = left + samples[-1][0] * across
            small += ' text-anchor="end"'
            parts.append(f'<text x="{at:.0f}" y="{bottom + 14}" {small}>{took}</text>')
        return drawn(left + width + 10, top + len(self.samples) * step, parts)


def _look(kind: str) -> str:
    """How a kind of memory is drawn."""
    return f'fill="{KINDS[kind][1]}" stroke="#1b1f24" stroke-width="0.5"'


GATES = {"before": "f", "after": "g"}
"""The names in Shoeybi et al. (2019) of what is before and after a half of a block."""


class Flow(Figure):
    """A half of a block on the devices of a mesh axis: what each has, and what they send.

    `chain` alternates tensors and the parameters that are multiplied between them: `"x", "wq wk
    wv", "o", "wo", "r"`. Splits, shapes, kinds of collectives and bytes are those of the plan. A
    collective belongs to the product on its line of the program; those of gradients of parameters
    are left out. As text it is a table.
    """

    def __init__(self, title: str, plan: Plan, axis: str, *chain: str) -> None:
        self.title, self.plan, self.axis, self.chain = title, plan, axis, chain
        self.size = plan.mesh[axis]
        lines = [plan.tensor(name).json["line"] for name in chain[2::2]]
        before = plan.tensor(chain[0]).json["line"]
        self.spans = list(zip([before, *lines], lines, strict=False))

    def gates(self, product: int) -> dict[str, list[str]]:
        """What is sent before and after a product: forward, then backward; "" for nothing."""
        sent = {"before": ["", ""], "after": ["", ""]}
        start, end = self.spans[product]
        if product == 0 and start > end:  # an input is declared after the function
            start = 0
        for c in self.plan.explain().json["collectives"]:
            if c["axes"] != [self.axis] or c["parts"] or not start < c["line"] <= end:
                continue
            backward = c["phase"] == "backward"
            ends_here = "partial" in c["from"]  # a sum is at the end of its pass, a gather before
            where = "after" if ends_here != backward else "before"
            amount = f"{c['wire_bytes'] / 2**20:.3g} MiB"
            sent[where][backward] = f"{c['kind']}, {amount}"
        return sent

    def split(self, name: str) -> str:
        """The dim of a tensor that the axis splits; "" for none."""
        placement = self.plan.tensor(name).placement[self.axis]
        return placement[2:-1] if placement.startswith("S(") else ""

    def way(self, product: int) -> str:
        """How the parameters of a product are split."""
        split = self.split(self.chain[2 * product + 1].split()[0])
        by_columns = split in self.plan.tensor(self.chain[2 * product + 2]).dims
        return "whole" if not split else "by columns" if by_columns else "by rows"

    def __repr__(self) -> str:
        rows = [["", "forward", "backward"]]
        for product in range(len(self.spans)):
            gates = self.gates(product)
            names = self.chain[2 * product + 1]
            for where in ("before", "after"):
                if any(gates[where]):
                    said = [each or "nothing" for each in gates[where]]
                    rows.append([f"{GATES[where]}, {where} {names} ({self.way(product)})", *said])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows)
        return "\n".join([self.title, *(row.rstrip() for row in table)])

    def _repr_svg_(self) -> str:
        lane, top, x = 62, 92, 62.0
        below = top + self.size * lane
        parts = [text(0, 14, self.title, "start", "#222222", "bold")]
        for device in range(self.size):
            y = top + device * lane + 22
            parts.append(text(0, y + 4, f"{self.axis} {device}", "start"))
            parts.insert(1, f'<path d="M46 {y}H%END%" stroke="#9a9a9a"/>')
        for product in range(len(self.spans)):
            if product == 0:
                x = self._tensor(parts, x, top, lane, self.chain[0])
            gates = self.gates(product)
            x = self._gate(parts, x, top, below, "before", gates["before"])
            x = self._product(parts, x, top, lane, product)
            x = self._gate(parts, x, top, below, "after", gates["after"])
            x = self._tensor(parts, x, top, lane, self.chain[2 * product + 2])
        parts = [part.replace("%END%", f"{x - 12:.0f}") for part in parts]
        notes = ("forward, left to right", "backward, right to left")
        parts.append(text(0, 40, notes[0], "start", LINES[0]))
        parts.append(text(0, below + 28, notes[1], "start", LINES[1]))
        return drawn(x, below + 34, parts)

    def _boxes(
        self, parts: list[str], x: float, top: float, lane: float, width: float, said: list[str]
    ) -> None:
        """A box for each device, in its colour, with lines of text."""
        for device in range(self.size):
            y = top + device * lane
            look = f'fill="{DEVICES[device % len(DEVICES)]}" stroke="#57606a" stroke-width="0.8"'
            parts.append(f'<rect x="{x}" y="{y}" width="{width}" height="46" rx="3" {look}/>')
            for row, line in enumerate(said):
                weight = "normal" if row else "bold"
                at = y + 27 - 7.5 * (len(said) - 1) + 15 * row
                parts.append(text(x + width / 2, at, line, "middle", "#222222", weight))

    def _tensor(self, parts: list[str], x: float, top: float, lane: float, name: str) -> float:
        """A tensor: its name, and how much of it each device has. The next place."""
        split = self.split(name)
        share = f"{split} 1/{self.size}" if split else "all of it"
        width = 16 + 6.4 * max(len(name), len(share))
        self._boxes(parts, x, top, lane, width, [name, share])
        return x + width + 18

    def _product(self, parts: list[str], x: float, top: float, lane: float, product: int) -> float:
        """The parameters of a product, and how they are split. The next place."""
        names = self.chain[2 * product + 1]
        said = [f"× {names.replace(' ', ', ')}", self.way(product)]
        width = 16 + 6.6 * max(map(len, said))
        self._boxes(parts, x, top, lane, width, said)
        return x + width + 18

    def _gate(
        self, parts: list[str], x: float, top: float, below: float, where: str, sent: list[str]
    ) -> float:
        """What all devices send each other here, if anything. The next place."""
        if not any(sent):
            return x
        width = 12 + 5.9 * max(len(each.split(",")[0]) for each in sent)
        middle = x + width / 2
        look = 'fill="#57606a"'
        height = below - top - 8
        parts.append(f'<rect x="{middle - 9}" y="{top - 4}" width="18" height="{height}" {look}/>')
        parts.append(text(middle, top + height / 2, GATES[where], "middle", "#ffffff", "bold"))
        for said, y, colour in ((sent[0], top - 24, LINES[0]), (sent[1], below + 8, LINES[1])):
            for row, line in enumerate((said or "nothing").split(", ")):
                parts.append(text(middle, y + 14 * row, line, "middle", colour))
        return x + width + 18


class Ring(Figure):
    """The steps of a ring: how many devices' numbers are in each chunk of each device.

    `history[step][device][chunk]` is that count. What a step has changed has a thick frame.
    """

    def __init__(self, history: list[list[list[int]]]) -> None:
        self.history = history

    def __repr__(self) -> str:
        steps = enumerate(self.history)
        return "\n".join(
            f"step {step}: " + "  ".join(" ".join(map(str, chunks)) for chunks in devices)
            for step, devices in steps
        )

    def _repr_svg_(self) -> str:
        n, size, left, top = len(self.history[0]), 20, 62, 46
        across = n * size + 14
        parts = [text(left, 12, "how many devices' numbers a chunk adds up", "start")]
        frames = []
        for device in range(n):
            parts.append(text(0, top + device * size + 14, f"device {device}", "start"))
        for step, devices in enumerate(self.history):
            x = left + step * across
            parts.append(text(x, top - 8, f"step {step}" if step else "before", "start"))
            for device, chunks in enumerate(devices):
                for chunk, count in enumerate(chunks):
                    fill = KINDS["grads"][1] if count == n else DEVICES[0]
                    opacity = 1 if count == n else (count - 1) / n
                    at = x + chunk * size, top + device * size
                    place = f'x="{at[0]}" y="{at[1]}" width="{size}" height="{size}"'
                    look = f'fill="{fill}" fill-opacity="{opacity:g}" stroke="#9a9a9a"'
                    parts.append(f"<rect {place} {look}/>")
                    parts.append(text(at[0] + size / 2, at[1] + 14, str(count), "middle"))
                    if step and count != self.history[step - 1][device][chunk]:
                        frames.append(f'<rect {place} fill="none" stroke="#222222"')
        parts += [f'{frame} stroke-width="2"/>' for frame in frames]
        bottom = top + n * size
        middle = left + n * across - 7
        parts.append(text(left + across, bottom + 18, "reduce_scatter", "start", LINES[0]))
        parts.append(text(middle + 7, bottom + 18, "all_gather", "start", LINES[1]))
        return drawn(left + len(self.history) * across, bottom + 24, parts)
