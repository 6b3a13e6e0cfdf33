"""The report for people: what it says, at every width, and that no file can steer the terminal."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.report.document import exact, human, scaled
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation, sentence, type_text
from meshdsl.report.terminal import Line, lines, print_document
from tests.compiling import compile_text
from tests.covering import in_turn
from tests.report.golden import CASES, Case, made, source


def _report(case: Case, **options: Any) -> Any:
    return explain(_stages(case, **options).device)


def _shown(report: Any, text: Source, width: int = 100) -> Iterator[Line]:
    return lines(explanation(report, {text.name: text}), width)


def _stages(case: Case, **options: Any) -> Compilation:
    if not options:
        return made(case)
    chosen = Options(layout=case.layout, **options)
    return compile_source(source(case.example), chosen, Diagnostics())


def _lines(case: Case, width: int = 100, **options: Any) -> list[str]:
    found = _shown(_report(case, **options), source(case.example), width)
    return ["".join(text for text, _ in line) for line in found]


MLP = Case("mlp", "hybrid")
LM = Case("transformer", "megatron")


def test_the_first_sentence_says_it_all() -> None:
    assert " ".join(_lines(MLP)[:2]).startswith(
        "mlp under layout hybrid on mesh { rows: 2, cols: 2 } (4 devices): "
        "2 collectives send 64 KiB per device."
    )


def test_where_nothing_is_sent_it_says_so() -> None:
    lines = _lines(Case("matmul", "data_parallel"))
    assert lines[0].endswith("(2 devices): nothing is sent.")
    assert "Sent per device: nothing, each works on its own." in lines


def test_one_device() -> None:
    lines = _lines(MLP, mesh="rows:1,cols:1")
    assert lines[0].endswith("(1 device): nothing is sent.")
    assert "Sent per device: nothing, there is only one." in lines
    assert not any("→" in line for line in lines)


def test_a_tensor_and_its_rules() -> None:
    assert (
        "     h  f32[batch@rows 64→32, hidden@cols 2048→1024]"
        "   line 8: batch -> rows, hidden -> cols" in _lines(MLP)
    )


def test_rules_of_the_command_line_are_named_so() -> None:
    stages = compile_source(source("mlp"), Options(mesh="d:2", layout="batch:d"), Diagnostics())
    text = "\n".join(
        "".join(part for part, _ in line) for line in _shown(explain(stages.device), stages.source)
    )
    assert "x       f32[batch@d 64→32, io 512]   --layout: batch -> d" in text
    assert "line 1" not in text.replace("line 19", "")


def test_iterations_are_multiplied() -> None:
    found = [line for line in _lines(LM, reduce="deferred") if "an iteration" in line]
    assert found == [
        "     => all_reduce sum of x over tp: 768 KiB an iteration × 4 iterations = 3 MiB "
        "sent per device"
    ] * len(found)
    assert len(found) == 2


def test_an_idle_axis_is_pointed_out() -> None:
    lines = _lines(LM, mesh="data:6,tp:8,pipe:64", set_dims={"batch": 48, "layers": 96})
    assert "(3,072 devices)" in " ".join(lines[:2])
    assert "Axis pipe splits nothing: its 64 devices all do the same work." in lines


def test_subexpressions_appear_where_they_send_something() -> None:
    report = _report(LM)
    unnamed = {c["tensor"] for c in report["collectives"]} - {t["name"] for t in report["tensors"]}
    text = "\n".join(_lines(LM))
    assert unnamed
    assert all(f"a subexpression (`{name}`)" in text for name in unnamed)


def test_warnings_are_counted_and_shown() -> None:
    report = _report(MLP) | {"warnings": [{"code": "MD0305", "message": "dim `q`", "line": 8}]}
    found = ["".join(t for t, _ in line) for line in _shown(report, source("mlp"))]
    assert found[-2:] == ["1 warning:", "  MD0305 line 8: dim `q`"]


@in_turn(case=CASES, width=(60, 80, 100, 120))
def test_no_line_is_wider_than_the_screen(case: Case, width: int) -> None:
    assert [line for line in _lines(case, width) if len(line) > width] == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_all_that_is_sent_is_shown(case: Case) -> None:
    report = _report(case)
    text = "\n".join(_lines(case))
    assert text.count("\n     => ") == len(report["collectives"])
    told = (len({part["why"] for part in c["parts"]}) or 1 for c in report["collectives"])
    assert text.count("why:") == sum(told)
    assert text.count("holds:") == sum(len(c["parts"]) for c in report["collectives"])
    assert human(report["memory"]["peak"]) in text


def _printed(report: Any, text: Source, **console: Any) -> str:
    out = console.pop("file", None) or io.StringIO()
    print_document(explanation(report, {text.name: text}), Console(file=out, **console))
    return out.getvalue() if isinstance(out, io.StringIO) else ""


def test_without_colour_off_a_terminal() -> None:
    assert "\x1b" not in _printed(_report(MLP), source("mlp"), width=80)


def test_with_colour_on_a_terminal() -> None:
    shown = _printed(
        _report(MLP), source("mlp"), width=80, force_terminal=True, color_system="standard"
    )
    assert "\x1b[" in shown


def test_a_terminal_that_knows_only_ascii() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii")
    text = Source("a.mdsl", "dim batch = 4\nprogram p(x[batch]) { # né\n  return x\n}\n")
    stages = compile_source(text, Options(mesh="d:2", layout="batch:d"), Diagnostics())
    document = explanation(explain(stages.device), {text.name: text})
    print_document(document, Console(file=out, width=80))
    out.flush()
    shown = raw.getvalue().decode("ascii")
    assert "f32[batch@d 4->2]" in shown
    assert "n\\xe9" in shown


@given(st.text(max_size=30), st.text(max_size=20))
def test_nothing_from_a_file_steers_the_terminal(comment: str, name: str) -> None:
    comment = "".join(comment.splitlines())
    text = "dim batch = 4\nprogram p(x[batch]) { # \x1b[31m[red]" + comment + "\n  return x\n}\n"
    before = _report(MLP)
    words = [{"code": "MD0001", "message": f"\x1b[2J{comment}", "line": 1}]
    tensor = before["tensors"][0] | {"file": name, "line": 2, "rules": {}}
    collective = before["collectives"][0] | {"file": name, "why": f"[bold]\x07{comment}", "line": 2}
    report = before | {
        "layout": f"[red]{name}\x1b",
        "tensors": [tensor],
        "collectives": [collective],
        "warnings": words,
    }
    shown = _printed(report, Source(name, text), width=200)
    assert not {char for char in shown if char < " " or "\x7f" <= char < "\xa0"} - {"\n"}
    assert "\\x1b[31m[red]" in shown
    assert "[bold]\\x07" in shown


def test_numbers() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 1024: "1 KiB", 65540: "64 KiB", 7084039: "6.76 MiB"}
    assert {size: human(size) for size in sizes} == sizes
    assert exact(1000) == "1,000 B"
    assert exact(2**40) == "1 TiB (1,099,511,627,776 B)"
    assert human(2**70) == "1048576 PiB"
    assert [scaled(n) for n in (0, 999, 67_223_552, 10**13)] == [
        "0 FLOP",
        "999 FLOP",
        "67.2 MFLOP",
        "10 TFLOP",
    ]


def test_partial_values_are_named_so() -> None:
    tensor: Any = {"dims": [], "shape": [], "local_shape": [], "order": {}, "dtype": "f32"}
    placed = {"placement": {"a": "P(max)", "b": "B", "c": "P(max)"}}
    assert type_text(tensor | placed) == "f32[], a partial max over a, c"


def test_one_collective_is_no_plural() -> None:
    assert "1 collective sends" in sentence(_report(Case("mlp", "megatron"), mesh="model:2"))


# --- subexpressions ------------------------------------------------------------------------------

EXPERTS = """
dim group = 4, token = 8, experts = 4, slot = 2, model = 8, hidden = 16
mesh line = { e: 2 }
layout routed { group -> e, w: experts -> e, inside: group -> none, inside: experts -> e, RULES }
program block(x[group, token, model], where_to[group, token, experts, slot]) {
  param w[experts, model, hidden]
  inside = einsum(where_to, x -> [experts, group, slot, model])
  BODY
  return o
}
"""
UNNAMED = "o = relu(einsum(inside, w -> [experts, group, slot, hidden]))"
NAMED = "z = einsum(inside, w -> [experts, group, slot, hidden])\n  o = relu(z)"
O_RULES = "o: group -> none, o: experts -> e"


@pytest.mark.parametrize(
    ("body", "rules", "told"),
    [
        (UNNAMED, O_RULES, 1),
        (NAMED, f"{O_RULES}, z: group -> none, z: experts -> e", 0),
        (NAMED, O_RULES, 0),
    ],
    ids=["unnamed", "with a rule of its own", "named"],
)
def test_an_unnamed_value_that_a_wider_rule_binds_is_told(body: str, rules: str, told: int) -> None:
    written = EXPERTS.replace("BODY", body).replace("RULES", rules)
    report = compile_text(written).report
    found = [t for t in report["tensors"] if t["between"]]
    shown = " ".join("".join(t for t, _ in x) for x in _shown(report, Source("test.mdsl", written)))
    assert len(found) == told == shown.count("name it, for a rule of its own")
    assert all(t["rules"]["group"]["rule"] == "group -> e" for t in found)
