"""Results that loops make in the stack that collects them, and what shows these results."""

from __future__ import annotations

import pytest

from tests.programs.harness import Case
from tests.training.stepping import check_step

TEXT = """
dim batch = 4, a = 2, b = 3, layers = 3, model = a * b, other = model
program p(x[batch, model]) {{
  param w[layers, model, a, b]
  param u[layers, model, other]
  y = x
  repeat layers {{
    hs = einsum(y, w -> [batch, a, b])
    z = hs[(a, b) -> model]
    {next}
  }}
  loss = mean(square(tanh(hs))){more}
  return loss, y
  minimize loss with sgd(lr=0.1)
}}
"""
SHOWING = {
    "the next iteration begins with it": ("y = z", " + mean(y * y)"),
    "it is read after the loop": ("y = z", ""),
    "it is saved for the backward pass": ("y = gelu(z) * 1.5", " + mean(y * y)"),
    "it is saved for a product": (
        "y = einsum(z, u -> [batch, other])[other -> model]",
        " + mean(y * y)",
    ),
}
"""What an iteration makes of a view of its slice, and what the loss has of it.

`tanh` is written over the stack, so whoever shows it would have its values.
"""


@pytest.mark.parametrize("name", SHOWING)
def test_what_is_handed_on_has_memory_of_its_own(name: str) -> None:
    next_, more = SHOWING[name]
    made = check_step(Case(TEXT.format(next=next_, more=more), "d:2", "{ batch -> d }"))
    assert "hs[layers] = " in made.emitted.text
    assert "out=d_w" in made.emitted.text
