"""`put` writes at indices under every layout: nothing is sent, of equal indices the last stays."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.execution import InputSource, run, verify
from meshdsl.backends.runtime.values import Array
from meshdsl.diagnostics import DiagnosticError
from meshdsl.placed.ir import Reshard, walk
from tests.compiling import compile_text, run_text

PROGRAM = """
dim b = 4, mem = 7, h = 4, step = 3
mesh grid = { p: 2, q: 2 }
layout rows { b -> p, h -> q }
layout parts { mem -> (q, p) }
layout both { mem -> q, b -> p }
program test(x[b, mem, h], row[b, h], some[b, step, h],
  pos[]: i32, each[b]: i32, ids[b, step]: i32) {
  BODY
}
"""
LAYOUTS = ("rows", "parts", "both")


def inputs() -> dict[str, Array]:
    rng = np.random.default_rng(3)
    found = {"x": (4, 7, 4), "row": (4, 4), "some": (4, 3, 4)}
    drawn = {n: rng.normal(size=s).astype(np.float32) for n, s in found.items()}
    ids = np.array([[1, 1, 1], [0, 6, 0], [2, 3, 4], [5, 5, 2]], np.int32)
    return drawn | {
        "pos": np.array(3, np.int32),
        "each": np.array([0, 6, 2, 2], np.int32),
        "ids": ids,
    }


def written(call: str) -> Array:
    """What a call means, one position after the other."""
    given = inputs()
    out, every = given["x"].copy(), range(4)
    match call:
        case "put[mem = pos](x, row)":
            out[:, 3] = given["row"]
        case "put[mem = each](x, row)":
            for b in every:
                out[b, given["each"][b]] = given["row"][b]
        case "put[mem = ids](x, some)":
            for b in every:
                for s in range(3):
                    out[b, given["ids"][b, s]] = given["some"][b, s]
        case "put[mem = pos:pos + 3 -> step](x, some)":
            out[:, 3:6] = given["some"]
        case "put[mem = 4: -> step](x, some)":
            out[:, 4:] = given["some"]
        case "put[mem = step](x, 2.0)":  # the size of a dim is a number
            out[:, 3] = 2
    return out


CALLS = (
    "put[mem = pos](x, row)",
    "put[mem = each](x, row)",
    "put[mem = ids](x, some)",
    "put[mem = pos:pos + 3 -> step](x, some)",
    "put[mem = 4: -> step](x, some)",
    "put[mem = step](x, 2.0)",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written(layout: str) -> None:
    lines = [f"y{i} = {call}" for i, call in enumerate(CALLS)]
    lines.append(f"return {', '.join(f'y{i}' for i in range(len(CALLS)))}")
    found = run_text(PROGRAM.replace("BODY", "\n  ".join(lines)), inputs(), layout=layout)
    for i, call in enumerate(CALLS):
        np.testing.assert_array_equal(found[f"y{i}"], written(call), err_msg=call)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_sent(layout: str) -> None:
    lines = "y = put[mem = pos](x, row)\n  z = put[mem = each](y, row)\n  return z"
    placed = compile_text(PROGRAM.replace("BODY", lines), layout=layout).placed
    assert not [node for node in walk(placed.body) if isinstance(node, Reshard)]


@pytest.mark.parametrize("call", CALLS)
def test_gradients(call: str) -> None:
    """The cotangent of what stays, and of the values that stand in the result."""
    lines = f"y = {call}\n  loss = sum(y * y) + 0.0 * (sum(x) + sum(row) + sum(some))"
    lines += "\n  dx, drow, dsome = grad(loss, x, row, some)\n  return dx, drow, dsome"
    text = PROGRAM.replace("BODY", lines)
    given, y = inputs(), written(call)
    kept = y == given["x"]
    want = {"dx": np.where(kept, 2 * y, 0), "drow": 0 * given["row"], "dsome": 0 * given["some"]}
    for b, m in zip(*np.where(~kept.all(-1)), strict=True):
        for name in ("row", "some"):
            source = given[name][b].reshape(-1, 4)
            at = np.where((source == y[b, m]).all(-1))[0]
            want[f"d{name}"][b].reshape(-1, 4)[at] = 2 * y[b, m]
    found = run_text(text, given, layout="parts")
    for name, expected in want.items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("put[mem = 7](x, row)", "MD0210"),
        ("put[mem = 1.5](x, row)", "MD0253"),
        ("put[mem = row](x, row)", "MD0211"),
        ("put[mem = pos:pos + 4 -> step](x, some)", "MD0209"),
        ("put[mem = pos:each -> step](x, some)", "MD0253"),
        ("put[mem = pos:pos + 3](x, some)", "MD0252"),
        ("put[mem = 5:8 -> step](x, some)", "MD0210"),
        ("put[mem](x, some)", "MD0251"),
        ("put(x, some)", "MD0251"),
        ("put[mem = pos](x, some)", "MD0237"),
        ("put[mem = pos](x, x)", "MD0237"),
        ("put[mem = ids[b -> c]](x, some)", "MD0236"),
        ("put[step = pos](x, row)", "MD0204"),
    ],
)
def test_what_is_refused(call: str, code: str) -> None:
    text = PROGRAM.replace("BODY", f"return {call}").replace("h = 4,", "h = 4, c = 4,")
    with pytest.raises(DiagnosticError) as error:
        compile_text(text, layout="rows")
    assert code in [d.code for d in error.value.diagnostics]


STATE = """
dim b = 4, mem = 7, h = 4, step = 3, layers = 2
mesh grid = { p: 2, q: 2 }
layout rows { b -> p, h -> q }
layout parts { mem -> (q, p) }
layout both { mem -> q, b -> p }
program test(row[b, h], some[b, step, h], pos[]: i32, each[b]: i32, ids[b, step]: i32) {
  param one[b, mem, h]
  param every[b, mem, h]
  param several[h, b, mem]
  new = put[mem = pos](one, row)
  one := new
  every := put[mem = each](every, row)
  several := put[mem = ids](several, some)
  repeat layers {
    param cache[mem, b, h]
    written = put[mem = pos:pos + 3 -> step](cache, some)
    y = sum[mem](written)
    cache := written
  }
  return new, y
}
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_state_is_written_where_it_stands(layout: str) -> None:
    """No cache is made anew, nor changes what was returned before."""
    program = compile_text(STATE, layout=layout)
    text = program.emitted.text
    assert '"new": one.clone()' in text
    for name in ("one", "every", "several"):
        assert f'params["{name}"] = {name}\n' in text
    assert 'params["cache"] =' not in text  # the loop writes over its slices
    result = run(program, "local", InputSource())
    compared = verify(program, InputSource(), result.outputs, result.updated)
    assert {c.name for c in compared} == {"new", "y", "one", "every", "several", "cache"}
    assert all(c.ok for c in compared)


KEPT = {
    "read again": "one := put[mem = pos](one, row)\n  return sum[mem](one)",
    "in another order": "one := put[mem = pos](every, row)\n  return row",
}


@pytest.mark.parametrize("case", KEPT)
def test_what_is_read_otherwise_is_kept(case: str) -> None:
    body = STATE.split("  new = ")[0] + f"  {KEPT[case]}\n}}\n"
    program = compile_text(body, layout="both")
    assert "write_at" not in program.emitted.text
    result = run(program, "local", InputSource())
    assert all(c.ok for c in verify(program, InputSource(), result.outputs, result.updated))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_writes_a_number_over_a_cotangent(layout: str) -> None:
    """Zeros, at the listed positions: nothing else reads the cotangent, so it is written over."""
    lines = "param w[b, mem, h]\n  y = put[mem = ids](w * x, some)\n  loss = sum(y * y)"
    text = PROGRAM.replace("BODY", f"{lines}\n  return loss\n  minimize loss with sgd(1.0)")
    made = compile_text(text, layout=layout)
    result = run(made, "local", InputSource())
    found = verify(made, InputSource(), result.outputs, result.updated)
    assert [c for c in found if not c.ok] == []
