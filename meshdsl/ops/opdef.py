"""One operator, one record: an `OpDef` has everything the compiler knows of an operator.

Shape rule, factors (the loops it runs over, from which its legal placements follow), numpy meaning,
and how torch writes it. The local work of a sharded operator is the same operator on local shapes;
where it is not (a gather from a split table, `iota`), numpy and torch read the part's offset from
the call. No file of operators imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, ParamSpec, Protocol

from meshdsl.backends.runtime.values import span
from meshdsl.ir.types import Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.ways import Way
from meshdsl.records import dataclass

Attrs = Mapping[str, Any]
Types = tuple[TensorType, ...]
Grads = Mapping[int, Value]
"""The gradients of operands, by index."""
ReduceOp = Literal["sum", "max", "min", "prod"]


class OpError(Exception):
    """A call that an operator refuses. `from_syntax` turns it into a diagnostic at the call.

    The help is of the `ways` out that the text has a place for; `help` where there are none. `also`
    is said after either: another way out, or the rule that the call breaks.
    """

    def __init__(
        self,
        code: str,
        message: str,
        help: str | None = None,
        *ways: Way,
        also: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.message, self.help = code, message, help
        self.ways, self.also = ways, also


@dataclass(frozen=True, slots=True)
class Reads:
    """The interval of an operand's dim that a block of a loop reads, a window of the operand.

    Indices [o0, o1) of the loop read [ceil((mul*o0 + lo)/div), floor((mul*(o1-1) + hi)/div)],
    inclusive; with `flip` the interval is mirrored, i to size-1-i. What lies outside of the dim is
    `fill`; where that is None the window ends at the border, and with "wrap" it goes on at the
    other end. (XLA calls the like of it
    `MultiplyAddDivideOffsetCalculation`.)
    """

    mul: int = 1
    div: int = 1
    lo: int = 0
    hi: int = 0
    flip: bool = False
    fill: float | Literal["wrap"] | None = 0.0

    def span(self, o0: int, o1: int, size: int) -> tuple[int, int]:
        """What [o0, o1) reads of a dim of `size`, half open; it may begin and end outside.

        It is empty for an empty block.
        """
        return span((o0, o1), size, (self.mul, self.div, self.lo, self.hi, self.flip))

    def interval(self, o0: int, o1: int, size: int) -> tuple[int, int]:
        """`span`, half open, as far as it lies in the dim."""
        start, stop = (min(max(i, 0), size) for i in self.span(o0, o1, size))
        return start, stop

    def window(self, o0: int, o1: int, size: int) -> tuple[int, int]:
        """What an operator is given for [o0, o1): `span`, or `interval` where nothing is filled."""
        return (self.interval if self.fill is None else self.span)(o0, o1, size)


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop of an operator: the dim it indexes in each operand and each output, or None.

    Splitting it splits the operands and outputs that have it. Outputs that lack it are reduced with
    `reduce`, or are the same everywhere. `ins` and `outs` are dim names.
    `reads` has per operand what a block of the loop reads of its dim; None is the block itself.
    Empty: all None. The blocks of the loop are those of an output or operand without `Reads`.
    """

    name: str
    ins: tuple[str | None, ...]
    outs: tuple[str | None, ...]
    reduce: ReduceOp | None = None
    reads: tuple[Reads | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Factors:
    """Legal placements of a call as data (GSPMD's and Shardy's sharding rule, with partial values).

    `loops` may be split. Dims in no loop need whole data.
    `linear`: sets of operands; a partial sum in all of one set, and whole copies of the others,
    gives a partial sum. `monotone`: operands through which partial maxima and minima pass.
    """

    loops: tuple[Factor, ...]
    linear: tuple[frozenset[int], ...] = ()
    monotone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Signature:
    """The global types and attributes of one call."""

    ins: Types
    outs: Types
    attrs: Attrs


@dataclass(frozen=True, slots=True)
class Filled:
    """Of the positions along `dims` at most `count` are not 0; which, may differ along `over`."""

    dims: frozenset[str]
    count: int
    over: frozenset[str]


@dataclass(frozen=True, slots=True)
class Operand:
    """What a rule of zeros may know of an operand: its fact, its operator, its value if constant.

    A parameter or an input has the operator "".
    """

    filled: Filled | None = None
    maker: str = ""
    number: float | None = None


ZeroRule = Callable[[Signature, Sequence[Operand]], Filled | None]
"""The fact of a result, from those of the operands."""


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """Of an operator on rows that lie group by group before padding (`ops/grouped_einsum.py`).

    row:     operand types and attributes -> the dim along which the rows lie.
    sizes:   the operand with the number of rows of each group.
    skips:   the operands whose padding the operator does not read.
    is_zero: whether the result is 0 in the padding.
    filled:  operand types and attributes -> how many rows the groups have at most, over the row dim
             and other dims that are counted with it; None: the operator does not say.
    """

    row: Callable[[Types, Attrs], str]
    sizes: int
    skips: tuple[int, ...]
    is_zero: bool
    filled: Callable[[Types, Attrs], tuple[tuple[str, ...], int]] | None = None


@dataclass(frozen=True, slots=True)
class NumpyCall:
    """One call on numpy arrays, whole or local.

    `ins` and `outs` are the global types. `extents` and `offsets` give, for each split dim, the
    size and the first index of this part; a dim that is not there is whole. `windows` gives, for
    an operand (by index) and a dim of which it is given a window, the first index and the end.
    `place` names the source line for run-time errors.
    """

    ins: Types
    outs: Types
    attrs: Attrs
    extents: Mapping[str, int] = field(default_factory=dict)
    offsets: Mapping[str, int] = field(default_factory=dict)
    place: str = ""
    windows: Mapping[tuple[int, str], tuple[int, int]] = field(default_factory=dict)

    def size(self, dim: str) -> int:
        """Global size of `dim`, wherever it occurs."""
        return _size((*self.ins, *self.outs), dim)

    def extent(self, dim: str) -> int:
        """Local size of `dim`."""
        return self.extents.get(dim, self.size(dim))

    def offset(self, dim: str) -> int:
        """Global index of the first local element of `dim`."""
        return self.offsets.get(dim, 0)

    def is_split(self, dim: str) -> bool:
        """Whether this part has only some of `dim`."""
        return dim in self.extents

    def is_window(self, index: int, dim: str) -> bool:
        """Whether operand `index` is what the row's `Reads` say of `dim`, with the fill.

        It may be no more than its block.
        """
        return (index, dim) in self.windows

    def start(self, index: int, dim: str) -> int:
        """Global index of the first element of `dim` in operand `index`; < 0 where it is fill."""
        return self.windows[index, dim][0] if self.is_window(index, dim) else self.offset(dim)

    def local(self, type_: TensorType) -> TensorType:
        """`type_` with local sizes."""
        return type_.resized(dict(self.extents))


Intervals = tuple[tuple[int, int], tuple[int, int]]
"""Two intervals [start, stop)."""


class TorchCall(Protocol):
    """One call to be written as torch text. Types are local: those of one device's shards.

    A record's `torch` returns the text of one expression. It may first put values into variables
    with `let`, and request a function of `backends/runtime` with `use`.
    """

    @property
    def args(self) -> tuple[str, ...]:
        """The text of each operand: a variable, or a literal for a constant.

        Safe to follow by `.f()` only through `tensor(i)`.
        """

    @property
    def ins(self) -> Types:
        """Local types of the operands."""

    @property
    def outs(self) -> Types:
        """Local types of the outputs."""

    @property
    def attrs(self) -> Attrs:
        """The attributes of the operator."""

    @property
    def whole(self) -> str:
        """The variable of which operand 0 is a chunk; empty where it is none."""

    @property
    def lines(self) -> list[str]:
        """The statements that precede the expression; a check without a result is added here."""

    @property
    def long(self) -> Mapping[int, str]:
        """By operand of integers, the variable that has it as i64, if one does."""

    @property
    def numbers(self) -> Mapping[int, str]:
        """By operand that is one integer, the variable that has it as an int of Python."""

    @property
    def leaves_long(self) -> bool:
        """Whether the result may be left in i64: it is only read as indices."""

    @property
    def place(self) -> str:
        """Python string literal with the source place, for run-time errors (`'mlp.mdsl:15'`)."""

    def tensor(self, index: int) -> str:
        """Operand `index` as the text of a tensor (constants become one, too)."""

    def is_constant(self, index: int) -> bool:
        """Whether operand `index` is a literal."""

    def seen(self, index: int, dim: str) -> bool:
        """Whether operand `index` was checked to be indices of `dim`; records that it now is."""

    def size(self, dim: str) -> int:
        """Global size of `dim`."""

    def is_split(self, dim: str) -> bool:
        """Whether a device has only some of `dim`."""

    def offset(self, dim: str) -> str:
        """Text of the global index of the first local element of `dim` (`0` when it is whole)."""

    def is_window(self, index: int, dim: str) -> bool:
        """Whether operand `index` is what the row's `Reads` say of `dim`, with the fill."""

    def start(self, index: int, dim: str) -> str:
        """Text of the global index of the first element of `dim` in operand `index`.

        It is below 0 where a window begins with fill.
        """

    def parts(self, of_output: str, of_operand: str, /) -> tuple[Intervals, ...]:
        """What each device has of a dim of the output, and of one of operand 0, as numbers.

        Empty where the dims are not split over the same axes, or that is not known.
        """

    def extent(self, dim: str) -> str:
        """Text of the local size of `dim`: a variable where devices have blocks of several sizes.

        Local types have the largest. What is written of a size is this, or `shape`.
        """

    def may_be_empty(self, dim: str, index: int | None = None) -> bool:
        """Whether some device has nothing of `dim`; of a window of operand `index`, if given."""

    def shape(self, index: int) -> str:
        """Text of the local shape of output `index`, a tuple."""

    def aligned(self, index: int, dims: tuple[Dim, ...]) -> str:
        """Operand `index`, transposed and indexed by `None` to broadcast against `dims`."""

    @property
    def is_list(self) -> bool:
        """Whether it updates several parameters; `ins` and `args` are those of the first."""

    def listed(self, index: int, dims: tuple[Dim, ...]) -> str:
        """The list of operand `index` of each parameter, aligned as by `aligned`."""

    def let(self, hint: str, text: str) -> str:
        """Assign `text` to a fresh variable named after `hint`; returns the variable."""

    def let_number(self, index: int, text: str) -> str:
        """Assign `text`, operand `index` as an int of Python, to a variable; returns that."""

    def let_all(self, hints: tuple[str, ...], text: str) -> tuple[str, ...]:
        """Assign the several values of `text` to variables, fresh unless some have them."""

    def let_long(self, index: int, text: str) -> str:
        """Assign `text`, operand `index` as i64, to a variable; returns that."""

    def use(self, function: str) -> str:
        """Request a function of the support library; returns the name to call it by."""


class Backward(Protocol):
    """One call to be differentiated. Operators emitted here become part of the backward pass.

    The gradient of a tensor has its dtype and no dims but its own. It lacks the dims along which it
    is constant: pointwise operators broadcast by name, so nothing is materialised too early.
    """

    @property
    def ins(self) -> Types:
        """Global types of the operands."""

    @property
    def outs(self) -> Types:
        """Global types of the results."""

    @property
    def attrs(self) -> Attrs:
        """The attributes of the operator."""

    @property
    def grad(self) -> Value:
        """The cotangent of the first result; some of its dims may be missing.

        Further results, such as indices, have none.
        """

    def wanted(self, index: int) -> bool:
        """Whether the gradient of operand `index` is used."""

    def operand(self, index: int) -> Value:
        """Operand `index`. Reading it stores it until the backward pass (or rematerialises it)."""

    def result(self, index: int = 0) -> Value:
        """Result `index` of the call; stored likewise."""

    def emit(self, name: str, *operands: Value | float, **attrs: Any) -> Value:
        """An operator of one result; numbers take the dtype of the first float, or first tensor."""

    def emit_all(self, name: str, *operands: Value, **attrs: Any) -> tuple[Value, ...]:
        """Apply an operator of several results."""

    def full(self, value: Value, dims: tuple[Dim, ...]) -> Value:
        """`value` with all of `dims`, in this order: broadcast over those it lacks."""

    def sized(self, value: Value, index: int) -> Value:
        """`value`, given per element of the result, summed and scaled for operand `index`.

        Summed over the dims that the operand does not have; of those, one that `value` lacks as
        well counts with its size.
        """


Infer = Callable[[Types, Attrs], Types]
Bind = Callable[[Attrs, Types], Attrs]
Gradient = Callable[[Backward], Grads]
InPlace = Callable[[TorchCall], str]
Adds = Callable[[TorchCall, str], str]
FitsIn = Callable[[int, Types, frozenset[int]], bool]
Scratch = Callable[[Signature, Mapping[int, Any]], int]


@dataclass(frozen=True, slots=True)
class Surface:
    """The call syntax of an operator: `name[items](args, options)`.

    items: `none`; `dims` (one or more); `dims?` (none means all); `dim` (exactly one); `arrow`
    (`a -> b`); `join` (a dim, or `(a, b) -> c`); `out` (`(… -> [dims])`); `maker` (the dims of the
    result); `filter` (`h by kh -> ho`, windows that are dims, and `(… -> [dims])`, which may be
    left out); `slide` (`h by 3 -> ho`, windows of any size); `rows` (a dim of the result, and
    `(… -> [dims])`, which may be left out); `view` (only through a view).
    arity: least and most number of tensors, None for any number. `options`: names of constant
    arguments, in order, with defaults (they may be given by position after the tensors).
    `seeded`: the last tensor is a seed, which may be left out or be the option `seed`; the indices
    of the loops around follow it, and the attribute `stream` names the call.
    `indexed`: the last tensor has indices of the dim; the language writes it in the bracket,
    `name[dim = index](…)`.
    """

    items: Literal["none", "dims", "dims?", "dim", "arrow", "join", "out", "maker",
                   "filter", "slide", "rows", "view"]  # fmt: skip
    arity: tuple[int, int | None]
    options: tuple[tuple[str, Any], ...] = ()
    seeded: bool = False
    indexed: bool = False

    @property
    def states_result(self) -> bool:
        """Whether a call may state the dims of its result: `(… -> [dims])`."""
        return self.items in ("out", "filter", "rows")


@dataclass(frozen=True, slots=True)
class Sample:
    """A small call for the tests that loop over the registry.

    `values` is the distribution of each operand: `int` (integers), `nonzero` (those that one can
    divide by), `positive`, `half` (multiples of 0.5 that are not integers), `unit` (in (-1, 1)),
    `bool`, or `index:DIM` (valid indices of that dim).
    """

    ins: Types
    attrs: tuple[tuple[str, Any], ...] = ()
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Spelling:
    """The text of an operator in another system, and the partial values that pass through it there.

    text:     a template (or a function of the call) in the words of `backends/peers/peer_call.py`;
              without one the operator is refused (MD0910). DTensor has the torch text.
    sums:     a partial sum passes through it there; otherwise it is reduced before.
    extremes: the same of partial maxima and minima.
    becomes:  the result may be left partial where a loop that it lacks is split.
    why:      the reason for which a call is refused; none: nobody has written it yet.
    """

    text: str | Callable[[Any], str | None] | None = None
    sums: bool = False
    extremes: bool = False
    becomes: bool = False
    why: str = ""


@dataclass(frozen=True, slots=True)
class OpDef:
    """The record of one operator.

    bind:    (attrs as the call gave them, operand types) -> attrs; None keeps them.
    infer:   (operand types, attrs) -> output types; raises `OpError` on a call it refuses.
    factors: signature -> loops that may be split, and where partial values pass.
    numpy:   (call, *arrays) -> array or tuple of arrays; float arithmetic in their dtype.
    torch:   call -> text of an expression.
    exact:   no rounding on integer-valued operands (finite sums < 2**24): no exp, root, division.
    view:    a mere relabelling of operand 0, whose memory the torch result may show.
    shows:   the calls, by operand types and attributes, whose torch result may show the memory of
    operand 0; None: those of a view. Every other result has memory of its own
    (`device/aliases.py`).
    passes:  where the dim is split that operand 0 is moved along, the torch result is operand 0:
    the window that was made for it, or its block where that is all it reads.
    composite: defined in the prelude under the same name; used as one operator only where every dim
             in no loop is whole, expanded there otherwise.
    prelude_lacks: the attribute that this definition lacks: a call that has it is taken apart by a
             function of `named/expand.py`. Empty: there is none.
    flops:   signature (local types) -> floating-point operations; None counts one per output
    element.
    attended: of an attention kernel, signature -> the part of `flops` that it computes.
    legal:   further condition on a whole multi-axis placement (views): (signature, splits of the
             operand, splits of the output) -> bool, where splits map dim -> product of axis sizes.
    true_rows: placements that are numerically valid but not declared, each with the reason.
    gradient: call to be differentiated -> the gradient of every wanted operand, by index; an
              operand that is not there has none (indices, conditions). None: constant almost
              everywhere, or not of numbers.
    saving:  the operator with the same first result, and others that its gradient reads: it stands
              in the forward pass of what is differentiated. None: the gradient needs no others.
    words:   what messages call it, where no program can write its name, which is the default.
    saved:   of such an operator, the name hints of its further results.
    overwrites: operands, one per output in order, that the torch text changes in place: output `i`
              is operand `overwrites[i]`, which nobody may read afterwards. The numpy meaning
              changes nothing.
    number: a call -> text of a number of Python, for a result that is one; None: it is a tensor.
    each: of an update, how many operands a parameter has. Those of several may follow one another
          in a call, before the scalars; the results do so, too. 0: there is one of each operand.
    in_place: by operand, a call -> torch text that leaves the result in the memory of that operand.
              It is requested where the operand has the type of the result, memory of its own, and
              is dead. The text is right on any strides; not every kernel of torch minds those of
              its `out=`.
    fits_in: (operand, types of all, those that are numbers) -> whether the call has such a text;
             None: always.
    converts: the result is operand 0 in another dtype, element by element: torch's `copy_` computes
             it into any memory that has its type.
    narrows: the result is operand 0 in fewer bytes: a parameter that is not stored as it is used is
             narrowed before it is sent.
    averages: over a loop that is reduced the result is the sum divided by the loop's size: of twice
             as many elements it is as large. Other sums are twice as large.
    adds: a call, an existing tensor -> torch text that adds the result to that tensor, and makes no
          other one for it; None: there is no such text.
    adds_to: (local signature, split dims, the positions of dims of the existing tensor before which
             its memory may have gaps) -> whether a call has this text, where both tensors have one
             dtype.
    fills: a call, a contiguous tensor -> torch text that writes the result to that tensor, with no
           other one for it; None: there is no such text.
    fills_to: local signature -> whether a call has this text; None: every call.
    contiguous: local signature -> whether the torch text makes a contiguous tensor.
    adds_up: a device may call it on several tensors: the result is the sum of those of each.
    scratch: (signature of local types, operands that are numbers, by index) -> bytes that the torch
             text takes beside its results while it runs, or, of a result that shows its operand,
             of a copy that it shows instead; None: nothing of the size of an operand.
    infix: the sign between its two operands in the language.
    fold:  the same of plain numbers, computed when a program is compiled; None: a number becomes a
             tensor first.
    precision: of floats, where a program computes in a narrow dtype (mixed precision): `widest` is
             that of the widest operand, `f32` at least f32 (sums, exponentials), `compute` the
             narrow one (products).
    lazy:  a sum over a mesh axis that is still to be reduced passes through it in Mesh-TensorFlow
             (`LazyAllreduceSum`), where both operands wait for the same one.
    ordered: the attribute with the dims along which an element's index counts, though a loop goes
             through them alike in all tensors that have them. Along any other such dim elements may
             lie in any order, in operands and results alike.
    earlier: operand types, attributes -> the dims that are read only up to the position of a
             result, each with the dim that this position is along: a memory and its queries, of a
             causal attention. A gradient along such a dim is of results from its position on.
    indices: the operand with indices of the attribute `dim`; None: there is none.
    below: of indices, signature -> a number that all of them are below; none is negative.
    leaves_long: the torch text leaves an i32 result in i64, as torch makes it, where it may
             (`TorchCall.leaves_long`).
    relocates: the result has elements of operand 0, or zeros; a view does so anyway.
    spelled: by system (`dtensor`, `jax`, `oneflow`), the text of an operator that is not in the
             table of `backends/peers/operator_tables.py`.
    zeros: the rule for where the (first) result is 0 whatever is computed (`ops/zeros.py`); None:
             it may be other than 0 everywhere.
    keeps_zeros: the result is 0 wherever all operands are.
    grouped: the rows and the padding of an operator on groups of rows; None: it has none.
    meaning: what the result is, in one sentence of Markdown; for the operator's page and its
             docstring.
    imports: the modules that the torch text calls functions of, by their full names; an emitted
             program imports them. For operators of packages: those of the project need none.
    """

    name: str
    surface: Surface
    infer: Infer
    factors: Callable[[Signature], Factors]
    numpy: Callable[..., Any]
    torch: Callable[[TorchCall], str]
    samples: Sequence[Sample]
    exact: bool = True
    view: bool = False
    shows: Callable[[Types, Attrs], bool] | None = None
    passes: bool = False
    composite: bool = False
    prelude_lacks: str = ""
    flops: Callable[[Signature], int] | None = None
    attended: Callable[[Signature], float] | None = None
    legal: Callable[[Signature, Mapping[str, int], Mapping[str, int]], bool] | None = None
    true_rows: Mapping[str, str] = field(default_factory=dict)
    bind: Bind | None = None
    gradient: Gradient | None = None
    saving: str | None = None
    saved: tuple[str, ...] = ()
    words: str = ""
    overwrites: tuple[int, ...] = ()
    number: Callable[[TorchCall], str] | None = None
    each: int = 0
    in_place: Mapping[int, InPlace] = field(default_factory=dict)
    fits_in: FitsIn | None = None
    converts: bool = False
    narrows: bool = False
    averages: bool = False
    adds: Adds | None = None
    adds_to: Callable[[Signature, frozenset[str], frozenset[int]], bool] | None = None
    fills: Adds | None = None
    fills_to: Callable[[Signature], bool] | None = None
    contiguous: Callable[[Signature], bool] = lambda sig: False
    adds_up: bool = False
    scratch: Scratch | None = None
    infix: str | None = None
    fold: Callable[..., float] | None = None
    precision: Literal["widest", "f32", "compute"] = "widest"
    lazy: bool = False
    ordered: str = ""
    earlier: Callable[[Types, Attrs], Mapping[str, str]] | None = None
    indices: int | None = None
    below: Callable[[Signature], int] | None = None
    leaves_long: bool = False
    relocates: bool = False
    spelled: Mapping[str, Spelling] = field(default_factory=dict)
    zeros: ZeroRule | None = None
    keeps_zeros: bool = False
    grouped: GroupedRows | None = None
    meaning: str = ""
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", self.words or f"`{self.name}`")

    def is_alike_along(self, dim: str, sig: Signature) -> bool:
        """Whether the result at an index of `dim` is made of the operands there, at each alike."""
        loops = [f for f in self.factors(sig).loops if dim in (*f.ins, *f.outs)]
        if len(loops) != 1 or any(loops[0].reads) or dim in self.ordered_dims(sig.ins, sig.attrs):
            return False
        types, names = (*sig.ins, *sig.outs), (*loops[0].ins, *loops[0].outs)
        pairs = zip(types, names, strict=True)
        return all(name == (dim if type_.has(dim) else None) for type_, name in pairs)

    def reduces(self, dims: Collection[str], sig: Signature) -> ReduceOp | Literal["mean"] | None:
        """The reduction over those of some dims that the results lack; None: none, or several."""
        gone = {d for t in sig.ins for d in t.names if d in dims and not sig.outs[0].has(d)}
        loops = [f for f in self.factors(sig).loops if not gone.isdisjoint(f.ins)]
        ways = {f.reduce for f in loops}
        covered = gone.issubset({d for f in loops for d in f.ins})
        plain = not any(any((*f.outs, *f.reads)) for f in loops)
        if (
            len(ways) != 1
            or not covered
            or not plain
            or gone & self.ordered_dims(sig.ins, sig.attrs)
        ):
            return None
        way = ways.pop()
        return "mean" if way == "sum" and self.averages else way

    def is_linear(self, operands: Collection[int], sig: Signature) -> bool:
        """Whether the result of sums of some operands is that of their addends, added up.

        A cast of floats counts as such: it rounds.
        """
        if self.converts:
            return {t.dtype.kind for t in (*sig.ins, *sig.outs)} == {"float"}
        return any(group.issuperset(operands) for group in self.factors(sig).linear)

    def ordered_dims(self, ins: Types, attrs: Attrs) -> frozenset[str]:
        """The dims along which an element's index counts in a call: rows of groups, too."""
        named = attrs[self.ordered] if self.ordered else ()
        dims: tuple[Dim, ...] = named if isinstance(named, tuple) else (named,)
        rows = () if self.grouped is None else (self.grouped.row(ins, attrs),)
        return frozenset((*(dim.name for dim in dims), *rows))

    def written_over(self, ins: Types, numbers: frozenset[int] = frozenset()) -> tuple[int, ...]:
        """The operands that have a text `in_place`, in a call where `numbers` are numbers."""
        fits = self.fits_in
        return tuple(i for i in self.in_place if fits is None or fits(i, ins, numbers))

    def overwritten(self, count: int) -> tuple[int, ...]:
        """`overwrites` in a call of so many operands, which may be those of several parameters."""
        if not self.each:
            return self.overwrites
        scalars = self.surface.arity[0] - self.each
        return tuple(at + i for at in range(0, count - scalars, self.each) for i in self.overwrites)

    def shows_operand(self, ins: Types, attrs: Attrs) -> bool:
        """Whether the torch result of a call may share the memory of operand 0."""
        return self.view if self.shows is None else self.shows(ins, attrs)


REGISTRY: dict[str, OpDef] = {}
"""The operators of the language, by name."""

ADDED: dict[str, OpDef] = {}
"""The operators of the packages that have been loaded (`named/packages.py`).

A file may call those of the packages that it uses.
"""

_Fields = ParamSpec("_Fields")


def register(opdef: OpDef) -> OpDef:
    """Put a record into the registry; its name must be new."""
    assert opdef.name not in REGISTRY, f"operator {opdef.name} is registered twice"
    REGISTRY[opdef.name] = opdef
    return opdef


def registering(record: Callable[_Fields, OpDef]) -> Callable[_Fields, OpDef]:
    """The function that makes a record as `record` does, and puts it into the registry."""

    def operator(*args: _Fields.args, **kwargs: _Fields.kwargs) -> OpDef:
        return register(record(*args, **kwargs))

    return operator


operator = registering(OpDef)
"""Put the record with these fields into the registry."""


def lookup(name: str) -> OpDef:
    """The record of operator `name`; it must exist."""
    if not _LOADED:
        load_all()
    return REGISTRY[name] if name in REGISTRY else ADDED[name]


def load_all() -> dict[str, OpDef]:
    """Import every file of operators beside this one, and return the registry."""
    if not _LOADED:
        import importlib
        import pkgutil

        import meshdsl.ops as package

        _LOADED.append(True)
        for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"meshdsl.ops.{module}")
    return REGISTRY


def signs() -> dict[str, str]:
    """The operators that the language writes between their operands, by their signs."""
    return {op.infix: name for name, op in load_all().items() if op.infix is not None}


_LOADED: list[bool] = []


def _size(types: Types, dim: str) -> int:
    for type_ in types:
        if type_.has(dim):
            return type_.size(dim)
    raise AssertionError(f"no dim {dim} in {types}")
