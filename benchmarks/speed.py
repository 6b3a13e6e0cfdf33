"""How long the commands take, as whole processes, beside an empty Python process.

`python -m benchmarks.speed [RUNS]` prints the median over RUNS (default 7) of each command, the
spread, the median and the least processor time, and the ratio to `python -c pass` of the same
round. The commands take turns, so that a busy moment of the machine hits all of them. Plans are
searched for in each run, and none is kept, but for the commands that are "warm": a run before the
first has left the plans, the tables of the parser and the compiled modules of Python.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"
CLI = [sys.executable, "-c", "from meshdsl.cli import main; main()"]
BIG_MESH = "data:6,tp:8,pipe:64"


def long_file(lines: int) -> str:
    """A program of about `lines` lines, most of them statements."""
    head = "dim batch = 64, model = 512\nmesh m = { data: 2 }\nlayout l { batch -> data }\n"
    body = "\n".join(
        f"  h{i} = relu(h{i - 1} * {i % 7 + 1}.5 + x) - mean[model](h{i - 1})"
        for i in range(1, lines - 7)
    )
    return f"{head}program p(x[batch, model]) {{\n  h0 = x\n{body}\n  return h{lines - 8}\n}}\n"


def blocks(count: int) -> str:
    """A training step of as many blocks, each a call: nothing is in a loop."""
    calls = "\n".join(f"  x{i + 1} = block(x{i})" for i in range(count))
    return f"""dim batch = 64, model = 256, hidden = 1024
mesh two = {{ data: 2, tp: 2 }}
layout both {{ batch -> data, hidden -> tp }}
def block(x[batch, model]) -> [batch, model] {{
  param up[model, hidden]
  param down[hidden, model]
  return x + einsum(relu(einsum(x, up -> [batch, hidden])), down -> [batch, model])
}}
program net(x0[batch, model]) {{
{calls}
  loss = mean(x{count} * x{count})
  return loss
  minimize loss with adamw(lr=0.001)
}}
"""


LARGEST = (
    *("--set", "layers=126", "--set", "batch=2048", "--mesh", "data:128,pipe:16,tp:8"),
    *("--layout", "batch -> data, layers -> pipe, kv -> tp, hidden -> tp, vocab -> tp"),
    *("--schedule", f'one_f_one_b[batch](16, layers="7 {" ".join("8" * 14)} 7")'),
    *("--reduce", "deferred"),
)
"""Layers on the stages as in Llama 3 405B (Dubey et al. 2024): the first and last have one less."""

SEARCHED = ("heads=8", "model=384", "batch=48", "layers=96")
"""Sizes of `examples/lm.mdsl` that divide over `BIG_MESH`."""

THREE_AXES = "\nlayout three extends megatron_zero3 { seq -> pipe, mem -> none }\n"
FIVE_AXES = (
    "mesh five = { a: 2, b: 2, c: 2, d: 2, e: 2 }\n"
    "layout wide { batch -> a, seq -> b, heads -> c, hidden -> d, vocab -> e }\n"
)


def commands(folder: Path) -> dict[str, list[str]]:
    """What is timed."""
    path = folder / "long.mdsl"
    path.write_text(long_file(1000))
    step = folder / "lm.mdsl"
    step.write_text((EXAMPLES / "lm.mdsl").read_text(encoding="utf-8") + THREE_AXES + FIVE_AXES)
    unrolled = folder / "blocks.mdsl"
    unrolled.write_text(blocks(256))
    big = ["--mesh", BIG_MESH, "--set", *SEARCHED]
    transformer = str(EXAMPLES / "transformer.mdsl")
    mesh = ["--layout", "megatron", "--mesh", BIG_MESH]
    deep = ["--set", "batch=48", "layers=96"]
    shallow = ["--set", "batch=48", "layers=2"]
    mlp = str(EXAMPLES / "mlp.mdsl")
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import meshdsl": [sys.executable, "-c", "import meshdsl"],
        "check mlp": [*CLI, "check", mlp],
        "warm: fmt mlp": [*CLI, "fmt", "--check", mlp],
        "warm: check mlp": [*CLI, "check", mlp],
        "warm: explain mlp": [*CLI, "explain", mlp],
        "warm: explain a training step": [
            *CLI, "explain", str(EXAMPLES / "lm.mdsl"), "--layout", "megatron_zero3",
        ],
        "check 1,000 lines": [*CLI, "check", str(path)],
        "explain 96 layers, 3,072 devices": [*CLI, "explain", transformer, *mesh, *deep],
        "explain 2 layers, 3,072 devices": [*CLI, "explain", transformer, *mesh, *shallow],
        "explain a training step, two axes": [
            *CLI, "explain", str(step), "--layout", "megatron_zero3", *big,
        ],
        "explain a training step, three axes": [
            *CLI, "explain", str(step), "--layout", "three", *big,
        ],
        "the same step, 2x2x2": [
            *CLI, "explain", str(step), "--layout", "three", "--mesh", "data:2,tp:2,pipe:2",
        ],
        "a training step, five axes": [
            *CLI, "explain", str(step), "--layout", "wide", "--mesh", "five",
        ],
        "explain 256 blocks, two axes": [*CLI, "explain", str(unrolled)],
        "explain uneven stages, 16,384 devices": [
            *CLI, "explain", str(EXAMPLES / "models" / "llama.mdsl"), *LARGEST,
        ],
        "compile mlp": [*CLI, "compile", mlp],
        "run transformer, 8 devices (local)": [
            *CLI, "run", transformer, "--layout", "megatron", "--mesh", "pod",
        ],
    }  # fmt: skip


def main() -> None:
    """Print the table."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    with tempfile.TemporaryDirectory() as name:
        table = commands(Path(name))
        times: dict[str, list[float]] = {label: [] for label in table}
        busy: dict[str, list[float]] = {label: [] for label in table}
        for number in range(-1, runs):
            for label, command in table.items():
                is_warm = label.startswith("warm")
                if number < 0 and not is_warm:
                    continue
                cache = Path(name) / ("warm" if is_warm else f"{number} {label}")
                env = {**os.environ, "MESHDSL_CACHE": str(cache)}
                started, used = time.perf_counter(), processor()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
                if number >= 0:
                    times[label].append(time.perf_counter() - started)
                    busy[label].append(processor() - used)
    base = times["python -c pass"]
    heads = ("median", "least", "most", "CPU", "least", "x empty")
    print(f"{'command':38}" + "".join(f"{head:>9}" for head in heads))
    for label, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, base, strict=True))
        used = (statistics.median(busy[label]), min(busy[label]))
        figures = (statistics.median(taken), min(taken), max(taken), *used)
        print(f"{label:38}" + "".join(f"{t:8.3f}s" for t in figures) + f"{ratio:9.1f}")


def processor() -> float:
    """Seconds of the processor that finished processes have used."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
