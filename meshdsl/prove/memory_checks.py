"""The torch text of records on operands that lie anyhow: values, and the memory of results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from meshdsl.ops.opdef import NumpyCall, OpDef, Sample, Signature
from meshdsl.prove.memory_kinds import one_at_a_time, overlaps, own, share, views
from meshdsl.prove.sample_values import draw, results, signature
from meshdsl.prove.torch_run import WIDENED, call, evaluate, run_lines, several, to_torch
from meshdsl.prove.wrong_cases import Cases, WrongCase, call_text, difference


def drawn(sig: Signature, sample: Sample) -> list[torch.Tensor]:
    """Random operands."""
    rng = np.random.default_rng(12)
    arrays = [draw(t, kind, rng) for t, kind in zip(sig.ins, sample.values, strict=True)]
    return [to_torch(a, t) for a, t in zip(arrays, sig.ins, strict=True)]


def meaning_of(
    opdef: OpDef, sig: Signature, operands: list[torch.Tensor]
) -> tuple[np.ndarray, ...]:
    """The numpy meaning of a call, of the values that the tensors have now."""
    arrays = [x.double().numpy() if x.dtype in WIDENED else x.numpy() for x in operands]
    numpy_call = NumpyCall(sig.ins, sig.outs, sig.attrs)
    return results(opdef, numpy_call, [a.copy() for a in arrays])


def unlike_on_memory(found: torch.Tensor, expected: np.ndarray) -> str:
    """How values differ beyond rounding, also where broadcast operands cancel to nothing."""
    most = {torch.bfloat16: 2e-2, torch.float32: 1e-5}.get(found.dtype, 1e-11)
    return difference(found.double().numpy(), expected, most, floor=1.0)


def on_any_memory(opdef: OpDef, sample: Sample) -> Cases:
    """On operands that lie anyhow: the values, and which results show which operands."""
    sig = signature(opdef, sample)
    shows = opdef.shows_operand(sig.ins, sig.attrs)
    for lie, operands in one_at_a_time(drawn(sig, sample)):
        if any(overlaps(operands[i]) for i in opdef.overwrites):
            continue  # never requested
        expected, before = meaning_of(opdef, sig, operands), [x.clone() for x in operands]
        yielded = several(evaluate(opdef, call(sig), operands))
        of_values = (unlike_on_memory(got, w) for got, w in zip(yielded, expected, strict=True))
        said = next(filter(None, of_values), "")
        code = "MD0173" if said else "MD0175"
        said = said or next(_wrong_memory(opdef, shows, yielded, operands, before), "")
        case = f"{call_text(sig)}; memory of operands: {lie}"
        yield WrongCase(code, "torch", case, said) if said else None


def _wrong_memory(
    opdef: OpDef,
    shows: bool,
    yielded: tuple[torch.Tensor, ...],
    operands: list[torch.Tensor],
    before: list[torch.Tensor],
) -> Iterator[str]:
    """Operands that are changed or shown, and elements of one place, where the record says not."""
    for i, (now, then) in enumerate(zip(operands, before, strict=True)):
        written = i in opdef.overwrites
        if not written and not torch.equal(now, then):
            yield f"operand {i} is changed"
        if not (written or (shows and i == 0)) and any(share(x, now) for x in yielded):
            yield f"the result is in the memory of operand {i}"
    if not shows and any(map(overlaps, yielded)):
        yield "elements of the result share a place"


def places_in_place(opdef: OpDef, sample: Sample) -> Iterator[tuple[int, frozenset[int]]]:
    """The operands of a sample that a result may be written over, and scalars that are numbers."""
    for index in opdef.in_place:
        if sample.ins[index] != signature(opdef, sample).outs[0]:
            continue
        scalars = {i for i, t in enumerate(sample.ins) if not t.dims} - {index}
        for literal in (frozenset[int](), *(frozenset({i}) for i in sorted(scalars))):
            if index in opdef.written_over(sample.ins, literal):
                yield index, literal


def in_place(opdef: OpDef, index: int, sample: Sample, literal: frozenset[int]) -> Cases:
    """The result of an operand written over, on operands that lie anyhow."""
    sig = signature(opdef, sample)
    operands = drawn(sig, sample)
    args = tuple(repr(x.item()) if i in literal else f"x{i}" for i, x in enumerate(operands))
    constants = tuple(i in literal for i in range(len(operands)))
    for lie, target in own(operands[index]).items():
        replaced = [*operands[:index], target, *operands[index + 1 :]]
        ways = [(lie, replaced)]
        for other in (i for i in range(len(operands)) if i != index):
            for kind, view in views(operands[other]).items():
                with_view = list(replaced)
                with_view[index], with_view[other] = target.clone(), view
                ways.append((f"{lie}, {kind}", with_view))
        for how, tensors in ways:
            said = _wrong_in_place(opdef, index, sig, tensors, (args, constants))
            case = f"{call_text(sig)}; in place of operand {index}, memory: {how}"
            yield WrongCase("MD0175", "in_place", case, said) if said else None


def _wrong_in_place(
    opdef: OpDef,
    index: int,
    sig: Signature,
    operands: list[torch.Tensor],
    how: tuple[tuple[str, ...], tuple[bool, ...]],
) -> str:
    text = call(sig, args=how[0], constants=how[1])
    written = opdef.in_place[index](text)
    if written is None:
        return ""
    expected, before = meaning_of(opdef, sig, operands), [x.clone() for x in operands]
    result = run_lines(text, written, operands, imports=opdef.imports)
    if said := unlike_on_memory(result, expected[0]) or unlike_on_memory(
        operands[index], expected[0]
    ):
        return said
    for i, x in enumerate(operands):
        if i != index and not torch.equal(x, before[i]):
            return f"operand {i} is changed"
        if i != index and share(result, x):
            return f"the result is in the memory of operand {i}"
    return ""
