"""Stages of several sizes, `layers="3 5"`: bits, memory and bytes, whatever the stages have.

With other options together: `test_pairs.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction

import numpy as np
import pytest

from benchmarks.training_memory import allocated
from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import run_local
from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device.ir import DeviceLoop
from meshdsl.diagnostics import Source
from meshdsl.ir.program import loops
from meshdsl.pipeline import Compilation, Options
from meshdsl.placed.placements import Mesh
from meshdsl.report.explanation import explain
from meshdsl.report.running import run_as_json
from meshdsl.search.candidate import Candidate, Execution, SearchRule
from meshdsl.simulate.engine import simulate
from tests.covering import some
from tests.device.alone import first_device
from tests.pipelines.test_numbers import ONE_SUM
from tests.pipelines.test_numbers import PROGRAMS as ONCE
from tests.pipelines.test_programs import compiled, hold, hold_text, results
from tests.pipelines.test_recompute import CLOSE, wide

STACKS = {
    "layers last": """
dim b = 8, m = 6, l = 4
program p(x[b, m]) {
  param w[m, l]
  repeat l { x = tanh(x * w) }
  loss = mean(x)
  return loss
  minimize loss with OPT
}
""",
    "a loop inside": """
dim b = 8, m = 6, l = 4, i = 2, o = m
program p(x[b, m]) {
  repeat l {
    repeat i {
      param w[m, o]
      x = tanh(einsum(x, w -> [b, o]))[o -> m]
    }
    param v[m]
    x = x * v
  }
  loss = mean(square(x))
  return loss
  minimize loss with OPT
}
""",
}
"""Programs whose gradients are reduced once a pass, of all layers of a stage."""


@pytest.mark.parametrize("layers", ["1 3", "3 1", "1 1 2", "2 1 1"])
@pytest.mark.parametrize("name", ONE_SUM)
def test_the_bits_of_one_device(name: str, layers: str) -> None:
    text = ONCE[name].replace("OPTIMIZER", "adamw(lr=0.01, accumulate=4)")
    found = []
    for mesh, use in (("pipe:1", ""), (f"pipe:{len(layers.split())}", f'(layers="{layers}")')):
        source = f"{text}\nlayout chosen {{ layers -> pipe }} with one_f_one_b{use}\n"
        made = Compilation(Source("p.mdsl", source), Options(mesh=mesh, layout="chosen"))
        found.append(results(run_local(made.text, seed=3)))
    for key, array in found[0].items():
        np.testing.assert_array_equal(found[1][key], array, key)


# --- what is told --------------------------------------------------------------------------------

SHAPES = (
    'gpipe[b](8, layers="7 1")', 'gpipe[b](8, layers="3 5")', 'zb_v[b](4, layers="3 1 1 3")',
    'zb_h1[b](8, layers="1 7")', 'interleaved[b](8, layers="1 3 2 2")',
    'gpipe[b](8, layers="5 3", recompute=stage)', 'chimera[b](4, layers="7 1", recompute=stage)',
    'chimera[b](8, layers="3 5")',
)  # fmt: skip


@pytest.mark.parametrize("use", some(SHAPES))
def test_the_memory_that_is_reported_is_what_torch_allocates(use: str) -> None:
    made = wide(f"with {use}")
    peak, *_ = explain(made.device)["pipeline"]["peak"]
    held, run = first_device(made)
    assert held + allocated(run) == pytest.approx(peak, rel=CLOSE)


def test_what_a_device_holds_computes_and_takes_follows_its_iterations() -> None:
    found = {}
    for layers in ("4 4", "1 7", "7 1"):
        made = wide(f'with gpipe[b](8, layers="{layers}")')
        report = explain(made.device)
        taken = simulate(made.device, Timing(load("h100"), made.device.mesh)).passes
        assert taken is not None
        found[layers] = report, taken
    even, late, early = found.values()
    layer = 2 * 256 * 1024 * 4  # bytes of the parameters of a layer
    for (report, _), most in ((even, 4), (late, 7), (early, 7)):
        assert report["memory"]["params"] == most * layer
    small, large = late[0]["pipeline"]["peak"]
    assert large - small >= 6 * 2 * layer  # and of their gradients
    assert late[0]["totals"]["flops_per_device"] > 1.7 * even[0]["totals"]["flops_per_device"]
    assert late[0]["pipeline"]["layers"] == [1, 7]
    assert Fraction(late[0]["pipeline"]["bubble"]) > Fraction(even[0]["pipeline"]["bubble"])
    assert late[1].makespan > even[1].makespan
    forward = [taken.times.forward for _, taken in (late, early)]
    assert forward[0][0] < forward[0][1]
    assert forward[1][0] > forward[1][1]


@pytest.mark.parametrize("layers", ["3 5", "7 1"])
def test_what_is_told_of_a_device_is_what_the_one_that_sends_most_sends(layers: str) -> None:
    """Of two that have each other's stages: one sends the larger block and gives back the smaller.

    Explain, search and a run say the same.
    """
    made = wide(f'with chimera[b](4, layers="{layers}")')
    counted = run_as_json(made, "local", run(made, "local", InputSource(seed=4)), ())["devices"]
    told, pipe = explain(made.device), made.placed.pipe
    assert pipe is not None
    layer, every = 2 * 256 * 1024 * 4, [*map(int, layers.split())]
    assert told["totals"]["by_kind"]["exchange"] == sum(every) * layer
    exchanges = [c for c in told["collectives"] if c["kind"] == "exchange"]
    assert sum(c["wire_bytes"] for c in exchanges) == 2 * max(every) * layer
    plan = Candidate(
        made.named,
        Mesh("m", (("pipe", 2),)),
        (SearchRule("l", ("pipe",)),),
        "deferred",
        None,
        Execution(pipe.use),
    )
    most = max(device["wire_bytes"] for device in counted)
    assert most == told["totals"]["wire_bytes"] == plan.sent


def test_sizes_that_are_equal_are_those_of_no_option() -> None:
    option = ', layers="4 4"'
    said, plain = (wide(f"with gpipe[b](8{more})").text for more in (option, ""))
    assert said.replace(option, "") == plain


def test_one_text_for_all_stages() -> None:
    text = wide('with one_f_one_b[b](8, layers="3 5")').text
    assert "at_l, n_l = block(8, ((3, 5),), (pipe,))  # l@pipe: 3, 5" in text
    assert "for l in range(n_l):" in text
    assert '"w": "f32[l=8:0-2|3-7@pipe, m=256, h=1024]' in text


@pytest.mark.parametrize("rules", ["l -> pipe, d_w: l -> d", "d_w: l -> d, l -> pipe"])
def test_a_rule_for_one_cotangent_is_no_pipeline(rules: str) -> None:
    text = STACKS["a loop inside"].replace("OPT", "sgd(lr=0.1)").replace("l = 4", "l = 8")
    made = compiled(text, "d:2,pipe:2", rules, 'with one_f_one_b[b](2, layers="3 5")')
    hold(made, text)
    hold_text(made)


OUTPUTS = """
dim b = 4, m = 4, h = 6, l = 4
program p(x[b, m], t[b, m]) {
  repeat l {
    param w[m, h]
    param u[h, m]
    x = x + einsum(tanh(einsum(x, w -> [b, h])), u -> [b, m])
    q = 2.0 * einsum(tanh(einsum(x, w -> [b, h])), u -> [b, m])
  }
  loss = mean((x - t)^2)
  return loss, q
  minimize loss with sgd(lr=0.1)
}
"""
"""A stage collects `q`, which is reduced in each iteration."""


@pytest.mark.parametrize("layers", ["3 1", "1 3"])
def test_outputs_of_a_stage_arrive_during_its_next_iteration(layers: str) -> None:
    """Those of its last one, after its own loop."""
    use = f'with one_f_one_b[b](2, layers="{layers}")'
    made = compiled(OUTPUTS, "tp:2,pipe:2", "l -> pipe, h -> tp, q: m -> tp", use, "deferred")
    (late,) = [loop for loop in loops(made.device.body, DeviceLoop) if loop.late]
    assert late.phase == "forward"
    assert re.search(r"if (\w+):\n +(\w+)\[l - 1\] = \1\.wait\(\)", made.text)
    hold(made, OUTPUTS)
    hold_text(made)
