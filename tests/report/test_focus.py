"""Parts of `explain`'s report: the largest collectives, a line, a tensor; and what is short."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md
from meshdsl.diagnostics import DiagnosticError
from meshdsl.report.document import human
from meshdsl.report.explanation import explain
from meshdsl.report.explanation_document import explanation
from meshdsl.report.focus import SHORT, TOP, Focus, focused
from meshdsl.report.terminal import text
from tests.report.golden import Case, made, source

MLP = Case("mlp", "hybrid")
TRANSFORMER = Case("transformer", "megatron")
BUCKETS = Case("lm", "zero2")
REST = "the rest is elsewhere"


def shown(case: Case, width: int = 100, **focus: Any) -> str:
    of = source(case.example)
    return text(focused(explain(made(case).device), {of.name: of}, Focus(**focus), REST), width)


def whole(case: Case) -> str:
    of = source(case.example)
    return text(explanation(explain(made(case).device), {of.name: of}), 100)


def sent(case: Case) -> list[int]:
    """The bytes of each collective, the most first."""
    found = explain(made(case).device)["collectives"]
    return sorted((c["wire_bytes"] for c in found), reverse=True)


def heads(found: str) -> list[str]:
    return [line.strip() for line in found.splitlines() if line.strip().startswith("=>")]


def test_a_short_report_is_shown_whole() -> None:
    assert shown(MLP) == whole(MLP)
    assert shown(Case("matmul", "inner_cols")) == whole(Case("matmul", "inner_cols"))


def test_of_a_long_one_the_summary_the_largest_and_the_memory() -> None:
    found = shown(TRANSFORMER)
    assert len(made(TRANSFORMER).placed.tensors) > SHORT
    first = " ".join(found.partition("\n\n")[0].split())
    assert first.endswith("12 collectives send 6.76 MiB per device.")
    assert len(heads(found)) == TOP
    for label, count in {"bytes:": 0, "from:": 0, "to:": 0, "why:": TOP}.items():
        assert found.count(f"        {label}") == count
    assert "The other entry (1 collective) sends 7 B per device." in found
    assert "Memory per device: 9.39 MiB at its peak" in found
    assert "f32[" not in found, "no list of tensors"
    assert found.endswith(f"\n\n{REST}")
    assert len(found.splitlines()) < len(whole(TRANSFORMER).splitlines()) / 1.5


def test_all_is_the_report_that_there_always_was() -> None:
    assert shown(TRANSFORMER, whole=True) == whole(TRANSFORMER)


@pytest.mark.parametrize("top", [1, 3, 1000])
def test_the_largest_come_first(top: int) -> None:
    found = heads(shown(BUCKETS, 1000, top=top))
    amounts = [line.rpartition(": ")[2].partition(" in ")[0] for line in found]
    assert sorted(amounts) == sorted(map(human, sent(BUCKETS)[:top]))
    assert amounts[0] == human(sent(BUCKETS)[0]), "lines are in the order of their largest"


def test_the_parts_of_a_bucket_are_those_of_its_line() -> None:
    assert "holds:" not in shown(BUCKETS, top=1)
    line = max(explain(made(BUCKETS).device)["collectives"], key=lambda c: c["wire_bytes"])["line"]
    assert shown(BUCKETS, line=line).count("holds:") > 3


def test_a_line_has_its_tensors_and_what_it_sends() -> None:
    first, _, rest = shown(MLP, line=18).partition("\n\n")
    found = rest.splitlines()
    assert first.startswith("mlp under layout hybrid")
    assert found[0] == "18 |   y = einsum(h, v -> [batch, io])"
    assert found[1].startswith("     y  f32[batch@rows 64→32, io 512]")
    assert len(heads("\n".join(found))) == 1


def test_the_line_of_a_rule_has_what_it_splits() -> None:
    found = shown(MLP, line=8).partition("\n\n")[2].splitlines()
    assert found[0].startswith(" 8 | layout hybrid {")
    assert [line.split()[0] for line in found[1:]] == ["x", "target", "w", "b", "v", "h", "y"]


def test_a_line_with_nothing_names_the_nearest() -> None:
    nothing = "is made, split or sent on this line. The nearest where there is:"
    assert shown(MLP, line=16).endswith(f"Nothing {nothing} 14, 15, 17, 18.")
    assert shown(MLP, line=16, tensor="h").endswith(f"Nothing of `h` {nothing} 17.")


def test_a_tensor_where_it_is_made_and_sent() -> None:
    found = shown(MLP, tensor="loss")
    assert "19 |   loss = mean((y - target)^2)\n     loss  f32[]\n     => all_reduce" in found
    assert len(heads(found)) == 1


def test_a_tensor_by_the_last_part_of_its_name_and_in_a_bucket() -> None:
    assert "attention.q  f32[" in shown(TRANSFORMER, tensor="q")
    assert "of a subexpression (`attention`)" in shown(TRANSFORMER, tensor="attention")
    assert heads(shown(BUCKETS, tensor="d_embed"))


def test_a_tensor_on_a_line_the_largest_of_it() -> None:
    found = shown(TRANSFORMER, line=40, top=1)
    assert len(heads(found)) == 1
    assert found.endswith("The other 2 entries (2 collectives) send 3.01 KiB per device.")


@pytest.mark.parametrize(
    ("focus", "code", "help"),
    [
        ({"line": 99}, "MD0607", "write `--line"),
        ({"line": 0}, "MD0607", "write `--line"),
        ({"tensor": "hh"}, "MD0607", "write `--tensor h`"),
        ({"tensor": "nothing_like_it"}, "MD0607", "there are x, target, w"),
        ({"top": 0}, "MD0601", "write `--top 1`"),
    ],
)
def test_what_is_not_there(focus: dict[str, Any], code: str, help: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        shown(MLP, **focus)
    (told,) = caught.value.diagnostics
    assert told.code == code
    assert help in (told.help or "")


def test_python_has_the_same_parts() -> None:
    plan = md.load("examples/mlp.mdsl").compile("square", "hybrid")
    assert str(plan.explain()) == str(plan.explain(all=True))
    assert "loss" not in str(plan.explain(tensor="h"))
    assert plan.explain(line=18).json == plan.explain().json
    assert "The nearest where there is" in plan.explain(line=16).html()
    with pytest.raises(md.ProgramError, match="MD0607"):
        plan.explain(line=99)
