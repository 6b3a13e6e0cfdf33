"""What the backward pass takes of the forward pass has its name of there, and no other reads it."""

from __future__ import annotations

import re

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.ir import DeviceLoop
from meshdsl.ir.program import loops
from tests.compiling import compile_text, run_text

TEXT = """
dim b = 4, m = 4, h = 8, l = 4
mesh two = { d: 2 }
layout zero { b -> d, params: m -> d }
layout staged { b -> none, l -> d } with one_f_one_b[b](2)
program p(x[b, m]) {
  repeat l {
    param u[m, h]
    param v[h, m]
    e = tanh(einsum(x, u -> [b, h]))
    x = x + einsum(gelu(e * e), v -> [b, m])
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize("layout", ["zero", "staged"])
def test_saved_activations_and_gathered_parameters_keep_their_names(layout: str) -> None:
    text = compile_text(TEXT, layout=layout).emitted.text
    device = text[: text.index("\n    return {")]
    put = re.findall(r"saved_l\.append\(\((.*)\)\)", device)
    taken = re.findall(r"(.*) = saved_l\.pop\(\)", device)
    assert len(put) == len(taken) == 1
    assert put[0] == taken[0].strip()
    assert not re.findall(r"\b\w+_full_\d+\b", device)
    inputs = {"x": np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)}
    whole = run_text(TEXT, inputs, layout="{ b -> none }", mesh="one:1")
    assert run_text(TEXT, inputs, layout=layout)["loss"] == pytest.approx(whole["loss"])


def _taken(text: str) -> dict[str, str]:
    """By name of what the backward pass takes of a list, the name of what was put there."""
    forward, backward = list(loops(compile_text(text, layout="zero").device.body, DeviceLoop))[:2]
    lists = {c.outer: c.inside for c in forward.collected if c.is_list}
    return {s.inside.name: lists[s.outer].name for s in backward.stacked if s.outer in lists}


def test_a_name_that_is_read_later_is_not_taken() -> None:
    assert all(name == before for name, before in _taken(TEXT).items())
    returned = _taken(TEXT.replace("return loss", "return loss, x"))
    assert [before[:1] for name, before in returned.items() if name != before] == ["x"]


def test_what_is_kept_on_the_host_has_a_name_of_its_own() -> None:
    text = TEXT.replace("repeat l {", "repeat l { recompute {").replace("  loss =", "}\n  loss =")
    text = text.replace(
        "layout staged", "layout away { b -> d, activations: memory = host }\nlayout staged"
    )
    inputs = {"x": np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)}
    whole = run_text(text, inputs, layout="{ b -> none }", mesh="one:1")
    assert run_text(text, inputs, layout="away")["loss"] == pytest.approx(whole["loss"])


def test_what_is_gathered_again_keeps_its_name_from_others() -> None:
    """A variable of the source is called as the gathered parameter is, which is read after it."""
    text = """
    dim b = 4, m = 4, l = 4
    mesh four = { p: 2, d: 2 }
    layout chosen { l -> p, b -> d, params: m -> d } with one_f_one_b[b](2)
    program p(x[b, m]) {
      repeat l { recompute {
        param w[m]
        h = tanh(x * w)
        w_full = tanh(h * h)
        x = x + w_full * h
      } }
      loss = mean(square(x))
      return loss
      minimize loss with sgd(lr=0.1)
    }
    """
    inputs = {"x": np.linspace(-1, 2, 16, dtype=np.float32).reshape(4, 4)}
    texts = (
        compile_text(text, layout="chosen").emitted.text,
        compile_text(text, layout="{ b -> none }", mesh="one:1").emitted.text,
    )
    found, whole = (run_local(each, inputs).updated for each in texts)
    assert found["w"] == pytest.approx(whole["w"])
