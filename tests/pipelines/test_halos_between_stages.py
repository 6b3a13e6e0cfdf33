"""Values that a stage sends with rows of other blocks, or as blocks that differ in size."""

from __future__ import annotations

import pytest

from tests.covering import Case, covering
from tests.pipelines.test_programs import compiled, hold

TEXT = """
dim b = 4, h = SIZE, c = 2, o = 2, k = 3
dim out = OUT
program p(x[b, h, c]) {
  param w[c]
  param f[o, c, k]
  y = tanh(x * w)
  z = BODY
  loss = mean(square(z)) + 0.1 * mean(f)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
BODIES = {
    "conv": ('conv[h by k](y, f, pad="same" -> [b, o, h])', lambda h: h),
    "conv, valid": ("conv[h by k -> out](y, f -> [b, o, out])", lambda h: h - 2),
    "conv, strided": (
        "conv[h by k -> out](y, f, stride=2, pad=1 -> [b, o, out])",
        lambda h: (h - 1) // 2 + 1,
    ),
    "max_pool": ("max_pool[h by 2 -> out](y)", lambda h: h // 2),
    "max_pool, overlapping": ("max_pool[h by 3](y, stride=1, pad=1)", lambda h: h),
    "avg_pool": ("avg_pool[h by 3](y, stride=1, pad=1)", lambda h: h),
    "upconv": ("upconv[h by k -> out](y, f, stride=2 -> [b, o, out])", lambda h: 2 * h + 1),
    "window": ("window[h by 3 -> k](y, before=2)", lambda h: h),
    "pad": ("pad[h -> out](y, 2, 1)", lambda h: h + 3),
    "slice": ("y[h = 1:LAST -> out]", lambda h: h - 2),
    "concat": ("concat[(h, h) -> out](y, y)", lambda h: 2 * h),
    "cumsum": ("cumsum[h](y)", lambda h: h),
    "cumprod": ("cumprod[h](y)", lambda h: h),
    "gather": ("y[h = 1]", lambda h: h),
}
"""Operators that read beyond their blocks, each with the size of `out` for one of `h`."""

CASES = covering(
    {
        "body": tuple(BODIES),
        "size": (4, 5, 6, 7, 8),
        "devices": (2, 3),
        "cut": ("z", "loss"),
        "split": ("h -> tp", "h -> tp, out -> tp"),
        "use": ("with gpipe[b](2)", "with one_f_one_b[b](4)"),
    }
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_a_step_is_that_of_one_device(case: Case) -> None:
    """With the bytes that are told."""
    (body, out), size = BODIES[case["body"]], case["size"]
    text = TEXT.replace("BODY", body).replace("LAST", str(size - 1)).replace("SIZE", str(size))
    text = text.replace("OUT", str(out(size)))
    rules = f"{case['cut']}: pipe = 1, {case['split']}"
    hold(compiled(text, f"pipe:2,tp:{case['devices']}", rules, case["use"]), text)
