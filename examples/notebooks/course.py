"""What the notebooks of this folder use: `check` a text, say what is `sent`, draw pictures."""

import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from meshdsl import Plan
from meshdsl.report.memory_kinds import KINDS
from meshdsl.report.palette import MEMORY
from meshdsl.simulate.device_run import DeviceRun

HERE = Path(__file__).resolve().parent
"""The folder of the notebooks."""


def example(name: str) -> str:
    """The path of a file of `examples`: in a copy of this folder those in `programs`."""
    copied = HERE / "programs" / name
    return os.path.relpath(copied if copied.exists() else HERE.parent / name)


def check(text: str) -> bool:
    """Print what `meshdsl check` says of a file with this text; whether it is fine."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "mine.mdsl").write_text(text, encoding="utf-8")
        line = [sys.executable, "-m", "meshdsl", "check", "mine.mdsl"]
        plain = {k: v for k, v in os.environ.items() if "COLOR" not in k} | {"NO_COLOR": "1"}
        run = subprocess.run(line, cwd=folder, env=plain, capture_output=True, text=True)
    print((run.stdout + run.stderr).strip())
    return run.returncode == 0


def sent(plan: Plan) -> None:
    """Print the collectives of a plan in one line each, and the bytes that one device sends."""
    for c in plan.explain().json["collectives"]:
        trips = f" × {c['count']}" if c["count"] > 1 else ""
        where = f"{c['kind']} over {', '.join(c['axes'])}{trips}"
        moved = c["to"] if "partial" in c["from"] else f"{c['from']} → {c['to']}"
        moved = f"{len(c['parts'])} tensors" if c["parts"] else moved
        print(f"{c['phase']:8} {where:26} {c['wire_bytes']:>14,} bytes  {moved}")
    print(f"{plan.cost().wire_bytes:,} bytes sent by each device")


LINES = ("#1f5fbf", "#b3541e", "#2e7d4f", "#7a3fa0", "#8a6d00")
"""The colours of curves."""


DEVICES = ("#9ecae9", "#ffd28f", "#a8d8a0", "#d7bde2")
"""The colours of devices, as in the pictures of plans; lines from a device are in `LINES`."""


class Routes:
    """A picture of tokens on their way to experts. As text it is a table of how many go where.

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


def drawn(width: float, height: float, parts: list[str]) -> str:
    """A picture of so many pixels, with a margin and a background."""
    total = width + 16, height + 16
    frame = f'width="{total[0]}" height="{total[1]}" viewBox="-8 -8 {total[0]} {total[1]}"'
    back = f'<rect x="-8" y="-8" width="{total[0]}" height="{total[1]}" fill="#ffffff"/>'
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>{back}{"".join(parts)}</svg>'


STACKED = ("params", "state", "grads", "new_grads", "gathered", "activations", "updates", "buffers")
"""The kinds of memory from the bottom of a picture to its top."""


class _Samples(DeviceRun):
    """A simulated step that notes the bytes of each kind, and those of a moment as buffers."""

    def _note(self, at: int) -> None:
        held = self.held
        kinds = ("activations", "grads", "new_grads", "gathered", "updates", "buffers")
        moment = max(0, held.high - held.now)
        amounts = dict(zip(kinds, held.by_kind, strict=True))
        amounts["buffers"] += moment
        self.__dict__.setdefault("samples", []).append((at, amounts))
        super()._note(at)


class MemoryOverTime:
    """A picture of the memory of a device in a step, by kind, for plans by name. As text a table.

    Times are those of a simulated step on a cluster. Plans have one scale of time and one of bytes.
    """

    def __init__(self, cluster: str = "h100", **plans: Plan) -> None:
        self.samples: dict[str, list[tuple[float, dict[str, int]]]] = {}
        for name, plan in plans.items():
            timeline = plan.simulate(cluster).timeline
            run = _Samples(timeline.program, timeline.timing, unroll=True)
            run.walked()
            stored = {kind: plan.memory[kind] for kind in ("params", "state")}
            samples = run.__dict__["samples"]
            self.samples[name] = [(at / 1e9, {**stored, **each}) for at, each in samples]

    def __repr__(self) -> str:
        rows = [["held at most, in MB", *(KINDS[k] for k in STACKED), "in all"]]
        for name, samples in self.samples.items():
            most = max((each for _, each in samples), key=lambda each: sum(each.values()))
            amounts = [*(most[k] for k in STACKED), sum(most.values())]
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
        parts, x = [], 0.0
        there = [k for k in STACKED if any(e[k] for s in self.samples.values() for _, e in s)]
        for kind in there:
            parts.append(f'<rect x="{x:g}" y="0" width="11" height="11" {_look(kind)}/>')
            parts.append(f'<text x="{x + 15:g}" y="10" font-size="11">{KINDS[kind]}</text>')
            x += 28 + 6 * len(KINDS[kind])
        for number, (name, samples) in enumerate(self.samples.items()):
            bottom = 24 + number * step + height
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
                below = STACKED[: STACKED.index(kind) + 1]
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
        return drawn(max(left + width + 10, x), 24 + len(self.samples) * step, parts)


def _look(kind: str) -> str:
    """How a kind of memory is drawn."""
    return f'fill="{MEMORY[kind]}" stroke="#1b1f24" stroke-width="0.5"'


class Curves:
    """A picture of curves: by name, `y` for each `x`, up to `most`. As text it is a table."""

    def __init__(
        self, title: str, values: dict[str, dict[int, float]], most: float | None = None
    ) -> None:
        self.title, self.values, self.most = title, values, most
        self.places = sorted({x for each in values.values() for x in each})

    def __repr__(self) -> str:
        width = max(map(len, self.values)) + 2
        head = " " * width + "".join(f"{x:>8}" for x in self.places)
        rows = [
            f"{name:{width}}"
            + "".join(f"{each[x]:8.4g}" if x in each else " " * 8 for x in self.places)
            for name, each in self.values.items()
        ]
        return "\n".join([self.title, head, *rows])

    def save(self, path: str) -> None:
        """Write the picture as an SVG file."""
        Path(path).write_text(self._repr_svg_(), encoding="utf-8", newline="\n")

    def _repr_svg_(self) -> str:
        left, top, width, height = 40, 26, 420, 170
        highest = max((y for each in self.values.values() for y in each.values()), default=1) or 1
        most = self.most or highest
        across = width / max(1, len(self.places) - 1)
        parts = [f'<text x="{left}" y="14">{escape(self.title)}</text>']
        box = f'x="{left}" y="{top}" width="{width}" height="{height}"'
        parts.append(f'<rect {box} fill="none" stroke="#888888"/>')
        for number, x in enumerate(self.places):
            parts.append(
                f'<text x="{left + number * across - 4:.1f}" y="{top + height + 15}">{x}</text>'
            )
        for y in (0, most):
            parts.append(
                f'<text x="2" y="{top + height - y / most * height + 4:.1f}">{y:.3g}</text>'
            )
        for number, (name, each) in enumerate(self.values.items()):
            colour = LINES[number % len(LINES)]
            points = " ".join(
                f"{left + n * across:.1f},{top + height - each[x] / most * height:.1f}"
                for n, x in enumerate(self.places)
                if x in each
            )
            parts.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            )
            at = top + 14 + 17 * number
            parts.append(
                f'<text x="{left + width + 12}" y="{at}" fill="{colour}">{escape(name)}</text>'
            )
        total = left + width + 150, top + height + 24
        frame = f'width="{total[0]}" height="{total[1]}" viewBox="0 0 {total[0]} {total[1]}"'
        back = f'<rect width="{total[0]}" height="{total[1]}" fill="#ffffff"/>'
        style = 'font-family="sans-serif" font-size="12"'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {frame} {style}>{back}{"".join(parts)}</svg>'
        )


def command(*words: str) -> Any:
    """What `meshdsl WORDS --json` answers, as data: where Python has no function for it."""
    line = [sys.executable, "-m", "meshdsl", *words, "--json"]
    return json.loads(subprocess.run(line, check=True, capture_output=True, text=True).stdout)
