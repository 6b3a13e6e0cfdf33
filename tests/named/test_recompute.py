"""`recompute`: what is computed again, what is kept for others, and what numbers come of it."""

from __future__ import annotations

import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.diagnostics import Diagnostics
from tests.compiling import compile_text
from tests.pipelines.test_programs import hold_bytes, hold_to, results

TEXT = """
dim b = 4, s = 4, m = 8, f = 16, layers = 3
mesh one = { tp: 1 }
layout l { f -> tp, x: s -> tp }
program p(x0[b, s, m], t[b, s, m]) {
  param w0[m]
  x = x0 * w0
  repeat layers {
    param w[m, f]
    param v[f, m]
    OPEN n = tanh(x) CLOSE
    h = einsum(n, w -> [b, s, f])
    OPEN g = gelu(h) CLOSE
    x = x + einsum(g, v -> [b, s, m])
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with sgd(0.1)
}
"""

KEPT, AGAIN = (
    TEXT.replace("OPEN", start).replace("CLOSE", end)
    for start, end in (("", ""), ("recompute {", "}"))
)


@pytest.mark.parametrize("mesh", ["one", "tp:2", "tp:3", "tp:4"])
def test_what_leaves_a_block_is_not_kept_and_no_number_changes(mesh: str) -> None:
    kept, again = (compile_text(text, mesh=mesh, layout="l") for text in (KEPT, AGAIN))
    collected = [
        [
            c.outer.local.bytes
            for loop in made.device.body
            if loop.phase == "forward"
            for c in loop.collected
        ]
        for made in (kept, again)
    ]
    # Of n, h and g, h alone: that is what a block reads. And x, what the other reads.
    assert len(collected[1]) == len(collected[0]) - 1
    assert sum(collected[1]) < sum(collected[0])
    run = run_local(again.text, seed=4)
    hold_to(results(run), results(run_local(compile_text(KEPT, mesh="one").text, seed=4)))
    assert not run.disagreements()
    hold_bytes(run, again)


ENDS = """
  loss = sum(square(y))
  return loss
  minimize loss with sgd(0.1)
}
"""


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ("recompute { u = tanh(x) }\n y = u * w", []),
        ("recompute { u = tanh(x) * w }\n y = tanh(u)", []),
        ("recompute { u = x + w }\n y = u - x", ["the backward pass reads none of its values"]),
        (
            "recompute { u = x + w }\n recompute { v = tanh(u) }\n y = v * u",
            ["`u` is kept for statements further on"],
        ),
        (
            "recompute { u = x + w\n z = x - w }\n recompute { v = tanh(u) }\n y = v * u + z * z",
            ["`u` and `z` are kept for statements further on"],
        ),
        (
            "y = x\n recompute { u = tanh(w) }\n repeat c { y = tanh(y * u) }",
            ["`u` is kept for statements further on"],
        ),
    ],
)
def test_a_block_without_effect_is_told(body: str, told: list[str]) -> None:
    found = Diagnostics()
    text = f"dim a = 4, c = 2\nprogram p(x[a]) {{\n param w[a]\n {body}{ENDS}"
    compile_text(text, found)
    assert [d.code for d in found] == ["MD0144" for _ in told]
    assert [d.message.partition(": ")[2] for d in found] == told


LOOP_INSIDE = """
dim a = 4, c = 2
program p(x[a]) {
  param w[a]
  t = w * x
  OPEN
  repeat c {
    u = t + x
    t = tanh(u) + t * 0.5
  }
  CLOSE
  loss = mean(tanh(u * u)) + mean(t)
  return loss
  minimize loss with sgd(0.1)
}
"""


def test_a_loop_of_a_block_is_computed_again_ahead_of_a_gradient_that_reads_it() -> None:
    """The gradient of `u * u` is made in the middle of the tape, which keeps the loop's copy."""
    made = (
        compile_text(LOOP_INSIDE.replace("OPEN", start).replace("CLOSE", end))
        for start, end in (("", ""), ("recompute {", "}"))
    )
    kept, again = (results(run_local(one.text, seed=4)) for one in made)
    hold_to(again, kept)
