"""What our programs send, beside what other systems were measured to send and the least known.

`python -m benchmarks.bytes` prints three tables. The first two have wire bytes per device of
forward programs and of gradients (`benchmarks/gradients.py`) under `--reduce optimal`, as predicted
and as counted where they ran. The third has the bytes of all devices, in units of the tensor, of
eight changes of placement on a 2×2 mesh. Bytes are those that ring algorithms send. The figures of
others were measured once, on a CPU (those for a TPU by compiling for one): JAX 0.10.2, torch 2.13's
DTensor with every step written by hand, and OneFlow 0.9.0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.explanation import explain

EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "sbp"

SCATTERED = """
dim m = 256, a = 128, k = 256
mesh four = { x: 4 }
layout split { a -> x, y: m -> x }
program p(u[m, a], v[a, k]) {
  y = einsum(u, v -> [m, k])
  return y
}"""

# The gradients of three layers added up over five micro-batches, from given cotangents.
MICRO_BATCHES = """
dim steps = 5, layers = 3, batch = 8, m = 256, k = 256
mesh four = { x: 4 }
layout split { batch -> x }
program p(x[steps, layers, batch, m], dy[steps, layers, batch, k]) {
  dw = zeros[layers, m, k]()
  repeat steps {
    dw = dw + einsum(x, dy -> [layers, m, k])
  }
  return dw
}"""


@dataclass(frozen=True, slots=True)
class Known:
    """A program and layout, and what is recorded of it: bytes per device, None for no record."""

    name: str
    text: str
    layout: str
    least: int
    jax_cpu: int | None
    jax_tpu: int | None
    dtensor: int | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sent:
    """Ours: bytes per device as predicted and as counted, and of all devices together."""

    predicted: int
    counted: int
    cluster: int
    proven: bool | None


def example(name: str) -> str:
    return (EXAMPLES / f"{name}.mdsl").read_text(encoding="utf-8")


def forward() -> list[Known]:
    """The forward programs; the recorded figures of others are in f32 on four devices."""
    uvw, sums = example("uvw"), example("sums")
    note = "Mesh-TensorFlow: 1 all_reduce; JAX with unreduced types by hand: 1,179,648"
    batches = (1_179_648, 5_898_240, 5_898_240, None, note)
    return [
        Known("block, 2-D", example("block"), "two_d", 1_048_576, 1_048_576, 1_048_576),
        Known("U·V·W, narrow result", uvw, "first", 24_576, 1_572_864, 1_572_864, 24_576),
        Known("U·V·W, wide result", uvw, "second", 98_304, 98_304, 98_304),
        Known("A·B + C·D", sums, "contractions", 393_216, 786_432, 393_216, 393_216),
        Known("partial -> S(0)", SCATTERED, "split", 196_608, 393_216, 196_608, 196_608),
        Known("5 micro-batches, 3 layers", MICRO_BATCHES, "split", *batches),
    ]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of placement on a 2×2 mesh; bytes of all devices in units of the tensor."""

    source: str
    target: str
    oneflow: float
    least: float

    @property
    def text(self) -> str:
        return f"""
dim i = 32, j = 32
mesh square = {{ x: 2, y: 2 }}
sbp change {{ t: {self.source}, u: {self.target} }}
program p(t[i, j]) {{
  u = t
  return u
}}"""


CHANGES = (
    Change("(S(0), S(0))", "(S(0), S(1))", 4.01, 0.5),
    Change("(S(0), S(1))", "(S(1), S(0))", 4.01, 0.5),
    Change("(B, S(0))", "(S(0), S(0))", 2.01, 0.5),
    Change("(S(0), P)", "(S(0), S(0))", 6.01, 1.0),
    Change("(P, S(0))", "(S(0), S(0))", 3.01, 1.5),
    Change("(S(0), P)", "(S(0), B)", 2.01, 2.0),
    Change("(P, S(1))", "(B, S(1))", 2.01, 2.0),
    Change("(S(0), S(1))", "(B, B)", 4.01, 3.0),
)
TENSOR_BYTES = 32 * 32 * 4


def measure(text: str, layout: str | None = None, sbp: str | None = None) -> Sent:
    """Compile under `optimal`, run every device, and count."""
    diagnostics = Diagnostics()
    options = Options(layout=layout, sbp=sbp, message_bytes=0)
    made: Compilation = compile_source(Source("bytes.mdsl", text), options, diagnostics)
    report = explain(made.device)
    result = run(made, "local", InputSource())
    assert not result.disagreements, result.disagreements
    counted = [sent for _, sent in result.sent]
    return Sent(report["totals"]["wire_bytes"], max(counted), sum(counted), report["proven"])


def of_change(change: Change) -> Sent:
    return measure(change.text, sbp="change")


def print_rows(title: str, rows: Iterable[Known]) -> None:
    """Print a table of programs: others, the least known, and ours."""
    print(f"Wire bytes per device, {title}")
    heads = ("JAX CPU", "JAX TPU", "DTensor", "least known", "ours", "counted")
    print(f"{'':28}" + "".join(f"{head:>13}" for head in heads))
    for known in rows:
        ours = measure(known.text, layout=known.layout)
        others = (known.jax_cpu, known.jax_tpu, known.dtensor, known.least)
        figures = (*others, ours.predicted, ours.counted)
        cells = "".join(f"{'' if f is None else f'{f:,}':>13}" for f in figures)
        print(f"{known.name:28}{cells}" + ("" if ours.proven else "  not proven least"))
        if known.note:
            print(f"{'':28}  ({known.note})")
    print()


def main() -> None:
    """Print the tables."""
    from benchmarks.gradients import GRADIENTS

    print_rows("forward", forward())
    print_rows("gradients", GRADIENTS)
    print("Bytes of all devices, in units of the tensor, 2×2 mesh")
    print(f"{'':28}{'OneFlow':>13}{'least':>13}{'ours':>13}")
    for change in CHANGES:
        sent = of_change(change).cluster / TENSOR_BYTES
        name = f"{change.source} -> {change.target}"
        print(f"{name:28}{change.oneflow:13.2f}{change.least:13.2f}{sent:13.2f}")


if __name__ == "__main__":
    main()
