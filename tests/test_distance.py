"""The way from text to device program, as CONTRIBUTING names it and as a compile goes it."""

from __future__ import annotations

import re
from functools import partial
from types import CodeType

from benchmarks.distance import EXAMPLE, ROOT, WAYS, distance, entered, file_of
from meshdsl.device.memory import memory
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options

MOST = {"to the device program": (529, 76), "with text and report": (826, 102)}
"""The most functions and files of a warm compile. Raise them only for a good reason.

The last were two passes: batch norms are found, and sums are taken out of backward loops.
"""


def walk() -> str:
    """The walk of CONTRIBUTING from one rule to a collective."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## One rule, from text to collective")[2].partition("\n## ")[0]


def cold(**sizes: int) -> tuple[CodeType, ...]:
    """The functions of a compile under the default policy, of sizes that nothing is known of."""
    options = Options(layout="hybrid", cache=False, set_dims=sizes)
    source = Source(EXAMPLE.name, EXAMPLE.read_text(encoding="utf-8"))
    return entered(lambda: Compilation(source, options, Diagnostics()).text)


def position(codes: tuple[CodeType, ...], name: str, file: str = "") -> int:
    """When a function is entered first; it is the one of its name, or of that in a file."""
    there = [
        number
        for number, code in enumerate(codes)
        if code.co_qualname == name and file_of(code).endswith(file)
    ]
    assert there, f"a compile does not enter `{name}` of {file or 'the project'}"
    return there[0]


def test_a_compile_enters_the_functions_of_the_walk_in_their_order() -> None:
    steps = re.findall(r"^\d+\. `([\w/]+\.py)`((?:, `[\w.]+`)+): ", walk(), re.MULTILINE)
    assert len(steps) == len(re.findall(r"^\d+\. ", walk(), re.MULTILINE))
    names = [(file, name) for file, said in steps for name in re.findall(r"`([\w.]+)`", said)]
    codes = cold(batch=56, io=88)
    places = [position(codes, name, file) for file, name in names]
    assert places == sorted(places), names


MAPPED = """
dim batch = 52, model = 44, hidden = 92, classes = 12, layers = 2
mesh two = { rows: 2 }
layout sharded { batch -> rows, params: model -> rows, grads: model -> rows }
layout cut { h: rows = 1 } with one_f_one_b[batch](13)
layout looped { layers -> rows } with one_f_one_b[batch](13)
program net(x[batch, model]) {
  param up[model, hidden]
  g = cumsum[hidden](einsum(x, up -> [batch, hidden]), reverse=1)
  repeat layers {
    param bias[hidden]
    g = g + bias
  }
  param down[hidden, classes]
  h = einsum(g, down -> [batch, classes])
  loss = mean(h * h)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""
"""A program and layouts that enter every function of the map in docs/system.md.

Its sizes are of no other test: what has been computed of those is known.
"""


def test_the_map_of_decisions_names_functions_that_compiles_enter() -> None:
    text = (ROOT / "docs" / "system.md").read_text(encoding="utf-8")
    rows = text.partition("## Where it is decided")[2].partition("\n## ")[0]
    pairs = re.findall(r"`((?:meshdsl|backends)/[\w/]+\.py)`(?:, `([\w.]+)`)?", rows)
    assert all((ROOT / file).is_file() for file, _ in pairs)
    functions = [(file, name) for file, name in pairs if name]
    assert len(functions) > 10
    codes = {
        (file_of(code), code.co_qualname)
        for layout in ("sharded", "cut", "looped")
        for code in entered(partial(_lowered, layout))
    }
    for file, name in functions:
        assert (str(ROOT / file), name) in codes, f"no compile enters `{name}` of {file}"


def _lowered(layout: str) -> None:
    options = Options(layout=layout, cache=False)
    compilation = Compilation(Source("net.mdsl", MAPPED), options, Diagnostics())
    memory(compilation.device)
    assert compilation.text


def test_six_functions_lead_from_the_policy_to_the_placed_program() -> None:
    sentence = (
        walk().partition("From policy to placed program read ")[2].partition("in this order")[0]
    )
    names = re.findall(r"`([\w.]+)`", sentence)
    assert names[0] == "place"
    assert len(names) == 6
    codes = cold(batch=40, io=104)
    places = [
        position(codes, name, "placed/place.py" if n < 2 else "placed/from_named.py")
        for n, name in enumerate(names)
    ]
    assert places == sorted(places)


def test_lint_is_entered_once_and_left_before_placing() -> None:
    """Placing is one way: nothing on it comes back to what was looked at before."""
    codes = cold(batch=72, io=136)
    linting = {n for n, code in enumerate(codes) if file_of(code).endswith("placed/lint.py")}
    assert position(codes, "lint") == min(linting)
    assert max(linting) < position(codes, "place", "placed/place.py")


def test_a_warm_compile_stays_short() -> None:
    for way, run in WAYS.items():
        codes = distance(run)
        functions, files = MOST[way]
        assert len(codes) <= functions
        assert len({file_of(code) for code in codes}) <= files
