"""The memory that is reported is what torch allocates for the emitted text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.training_memory import allocated
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.memory_kinds import KINDS, at_peak
from tests.device.alone import first_device

MLP = """
dim batch = 32, io = 512
dim hidden = 4 * io
layout one { batch -> none }
layout data { batch -> data }
layout zero1 extends data { state: io -> data }
layout zero3 extends zero1 { params: io -> data, grads: io -> data }
program mlp(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, io])
  loss = mean((y - target)^2)
  return loss
  minimize loss with adam()
}
"""
LM = (Path(__file__).parents[2] / "examples" / "lm.mdsl").read_text()
LAYERS = re.search(r"    q, k, v = .*\n(    .*\n)*    x = x \+ mlp.*\n", LM)
assert LAYERS is not None
RECOMPUTED = LM.replace(LAYERS[0], f"    recompute {{\n{LAYERS[0]}    }}\n")
NMT = (Path(__file__).parents[2] / "examples" / "nmt.mdsl").read_text()
TEXTS = {"mlp": MLP, "lm": LM, "recomputed": RECOMPUTED, "nmt": NMT}

LONG = {"batch": 32, "seq": 128}
LONG_ROWS = {"batch": 8, "seq": 128}
WORDS = {"source": 20, "target": 20, "model": 128, "hidden": 256}
WIDE = {"batch": 8, "seq": 32, "model": 256, "hidden": 1024, "heads": 4, "key": 64, "layers": 5}

Dims = dict[str, int]

PROGRAMS: dict[str, tuple[str, str, str, str, Dims]] = {
    "several batches": ("mlp", "adam(accumulate=4)", "data:2", "data", {}),
    "on one device": ("mlp", "sgd(accumulate=4)", "data:1", "one", {}),
    "several, in bf16": ("mlp", 'adam(accumulate=4, compute="bf16")', "data:2", "data", {}),
    "states split": ("mlp", "momentum(accumulate=4, clip=1.0)", "data:2", "zero1", {}),
    "all split": ("mlp", 'adamw(clip=1.0, compute="bf16")', "data:2", "zero3", {}),
    "adafactor": ("mlp", "adafactor(lr=0.1, clip=1.0)", "data:2", "data", {}),
    "layers": ("lm", "adamw()", "data:4", "data_parallel", LONG),
    "wide layers": ("lm", "adamw(clip=1.0)", "data:2,tp:2", "megatron", WIDE),
    "layers, split": ("lm", "adamw()", "data:4", "zero3", WIDE),
    "layers, several batches": ("lm", "adamw(accumulate=3)", "data:4", "zero2", WIDE),
    "layers in bf16": ("lm", 'adamw(accumulate=4, compute="bf16")', "data:4", "zero3", LONG_ROWS),
    "recomputed layers": ("recomputed", "adamw()", "data:4", "data_parallel", LONG),
    "state after state": ("nmt", "adamw()", "data:1", "sentences", WORDS),
    "reduced on the way": ("lm", "adamw(clip=1.0)", "data:4", "data_parallel", WIDE),
    "many words, split": ("lm", "adamw()", "data:2,tp:2", "vocabulary", {"vocab": 16_384}),
    "recomputed, wide": ("recomputed", 'adamw(compute="bf16")', "data:4", "zero2", WIDE),
}
CLOSE = 0.05


def made(text: str, optimizer: str, mesh: str, layout: str, dims: dict[str, int]) -> Compilation:
    # A walk will do: memory is counted alike whoever planned it.
    text = re.sub(r"minimize loss with .*", f"minimize loss with {optimizer}", text)
    options = Options(mesh=mesh, layout=layout, reduce="deferred", set_dims=dims)
    return compile_source(Source("case.mdsl", text), options, Diagnostics())


@pytest.mark.parametrize("case", PROGRAMS)
def test_what_is_reported_is_what_torch_allocates(case: str) -> None:
    name, optimizer, mesh, layout, dims = PROGRAMS[case]
    program = made(TEXTS[name], optimizer, mesh, layout, dims)
    report = memory(program.device)
    held, run = first_device(program)
    kept = report["params"] + report["state"] + report["inputs"]
    assert held == kept
    most = allocated(run)
    assert held + most == pytest.approx(report["peak"], rel=CLOSE)
    assert most == pytest.approx(report["peak"] - kept, rel=CLOSE)


def test_figures_add_up() -> None:
    report = memory(made(LM, "adamw()", "data:4", "zero2", {}).device)
    assert sum(at_peak(report).values()) == report["peak"]
    assert {*KINDS, "grads_later", "peak", "peak_line"} == {*report}
    assert all(report[kind] > 0 for kind in ("params", "grads", "state", "inputs", "activations"))


DEEP = """
dim batch = 8, io = 512, layers = 8
dim io2 = io
program deep(x[batch, io], target[batch, io]) {
  h = x
  repeat layers {
    param w[io, io2]
    h = tanh(einsum(h, w -> [batch, io2]))[io2 -> io]
  }
  loss = mean((h - target)^2)
  return loss
  minimize loss with sgd()
}
"""


def test_sums_over_batches_take_the_memory_of_one_set_of_gradients() -> None:
    """Beside it there is what one layer adds: neither zeros to begin with nor a batch's own set."""
    program = made(DEEP, "sgd(accumulate=4)", "one:1", "batch:one", {})
    layer = 512 * 512 * 4
    assert 8 * layer < allocated(first_device(program)[1]) < 10 * layer


SHOWN = {
    "a cast to its own dtype": "cast(x, f32)",
    "a cast to another dtype": "cast(x, f64)",
    "other order of dims": "einsum(x -> [io, batch])",
    "a product": "einsum(x, twice -> [batch, io, two])",
    "an index": "x[io = n]",
    "indices": "x[io = ids]",
    "windows": "window[io by 3 -> at_](x, before=1)",
}


@pytest.mark.parametrize("case", SHOWN)
def test_a_result_takes_memory_where_it_does_not_show_its_operand(case: str) -> None:
    text = "dim batch = 512, io = 1024, two = 2, some = 900, at_ = 3\n"
    text += "program p(w[batch, io], twice[two], n: i32, ids[some]: i32) {\n  x = w * 2.0\n"
    text += f"  y = {SHOWN[case]}\n  return sum(y), sum(x)\n}}\nlayout one {{ batch -> none }}\n"
    program = made(text, "", "data:1", "one", {})
    report = memory(program.device)
    held, run = first_device(program)
    assert held + allocated(run) == pytest.approx(report["peak"], rel=CLOSE)


BETWEEN = {
    "a product that is summed": ("y[n, d], z[n, e]", "loss = mean(square((y * w) * (z * u)))"),
    "sums before a product": (
        "y[n, d], z[n, c]", "v = y * w\n  loss = mean(square(einsum(v, v * z -> [n])))"
    ),
    "a number over a tensor": ("y[n, d]", "loss = mean(2.0 / (y + w))"),
    "indices that are computed": (
        "i[n, c]: i32, y[n, c, d]", "loss = mean(square((t * 2.0)[k = i % 5] - y))"
    ),
    "indices of an order": (
        "y[n, d]",
        "v = tanh(y * w)\n  a, ia = sort[d](v)\n  b, ib = sort[n](v)\n"
        "  loss = mean(square(a)) + mean(square(b)) + mean(square(v))",
    ),
}  # fmt: skip
"""What texts of operators make beside their results: inputs, and statements."""


@pytest.mark.parametrize("case", BETWEEN)
def test_what_is_made_between_is_counted(case: str) -> None:
    inputs, body = BETWEEN[case]
    text = "dim n = 65_536, c = 4, d = 8, e = 6, k = 5\nlayout one { n -> none }\n"
    text += f"program p({inputs}) {{\n  param w[d]\n  param u[e]\n  param t[k, d]\n  {body}\n"
    text += "  return loss\n  minimize loss with sgd()\n}\n"
    program = made(text, "sgd()", "data:1", "one", {})
    held, run = first_device(program)
    assert held + allocated(run) == pytest.approx(memory(program.device)["peak"], rel=0.001)


SLICES = """
dim steps = 16, batch = 512, io = 512
layout one { batch -> none }
program p(x[steps, batch, io]) {
  large = x * 2.0
  total = zeros[io]()
  repeat steps {
    first = large[batch = 0]
    total = total + first
  }
  return total, mean(x - 1.0)
}
"""


def test_the_last_slice_does_not_keep_its_stack() -> None:
    """`large` is gone before as much is made again."""
    program = made(SLICES, "", "x:1", "one", {})
    stack = 16 * 512 * 512 * 4
    assert allocated(first_device(program)[1]) == pytest.approx(stack, rel=CLOSE)
    assert memory(program.device)["peak"] == pytest.approx(2 * stack, rel=CLOSE)


CACHE = """
dim batch = 8, mem = 1024, key = 64, layers = 4
layout one { batch -> none }
program step(new[batch, key], pos[]: i32) {
  param first[batch, mem, key]
  first := put[mem = pos](first, new)
  repeat layers {
    param cache[batch, mem, key]
    written = put[mem = pos](cache, new)
    read = max[mem](written)
    cache := written
  }
  return read
}
"""


def test_a_step_makes_no_other_cache() -> None:
    program = made(CACHE, "", "x:1", "one", {})
    report, most = memory(program.device), allocated(first_device(program)[1])
    assert most < report["params"] / 50
    assert report["activations"] < report["params"] / 50
