"""All checks of one record, in the order in which a later one needs the earlier: `prove`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from typing import Any

import numpy as np

from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import F64
from meshdsl.named.packages import PartFailed, error_text
from meshdsl.ops.opdef import NumpyCall, OpDef, OpError, Sample, Signature
from meshdsl.prove import block_checks, gradient_checks, memory_checks, text_checks
from meshdsl.prove.row_prover import counterexample, declared_rows, judge
from meshdsl.prove.sample_values import draw, results, signature
from meshdsl.prove.torch_run import FLOATS, TORCH, call, evaluate, retyped, several, to_torch
from meshdsl.prove.window_rows import reads_windows
from meshdsl.prove.wrong_cases import Cases, WrongCase, call_text
from meshdsl.records import dataclass


@dataclass(slots=True)
class Checked:
    """One check of a record: what it is called, how many cases it has tried, which are wrong."""

    name: str
    cases: int = 0
    wrong: list[WrongCase] = field(default_factory=list)


def prove(opdef: OpDef) -> list[Checked]:
    """The checks of a record on all of its samples.

    Without right shapes nothing else is tried; without right placements, no text on parts.
    """
    checks: list[tuple[str, Callable[[OpDef, Sample], Cases]]] = [("shapes", _shapes)]
    later = [
        ("placements", _placements),
        ("torch text", _texts),
        ("memory", _memory),
        ("gradient", _gradients),
    ]
    done: list[Checked] = []
    for name, check in [*checks, *later]:
        checked = Checked(name)
        for sample in opdef.samples:
            for case in _guarded(opdef, sample, check):
                checked.cases += 1
                checked.wrong += [] if case is None else [case]
        done.append(checked)
        if name == "shapes" and checked.wrong:
            break
    return done


def _guarded(
    opdef: OpDef, sample: Sample, check: Callable[[OpDef, Sample], Cases]
) -> Iterator[WrongCase | None]:
    """The cases of a check; what a function of the record raises is a wrong case, too."""
    try:
        yield from check(opdef, sample)
    except PartFailed as error:
        yield WrongCase("MD0164", error.field, _sample_text(sample), error.wrong)
    except OpError as error:
        code = "MD0170" if check is _shapes else "MD0164"
        yield WrongCase(code, "infer", _sample_text(sample), _reason(error))
    except Exception as error:
        part = "gradient" if check is _gradients else "numpy" if check is _placements else "torch"
        code = "MD0174" if part == "gradient" else "MD0164"
        yield WrongCase(code, part, _sample_text(sample), _reason(error))


def _reason(error: Exception) -> str:
    """What an exception says; of those that say it in words of their own, nothing but that."""
    if isinstance(error, PartFailed):
        return error.wrong
    if isinstance(error, DiagnosticError) and error.diagnostics:
        return error.diagnostics[0].message
    if isinstance(error, OpError | AssertionError) and str(error):
        return " ".join(str(error).split())
    return error_text(error)


def _sample_text(sample: Sample) -> str:
    return call_text(Signature(sample.ins, (), dict(sample.attrs))).replace(" -> nothing", "")


# --- the checks ------------------------------------------------------------------------------


def _shapes(opdef: OpDef, sample: Sample) -> Cases:
    """The shape rule, against the shapes and dtypes of the numpy meaning and the torch text."""
    for floats in FLOATS:
        each = retyped(sample, floats)
        sig, rng = signature(opdef, each), np.random.default_rng(2)
        arrays = [draw(t, kind, rng) for t, kind in zip(sig.ins, each.values, strict=True)]
        operands = [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]
        numpy_call = NumpyCall(sig.ins, sig.outs, sig.attrs)
        dtypes: list[str] = []

        def by_numpy(call: NumpyCall = numpy_call, arrays: list[Any] = arrays) -> list[Any]:
            with np.errstate(all="ignore"):
                return [list(np.shape(a)) for a in results(opdef, call, arrays)]

        def by_torch(
            sig: Signature = sig, operands: list[Any] = operands, dtypes: list[str] = dtypes
        ) -> list[Any]:
            yielded = several(evaluate(opdef, call(sig), operands))
            dtypes += [str(x.dtype) for x in yielded]
            return [list(x.shape) for x in yielded]

        shapes = {
            "infer": [list(t.shape) for t in sig.outs],
            "numpy": _attempt(by_numpy),
            "torch": _attempt(by_torch),
        }
        yield _wrong_shape(sig, shapes) or _wrong_dtype(sig, dtypes)


def _attempt(yielded: Callable[[], list[Any]]) -> list[Any] | str:
    """The shapes of results, or why there are none."""
    try:
        return yielded()
    except Exception as error:
        return _reason(error)


def _wrong_shape(sig: Signature, shapes: dict[str, list[Any] | str]) -> WrongCase | None:
    """The part that disagrees with the two others about the results; None where they agree.

    Where one fails and the other yields what the rule says, that one is wrong, not the rule.
    """
    case, rule = call_text(sig), shapes["infer"]
    wrong = [part for part in ("numpy", "torch") if shapes[part] != rule]
    if not wrong:
        return None
    said = "; ".join(f"{_WORDS[part]}: {_listed(each)}" for part, each in shapes.items())
    if len(wrong) > 1:
        return WrongCase("MD0170", "infer", case, said)
    failed = shapes[wrong[0]]
    if isinstance(failed, str):
        return WrongCase("MD0164", wrong[0], case, failed)
    return WrongCase("MD0173", wrong[0], case, said)


def _wrong_dtype(sig: Signature, dtypes: list[str]) -> WrongCase | None:
    rule = [str(TORCH[t.dtype.name]) for t in sig.outs]
    if rule == dtypes:
        return None
    said = f"the shape rule: {', '.join(rule)}; the torch text: {', '.join(dtypes)}"
    return WrongCase("MD0170", "infer", call_text(sig), said)


_WORDS = {"infer": "the shape rule", "numpy": "the numpy meaning", "torch": "the torch text"}


def _listed(shapes: list[Any] | str) -> str:
    return shapes if isinstance(shapes, str) else ", ".join(map(str, shapes)) or "nothing"


def _placements(opdef: OpDef, sample: Sample) -> Cases:
    """The rows that the factors imply: all that are declared hold; those not declared are told."""
    sig = signature(opdef, sample)
    verdict = judge(opdef, sample)
    for row in text_checks.rows_of(opdef, sample):
        if str(row) not in verdict.false:
            yield None
            continue
        said = counterexample(opdef, sig, sample, row)
        yield WrongCase("MD0171", "factors", f"{call_text(sig)}; {row}", said)
    for text in sorted(verdict.missing - set(opdef.true_rows)):
        yield WrongCase("MD0172", "factors", f"{call_text(sig)}; {text}", "it holds")
    for row in text_checks.rows_of(opdef, sample):
        if str(row) in verdict.false:
            return
    for ways in block_checks.WAYS[:1]:
        for row in block_checks.uneven_rows(opdef, sig, ways):
            yield from block_checks.on_blocks(opdef, sample, sig, row, ways)


def _texts(opdef: OpDef, sample: Sample) -> Cases:
    """The torch text, in f32 and f64: whole, on parts and windows, and with numbers as operands."""
    false = judge(opdef, sample).false
    for floats in FLOATS:
        each = retyped(sample, floats)
        yield from text_checks.on_wholes(opdef, each)
        for row in declared_rows(opdef, signature(opdef, each)):
            if row.factor is not None and not reads_windows(row) and str(row) not in false:
                yield from text_checks.on_parts(opdef, each, row)
        for row, ranks in text_checks.windows(opdef, each):
            yield from text_checks.on_windows(opdef, each, row, ranks)
    for literal in text_checks.literals(opdef, sample):
        yield from text_checks.with_literals(opdef, sample, literal)


def _memory(opdef: OpDef, sample: Sample) -> Cases:
    """Operands that lie anyhow, and texts that write over an operand."""
    if sample.ins:
        yield from memory_checks.on_any_memory(opdef, retyped(sample, F64))
    for index, literal in memory_checks.places_in_place(opdef, sample):
        yield from memory_checks.in_place(opdef, index, sample, literal)


def _gradients(opdef: OpDef, sample: Sample) -> Cases:
    """Finite differences, and torch's autograd where the text has it."""
    if not gradient_checks.is_differentiated(opdef, sample):
        return
    yield from gradient_checks.against_differences(opdef, sample)
    if opdef.gradient is not None:
        yield from gradient_checks.against_autograd(
            opdef, sample, gradient_checks.drawn(sample, 0.2)
        )
