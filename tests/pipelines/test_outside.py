"""What lies around the loop of a pipeline: with its dim, kept or contracted, or a window of it.

Whether a layout is accepted depends on no policy, and numbers are those of one device.
"""

from __future__ import annotations

import itertools
import os

import pytest

from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.ir import walk
from meshdsl.ops.opdef import load_all
from meshdsl.placed.place import POLICIES
from meshdsl.prove.sample_values import signature
from tests.covering import in_turn
from tests.ops.test_unordered import loops_everywhere
from tests.pipelines.random_stages import pipelined
from tests.pipelines.test_programs import compiled, hold

HALO = """
dim b = 4, m = 4, l = 2
program p(x[b, m]) {
  param w[m]
  s = shift[m](w, 1)
  repeat l {
    param v[m]
    x = tanh(x * v)
  }
  loss = mean(square(x + s))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
KEPT_AND_CONTRACTED = """
dim b = 8, m = 2, k = 2, seq = 2, l = 4
program p(x[b, m], y[m, k]) {
  param w[l, seq]
  param g[m]
  a = einsum(g, w, y -> [k, seq])
  c = einsum(w, g, y -> [m, l])
  repeat l {
    d = einsum(a, w, c -> [seq])
    param v[m]
    x = tanh(x * v * 0.9 + mean[seq](d))
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1OPT)
}
"""


@pytest.mark.parametrize("policy", POLICIES)
def test_a_window_of_what_one_stage_has(policy: str) -> None:
    hold(compiled(HALO, "pipe:2,t:2", "l -> pipe, m -> t", "with gpipe[b](2)", policy), HALO)


USES = (
    "gpipe", "one_f_one_b(reduce=each)", "zb_h2(reduce=each)", "interleaved", "zb_v", "chimera",
)  # fmt: skip


@in_turn(use=USES, policy=POLICIES)
def test_the_dim_of_the_loop_is_kept_and_contracted_outside(use: str, policy: str) -> None:
    """Where the optimizer accumulates, and where the schedule cuts the batch."""
    text = KEPT_AND_CONTRACTED.replace("OPT", ", accumulate=4")
    hold(compiled(text, "pipe:2", "l -> pipe", f"with {use}", policy), text)
    text = KEPT_AND_CONTRACTED.replace("OPT", "")
    name, _, options = use.partition("(")
    cut = f"with {name}[b](4{', ' + options if options else ')'}"
    hold(compiled(text, "pipe:2", "l -> pipe", cut, policy), text)


ALONG = """
dim b = 4, m = 4, l = 4, c = 2, d = 3, v = 3, one = 1, two = 2, o = m
program p(x[b, m], i[d]: i32) {
  param w[l, d]
  param z[l, m]
  param k[c]
  param s[l, v]
  param e[l, one]
  t = OPERATOR
  repeat l {
    x = tanh(x * t)
  }
  loss = mean(square(x))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
OPERATORS = {
    "argmax": "z * cast(argmax[m](z), f32)",
    "attention": "attention[c, d](z * k, w * k, w)",
    "avg_pool": "avg_pool[m by 3 -> m](z, stride=1, pad=1)",
    "batch_norm": "sum[d](w)\n  a = z - mean[m](z)\n"
    "  t = a * rsqrt(mean[m](square(a)) + 0.1) * t + t",
    "concat": "concat[(d, one) -> m](w, e)",
    "conv": "z + sum[v](conv[m by c -> v](z, k -> [l, v]))",
    "cross_entropy": "z + cross_entropy[m](z, cast(iota[l], i32) * 0)",
    "cumprod": "cumprod[m](z)",
    "cumsum": "cumsum[m](z)",
    "dropout": "dropout[m](z, 0.5)",
    "floordiv": "z + (z * 7.0 // 2.0)",
    "gather": "z + sum[d](s[v = i])",
    "grouped_einsum": "grouped_einsum(z * k, s * k, iota[l] * 0 + iota[v] -> [l, m])",
    "iota": "z + cast(iota[m], f32)",
    "layer_norm": "layer_norm[m](z)",
    "linear_recurrence": "linear_recurrence[m](z, z * 0.5, sum[d](w))",
    "log_softmax": "log_softmax[m](z)",
    "logsumexp": "z + logsumexp[d](w)",
    "mask_padding": "mask_padding[m](z, iota[l] * 0 + 3)",
    "max_pool": "max_pool[m by 3 -> m](z, stride=1, pad=1)",
    "mod": "mod(z, 0.7)",
    "one_hot": "z + sum[v](one_hot[v](argmax[m](z)) * s)",
    "pad": "pad[d -> m](w, 0, 1)",
    "pick": "z + w[d = 1]",
    "split and merge": "z[m -> (c, two)][(two, c) -> m]",
    "put": "put[m = 1](z, sum[d](w))",
    "reverse": "reverse[m](z)",
    "stack": "z + w[d = 0] * w[d = 1] * w[d = 2]",
    "rms_norm": "rms_norm[m](z)",
    "roll": "roll[m](z, 1)",
    "shift": "shift[m](z, 1)",
    "softmax": "softmax[m](z)",
    "sort": "z * 2\n  first, order = sort[m](z)\n  t = first + cast(order, f32)",
    "top_k": "z * 2\n  first, order = top_k[m -> v](z)\n  t = z + sum[v](first)",
    "upconv": "upconv[d by c -> m](w, k -> [l, m])",
    "window": "sum[v](window[m by 3 -> v](z, before=1))",
}
"""What makes `t[l, m]`, along another dim than that of the stages."""

TOGETHER = [tuple(itertools.islice(OPERATORS, at, None, 9)) for at in range(9)]
"""Operators that one program has together: gradients of parts of `w` are stacked in one without
others of `w`."""

ELSEWHERE = {
    "attention", "parts", "scatter_parts", "pack_signs", "unpack_signs", "pack_int8", "unpack_int8",
    "max_pool_take",
}  # fmt: skip
"""Outside of these programs: without a backward pass, of compressed gradients, derived twice."""


def along(names: tuple[str, ...]) -> str:
    """A program whose `t` is made by each of some operators, and by their product."""
    lines = ["ones[l, m]() / 2", "  every = t"]
    for name in names:
        lines += [f"  t = {OPERATORS[name]}", "  every = every * t + t"]
    return ALONG.replace("OPERATOR", "\n".join([*lines, "  t = every"]))


@pytest.mark.parametrize("names", TOGETHER, ids=", ".join)
def test_an_operator_along_another_dim_than_that_of_the_stages(names: tuple[str, ...]) -> None:
    """Where a device has stages that are no neighbours, an index of another dim is what it was."""
    text = along(names)
    hold(compiled(text, "pipe:2", "l -> pipe", "with interleaved[b](2)"), text)


def test_all_operators_are_there() -> None:
    """Each that goes along one dim, and lets a loop go through another one."""
    made = (
        compiled(along(names), "pipe:2", "l -> pipe", "with interleaved[b](2)")
        for names in TOGETHER
    )
    there = {op.name for program in made for op in walk(program.named.body)}
    assert set(filter(goes_along, load_all())) - there == ELSEWHERE


def goes_along(name: str) -> bool:
    """Whether an operator goes along some dim while a loop goes through another one."""
    record = load_all()[name]
    for sample in record.samples:
        sig = signature(record, sample)
        alike = {*loops_everywhere(sig, record.factors(sig).loops)}
        alike -= record.ordered_dims(sig.ins, sig.attrs)
        dims = {dim.name for type_ in (*sig.ins, *sig.outs) for dim in type_.dims}
        if alike and dims - alike:
            return True
    return False


def test_an_operator_along_the_dim_of_the_stages_is_refused() -> None:
    for text in ("cumsum[l](z)", "dropout[l, m](z, 0.5)", "z * cast(argmax[l](z), f32)"):
        made = compiled(ALONG.replace("OPERATOR", text), "pipe:2", "l -> pipe", "with zb_v[b](2)")
        with pytest.raises(DiagnosticError, match="MD0338"):
            made.checked()


# --- random programs ---------------------------------------------------------------------------

ALL = "MESHDSL_CASES" in os.environ
CASES = int(os.environ.get("MESHDSL_CASES", "12"))
REFUSED = ("MD0259", "MD0330", "MD0529")
"""What stages cannot have: all of a stack at an end, or a schedule of other sizes."""


@pytest.mark.parametrize("seed", range(CASES))
def test_policies_agree_on_random_pipelines(seed: int) -> None:
    """All accept a layout, and one in turn has the numbers of one device; or all refuse it."""
    case, found = pipelined(seed), set[str]()
    for number, policy in enumerate(POLICIES):
        made = compiled(case.text, case.mesh, case.rules, case.use, policy)
        try:
            made.checked()
        except DiagnosticError as error:
            found.add(error.diagnostics[0].code)
            continue
        found.add("")
        if ALL or number == seed % len(POLICIES):
            hold(made, case.text)
    assert len(found) == 1, found
    assert found <= {"", *REFUSED}
