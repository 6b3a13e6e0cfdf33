"""The emitted text: what subexpressions are called, and the source line over each statement."""

from __future__ import annotations

import functools
import re

from tests.compiling import compile_text

TEXT = """
dim batch = 4, seq = 4, mem = seq, key = 8, n = 2
mesh line = { pipe: 2 }
layout staged { n -> pipe } with gpipe[batch](2)
program p(x[batch, seq, key]) {
  param w[n, key]
  param shared[key]
  h = x
  repeat n {
    k = h[seq -> mem]
    h = attention[key, mem](h * shared, k, k) * w
  }
  loss = mean(h)
  return loss
  minimize loss with sgd(0.1, clip=1.0)
}
"""


@functools.cache
def statements() -> dict[str, str]:
    """The source line that stands over each statement of the device function."""
    device = compile_text(TEXT).text.partition("def device")[2].partition("# ---")[0]
    found, source = {}, ""
    for line in map(str.strip, device.splitlines()):
        if match := re.match(r"# \S+:\d+  (.*)", line):
            source = match[1]
        else:
            found[line.partition("  # ")[0]] = source
    return found


def test_clipping_and_what_attention_saves_are_called_after_what_they_are() -> None:
    names = re.findall(r"\b(?:grad_norm|clip_scale|lse)\w*", "\n".join(statements()))
    assert {*names} == {"lse", "grad_norm_part", "grad_norm", "clip_scale"}
    assert "torch.sqrt_(grad_norm)" in statements()
    assert "clip_scale = (1.0 / grad_norm).clamp_(max=1.0)" in statements()


def test_what_a_loop_sums_is_under_the_line_that_adds_to_it() -> None:
    """Of what it carries, and of a parameter: not where either is made, in front of the loop."""
    sources = statements()
    assert sources["d_h_2.add_(d_k)"] == "k = h[seq -> mem]"
    assert sources["d_shared_4.add_(d_shared_3)"].startswith("h = attention")


def test_the_zeros_of_a_schedule_are_under_its_layout() -> None:
    zeros = {line: source for line, source in statements().items() if line.startswith("loss = ")}
    assert len(zeros) == 1
    assert [*zeros.values()] == ["layout staged { n -> pipe } with gpipe[batch](2)"]
