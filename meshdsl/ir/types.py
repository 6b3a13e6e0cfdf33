"""Types of tensors: named dims with sizes, and element types."""

from __future__ import annotations

import math
from dataclasses import field

from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class DType:
    """An element type: `kind` is `float`, `int`, `bool` or `f8`; `bytes` is that of one element."""

    name: str
    kind: str
    bytes: int
    numpy: str
    torch: str

    def __str__(self) -> str:
        return self.name


LARGE = 1 << 20
"""The least bytes of a tensor that the emitted program deletes after its last use.

A smaller one lives until its block ends (`device/liveness.py`).
"""

DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        DType("f32", "float", 4, "float32", "torch.float32"),
        DType("f64", "float", 8, "float64", "torch.float64"),
        DType("bf16", "float", 2, "float32", "torch.bfloat16"),
        DType("f16", "float", 2, "float16", "torch.float16"),
        DType("i32", "int", 4, "int32", "torch.int32"),
        DType("i64", "int", 8, "int64", "torch.int64"),
        DType("bool", "bool", 1, "bool", "torch.bool"),
    )
}
LARGEST = {"f32": 3.4028235e38, "f64": 1.7976931348623157e308, "bf16": 3.3895314e38, "f16": 65504.0}
"""The largest finite number of each float type."""

E4M3 = DType("e4m3", "f8", 1, "float32", "torch.float8_e4m3fn")
E5M2 = DType("e5m2", "f8", 1, "float32", "torch.float8_e5m2")
EIGHT_BIT = {d.name: d for d in (E4M3, E5M2)}
"""Operands of scaled products (`named/scaled_products.py`); a program declares none of them.

Named for the bits of exponent and significand (Micikevicius et al. 2022); numpy has their values as
float32.
"""
ELEMENT_TYPES = {**DTYPES, **EIGHT_BIT}
"""All types of elements: those of the language, and what training steps compute with."""

F32, F64, BF16, F16 = (DTYPES[n] for n in ("f32", "f64", "bf16", "f16"))
I32, I64, BOOL = (DTYPES[n] for n in ("i32", "i64", "bool"))


@dataclass(frozen=True, slots=True)
class Dim:
    """A named dimension. One name has one size in a whole file."""

    name: str
    size: int

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class TensorType:
    """Ordered named dims and a dtype. The order is that of the memory (row-major).

    `names` and `shape` are those and the sizes of the dims, in order; `elements` is their number.
    """

    dims: tuple[Dim, ...]
    dtype: DType
    names: tuple[str, ...] = field(init=False, compare=False, repr=False)
    shape: tuple[int, ...] = field(init=False, compare=False, repr=False)
    elements: int = field(init=False, compare=False, repr=False)
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        # They are read more often than anything else in the compiler.
        object.__setattr__(self, "names", tuple([d.name for d in self.dims]))
        object.__setattr__(self, "shape", tuple([d.size for d in self.dims]))
        object.__setattr__(self, "elements", math.prod(self.shape))
        object.__setattr__(self, "_hash", hash((self.names, self.shape, self.dtype.name)))

    def __eq__(self, other: object) -> bool:
        # Tables by type compare equal types that are not the same object: dim by dim takes long.
        if self is other:
            return True
        if not isinstance(other, TensorType):
            return NotImplemented
        of_dims = self._hash == other._hash and self.names == other.names
        return of_dims and self.shape == other.shape and self.dtype == other.dtype

    def __hash__(self) -> int:
        return self._hash

    @property
    def bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return self.elements * self.dtype.bytes

    def index(self, name: str) -> int:
        """Position of the dim `name`; it must be there."""
        return self.names.index(name)

    def has(self, name: str) -> bool:
        """Whether there is a dim `name`."""
        return name in self.names

    def size(self, name: str) -> int:
        """Size of the dim `name`; it must be there."""
        return self.dims[self.index(name)].size

    def without(self, *names: str) -> TensorType:
        """The same type less the dims `names`."""
        return TensorType(tuple(d for d in self.dims if d.name not in names), self.dtype)

    def along(self, dim: Dim) -> TensorType:
        """The type of so many of this type one after the other: `dim` is the first."""
        return TensorType((dim, *self.dims), self.dtype)

    def resized(self, sizes: dict[str, int]) -> TensorType:
        """The same type with other sizes for the dims in `sizes`."""
        if not sizes:
            return self
        dims = tuple(Dim(d.name, sizes[d.name]) if d.name in sizes else d for d in self.dims)
        return TensorType(dims, self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.names)}]"
