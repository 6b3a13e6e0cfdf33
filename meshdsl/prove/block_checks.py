"""Blocks of several sizes, and empty ones: every split that an operator declares, tried on them.

Each device has its blocks, and where a loop reads more of an operand, that window of the whole. The
results, by the numpy meaning and by the torch text, joined are the result of the whole.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from meshdsl.backends.torch.op_context import TorchText
from meshdsl.ops.opdef import NumpyCall, OpDef, OpError, Sample, Signature
from meshdsl.placed.placements import Split
from meshdsl.placed.sharding_rules import Row, rows
from meshdsl.prove.row_prover import localised
from meshdsl.prove.sample_values import draw, join, results, signature
from meshdsl.prove.torch_run import result_of, run_lines, several, to_torch
from meshdsl.prove.window_rows import piece
from meshdsl.prove.wrong_cases import Cases, WrongCase, call_text, difference

WAYS: tuple[tuple[int, ...], ...] = ((3,), (4,), (5,), (2, 2), (3, 2))
"""Numbers of blocks along each axis. Dims of the samples are of sizes 2, 4, 6 and 8: among these
are blocks of several sizes, of one element, and none."""

SIZES: tuple[tuple[int, tuple[int, ...]], ...] = ((5, (2,)), (3, (2,)), (1, (2,)), (7, (2, 2)))
"""Sizes that a loop is given, and its blocks."""

Piece = tuple[NumpyCall, list[np.ndarray[Any, Any]]]


def uneven_rows(opdef: OpDef, sig: Signature, ways: tuple[int, ...]) -> list[Row]:
    """The rows that split a dim which so many blocks do not divide, as far as they are legal."""
    count = math.prod(ways)
    candidates = rows(opdef.factors(sig), len(sig.ins), len(sig.outs))
    return [r for r in candidates if _is_uneven(sig, r, count) and _is_legal(opdef, sig, r, count)]


def _splits(sig: Signature, row: Row) -> dict[str, int]:
    """The dims that a row splits, first those of results, with their sizes."""
    types = zip((*sig.outs, *sig.ins), (*row.outs, *row.ins), strict=True)
    return {c.dim: t.size(c.dim) for t, c in types if isinstance(c, Split)}


def _is_uneven(sig: Signature, row: Row, count: int) -> bool:
    return any(size % count for size in _splits(sig, row).values())


def _is_legal(opdef: OpDef, sig: Signature, row: Row, count: int) -> bool:
    if opdef.legal is None:
        return True
    sides = ({c.dim: count for c in s if isinstance(c, Split)} for s in (row.ins, row.outs))
    return opdef.legal(sig, *sides)


# --- samples of other sizes -----------------------------------------------------------------------


def resized(opdef: OpDef, sample: Sample, dims: list[str], size: int) -> Sample | None:
    """The sample with the first of the dims of a size, and the others as it then has to be."""
    for others in itertools.product(range(1, 3 * size + 8), repeat=len(dims) - 1):
        sizes = dict(zip(dims, (size, *others), strict=True))
        ins, attrs = (localised(part, sizes) for part in (sample.ins, sample.attrs))
        other = dataclasses.replace(sample, ins=ins, attrs=attrs)
        try:
            sig = signature(opdef, other)
        except OpError:
            continue
        if all(t.size(d) == n for t in sig.outs for d, n in sizes.items() if t.has(d)):
            return other
    return None


def loops_of_sizes(
    opdef: OpDef, every: bool = False
) -> Iterator[tuple[Sample, tuple[int, ...], str]]:
    """Samples with a loop of one of `SIZES`, the blocks, and the loop.

    Each row once, on the first sample that has it, unless `every` sample is wanted.
    """
    seen = set()
    for sample in opdef.samples:
        sig = signature(opdef, sample)
        for row in rows(opdef.factors(sig), len(sig.ins), len(sig.outs)):
            if row.factor is None or (row in seen and not every):
                continue
            seen.add(row)
            dims = list(_splits(sig, row))
            for size, ways in SIZES:
                other = resized(opdef, sample, dims, size)
                other = other or resized(opdef, sample, dims[::-1], size)
                if other is not None:
                    yield other, ways, row.factor.name


# --- the blocks -----------------------------------------------------------------------------------


def text_call(sig: Signature, pieces: list[Piece]) -> TorchText:
    """The call as an emitter makes it: local types have the largest sizes."""
    numbers, calls = itertools.count(), [call for call, _ in pieces]
    extents = {d: [c.extents[d] for c in calls] for d in calls[0].extents}
    windows = {of: [c.windows[of] for c in calls] for of in calls[0].windows}
    largest = {d: max(sizes) for d, sizes in extents.items()}
    ins = [t.resized(largest) for t in sig.ins]
    for (index, dim), held in windows.items():
        ins[index] = ins[index].resized({dim: max(stop - start for start, stop in held)})
    none_read = (of for of, held in windows.items() if any(a == b for a, b in held))
    return TorchText(
        args=tuple(f"x{i}" for i in range(len(sig.ins))),
        constants=(False,) * len(sig.ins),
        ins=tuple(ins),
        outs=tuple(t.resized(largest) for t in sig.outs),
        global_ins=sig.ins,
        global_outs=sig.outs,
        attrs=sig.attrs,
        fresh=lambda hint: f"{hint}_{next(numbers)}",
        place="'test.mdsl:1'",
        offsets={d: functools.partial(str, f"at_{d}") for d in extents},
        splits=frozenset(extents),
        extents={
            d: functools.partial(str, f"n_{d}")
            for d, sizes in extents.items()
            if len(set(sizes)) > 1
        },
        empty=frozenset((*(d for d, sizes in extents.items() if not all(sizes)), *none_read)),
        starts={(i, d): functools.partial(str, f"at_{i}_{d}") for i, d in windows},
        parts=lambda of_output, of_operand: tuple(
            (_interval(c, of_output), c.windows.get((0, of_operand), _interval(c, of_operand)))
            for c in calls
        ),
    )


def _interval(call: NumpyCall, dim: str) -> tuple[int, int]:
    """What a device has of a dim: all of it, where it is not split."""
    if dim not in call.extents:
        return 0, call.size(dim)
    return call.offset(dim), call.offset(dim) + call.extents[dim]


def pieces_of(
    sig: Signature, row: Row, wholes: list[np.ndarray[Any, Any]], ways: tuple[int, ...]
) -> list[Piece]:
    """What each device has. A window that is the block itself, on all of them, is none."""
    pieces = [piece(sig, row, wholes, ways, at) for at in itertools.product(*map(range, ways))]
    used = {
        of
        for call, _ in pieces
        for of, window in call.windows.items()
        if window != (call.offset(of[1]), call.offset(of[1]) + call.extent(of[1]))
    }
    return [
        (
            dataclasses.replace(c, windows={of: w for of, w in c.windows.items() if of in used}),
            xs,
        )
        for c, xs in pieces
    ]


def blocks_of(opdef: OpDef, sig: Signature, pieces: list[Piece]) -> dict[str, list[Any]]:
    """What each device makes of its parts: by the numpy meaning, and by the torch text."""
    blocks: dict[str, list[Any]] = {"numpy": [], "torch": []}
    for call, local in pieces:
        blocks["numpy"].append([np.asarray(a) for a in results(opdef, call, local)])
        text = text_call(sig, pieces)
        operands = [to_torch(a, t) for a, t in zip(local, sig.ins, strict=True)]
        names = {f"at_{d}": n for d, n in call.offsets.items()}
        names |= {f"n_{d}": n for d, n in call.extents.items()}
        names |= {f"at_{i}_{d}": start for (i, d), (start, _) in call.windows.items()}
        value = run_lines(text, opdef.torch(text), operands, 0, names, opdef.imports)
        outputs = several(result_of(opdef, value, operands))
        blocks["torch"].append(
            [(m.double() if m.is_floating_point() else m).numpy() for m in outputs]
        )
    return blocks


def drawn(sig: Signature, sample: Sample) -> list[np.ndarray[Any, Any]]:
    """Operands with zeros and ties among them; indices are of the dim as it is now."""
    rng, arrays = np.random.default_rng(5), []
    sizes = {d.name: d.size for t in (*sig.ins, *sig.outs) for d in t.dims}
    for type_, kind in zip(sig.ins, sample.values, strict=True):
        array = draw(type_, kind, rng)
        if kind.startswith("index:"):
            array %= sizes.get(kind.removeprefix("index:"), 8)
        elif kind == "int":
            array[rng.random(array.shape) < 0.2] = 0
        arrays.append(array)
    return arrays


def on_blocks(
    opdef: OpDef, sample: Sample, sig: Signature, row: Row, ways: tuple[int, ...]
) -> Cases:
    """Blocks of several sizes under a row: by the numpy meaning, and by the torch text."""
    wholes = drawn(sig, sample)
    with np.errstate(all="ignore"):
        expected = results(opdef, NumpyCall(sig.ins, sig.outs, sig.attrs), wholes)
        pieces = pieces_of(sig, row, wholes, ways)
        blocks = blocks_of(opdef, sig, pieces)
    for which, outputs in blocks.items():
        for i, (out, type_) in enumerate(zip(row.outs, sig.outs, strict=True)):
            outs = [m[i] for m in outputs]
            said = ""
            if isinstance(out, Split):
                at = type_.index(out.dim)
                sizes = [call.extents[out.dim] for call, _ in pieces]
                shapes = [a.shape[at] for a in outs]
                said = "" if shapes == sizes else f"blocks of {shapes} instead of {sizes}"
            if not said:
                got = join(outs, out, type_)
                tolerance = {"numpy": 1e-9, "torch": 1e-4}[which]  # f32 rounds
                said = difference(got, expected[i], tolerance, type_.names, floor=1.0)
            yield _problem(sig, row, which, ways, said)


def _problem(
    sig: Signature, row: Row, which: str, ways: tuple[int, ...], said: str
) -> WrongCase | None:
    """A block that is wrong by the numpy meaning or the torch text; None where nothing is said."""
    if not said:
        return None
    code = {"numpy": "MD0171", "torch": "MD0173"}[which]
    part = {"numpy": "factors", "torch": "torch"}[which]
    devices = " x ".join(map(str, ways))
    case = f"{call_text(sig)}; {row} on {devices} devices, with blocks of several sizes"
    return WrongCase(code, part, case, said)
