"""Slices of parameters that are made once, for a program that is called for every token."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.layer_slices import slices
from tests.compiling import compile_text

STATE = """
dim layers = 2, n = 3
program p(x[n]) {
  repeat layers {
    param w[n]
    param sum[n] = zeros()
    sum := sum + x * w
  }
  repeat layers {
    param v[n]
    x = x * v
  }
  return x
}
"""


def test_slices_are_made_once_and_do_not_keep_their_tensor() -> None:
    """Under inference mode they are views that stay; elsewhere autograd sees each call."""
    stack = torch.arange(6.0).reshape(2, 3)
    with torch.inference_mode():
        first, again, columns = slices(stack), slices(stack), slices(stack, 1)
        first[1].zero_()
    assert again is first
    assert [x.shape for x in columns] == [(2,)] * 3
    assert stack[1].tolist() == [0, 0, 0]
    stack.data = torch.ones(2, 3)
    with torch.inference_mode():
        assert slices(stack)[1].tolist() == [1, 1, 1]
    gone = weakref.ref(stack)
    del stack
    assert gone() is None
    leaf = torch.ones(2, 3, requires_grad=True)
    slices(leaf)[0].sum().backward()
    assert leaf.grad is not None


def test_a_program_that_keeps_states_loads_slices_of_what_loops_read() -> None:
    """One that keeps nothing does not: it may be called once."""
    emitted = compile_text(STATE, layout="n -> a", mesh="a:1").emitted.text
    for name in ("w", "v", "sum"):
        assert f'slices(params["{name}"])' in emitted
    assert 'params["sum"] =' not in emitted
    stateless = STATE.replace("    sum := sum + x * w\n", "    x = x + sum * w\n")
    assert "slices(" not in compile_text(stateless, layout="n -> a", mesh="a:1").emitted.text


def test_what_loops_over_two_dims_read_is_not_loaded_as_slices() -> None:
    """A tuple has the slices along one of them."""
    text = """
    dim a = 2, c = 2, m = 2
    program p(x[m]) {
      param w[a, c, m]
      param last[m] = zeros()
      repeat a { x = x + sum[c](w * w[c = 0]) }
      repeat c { x = x * sum[a](w + w[a = 1]) }
      last := x
      return x
    }
    """
    w = np.arange(8, dtype=np.float32).reshape(2, 2, 2)
    emitted = compile_text(text, layout="m -> d", mesh="d:2").emitted.text
    found = run_local(emitted, {"x": np.ones(2, np.float32)}, {"w": w}).outputs["x"]
    x = np.ones(2)
    for layer in w:
        x = x + (layer * layer[0]).sum(0)
    for layer in w.swapaxes(0, 1):
        x = x * (layer + layer[1]).sum(0)
    assert found.tolist() == x.tolist()
