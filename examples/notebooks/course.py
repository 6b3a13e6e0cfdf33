"""What the notebooks of this folder use: `check` a text, say what is `sent`, draw `Curves`."""

import json
import os
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from typing import Any

from meshdsl import Plan

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


class Curves:
    """A picture of curves: by name, `y` for each `x`. As text it is a table."""

    def __init__(self, title: str, values: dict[str, dict[int, float]]) -> None:
        self.title, self.values = title, values
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

    def _repr_svg_(self) -> str:
        left, top, width, height = 40, 26, 420, 170
        most = max((y for each in self.values.values() for y in each.values()), default=1) or 1
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
