"""Gradients added up in another dtype: the bytes, the numbers, and what stays as it was."""

from __future__ import annotations

import pytest

from meshdsl.backends.engines.execution import InputSource, run, verify
from meshdsl.device.ir import Bucket, Move, walk
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.pipeline import Compilation, Options, compile_source
from meshdsl.placed.printer import print_program
from meshdsl.report.explanation import explain
from tests.device.steps import LAYOUTS, TEXT
from tests.device.steps import run as run_device
from tests.ir_text.placed import parse_program
from tests.programs.harness import check_bytes

NARROW = "\n".join(f"layout {n}_narrow extends {n} {{ grads: reduce = bf16 }}" for n in LAYOUTS)


def made(layout: str, text: str = TEXT, mesh: str = "", dtype: str | None = None) -> Compilation:
    mesh = mesh or LAYOUTS[layout.removesuffix("_narrow")]
    options = Options(mesh=mesh, layout=layout, dtype=dtype)
    return compile_source(Source("case.mdsl", f"{text}\n{NARROW}"), options, Diagnostics())


def reductions(compiled: Compilation) -> int:
    """The bytes that are sent to reduce gradients; those of a scalar are of the loss."""
    moves = ((m, n) for node, n in walk(compiled.device.body) for m in getattr(node, "moves", ()))
    return sum(m.wire * n for m, n in moves if m.step.op == "sum" and m.source.value.role == "grad")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_send_half_the_bytes_and_the_step_is_that_of_one_device(layout: str) -> None:
    plain, narrow = made(layout), made(f"{layout}_narrow")
    assert 2 * reductions(narrow) == reductions(plain) > 0
    check_bytes(explain(narrow.device), run_device(narrow.named, narrow.device))
    done = run(narrow, "local", InputSource())
    assert not done.disagreements
    assert all(found.ok for found in verify(narrow, InputSource(), done.outputs, done.updated))


def test_as_many_collectives_go_into_a_bucket() -> None:
    def collectives(layout: str) -> list[int]:
        nodes = (n for n, _ in walk(made(layout).device.body) if isinstance(n, Bucket | Move))
        return [sum(m.source.value.role == "grad" for m in n.moves) for n in nodes if n.step.moves]

    assert max(collectives("data_parallel_narrow")) == max(collectives("data_parallel"))


def test_narrow_gradients_may_be_added_up_wider() -> None:
    text = TEXT.replace("= bf16", "= f32")
    half = made("data_parallel", dtype="bf16")
    whole = made(
        "wide",
        f"{text}layout wide extends data_parallel {{ grads: reduce = f32 }}",
        "data:4",
        "bf16",
    )
    assert reductions(whole) == 2 * reductions(half)


def test_what_is_wider_stays_so() -> None:
    text = f"{TEXT}layout wide extends data_parallel {{ grads: reduce = f32 }}"
    wide, plain = (made(n, text, "data:4", "f64") for n in ("wide", "data_parallel"))
    assert wide.bare.replace("layout wide", "layout data_parallel") == plain.bare


def test_without_a_mesh_nothing_is_cast() -> None:
    narrow, plain = (made(n, mesh="data:1") for n in ("data_parallel_narrow", "data_parallel"))
    assert narrow.bare.replace("_narrow", "") == plain.bare


def test_explain_names_the_setting() -> None:
    report = explain(made("data_parallel_narrow").device)
    whys = [part["why"] for c in report["collectives"] for part in c.get("parts", [c])]
    assert any("in bf16, by `grads: reduce = bf16` (line" in why for why in whys)


def test_a_placed_program_is_read_back() -> None:
    text = print_program(made("data_parallel_narrow").placed)
    assert " in bf16 [" in text
    assert print_program(parse_program(text)) == text
