"""The notation of samples says all that a sample has, and no more."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshdsl.ir.types import BOOL, F32, I32, I64, Dim, DType, TensorType
from meshdsl.ops.opdef import Sample, load_all, lookup
from meshdsl.ops.samples import BATCH, HIDDEN, SEQ, VOCAB, sample, samples
from tests.ops.cases import SAMPLES
from tests.together import together

PART, MEM = Dim("part", 2), Dim("m", 4)
CASES: dict[str, Sample] = {
    "b s h": Sample((TensorType((BATCH, SEQ, HIDDEN), F32),), (), ("int",)),
    "()": Sample((TensorType((), F32),), (), ("int",)),
    "| dim=s": Sample((), (("dim", SEQ),)),
    "v h; (): i64 | dim=v": Sample(
        (TensorType((VOCAB, HIDDEN), F32), TensorType((), I64)), (("dim", VOCAB),), ("int", "int")
    ),
    "b: bool": Sample((TensorType((BATCH,), BOOL),), (), ("bool",)),
    "b: i32 half | dtype=i32": Sample((TensorType((BATCH,), I32),), (("dtype", I32),), ("half",)),
    "s | source=(s) target=(part=2) more=part": Sample(
        (TensorType((SEQ,), F32),),
        (("source", (SEQ,)), ("target", (PART,)), ("more", PART)),
        ("int",),
    ),
    "h=8 | pairs=((h m=4) (m h))": Sample(
        (TensorType((Dim("h", 8),), F32),),
        (("pairs", ((Dim("h", 8), MEM), (MEM, Dim("h", 8)))),),
        ("int",),
    ),
    '| pad="same" by=-2 rate=0.5 none=None yes=True least=-inf of=()': Sample(
        (),
        (
            ("pad", "same"),
            ("by", -2),
            ("rate", 0.5),
            ("none", None),
            ("yes", True),
            ("least", float("-inf")),
            ("of", ()),
        ),
    ),
}


@pytest.mark.parametrize("text", CASES)
def test_a_line_is_a_sample(text: str) -> None:
    assert repr(sample(text)) == repr(CASES[text])


def test_values_are_for_each_operand_or_for_all() -> None:
    assert sample("b; s", values="unit").values == ("unit", "unit")
    first, second = samples("b; s: i32", "b", values="unit index:v", dtype=I64)
    assert first.values == ("unit", "index:v")
    assert second.values == ("unit",)
    assert [t.dtype for t in first.ins] == [I64, I32]


@pytest.mark.parametrize(
    ("text", "values", "message"),
    [
        ("b part", "int", "the dim 'part' of a sample has no size: write `part=2`"),
        ("b 2s", "int", "'2s' is not a dim of a sample"),
        ("b; s; h", "int unit", "2 distributions for the operands"),
    ],
)
def test_our_mistakes_are_told(text: str, values: str, message: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(message)):
        sample(text, values=values)


def _written(value: Any) -> str:
    """A value in the notation, every dim with its size."""
    match value:
        case Dim():
            return f"{value.name}={value.size}"
        case DType():
            return value.name
        case tuple():
            return f"({' '.join(map(_written, value))})"
    return repr(value)


def test_samples_draw_indices_for_the_operand_that_the_record_names() -> None:
    for label, (name, each) in SAMPLES.items():
        dim = dict(each.attrs).get("dim")
        kind = f"index:{dim.name}" if isinstance(dim, Dim) else None
        drawn = [i for i, value in enumerate(each.values) if value == kind]
        indices = lookup(name).indices
        assert drawn == ([] if indices is None else [indices]), label


@together(name=load_all())
def test_every_sample_of_the_registry_can_be_written(name: str) -> None:
    for each in load_all()[name].samples:
        types = (f"{' '.join(map(_written, t.dims)) or '()'}: {t.dtype.name}" for t in each.ins)
        operands = [f"{text} {kind}" for text, kind in zip(types, each.values, strict=True)]
        attrs = (f"{key}={_written(value)}" for key, value in each.attrs)
        read = sample(f"{'; '.join(operands)} | {' '.join(attrs)}")
        assert repr(read) == repr(each)
