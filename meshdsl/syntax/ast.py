"""The syntax tree of `.mdsl`: the text as nodes with their spans, without meaning yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, cast

from meshdsl.diagnostics import Span
from meshdsl.records import dataclass


@dataclass(frozen=True, slots=True)
class Name:
    """An identifier at its place.

    `known` is the name of the tensor or function where that is not the identifier, and empty where
    it has none. Texts leave it None: it is for trees recorded in Python, whose variables may share
    a name.
    """

    text: str
    span: Span
    known: str | None = None

    @property
    def label(self) -> str:
        """The name of the tensor or function; empty for none."""
        return self.text if self.known is None else self.known


# --- expressions -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Number:
    """An integer or float literal; `value` is an int or a float accordingly."""

    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class String:
    """A string literal, quotes and escapes resolved."""

    value: str
    span: Span


@dataclass(frozen=True, slots=True)
class Ref:
    """A name used as a value: a tensor, or a dim whose size is meant."""

    name: Name
    span: Span


@dataclass(frozen=True, slots=True)
class Unary:
    """`-x` or `not x`; `op` is `-` or `not`."""

    op: str
    operand: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right`; `op` is one of `+ - * / ^ == != < <= > >= and or`, at `op_span`."""

    op: str
    left: Expr
    right: Expr
    op_span: Span
    span: Span


@dataclass(frozen=True, slots=True)
class DimItem:
    """A bare dim in brackets, as in `softmax[mem]` or `iota[seq]`; `...` is the name `...`."""

    dim: Name
    span: Span


@dataclass(frozen=True, slots=True)
class ArrowItem:
    """`seq -> mem`, `model -> (heads, key)`, `(heads, key) -> model`, `experts -> slots`."""

    sources: tuple[Name, ...]
    targets: tuple[Name, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ByItem:
    """`h by kh -> ho`, `w by 3`: a dim, the window that slides along it, and what comes of it.

    `target` is None where the dim stays.
    """

    dim: Name
    window: Name | Number
    target: Name | None
    span: Span


@dataclass(frozen=True, slots=True)
class PickItem:
    """`vocab = ids` or `seq = 0`: index `dim` with an integer tensor or a constant."""

    dim: Name
    index: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class SliceItem:
    """`seq = 0:128 -> prefix`; `start` and `stop` may be missing, `target` names the new dim."""

    dim: Name
    start: Expr | None
    stop: Expr | None
    target: Name | None
    span: Span


Item = DimItem | ArrowItem | ByItem | PickItem | SliceItem


@dataclass(frozen=True, slots=True)
class Keyword:
    """`stride=1` in an argument list."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class CallExpr:
    """`f[items](args, keywords -> [out])`: a function, an operator, or an einsum (with `out`).

    `items` is None without brackets, and `out` is None without an arrow.
    """

    function: Name
    items: tuple[Item, ...] | None
    args: tuple[Expr, ...]
    keywords: tuple[Keyword, ...]
    out: tuple[Name, ...] | None
    span: Span


@dataclass(frozen=True, slots=True)
class ViewExpr:
    """`tensor[items]`: rename, split, merge, pick, slice, gather."""

    tensor: Expr
    items: tuple[Item, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Bounds:
    """`1:4` among positions in brackets; either end may be missing."""

    start: Expr | None
    stop: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Foreign:
    """An expression as other languages write it: refused, with what to write here instead.

    `word` is an operator (`@ // % **`), a method or member behind a dot, `if` for
    `a if c else b`, `[]` for a list, `[:]` for a tensor with positions in brackets. `parts` are its
    operands, a receiver first.
    """

    kind: Literal["sign", "method", "member", "choice", "list", "positions"]
    word: Name
    parts: tuple[Expr | Bounds, ...]
    keywords: tuple[Keyword, ...]
    span: Span


Expr = Number | String | Ref | Unary | Binary | CallExpr | ViewExpr | Foreign


# --- statements ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DimRef:
    """`batch`, `batch@data`, `batch@(x, y)` or `batch@none` in a list of dims.

    `axes` is None when nothing is fixed, and empty for `@none`. The dim `...` is all the others, in
    functions.
    """

    dim: Name
    axes: tuple[Name, ...] | None
    span: Span


@dataclass(frozen=True, slots=True)
class Target:
    """The left of an assignment: `h`, `h[batch, hidden]`, `h[batch@data, hidden]`."""

    name: Name
    dims: tuple[DimRef, ...] | None
    span: Span


@dataclass(frozen=True, slots=True)
class Assign:
    """`targets = value`; more than one target for `top_k` and `grad`."""

    targets: tuple[Target, ...]
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class ParamDecl:
    """`param w[io, hidden]: bf16 = normal(0.02)`."""

    target: Target
    dtype: Name | None
    init: CallExpr | None
    span: Span


@dataclass(frozen=True, slots=True)
class UpdateStatement:
    """`mean := 0.9 * mean + 0.1 * m`: what a parameter is in the next step."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Repeat:
    """`repeat layers { … }`."""

    dim: Name
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Recompute:
    """`recompute { … }`."""

    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Return:
    """`return loss, y`."""

    values: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class GroupSetting:
    """`embed: lr = 1e-4` or `base: frozen`: an option of the optimizer for some parameters.

    Behind the first setting of a group others may follow without selectors: they have those of the
    first one. `value` is None where the name is a word of its own.
    """

    selectors: tuple[tuple[Name, ...], ...]
    name: Name
    value: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class GroupOptimizer:
    """`embed: adamw(lr=1e-4)`: another optimizer for some parameters."""

    selectors: tuple[tuple[Name, ...], ...]
    optimizer: CallExpr
    span: Span


@dataclass(frozen=True, slots=True)
class Minimize:
    """`minimize loss with adam(lr=1e-3) { embed: lr = 1e-4 }`."""

    value: Expr
    optimizer: CallExpr
    groups: tuple[GroupSetting | GroupOptimizer, ...]
    span: Span


Statement = Assign | UpdateStatement | ParamDecl | Repeat | Recompute | Return | Minimize


# --- declarations ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DimDecl:
    """One entry of a `dim` declaration: `hidden = 4 * io`."""

    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class MeshAxis:
    """One entry of a mesh: `rows: 2`."""

    name: Name
    size: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class MeshDecl:
    """`mesh pod = { data: 2, model: 4 } on h100`."""

    name: Name
    axes: tuple[MeshAxis, ...]
    profile: Name | None
    span: Span


@dataclass(frozen=True, slots=True)
class RuleDecl:
    """`dim -> axis`, `dim -> (a, b)`, `dim -> none`, with an optional selector and `keep`.

    `selector` is the dotted path before the colon, empty for a rule that binds every tensor.
    `axes` is empty for `none`.
    """

    selector: tuple[Name, ...]
    dim: Name
    axes: tuple[Name, ...]
    keep: bool
    span: Span


@dataclass(frozen=True, slots=True)
class SettingDecl:
    """`grads: reduce = bf16`: how what the selector names is handled; `value` is an expression."""

    selector: tuple[Name, ...]
    name: Name
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class LayoutDecl:
    """`layout pipeline extends megatron { … } with one_f_one_b[batch](8)`.

    `schedule` is what stands behind `with`, as a call also where that is a name alone. One that is
    `recorded` is a call in Python, not this text.
    """

    name: Name
    base: Name | None
    rules: tuple[RuleDecl, ...]
    schedule: CallExpr | None
    span: Span
    settings: tuple[SettingDecl, ...] = ()
    recorded: bool = False


@dataclass(frozen=True, slots=True)
class ScheduleAction:
    """`F0` or `F0@2` in the row of a schedule; `stage` is None where it is not written."""

    text: Name
    stage: Number | None
    span: Span


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """`0: F0 F1 B0 …`: the actions of one device."""

    device: Number
    actions: tuple[ScheduleAction, ...]
    span: Span


@dataclass(frozen=True, slots=True, eq=False)
class ScheduleDecl:
    """`schedule mine(stages=2, micro=4) { 0: … }`. Compared by identity: tables may be long."""

    name: Name
    options: tuple[Keyword, ...]
    rows: tuple[ScheduleRow, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class SbpEntry:
    """`x: (S(0), B)`: one component (`S(0)`, `B`, `P`, `P(max)` as a Ref or Call) per mesh axis.

    `x at y: (…)` applies only where `x` is read on the way to `y`; `at` is empty without it.
    """

    tensor: tuple[Name, ...]
    at: tuple[Name, ...]
    components: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Sbp:
    """`sbp NAME { x: (S(0), B), … }`."""

    name: Name
    entries: tuple[SbpEntry, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class FileUnit:
    """A dim of a tensor in a file: one of the program, or `1` for a dim that the program lacks.

    `vocab = 50304` has another size in the file.
    """

    dim: Name | Number
    size: Name | Number | None
    span: Span


@dataclass(frozen=True, slots=True)
class FileMerged:
    """`(heads, key)`: dims that are one dim of a tensor in a file, outer first."""

    dims: tuple[FileDim, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class FileJoined:
    """`(heads, key) + (kv, key)`: tensors that lie one behind the other along a dim of a file."""

    parts: tuple[FileUnit | FileMerged, ...]
    span: Span


FileDim = FileUnit | FileMerged | FileJoined


@dataclass(frozen=True, slots=True)
class FileTensor:
    """`"h.{layers}.attn.weight"[model, (heads, key)]`: a key of a file, and the dims it has there.

    Each index of a dim in braces has a tensor of its own.
    """

    key: String
    dims: tuple[FileDim, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class StoredPath:
    """`embed` as the place of another parameter's values, or `init` for the initial values."""

    path: tuple[Name, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class WeightsEntry:
    """`head: "lm_head.weight"[vocab, model] or embed`: the places of parameters, by preference.

    Several parameters lie in one tensor.
    """

    params: tuple[tuple[Name, ...], ...]
    places: tuple[FileTensor | StoredPath, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class IgnoredKeys:
    """`ignore "*.inv_freq"`: keys of a file that no parameter reads; `*` is any text."""

    pattern: String
    span: Span


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """`under "transformer." or "" { … }`: entries whose keys begin with one of the prefixes."""

    prefixes: tuple[String, ...]
    entries: tuple[WeightsEntry | IgnoredKeys | WeightsGroup, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class WeightsDecl:
    """`weights hf { … }`: the names and dims of parameters in the files of another program."""

    name: Name
    entries: tuple[WeightsEntry | IgnoredKeys | WeightsGroup, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class TensorParam:
    """A tensor parameter: `x[..., d]`, `ids[batch]: i32`, `scale[d] = 1.0`, `rate`."""

    name: Name
    dims: tuple[DimRef, ...]
    dtype: Name | None
    default: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class FunctionDecl:
    """`def f[d](x[..., d]) -> [..., d] { … }`; `result` is None without an arrow."""

    name: Name
    dims: tuple[Name, ...]
    params: tuple[TensorParam, ...]
    result: tuple[DimRef, ...] | None
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ProgramDecl:
    """`program mlp(x[batch, io]) { … }`."""

    name: Name
    params: tuple[TensorParam, ...]
    body: tuple[Statement, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ExpectPlacement:
    """`h: [batch@data, hidden@model]` in an `expect` block."""

    tensor: tuple[Name, ...]
    dims: tuple[DimRef, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class ExpectCount:
    """`all_reduce over (data, model): 1` (`axes` None: over any) or `wire_bytes: 65536`."""

    what: Name
    axes: tuple[Name, ...] | None
    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Expect:
    """`expect NAME for PROGRAM on MESH with immediate { … }`; `program` None: of every program."""

    layout: Name
    program: Name | None
    mesh: Name | None
    policy: Name | None
    entries: tuple[ExpectPlacement | ExpectCount, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class UseDecl:
    """`use kernels`: the file may call the operators of an installed package."""

    name: Name
    span: Span


NamedDeclaration = (
    UseDecl
    | DimDecl
    | MeshDecl
    | LayoutDecl
    | Sbp
    | ScheduleDecl
    | WeightsDecl
    | FunctionDecl
    | ProgramDecl
)
Declaration = NamedDeclaration | Expect

KEYWORDS: Mapping[type[NamedDeclaration], str] = {
    UseDecl: "use",
    DimDecl: "dim",
    MeshDecl: "mesh",
    LayoutDecl: "layout",
    Sbp: "sbp",
    ScheduleDecl: "schedule",
    WeightsDecl: "weights",
    FunctionDecl: "def",
    ProgramDecl: "program",
}
"""The word that a declaration with a name begins with."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A whole `.mdsl` file: its declarations in order."""

    declarations: tuple[Declaration, ...]
    span: Span


def walk(node: object) -> Iterator[object]:
    """`node` and every node inside it, in the order of the text."""
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, tuple):
            waiting += reversed(current)
        elif type(current).__module__ == __name__ or isinstance(current, Ref):
            yield current
            names = [f.name for f in fields(cast(Any, current))]
            waiting += [getattr(current, name) for name in reversed(names)]
