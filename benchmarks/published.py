"""Seconds that others measured beside those that the simulation predicts.

`python -m benchmarks.published` computes every row and prints the tables of docs/published.md; with
names of rows it prints those. Nothing runs. Each row of the first table is a program of
`benchmarks/models/` with sizes, a mesh and a layout; those of the second are Alpa's plans
(`benchmarks/alpa.py`). All that is known of a machine is in its profile, the same for all rows.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import alpa
from meshdsl.diagnostics import Source, did_you_mean
from meshdsl.pipeline import Compilation, Options
from meshdsl.simulate.engine import simulate
from meshdsl.simulate.timeline import Timeline

MODELS = Path(__file__).with_name("models")
GIB = 1 << 30
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Row:
    """One published configuration: what was measured, in `unit`, and how `model` is compiled here.

    `works` has the units of a step: tokens for a device, FLOPs for a device and a second, the
    FLOPs of a step at its best rate. So the figure is `works` over the seconds of a step.
    """

    name: str
    source: str
    what: str
    unit: str
    published: float
    works: float
    model: str
    options: Options
    memory: float | None = None

    def timeline(self) -> Timeline:
        """The simulated step."""
        path = MODELS / f"{self.model}.mdsl"
        source = Source(str(path), path.read_text(encoding="utf-8"))
        compilation = Compilation(source, self.options)
        assert compilation.timing is not None, "a row names its cluster"
        return simulate(compilation.device, compilation.timing)


# --- torchtitan ----------------------------------------------------------------------------------

SEQ = 8192
LLAMA: Mapping[str, Mapping[str, int]] = {
    "8B": {},
    "70B": {"model": 8192, "group": 8, "hidden": 28672, "layers": 80},
    "405B": {"model": 16384, "group": 16, "hidden": 53248, "layers": 126},
}
TITAN = {
    "2024-12": "benchmarks/llama3_h100_202412_torchtitan.md",
    "2025-06": "benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md",
    "2024": "docs/performance.md",
}


def _llama(
    size: str,
    of: str,
    data: int,
    tp: int,
    batch: int,
    program: str,
    published: float,
    memory: float | None = None,
) -> Row:
    """A row of torchtitan: `batch` sequences for each of `data` groups of `tp` devices."""
    cluster = "a100-dgx" if of == "2024" and tp == 1 else "h100-500w"
    kind = "A100" if cluster == "a100-dgx" else "H100"
    tensor = f", TP {tp}" if tp > 1 else ""
    return Row(
        name=f"llama-{size}-{kind}-{data * tp}{'-eager' * (program == 'eager')}".lower(),
        source=f"torchtitan, {TITAN[of]}",
        what=f"Llama 3.1 {size}, {data * tp} {kind}, FSDP {data}{tensor}, batch {batch}, {program}",
        unit="tokens/s/GPU",
        published=published,
        works=batch * SEQ / tp,
        model="llama",
        options=Options(
            program=program,
            mesh=f"data:{data},tp:{tp}" if tp > 1 else f"data:{data}",
            layout="fsdp_tp" if tp > 1 else "fsdp",
            set_dims={"batch": data * batch, **LLAMA[size]},
            cluster=cluster,
        ),
        memory=memory,
    )


# --- Megatron-LM ---------------------------------------------------------------------------------

GPT = """
1.7B   24  2304  24 1  1   32  512 16 1 137
3.6B   32  3072  30 2  1   64  512 16 1 138
7.5B   32  4096  36 4  1  128  512 16 1 142
18.4B  48  6144  40 8  1  256 1024  8 1 135
39.1B  64  8192  48 8  2  512 1536  4 1 138
76.1B  80 10240  60 8  4 1024 1792  2 3 140
145.6B 96 12288  80 8  8 1536 2304  2 2 148
310.1B 128 16384  96 8 16 1920 2160  1 2 155
529.6B 128 20480 105 8 35 2520 2520  1 3 163
1008B  160 25600 128 8 64 3072 3072  1 1 163
"""
"""Table 1 of Narayanan et al. 2021: parameters, heads, hidden size, layers, tensor and pipeline
parallelism, devices, batch, sequences of a micro-batch, stages for each device, and TFLOP/s for
each device. Micro-batches and stages are those of Megatron-LM's examples/sc21/run_table_1.sh."""


@dataclass(frozen=True, slots=True)
class _Gpt:
    """A model of GPT's kind on devices; `micro` sequences are a micro-batch."""

    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    devices: int
    batch: int
    micro: int
    chunks: int

    @property
    def flops(self) -> float:
        """FLOPs of a step with each layer computed again (Narayanan et al. 2021, equation 3)."""
        h, seq, vocab = self.hidden, 2048, 51200
        once = 1 + seq / (6 * h) + vocab / (16 * self.layers * h)
        return 96 * self.batch * seq * self.layers * h * h * once

    @property
    def model_flops(self) -> float:
        """FLOPs of a step with nothing computed again (Korthikanti et al. 2023, appendix A)."""
        h, seq, vocab = self.hidden, 2048, 51200
        once = 1 + seq / (6 * h) + vocab / (12 * self.layers * h)
        return 72 * self.batch * seq * self.layers * h * h * once

    def row(self, name: str, source: str, unit: str, published: float, works: float) -> Row:
        """The row of a figure, with each layer computed again."""
        data = self.devices // (self.tensor * self.pipeline)
        micro = self.batch // (data * self.micro)
        options = Options(
            program="full",
            mesh=f"data:{data},pipe:{self.pipeline},tp:{self.tensor}",
            layout="megatron",
            schedule=f"interleaved[batch]({micro}, chunks={self.chunks})"
            if self.chunks > 1
            else f"one_f_one_b[batch]({micro})",
            set_dims={
                "batch": self.batch,
                "model": self.hidden,
                "heads": self.heads,
                "key": self.hidden // self.heads,
                "layers": self.layers,
            },
            dtype="f16",
            fused=False,
            cluster="a100-dgx",
            objective="bytes",
        )
        return Row(
            name=f"gpt-{name}-{self.devices}".lower(),
            source=source,
            what=f"GPT {name}, {self.devices} A100, data {data}, tensor {self.tensor}, "
            f"pipeline {self.pipeline}, batch {self.batch}",
            unit=unit,
            published=published,
            works=works,
            model="gpt",
            options=options,
        )


NARAYANAN = "Narayanan et al. 2021, table 1"
KORTHIKANTI = "Korthikanti et al. 2023, section 6"
A100_FLOPS = 312e12


def _table_1() -> Iterator[Row]:
    """The rows of `GPT`, in TFLOP/s for each device."""
    for line in GPT.split("\n")[1:-1]:
        name, *numbers = line.split()
        *sizes, published = map(int, numbers)
        heads, hidden, layers, tensor, pipeline, devices, batch, micro, chunks = sizes
        gpt = _Gpt(heads, hidden, layers, tensor, pipeline, devices, batch, micro, chunks)
        rate = gpt.flops / devices / 1e12
        yield gpt.row(name, NARAYANAN, "TFLOP/s/GPU", published, rate)


def _turing_nlg() -> Iterator[Row]:
    """530 B parameters with each layer computed again, and with its attention alone."""
    gpt = _Gpt(128, 20480, 105, 8, 35, 2240, 2240, 1, 3)
    best = 100 * gpt.model_flops / gpt.devices / A100_FLOPS
    full = gpt.row("530B", KORTHIKANTI, "% MFU", 42.1, best)
    yield replace(full, what=f"{full.what}, full recomputation")
    yield replace(
        full,
        name="gpt-530b-selective-2240",
        what=f"{full.what}, sequence parallelism, selective recomputation",
        published=54.2,
        options=replace(full.options, program="selective", layout="sequence"),
    )


ROWS = {
    row.name: row
    for row in (
        _llama("8B", "2024-12", 8, 1, 2, "eager", 5762, 82.4),
        _llama("8B", "2024-12", 8, 1, 2, "selective", 6667, 77.0),
        _llama("8B", "2025-06", 8, 8, 12, "selective", 4378),
        _llama("70B", "2025-06", 32, 8, 16, "full", 597.3),
        _llama("405B", "2024", 16, 8, 2, "full", 109),
        _llama("8B", "2024", 64, 1, 1, "alternate", 2904),
        _llama("70B", "2024", 64, 1, 1, "full", 331),
        *_table_1(),
        *_turing_nlg(),
    )
}


# --- the table -----------------------------------------------------------------------------------

HEAD = """\
| row | published | predicted | off by | peak memory |
|---|---|---|---|---|"""


def line(row: Row) -> str:
    """A line of the table, of which every figure but the published one is computed now."""
    timeline = row.timeline()
    found = row.works / timeline.seconds
    peak = f"{timeline.peak[0] / GIB:.1f} GiB"
    if row.memory is not None:
        peak += f", published {row.memory}"
    figures = f"{row.published:,.4g} {row.unit} | {found:,.4g} | {found / row.published - 1:+.1%}"
    return f"| `{row.name}` | {figures} | {peak} |"


def main(names: Sequence[str]) -> int:
    """Print the tables, or the rows with these names, and where the figures are published."""
    every = [*ROWS, *alpa.CASES]
    for name in names:
        if name not in every:
            near = did_you_mean(name, every) or ", ".join(every)
            print(f"there is no row `{name}`: {near}", file=sys.stderr)
            return 1
    names = names or every
    started = time.perf_counter()
    if rows := [ROWS[name] for name in names if name in ROWS]:
        _table(HEAD, (line(row) for row in rows), {row.source: None for row in rows})
    if cases := [alpa.CASES[name] for name in names if name in alpa.CASES]:
        sources = [f"{name}: {source}" for name, source in alpa.SOURCES.items()]
        _table(alpa.HEAD, (alpa.line(case) for case in cases), sources)
    took = time.perf_counter() - started
    print(f"Computed in {took:.0f} s.", file=sys.stderr)
    return 0


def _table(head: str, lines: Iterable[str], sources: Iterable[str]) -> None:
    """Print a table, each line as soon as it is there, and its sources."""
    print(head)
    for text in lines:
        print(text, flush=True)
    print("\nSources:", *(f"- {source}" for source in sources), "", sep="\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
