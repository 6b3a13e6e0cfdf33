"""Training steps under layouts of every kind, lowered pass by pass."""

from __future__ import annotations

from collections.abc import Callable

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.engines.reference import made_up, whole_specs
from meshdsl.backends.torch.emitter import emit
from meshdsl.device.buckets import in_buckets
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import DeviceProgram
from meshdsl.device.overlap import overlapped
from meshdsl.device.verify import verify
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Compilation, Options, compile_source

TEXT = """
dim batch = 8, model = 8, hidden = 16, layers = 3
layout data_parallel { batch -> data }
layout zero1 extends data_parallel { state: model -> data }
layout zero2 extends zero1 { grads: model -> data }
layout zero3 extends zero2 { params: model -> data }
layout megatron { batch -> data, hidden -> tp }
layout both extends megatron { params: model -> data, grads: model -> data }
layout split { batch -> data, model -> tp }
program mlp(x[batch, model], target[batch, model]) {
  param first[model, hidden]
  param last[hidden, model]
  h = relu(einsum(x, first -> [batch, hidden]))
  h = einsum(h, last -> [batch, model])
  repeat layers {
    param up[model, hidden]
    param bias[hidden] = zeros()
    param down[hidden, model]
    param gain[model] = ones()
    z = relu(einsum(h, up -> [batch, hidden]) + bias)
    h = h + einsum(z, down -> [batch, model]) * gain
  }
  loss = mean((h - target)^2)
  return loss
  minimize loss with adamw(lr=1e-3)
}
"""
LAYOUTS = {
    "data_parallel": "data:4",
    "zero1": "data:4",
    "zero2": "data:4",
    "zero3": "data:4",
    "megatron": "data:2,tp:2",
    "both": "data:2,tp:2",
    "split": "data:2,tp:2",
}
CASES = [(layout, policy) for layout in LAYOUTS for policy in ("optimal", "immediate")]

Pass = Callable[[DeviceProgram], DeviceProgram]


def placed(layout: str, policy: str = "optimal", text: str = TEXT, mesh: str = "") -> Compilation:
    """A text compiled until its program is placed."""
    options = Options(mesh=mesh or LAYOUTS[layout], layout=layout, reduce=policy)
    return compile_source(Source("case.mdsl", text), options, Diagnostics(), until="placed")


def plain(layout: str, policy: str = "optimal", text: str = TEXT, mesh: str = "") -> DeviceProgram:
    """The device program as it is before any pass."""
    return lower(placed(layout, policy, text, mesh).placed)


def with_overlap(program: DeviceProgram) -> DeviceProgram:
    """The program as the pipeline makes it."""
    return overlapped(in_buckets(program))


def passed(program: DeviceProgram, *passes: Pass) -> DeviceProgram:
    """The program after some passes, verified after each."""
    for made in passes:
        program = made(program)
        verify(program)
    return program


def run(named: NamedProgram, program: DeviceProgram) -> LocalRun:
    """One step of a program, lowered to `program`, on made-up values."""
    inputs, params = (made_up(specs) for specs in whole_specs(named, draws(named)))
    emitted = emit(program, draws(named))
    return run_local(emitted.text, inputs, params, lines=emitted.places)
