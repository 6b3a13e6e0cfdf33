"""What the models of `examples/models` cost on 8, 64 and 256 H100s, as `docs/costs.md` says it.

`python -m benchmarks.costs` searches the layout of every row, and prints the tables; with names of
rows it prints those. Nothing runs on a GPU: figures are those of `meshdsl simulate`. A row takes
up to a few minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import meshdsl as md
from meshdsl.api.programs import read
from meshdsl.diagnostics import Source
from meshdsl.named.size_files import read_size_file
from meshdsl.pipeline import Compilation, Options
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.timeline import Timeline

MODELS = Path(__file__).parents[1] / "examples" / "models"
GIB = 1 << 30
CLUSTER, MEMORY = "h100", "80GB"
MESHES = {8: {"data": 2, "tp": 4}, 64: {"data": 8, "tp": 8}, 256: {"data": 32, "tp": 8}}


@dataclass(frozen=True, slots=True)
class Row:
    """A model on a number of devices; `samples` are a batch for eight of them."""

    model: str
    sizes: str | None
    samples: int
    devices: int

    @property
    def name(self) -> str:
        """`llama3_70b-256`: its argument."""
        return f"{self.sizes or self.model}-{self.devices}"

    @property
    def dims(self) -> dict[str, int]:
        """The sizes that the row sets."""
        path = MODELS / "sizes" / f"{self.sizes}.mdsl"
        dims = dict(read_size_file(path).sizes) if self.sizes else {}
        return {**dims, "batch": self.batch}

    @property
    def batch(self) -> int:
        """The samples of a step."""
        return self.samples * self.devices // 8

    @property
    def text(self) -> str:
        """The program, which computes in bf16 and keeps parameters and states in f32."""
        text = (MODELS / f"{self.model}.mdsl").read_text(encoding="utf-8")
        return re.sub(r"(minimize loss with \w+\()", r"\1compute=bf16, ", text)

    def searched(self) -> tuple[str, str]:
        """The layout that the search finds as rules, and how it reduces. Raises ProgramError."""
        program = read(Source(f"{self.model}.mdsl", self.text), None, self.dims)
        found = program.search(MESHES[self.devices], cluster=CLUSTER, memory=MEMORY)
        block = re.sub(r"#.*", "", found.layout)
        body, _, after = block[block.index("layout searched") :].partition("{")[2].partition("}")
        parts = map(str.strip, re.split(r"[\n,](?![^(]*\))", body))
        rules = ", ".join(filter(None, parts))
        return f"{rules} {' '.join(after.split())}".strip(), found.json["plans"][0]["reduce"]

    def timeline(self, layout: str, reduce: str) -> Timeline:
        """The simulated step under a layout."""
        mesh = ", ".join(f"{axis}:{size}" for axis, size in MESHES[self.devices].items())
        options = Options(
            mesh=mesh, layout=layout, reduce=reduce, set_dims=self.dims, cluster=CLUSTER
        )
        compilation = Compilation(Source(f"{self.model}.mdsl", self.text), options)
        assert compilation.timing is not None
        return simulate(compilation.device, compilation.timing)

    def figures(self, layout: str, reduce: str) -> list[str]:
        """Seconds of a step, utilisation and memory of a device, as the page has them."""
        timeline = self.timeline(layout, reduce)
        return [
            f"{1000 * timeline.seconds:,.4g} ms",
            f"{timeline.mfu:.1%}",
            f"{timeline.peak[0] / GIB:.1f} GiB",
        ]

    def line(self) -> str:
        """The row of the table."""
        before = f"| `{self.name}` | {self.batch:,} |"
        try:
            layout, reduce = self.searched()
        except md.ProgramError as error:
            return f"{before} | | | {_why(error)} |"
        return f"{before} {' | '.join(self.figures(layout, reduce))} | `{layout}`, {reduce} |"


def _why(error: md.ProgramError) -> str:
    return str(error).strip().splitlines()[0].partition(": ")[2]


SAMPLES = {
    ("gpt2", "gpt2_xl"): 64,
    ("llama", None): 8,
    ("llama", "llama3_70b"): 1,
    ("bert", "bert_large"): 256,
    ("mixtral", None): 1,
    ("clip", None): 2048,
    ("resnet50", None): 2048,
}
"""Samples of a batch for eight devices."""

ROWS = [Row(m, s, samples, n) for (m, s), samples in SAMPLES.items() for n in MESHES]


def lines(names: list[str]) -> Iterator[str]:
    """The table's rows of these names, of all where there are none."""
    yield "| row | batch | a step | MFU | memory | layout, and when sums are reduced |"
    yield "|---|---|---|---|---|---|"
    for row in ROWS:
        if row.name in names or not names:
            yield row.line()


if __name__ == "__main__":
    for line in lines(sys.argv[1:]):
        print(line, flush=True)
