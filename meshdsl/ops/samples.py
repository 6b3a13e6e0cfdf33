"""The notation of samples: operands, their dtypes, and attributes in one line.

`"v h; b s: i32 | dim=v"` is a table over `v` and `h` and integers over `b` and `s`, with the
attribute `dim`. Operands are separated by `;`; one without dims is `()`, and nothing before `|` is
a call without operands. A dtype may be followed by a distribution: `b h: f32 half`. A dim is one of
`b s h v`, or has its size where it is named first: `part=2`. A value is a dim, a dtype, a Python
literal without blanks, or a tuple of values in parentheses: `pairs=((s m=4) (b c=2))`.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import overload

from meshdsl.ir.types import ELEMENT_TYPES, F32, Dim, DType, TensorType
from meshdsl.ops.opdef import Sample

BATCH, SEQ, HIDDEN, VOCAB = Dim("b", 2), Dim("s", 4), Dim("h", 6), Dim("v", 8)
"""Dims that need no size in a sample; every size is even, so that two ranks can split each."""

_WORD = re.compile(r"[()]|[^\s()]+")
_DIM = re.compile(r"([a-z]\w*)(?:=(\d+))?")


class SampleList(Sequence[Sample]):
    """Samples that are made when one is first asked for: no command that compiles needs any."""

    def __init__(self, make: Callable[[], Iterable[Sample]]) -> None:
        self.make = make

    @functools.cached_property
    def every(self) -> tuple[Sample, ...]:
        """The samples."""
        return (*self.make(),)

    @overload
    def __getitem__(self, at: int) -> Sample: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Sample]: ...
    def __getitem__(self, at: int | slice) -> Sample | Sequence[Sample]:
        return self.every[at]

    def __len__(self) -> int:
        return len(self.every)


def samples(*texts: str, values: str = "int", dtype: DType = F32) -> SampleList:
    """The samples of several lines, each read by `sample`."""
    return SampleList(lambda: (sample(text, values=values, dtype=dtype) for text in texts))


def sample(text: str, values: str = "int", dtype: DType = F32) -> Sample:
    """The sample of one line; operands without a dtype have `dtype`.

    `values` names one distribution (see `Sample`) for all operands, or one for each; more than
    there are operands may be named. Bools are drawn from `bool`.
    """
    operands, _, attrs = text.partition("|")
    reader = _Reader()
    texts = operands.split(";") if operands.strip() else []
    kinds = values.split() if " " in values else [values] * len(texts)
    assert len(kinds) >= len(texts), f"{len(kinds)} distributions for the operands of {text!r}"
    read = [reader.operand(t, dtype, kind) for t, kind in zip(texts, kinds, strict=False)]
    attributes = tuple(reader.attributes(iter(_WORD.findall(attrs))))
    return Sample(tuple(t for t, _ in read), attributes, tuple(kind for _, kind in read))


class _Reader:
    """Reads one line; it remembers the sizes of the dims that the line has named."""

    def __init__(self) -> None:
        self.sizes = {d.name: d.size for d in (BATCH, SEQ, HIDDEN, VOCAB)}

    def operand(self, text: str, dtype: DType, kind: str) -> tuple[TensorType, str]:
        """The type and the distribution of an operand: `b s`, `b s: i32`, `(): f32 half`."""
        dims, _, dtype_and_kind = text.partition(":")
        written_dtype, written_kind, *_ = (*dtype_and_kind.split(), "", "")
        dtype = ELEMENT_TYPES[written_dtype] if written_dtype else dtype
        words = [] if dims.strip() == "()" else dims.split()
        kind = written_kind or ("bool" if dtype.kind == "bool" else kind)
        return TensorType(tuple(self._dim(w) for w in words), dtype), kind

    def attributes(self, words: Iterator[str]) -> Iterator[tuple[str, object]]:
        """The attributes by name, in order."""
        for word in words:
            name, _, value = word.partition("=")
            yield name, self._value(value or next(words), words)

    def _value(self, word: str, words: Iterator[str]) -> object:
        """The value that begins with `word`."""
        if word == "(":
            return tuple(self._value(w, words) for w in iter(lambda: next(words), ")"))
        if word in ELEMENT_TYPES:
            return ELEMENT_TYPES[word]
        if word.lstrip("-") == "inf":
            return float(word)
        return self._dim(word) if _DIM.fullmatch(word) else ast.literal_eval(word)

    def _dim(self, word: str) -> Dim:
        """A dim by name, or with the size that it has from here on: `part=2`."""
        match = _DIM.fullmatch(word)
        assert match, f"{word!r} is not a dim of a sample"
        name, size = match.groups()
        if size:
            self.sizes[name] = int(size)
        assert name in self.sizes, f"the dim {name!r} of a sample has no size: write `{name}=2`"
        return Dim(name, self.sizes[name])
