"""Dims with their sizes, element types, and the two together: the type of a tensor."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any, NoReturn, cast

from meshdsl.api.argument_types import kind_of
from meshdsl.api.errors import told
from meshdsl.api.sizes import Moment, Number, Size, SizeArithmetic, Taken, computed, number_of
from meshdsl.api.source_location import here
from meshdsl.diagnostics import Span, did_you_mean, fail
from meshdsl.ir import types
from meshdsl.named.size_formulas import size_of
from meshdsl.syntax.tokens import is_name

MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Dim(SizeArithmetic):
    """A named dimension. In arithmetic it is its size.

    >>> import meshdsl as md
    >>> batch, io = md.dims(batch=64, io=512)
    >>> 4 * io
    2048
    >>> batch >> io
    batch >> io

    `seq >> mem` is an arrow for views, `h.by(kh) >> ho` a window that slides, and `batch @ "data"`
    pins the dim of one tensor to a mesh axis (`@ ("x", "y")`: outer first; `@ None`: to no axis).
    """

    name: str
    _size: int
    span: Span = field(compare=False, repr=False)
    _made_of: Size | None = field(default=None, compare=False, repr=False)
    _computed: Moment | None = field(default=None, compare=False, repr=False)
    _taken: Taken = field(default_factory=Taken, compare=False, repr=False)

    @property
    def size(self) -> int:
        """The size as a plain number, without the dim that it is of."""
        return self.__index__()

    def by(self, window: Dim | int) -> By:
        """`h by kh`, `h by 3`: a dim and the window that slides along it; `h.by(3) >> ho`."""
        return By(self, window)

    def _number(self) -> Number:
        return size_of(types.Dim(self.name, self._size))

    def _dims(self) -> tuple[Dim, ...]:
        return (self,)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return self.name

    def __rshift__(self, target: Dim | tuple[Dim, ...]) -> Arrow:
        return Arrow((self,), target if isinstance(target, tuple) else (target,))

    def __rrshift__(self, sources: tuple[Dim, ...]) -> Arrow:
        if not isinstance(sources, tuple):
            return NotImplemented
        return Arrow(sources, (self,))

    def __matmul__(self, axes: str | tuple[str, ...] | None) -> Pinned:
        return Pinned(self, (axes,) if isinstance(axes, str) else tuple(axes or ()))


@dataclass(frozen=True, slots=True)
class Arrow:
    """`seq >> mem`, `model >> (heads, key)` or `(heads, key) >> model`, for views."""

    sources: tuple[Dim, ...]
    targets: tuple[Dim, ...]

    def __repr__(self) -> str:
        def side(dims: tuple[Dim, ...]) -> str:
            return dims[0].name if len(dims) == 1 else f"({', '.join(d.name for d in dims)})"

        return f"{side(self.sources)} >> {side(self.targets)}"


@dataclass(frozen=True, slots=True)
class By:
    """`h.by(kh)`: a dim and its window; `h.by(kh) >> ho` names what comes of it."""

    dim: Dim
    window: Dim | int
    target: Dim | None = None

    def __rshift__(self, target: Dim) -> By:
        return By(self.dim, self.window, target)

    def __repr__(self) -> str:
        out = "" if self.target is None else f" >> {self.target}"
        return f"{self.dim}.by({self.window}){out}"


@dataclass(frozen=True, slots=True)
class Pinned:
    """`batch @ "data"`: a dim of one tensor, pinned to mesh axes whatever the layout.

    `axes` is empty for `@ None`.
    """

    dim: Dim
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """Dims and an element type, as in `md.i32[batch, seq]`; `dtype` None leaves it open."""

    dims: tuple[Dim | Pinned | EllipsisType, ...]
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class DType:
    """An element type; `md.bf16[batch, io]` is the type of a tensor of it."""

    name: str

    def __getitem__(self, dims: Any) -> TensorType:
        return TensorType(as_tuple(dims), self.name)

    def __repr__(self) -> str:
        return self.name


f32, f64, bf16, f16, i32, i64 = map(DType, ("f32", "f64", "bf16", "f16", "i32", "i64"))
bool = DType("bool")


def as_tuple(dims: Any) -> tuple[Any, ...]:
    """The items in brackets as a tuple."""
    return tuple(dims) if isinstance(dims, tuple | list) else (dims,)


# --- making dims -----------------------------------------------------------------------------


@told
def dims(**sizes: int | Dim | Size) -> tuple[Dim, ...]:
    """Dims with the given sizes, in the order given. A dim as a size gives another name to it.

    >>> import meshdsl as md
    >>> batch, seq = md.dims(batch=8, seq=128)
    >>> batch, seq.size
    (batch, 128)

    Raises:
        ProgramError: a size is not a whole number of 1 or more (MD0105, MD0106).
    """
    site = here()
    return tuple(_dim(name, size, site.argument(name)) for name, size in sizes.items())


@told
def dim(name: str, size: int | Dim | Size | None = None, *, like: Dim | None = None) -> Dim:
    """One dim: `md.dim("hidden", 4 * io)`, or `md.dim("mem", like=seq)`, of the same size.

    Raises:
        ProgramError: a name or a size that the language does not allow (MD0105, MD0106, MD0817).
    """
    site = here()
    if (size is None) == (like is None):
        help = 'write `md.dim("hidden", 4 * io)` or `md.dim("mem", like=seq)`'
        fail(
            "MD0105",
            f"the dim `{name}` needs a size, or a dim that it is like",
            site.span,
            help=help,
        )
    if size is None:
        return _dim(name, like, site.span, site.argument("like"))
    return _dim(name, size, site.span, site.argument("size", 1))


def _dim(name: str, given: Any, span: Span, place: Span | None = None) -> Dim:
    """The dim written at `span`, with its size written at `place`."""
    check_name("dim", name, span)
    number = number_of(given)
    if number is None and hasattr(given, "__index__"):
        number = given.__index__()
    if isinstance(given, builtins.bool) or not isinstance(number, int):
        help = "use whole numbers; `//` divides them"
        fail("MD0105", f"the size of `{name}` is no whole number: {given!r}", span, help=help)
    size = int(number)
    if size < 1:
        help = "give a whole number of 1 or more"
        fail("MD0105", f"a size must be at least 1, and `{name}` is {size}", span, help=help)
    if size > MAX_SIZE:
        help = "choose a smaller size; several dims together may have up to 2^63 - 1 elements"
        fail(
            "MD0106", f"the size of `{name}` is larger than {MAX_SIZE} (2^31 - 1)", span, help=help
        )
    made_of = cast(Size, +given) if isinstance(given, SizeArithmetic) else None
    return Dim(name, size, span, made_of, computed(given, place or span))


MAX_SEED = (1 << 63) - 1
"""The greatest seed, and the least one negated."""


def check_seed(seed: Any) -> int:
    """The seed as a whole number. Raises MD0604 for any other, and for one out of range."""
    try:
        number = operator.index(seed)
    except TypeError:
        fail("MD0604", f"a seed is a whole number, not {seed!r}", help="for instance `seed=0`")
    if not -MAX_SEED <= number <= MAX_SEED:
        message = f"the seed {number} is not in {-MAX_SEED} … {MAX_SEED}"
        fail("MD0604", message, help="choose a smaller number")
    return number


def check_name(what: str, name: Any, span: Span) -> None:
    """Refuse a name that cannot be written in the language (MD0817)."""
    if not isinstance(name, str) or not is_name(name):
        help = "use ASCII letters, digits and `_`, and no word of the language such as `param`"
        fail("MD0817", f"`{name}` cannot name a {what}", span, help=help)


def need_dim(found: Any, span: Span, known: Iterable[str] = ()) -> Dim:
    """The dim `found`; MD0815 if it is none."""
    if isinstance(found, Dim):
        return found
    _no_dim(found, span, known)


def _no_dim(found: Any, span: Span, known: Iterable[str]) -> NoReturn:
    close = did_you_mean(found, list(known)) if isinstance(found, str) else None
    help = close or "dims are made by `batch, io = md.dims(batch=64, io=512)`"
    if isinstance(found, str) and found in known:
        help = f"use the dim itself: `{found}`, not its name in quotes"
    fail("MD0815", f"a dim is needed here, not {kind_of(found)}", span, help=help)
