"""Every part of a record, made wrong: `prove` finds it, by its code, its place and its figures."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshdsl.ir.types import TensorType
from meshdsl.named.packages import add
from meshdsl.ops import kit
from meshdsl.ops.opdef import Factor, Factors, OpDef
from meshdsl.prove.verdicts import Verdict, of_package
from tests.packages import KERNELS, example


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpDef]:
    """The record of the guide; its kernel can be imported."""
    with example(tmp_path_factory.mktemp("right")):
        yield importlib.import_module(KERNELS).OPERATORS[0]


def verdict_on(record: OpDef, monkeypatch: pytest.MonkeyPatch, **parts: Any) -> Verdict:
    """What is said of the record with other parts, as the package `twin`."""
    from meshdsl.named import packages
    from meshdsl.ops.opdef import ADDED

    changed = dataclasses.replace(record, name="twin", **parts)
    monkeypatch.delitem(ADDED, "twin", raising=False)
    monkeypatch.delitem(packages.LOADED, "twin", raising=False)
    (verdict,) = of_package(add("twin", f"{KERNELS}:OPERATORS", (changed,)))
    packages.LOADED.pop("twin")
    return verdict


def _flipped(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    return (TensorType(ins[1].dims, ins[0].dtype),)


def _without_alpha(call: kit.NumpyCall, gate: kit.Array, up: kit.Array) -> kit.Array:
    return np.asarray(gate / (1 + np.exp(-gate)) * kit.align(up, call.ins[1], call.outs[0].dims))


def _of_alpha_1(call: kit.Backward) -> kit.Grads:
    s = call.emit("sigmoid", call.operand(0))
    return {1: call.emit("mul", kit.full_grad(call), call.emit("mul", call.operand(0), s))}


def _too_wide(call: kit.Backward) -> kit.Grads:
    return {0: call.emit("cast", kit.full_grad(call), dtype=kit.DTYPES["f64"])}


def _summed_loop(sig: kit.Signature) -> Factors:
    """The first dim summed, as if the result lacked it."""
    first, *others = kit.loops(sig)
    return Factors((Factor(first.name, first.ins, (None,), "sum"), *others))


def _no_loops(sig: kit.Signature) -> Factors:
    return Factors((), (frozenset({1}),))


def _failing(error: Exception) -> Callable[..., Any]:
    def fail(*args: Any) -> Any:
        raise error

    return fail


def _text(text: str) -> Callable[[kit.TorchCall], str]:
    return lambda call: text.format(call.tensor(0), call.tensor(1))


SQUARES = kit.samples("b h; b h | alpha=1.0")

WRONG: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "linear in the gate": (
        {"factors": kit.plain(linear=[[0], [1]])},
        "error[MD0171]",
        ("; P, B -> P;", "on 2 devices the results are", "b = 2, h = 6"),
    ),
    "a loop that is summed": (
        {"factors": _summed_loop},
        "error[MD0171]",
        ("S(b), S(b) -> P", "2 devices"),
    ),
    "a loop that is missing": (
        {"factors": _no_loops},
        "warning[MD0172]",
        ("S(b), S(b) -> S(b)", "more case"),
    ),
    "the shape rule": (
        {"infer": _flipped},
        "error[MD0170]",
        ("the shape rule: [6, 2]; the numpy meaning: ValueError: ", "alpha=1.5"),
    ),
    "the dtype of the result": (
        {"infer": lambda ins, attrs: (TensorType(ins[0].dims, kit.F32),)},
        "error[MD0170]",
        ("the shape rule: torch.float32; the torch text: torch.float64", "f64[b, h]"),
    ),
    "the numpy meaning": (
        {"numpy": _without_alpha},
        "error[MD0173]",
        ("alpha=1.5", " instead of ", " at [b ", "values"),
    ),
    "the gradient": (
        {"gradient": _of_alpha_1},
        "error[MD0174]",
        ("cotangent over [", "operand 0, by finite differences", " instead of "),
    ),
    "no gradient": ({"gradient": None}, "error[MD0174]", ("0 instead of ", "operand 0")),
    "a gradient of another type": (
        {"gradient": _too_wide},
        "error[MD0174]",
        ("the gradient of operand 0 is f64[",),
    ),
    "a text that writes over its operand": (
        {"torch": _text("{0}.mul_(torch.sigmoid({0})).mul_({1})"), "samples": SQUARES},
        "error[MD0175]",
        ("operand 0 is changed", "memory of operands: plain"),
    ),
    "a text that needs plain memory": (
        {
            "torch": _text("torch.nn.functional.silu({0}) * {1}.as_strided({1}.shape, (6, 1))"),
            "samples": SQUARES,
        },
        "error[MD0173]",
        ("in memory with gaps",),
    ),
    "a text that fails": (
        {"torch": _text("torch.ops.swiglu_kernels.nothing({0}, {1})")},
        "error[MD0164]",
        ("AttributeError", "nothing"),
    ),
    "a shape rule that fails": (
        {"infer": lambda ins, attrs: (ins[5],)},
        "error[MD0170]",
        ("the shape rule of `twin` (package `twin`) failed: IndexError",),
    ),
    "a text that is none": (
        {"torch": lambda call: None},
        "error[MD0164]",
        ("it yields nothing, not a text",),
    ),
    "a gradient that fails, and speaks of another part": (
        {"gradient": _failing(ValueError("the factors of it"))},
        "error[MD0164]",
        ("the gradient of `twin` fails: ValueError: the factors of it (",),
    ),
    "a text that fails with words of its own": (
        {"torch": _failing(kit.OpError("MD0213", "the shape rule of it"))},
        "error[MD0164]",
        ("the torch text of `twin` fails: the shape rule of it (",),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_part_is_found(what: str, right: OpDef, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, head, said = WRONG[what]
    samples = parts.get("samples", right.samples[:2])
    verdict = verdict_on(right, monkeypatch, **{**parts, "samples": samples})
    heads = [f"{d.severity}[{d.code}]" for d in verdict.diagnostics]
    assert head in heads
    told = next(d for d in verdict.diagnostics if f"{d.severity}[{d.code}]" == head)
    assert all(words in told.message for words in said), told.message
    assert told.help
    assert verdict.facts["proved"] == head.startswith("warning")


def test_the_right_one_is_proved(right: OpDef, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict = verdict_on(right, monkeypatch)
    assert verdict.diagnostics == ()
    assert verdict.facts["proved"]
    assert all(check["cases"] > 5 for check in verdict.facts["checks"])


def test_a_wrong_part_is_shown_where_the_package_defines_it(
    right: OpDef, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = verdict_on(right, monkeypatch, infer=_flipped, samples=right.samples[1:2])
    assert verdict.diagnostics[0].span is None  # the rule is of this file
    verdict = verdict_on(right, monkeypatch, samples=right.samples[1:2], numpy=_without_alpha)
    span = verdict.diagnostics[0].span
    assert span is not None
    assert Path(span.file).parts[-2:] == (KERNELS, "__init__.py")
    assert span.text == "def _torch(call: kit.TorchCall) -> str:"


def test_numpy_or_torch_is_named_by_the_gradient(
    right: OpDef, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = right.samples[1:2]
    verdict = verdict_on(right, monkeypatch, samples=sample, numpy=_without_alpha)
    assert "not that of the numpy meaning either" in (verdict.diagnostics[0].help or "")
    of_1 = _text("torch.ops.swiglu_kernels.swiglu({0}, {1}.mT, 1.0)")
    verdict = verdict_on(right, monkeypatch, samples=sample, torch=of_1)
    assert {d.code for d in verdict.diagnostics} == {"MD0173"}
    assert "the torch text is probably wrong" in (verdict.diagnostics[0].help or "")
