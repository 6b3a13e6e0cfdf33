"""What other libraries write, in the words of this language: the rules of `foreign.toml`.

A rule writes the expression from the types of its operands: `x @ w` is `einsum(_0, _1 -> [batch,
hidden])`, with `_0`, `_1`, … for the operands. It is None where the operands leave it open.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshdsl.ir.types import DTYPES, Dim, DType
from meshdsl.syntax import ast
from meshdsl.syntax.parse import parse_expression
from meshdsl.syntax.table import table


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: words of other libraries, and what is written here instead."""

    words: tuple[str, ...]
    code: str
    write: str | None
    rule: str | None
    mdsl: str
    python: str
    means: str


@functools.cache
def rows() -> tuple[Row, ...]:
    """The table."""
    found = []
    for row in table()["row"]:
        texts = {name: row.get(name) for name in ("write", "rule")}
        examples = {name: row[name] for name in ("mdsl", "python", "means")}
        found.append(Row(tuple(row["words"]), row.get("code", "MD0125"), **texts, **examples))
    return tuple(found)


@functools.cache
def row_of(word: str) -> Row | None:
    """The row that has a word, or None."""
    return next((row for row in rows() if word in row.words), None)


MODULES = frozenset({
    "np", "numpy", "torch", "jnp", "jax", "F", "nn", "tf", "math", "einops", "functional", "linalg",
    "lax", "mx", "cp", "scipy", "special", "tl", "keras", "ops",
})  # fmt: skip
"""Names of modules before the dot of a function."""

RENAMED = {
    "amax": "max", "amin": "min", "nansum": "sum", "average": "mean", "absolute": "abs",
    "fabs": "abs", "swish": "silu", "expit": "sigmoid", "arctan": "atan", "negative": "neg",
    "logical_not": "not", "invert": "not", "multiply": "*", "mul": "*", "add": "+", "subtract": "-",
    "sub": "-", "divide": "/", "div": "/", "true_divide": "/", "greater": ">", "gt": ">",
    "less": "<", "lt": "<", "greater_equal": ">=", "ge": ">=", "less_equal": "<=", "le": "<=",
    "equal": "==", "eq": "==", "not_equal": "!=", "ne": "!=", "logical_and": "and",
    "logical_or": "or", "square_": "square", "relu_": "relu", "exp_": "exp", "add_": "+",
    "mul_": "*", "sub_": "-", "div_": "/", "floor_divide": "//", "floordiv": "//", "mod": "%",
    "remainder": "%",
}  # fmt: skip
"""Functions that the language has under another name, or as an operator."""


@dataclass(frozen=True, slots=True)
class Part:
    """An operand: `ref` is its placeholder in what is written.

    A tensor has `dims`, in the order that positions count, and a `dtype`; others are a `number`, a
    `dim` by its name, a `text` (a string, or a name without meaning), a list (`parts`), or the
    `bounds` of a slice. Of a `shifted` tensor positions cannot be counted: other libraries have
    dims of size 1 there, or several tensors.
    """

    ref: str
    dims: tuple[Dim, ...] | None = None
    dtype: DType | None = None
    number: int | float | None = None
    dim: Dim | None = None
    text: str | None = None
    parts: tuple[Part, ...] | None = None
    bounds: tuple[int | None, int | None] | None = None
    shifted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the dims of a tensor."""
        return tuple(d.name for d in self.dims or ())


@dataclass(slots=True)
class Use:
    """One foreign expression: its word, its operands, and the dims known where it stands.

    A rule may declare dims (`fresh`), and say in which `order` the result has its dims where it was
    used by positions, or that it is `shifted`: positions are counted otherwise there.
    """

    word: str
    parts: tuple[Part, ...]
    named: Mapping[str, Part]
    known: Mapping[str, Dim]
    new: dict[str, Dim] = field(default_factory=dict)
    order: tuple[str, ...] | None = None
    shifted: bool = False

    @property
    def tensors(self) -> list[Part]:
        """The operands that are tensors."""
        return [p for p in self.parts if p.dims is not None]

    def fresh(self, hint: str, size: int, taken: Sequence[str] = ()) -> str:
        """The name of a dim of this size that no operand has: a new one after `hint`."""
        if size < 1:
            raise ValueError(size)
        for name in itertools.chain([hint], (f"{hint}{i}" for i in itertools.count(2))):
            old = self.new.get(name) or self.known.get(name)
            if name not in taken and (old is None or old.size == size):
                if old is None:
                    self.new[name] = Dim(name, size)
                return name
        raise AssertionError("there is always another name")

    def option(self, *names: str, at: int | None = None) -> Part | None:
        """The argument of one of these names, or at a position."""
        found = next((self.named[n] for n in names if n in self.named), None)
        if found is None and at is not None and at < len(self.parts):
            return self.parts[at]
        return found

    def dims_of(self, part: Part | None, tensor: Part) -> tuple[str, ...] | None:
        """The names of the dims that an argument names or counts; None where it does not."""
        if part is None:
            return None
        if part.parts is not None:
            each = [self.dims_of(p, tensor) for p in part.parts]
            return None if None in each else tuple(n for found in each for n in found or ())
        if part.dim is not None:
            return (part.dim.name,) if part.dim.name in tensor.names else None
        if part.text is not None:
            words = tuple(part.text.split())
            return words if words and set(words) <= set(tensor.names) else None
        if tensor.shifted:
            return None
        if isinstance(part.number, int) and -len(tensor.names) <= part.number < len(tensor.names):
            return (tensor.names[part.number],)
        return None


def written(use: Use) -> ast.Expr | None:
    """What to write instead of a foreign expression; None where its operands leave it open."""
    text = _written(use)
    return None if text is None else parse_expression(text)


def _written(use: Use) -> str | None:
    row = row_of(use.word)
    if row is None:
        return _same_name(use)
    if row.rule in _COUNTING and any(p.shifted for p in use.tensors):
        return None
    try:
        if row.rule is not None:
            return RULES[row.rule](use) or _same_name(use)
        assert row.write is not None, "a row has a rule or a template"
        wanted = {int(i) for i in re.findall(r"_(\d+)", row.write)}
        return row.write if max(wanted, default=-1) < len(use.parts) else None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None  # operands of another kind or number than the rule takes


_COUNTING = frozenset({
    "contract", "einsum", "transposed", "reshaped", "flattened", "rearranged", "indexed",
    "joined", "parted", "triangle", "pooled", "convolved",
})  # fmt: skip
"""The rules that count positions."""


def _same_name(use: Use) -> str | None:
    """A function of this name (or one that means it), called as functions are here."""
    from meshdsl.ops.opdef import load_all

    name = RENAMED.get(use.word, use.word)
    refs = [p.ref for p in use.parts]
    use.shifted = len(refs) == 1 and use.parts[0].shifted
    if not name.isidentifier() or name in ("and", "or", "not"):
        if len(refs) == 2 and name != "not":
            return f"{refs[0]} {name} {refs[1]}"
        return f"{name} {refs[0]}" if len(refs) == 1 and name == "not" else None
    opdef = load_all().get(name)
    if opdef is None or opdef.surface.items not in ("none", "dims?"):
        return None
    low, high = opdef.surface.arity
    most = math.inf if high is None else high + len(opdef.surface.options)
    if not low <= len(refs) <= most or any(p.parts is not None for p in use.parts):
        return None
    return f"{name}({', '.join(refs)})"


# --- products ----------------------------------------------------------------------------------


def _contract(use: Use) -> str | None:
    """A product of two tensors: dims meet by positions or, where sizes differ, by names."""
    one, other = use.tensors[:2]
    if not one.dims or not other.dims:
        return f"{one.ref} * {other.ref}"
    pairs = list(zip(other.names, other.dims, strict=True))
    at = {"inner": -1, "tensordot": 0, "contract": 0}.get(use.word, max(-2, -len(pairs)))
    _, met = pairs.pop(at)
    count = use.option("dims", "axes", at=2)
    if use.word in ("tensordot", "contract") and count is not None and count.number != 1:
        return None
    if one.dims[-1].size != met.size:
        return _met_by_name(use, one, other)
    batch = [] if use.word in ("inner", "tensordot", "contract", "dot") else pairs[:-1]
    before = [*one.dims[:-2]][-len(batch) :] if batch else []
    to = {met.name: one.names[-1]}
    for (name, dim), left in zip(batch[::-1], before[::-1], strict=False):
        if dim.size != left.size:
            return None  # one of them is of size 1, and spread
        to[name] = left.name
    extra = batch[: len(batch) - len(before)]
    taken = [*one.names]
    for name, dim in (*extra, *pairs[len(batch) :]):
        free = name not in taken
        to[name] = name if free else use.fresh(f"{name}_other", dim.size, (*taken, *other.names))
        taken.append(to[name])
    out = [*(to[n] for n, _ in extra), *one.names[:-1], *(to[n] for n, _ in pairs[len(batch) :])]
    return _product(use, one, other, to, out)


def _met_by_name(use: Use, one: Part, other: Part) -> str | None:
    """A product that no positions allow: over the last dim of the first, or the only shared one."""
    shared = [n for n in one.names if n in other.names]
    inner = one.names[-1]
    if inner not in shared:
        if len(shared) != 1 or use.word == "bmm":
            return None
        inner = shared[0]
    to = {n: n for n in other.names}
    left, columns = ([n for n in names if n != inner] for names in (one.names, other.names))
    if len(one.names) == 2 and set(one.names) == set(other.names):  # the rows are other rows
        size = next(d.size for d in other.dims or () if d.name == columns[-1])
        to[columns[-1]] = use.fresh(f"{columns[-1]}_other", size, one.names)
    out = [*left, *(to[n] for n in columns if to[n] not in left)]
    return _product(use, one, other, to, out)


def _product(use: Use, one: Part, other: Part, to: Mapping[str, str], out: Sequence[str]) -> str:
    """The einsum of two tensors, dims of the second renamed."""
    use.order = tuple(out)
    renamed = ", ".join(f"{n} -> {to[n]}" for n in other.names if to[n] != n)
    view = f"[{renamed}]" if renamed else ""
    return f"einsum({one.ref}, {other.ref}{view} -> [{', '.join(out)}])"


def _linear(use: Use) -> str | None:
    x, w = use.tensors[:2]
    shared = [n for n in x.names if n in w.names]
    out = [n for n in (*x.names, *w.names) if n not in shared]
    bias = "".join(f" + {p.ref}" for p in use.tensors[2:])
    return f"einsum({x.ref}, {w.ref} -> [{', '.join(out)}]){bias}" if shared else None


def _einsum(use: Use) -> str | None:
    """An einsum with letters, or with its result as a list."""
    for part in use.parts:
        if part.text is not None and "->" in part.text:
            return _lettered(use, part.text)
    lists = [p for p in (*use.parts, *use.named.values()) if p.parts is not None]
    if not lists or not use.tensors:
        return None
    names = [p.dim.name if p.dim is not None else p.text for p in lists[-1].parts or ()]
    if None in names:
        return None
    refs = ", ".join(p.ref for p in use.tensors)
    return f"einsum({refs} -> [{', '.join(map(str, names))}])"


def _lettered(use: Use, text: str) -> str | None:
    left, _, right = text.replace(" ", "").partition("->")
    given = left.split(",")
    if len(given) != len(use.tensors) or "." in text:
        return None
    found: dict[str, Dim] = {}
    operands = []
    for letters, part in zip(given, use.tensors, strict=True):
        if part.dims is None or len(letters) != len(part.dims):
            return None
        renames = []
        for letter, dim in zip(letters, part.dims, strict=True):
            old = found.setdefault(letter, _apart(use, letter, dim, found))
            if old.name != dim.name:
                renames.append(f"{dim.name} -> {old.name}")
        operands.append(part.ref + (f"[{', '.join(renames)}]" if renames else ""))
    if not set(right) <= set(found):
        return None
    out = ", ".join(found[letter].name for letter in right)
    return f"einsum({', '.join(operands)} -> [{out}])"


def _apart(use: Use, letter: str, dim: Dim, found: Mapping[str, Dim]) -> Dim:
    """The dim of a letter: another name where a letter before has this one."""
    if all(known.name != dim.name for other, known in found.items() if other != letter):
        return dim
    return Dim(use.fresh(f"{dim.name}_other", dim.size), dim.size)


# --- arithmetic --------------------------------------------------------------------------------


def _clipped(use: Use) -> str | None:
    low = use.option("min", "a_min", "min_val", "clip_value_min", at=1)
    high = use.option("max", "a_max", "max_val", "clip_value_max", at=2)
    text = use.parts[0].ref
    if low is not None and low.text != "None":
        text = f"maximum({text}, {low.ref})"
    if high is not None and high.text != "None":
        text = f"minimum({text}, {high.ref})"
    return text if low or high else None


_CASTS = {
    "float": "f32", "float32": "f32", "half": "f16", "float16": "f16", "double": "f64",
    "float64": "f64", "int": "i32", "int32": "i32", "long": "i64", "int64": "i64", "bool": "bool",
    "bfloat16": "bf16",
}  # fmt: skip


def _converted(use: Use) -> str | None:
    wanted = use.option("dtype", at=1)
    name = _CASTS.get(use.word)
    if wanted is not None:
        said = str(wanted.text or wanted.dtype or "").rpartition(".")[2]
        name = _CASTS.get(said, said if said in DTYPES else None)
    return f"cast({use.parts[0].ref}, {name})" if name else None


def _like(use: Use) -> str | None:
    x = use.tensors[0]
    if use.word == "full_like":
        return f"{use.parts[1].ref} * ones[{', '.join(x.names)}]()"
    return f"{use.word.partition('_')[0]}[{', '.join(x.names)}]()"


# --- along dims ------------------------------------------------------------------------------

_DIM_OPTIONS = ("dim", "axis", "dims", "axes", "reduction_indices")


def _own_dims(use: Use, at: int = 1) -> tuple[str, ...] | None:
    """The dims that a reduction names or counts; empty for none, None for others."""
    given = [*use.parts[at:], *(use.named[n] for n in _DIM_OPTIONS if n in use.named)]
    if not given:
        return ()
    found = [use.dims_of(p, use.parts[0]) for p in given]
    return None if None in found else tuple(n for each in found for n in each or ())


def _along(use: Use) -> str | None:
    """A reduction or a normaliser, with its dims in `[ ]`."""
    name = RENAMED.get(use.word, use.word)
    if name in ("max", "min") and len(use.tensors) == 2:
        return f"{name}imum({use.tensors[0].ref}, {use.tensors[1].ref})"
    dims = _own_dims(use)
    if dims is None or use.parts[0].dims is None:
        return None
    kept = use.option("keepdim", "keepdims")
    pair = use.word in ("max", "min", "cummax", "median") and bool(dims)  # and the indices
    use.shifted = pair or (kept is not None and kept.text in ("True", "true"))
    return f"{name}[{', '.join(dims)}](_0)" if dims else f"{name}(_0)"


def _spread(use: Use) -> str | None:
    """The variance: torch's, by n - 1, unless an `axis` or `ddof` speaks of numpy's, by n."""
    dims = _own_dims(use)
    if dims is None or "unbiased" in use.named:
        return None
    less = use.option("ddof", "correction")
    fewer = (0 if "axis" in use.named else 1) if less is None else less.number
    own = {d.name: d.size for d in use.parts[0].dims or ()}
    count = math.prod(own[name] for name in dims or own)
    if not isinstance(fewer, int) or count <= fewer:
        return None
    over = f"[{', '.join(dims)}]" if dims else ""
    squares = f"square(_0 - mean{over}(_0))"
    text = f"sum{over}({squares}) / {count - fewer}" if fewer else f"mean{over}({squares})"
    return f"sqrt({text})" if use.word == "std" else text


def _norm(use: Use) -> str | None:
    dims = _own_dims(use)
    if dims is None:
        return None
    total = f"sum[{', '.join(dims)}]" if dims else "sum"
    return f"sqrt({total}(square(_0)))"


def _greatest(use: Use) -> str | None:
    """The greatest elements; of one, its index is `argmax`."""
    count = use.option("k", at=1)
    given = use.option(*_DIM_OPTIONS, at=2)
    dims = use.dims_of(given, use.parts[0]) if given else use.parts[0].names[-1:]
    if count is None or count.number != 1 or not dims:
        return None
    use.shifted = True  # a pair, with the indices
    return f"max[{dims[0]}](_0)"


def _attended(use: Use) -> str | None:
    """Attention of queries [..., seq, key], keys and values [..., mem, key]."""
    tensors = use.tensors
    if len(tensors) != 3 or any(len(t.names) < 2 or t.shifted for t in tensors):
        return None
    q, k, v = tensors
    causal = use.option("is_causal")
    if causal is not None and causal.text not in ("True", "False"):
        return None
    if q.names[-1] != k.names[-1] or k.names[-2] != v.names[-2]:
        return None
    mem, keys, values = k.names[-2], k.ref, v.ref
    if mem in q.names:
        size = next(d.size for d in k.dims or () if d.name == mem)
        new = use.fresh("mem", size, [*q.names, *k.names, *v.names])
        keys, values = (f"{ref}[{mem} -> {new}]" for ref in (keys, values))
        mem = new
    mask = f", iota[{q.names[-2]}] >= iota[{mem}]" if causal and causal.text == "True" else ""
    use.order = (*q.names[:-1], v.names[-1])
    return f"attention[{q.names[-1]}, {mem}]({q.ref}, {keys}, {values}{mask})"


def _numbered(use: Use) -> str | None:
    part = use.parts[-1]
    dim = part.dim.name if part.dim else None
    if dim is None and isinstance(part.number, int):
        close = [d.name for d in use.known.values() if d.size == part.number]
        dim = close[0] if close else use.fresh("index", part.number)
    return f"iota[{dim}]" if dim and len(use.parts) == 1 else None


def _one_hot(use: Use) -> str | None:
    classes = use.option("num_classes", "depth", at=1)
    if classes is None:
        return None
    return f"one_hot[{_sized_dim(use, classes, 'classes')}](_0)"


def _sized_dim(use: Use, part: Part, hint: str, taken: Sequence[str] = ()) -> str:
    """The dim that a size in a shape stands for."""
    if part.dim is not None:
        return part.dim.name
    if not isinstance(part.number, int) or part.number < 1:
        raise ValueError(part)
    return use.fresh(hint, part.number, taken)


def _looked_up(use: Use) -> str | None:
    tensors = use.tensors
    ids = next((p for p in tensors if p.dtype is not None and p.dtype.kind == "int"), None)
    table = next((p for p in tensors if p is not ids), None)
    if ids is None or table is None:
        return None
    given = [use.dims_of(p, table) for p in (*use.parts, *use.named.values()) if p.dims is None]
    dim = next((d[0] for d in given if d), table.names[0])
    return f"{table.ref}[{dim} = {ids.ref}]"


def _triangle(use: Use) -> str | None:
    rows, columns = use.parts[0].names[-2:]
    sign = ">=" if use.word == "tril" else "<="
    shift = use.option("diagonal", "k", at=1)
    right = f"iota[{columns}]" if shift is None else f"iota[{columns}] - {shift.ref}"
    return f"where(iota[{rows}] {sign} {right}, _0, 0)"


# --- positions and shapes --------------------------------------------------------------------


def _transposed(use: Use) -> str | None:
    names = list(use.parts[0].names)
    given = [p for part in use.parts[1:] for p in (part.parts or (part,))]
    places = [use.dims_of(p, use.parts[0]) for p in given]
    if None in places:
        return None
    said = [n for each in places for n in each or ()]
    if use.word in ("permute", "transpose") and len(said) == len(names) and said != names:
        names = said if len(names) > 2 or given[0].dim or use.word == "permute" else names[::-1]
    elif len(said) == 2 and use.word.startswith("move"):
        names.insert(names.index(said[1]), names.pop(names.index(said[0])))
    elif len(said) == 2:
        one, other = (names.index(n) for n in said)
        names[one], names[other] = names[other], names[one]
    elif use.word == "mT":
        names[-2:] = names[:-3:-1]
    elif not said:
        names.reverse()
    else:
        return None
    use.order = tuple(names)
    return "_0"


def _reshaped(use: Use) -> str | None:
    x = use.parts[0]
    given = [p for part in use.parts[1:] for p in (part.parts or (part,))]
    if use.word == "unflatten":
        dims = use.dims_of(given[0], x)
        sizes = [*x.dims] if x.dims else []
        if not dims:
            return None
        at = x.names.index(dims[0])
        old = [Part("", dim=d) for d in sizes]
        given = [*old[:at], *given[1:], *old[at + 1 :]]
    return _into(use, given)


def _into(use: Use, shape: Sequence[Part]) -> str | None:
    """Operand 0 in another shape: groups of its dims become groups of the shape's."""
    x = use.parts[0]
    if x.dims is None:
        return None
    numbers = [p.dim.size if p.dim is not None else p.number for p in shape]
    total = math.prod(d.size for d in x.dims)
    rest = math.prod(n for n in numbers if isinstance(n, int) and n > 0)
    sizes = [total // rest if n == -1 else n for n in numbers]
    whole = [n for n in sizes if isinstance(n, int)]
    if len(whole) < len(sizes) or math.prod(whole) != total:
        return None
    groups = _grouped([d.size for d in x.dims], whole)
    views: list[str] = []
    order: list[str] = []
    for old, new in groups:
        own = [x.names[i] for i in old]
        wanted = [_shape_dim(use, shape[i], whole[i], own, order) for i in new]
        order += wanted
        views += _arrows(use, own, wanted, [x.dims[i].size for i in old])
    use.order = tuple(order)
    return x.ref + "".join(f"[{v}]" for v in views)


def _shape_dim(use: Use, part: Part, size: int, own: Sequence[str], taken: Sequence[str]) -> str:
    """The dim for one entry of a shape: the one that is named, one that stays, or a new one."""
    if part.dim is not None:
        return part.dim.name
    same = [n for n in own if (use.known.get(n) or Dim(n, 0)).size == size and n not in taken]
    return same[0] if len(own) == 1 and same else use.fresh(f"part{size}", size, (*own, *taken))


def _arrows(use: Use, own: list[str], wanted: list[str], sizes: list[int]) -> list[str]:
    if own == wanted:
        return []
    if len(own) == 1:
        return [f"{own[0]} -> {_group(wanted)}"]
    if len(wanted) == 1:
        return [f"{_group(own)} -> {wanted[0]}"]
    whole = use.fresh("_".join(own), math.prod(sizes))
    return [f"{_group(own)} -> {whole}", f"{whole} -> {_group(wanted)}"]


def _group(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"({', '.join(names)})"


def _grouped(old: list[int], new: list[int]) -> list[tuple[list[int], list[int]]]:
    """The smallest groups of neighbours in both shapes with the same number of elements."""
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [i], [j]
        a, b = old[i], new[j]
        while a != b:
            if a < b:
                left.append(i + len(left))
                a *= old[left[-1]]
            else:
                right.append(j + len(right))
                b *= new[right[-1]]
        i, j = i + len(left), j + len(right)
        groups.append((left, right))
    return groups


def _flattened(use: Use) -> str | None:
    names = use.parts[0].names
    ends = [use.dims_of(p, use.parts[0]) for p in use.parts[1:3]]
    if None in ends or len(names) < 2:
        return "_0" if len(names) < 2 else None
    first = names.index((ends[0] or names)[0]) if ends else 0
    last = names.index((ends[1] or names)[0]) if len(ends) > 1 else len(names) - 1
    own = names[first : last + 1]
    sizes = [d.size for d in (use.parts[0].dims or ())[first : last + 1]]
    return f"_0[({', '.join(own)}) -> {use.fresh('flat', math.prod(sizes))}]"


def _rearranged(use: Use) -> str | None:
    """einops: its names are bound to the dims by position; groups are split and merged."""
    x = use.parts[0]
    text = next((p.text for p in use.parts if p.text and "->" in p.text), None)
    if text is None or x.dims is None:
        return None
    left, right = (_pattern(side) for side in text.split("->"))
    same = sorted(n for names in left for n in names) == sorted(n for own in right for n in own)
    if len(left) != len(x.dims) or not same:
        return None
    sizes = {n: int(p.number or (p.dim.size if p.dim else 0)) for n, p in use.named.items()}
    bound: dict[str, str] = {}
    splits = []
    for names, dim in zip(left, x.dims, strict=True):
        if len(names) == 1:
            bound[names[0]] = dim.name
            continue
        known = math.prod(sizes[n] for n in names if n in sizes)
        for n in names:
            bound[n] = use.fresh(n, sizes.get(n, dim.size // known), x.names)
            sizes[n] = (use.known.get(bound[n]) or use.new[bound[n]]).size
        splits.append(f"[{dim.name} -> {_group([bound[n] for n in names])}]")
    for n, name in bound.items():
        sizes.setdefault(n, next((d.size for d in x.dims if d.name == name), 1))
    merges: list[str] = []
    order: list[str] = []
    for names in right:
        own = [bound[n] for n in names]
        if len(own) > 1:
            whole = use.fresh("_".join(names), math.prod(sizes[n] for n in names))
            merges.append(f"[{_group(own)} -> {whole}]")
            own = [whole]
        order += own
    use.order = tuple(order)
    return x.ref + "".join(splits + merges)


def _pattern(side: str) -> list[list[str]]:
    found = re.findall(r"\(([^)]*)\)|(\w+)", side)
    return [group.split() if group else [name] for group, name in found]


def _widened(use: Use) -> str:
    """A tensor as it is, with dims of size 1 in other libraries."""
    use.shifted = True
    return "_0"


def _squeezed(use: Use) -> str:
    x = use.parts[0]
    ones = [d.name for d in x.dims or () if d.size == 1]
    return f"_0[{', '.join(f'{n} = 0' for n in ones)}]" if ones else "_0"


def _indexed(use: Use) -> str | None:
    """`x[0, :, 1:4]`, position by position; integers index as tensors do."""
    x, *places = use.parts
    if x.dims is None:
        return None
    use.shifted = any(p.text == "None" for p in places)
    places = [p for p in places if p.text != "None"]
    dots = [i for i, p in enumerate(places) if p.text == "..."]
    if dots:
        whole = Part("", bounds=(None, None))
        missing = len(x.dims) - len(places) + 1
        places[dots[0] : dots[0] + 1] = [whole] * missing
    if len(places) > len(x.dims):
        return None
    items = [_item(use, d, p) for d, p in zip(x.dims, places, strict=False)]
    kept = [item for item in items if item]
    return f"_0[{', '.join(kept)}]" if kept else "_0"


def _item(use: Use, dim: Dim, part: Part) -> str:
    if part.bounds is not None:
        start, stop = (None if n is None else n + dim.size * (n < 0) for n in part.bounds)
        first, last = start or 0, dim.size if stop is None else min(stop, dim.size)
        if (first, last) == (0, dim.size):
            return ""
        return f"{dim.name} = {first}:{last} -> {use.fresh('part', last - first)}"
    if isinstance(part.number, int):
        return f"{dim.name} = {part.number + dim.size * (part.number < 0)}"
    return f"{dim.name} = {part.ref}"


def _joined(use: Use) -> str | None:
    tensors = [p for part in use.parts for p in (part.parts or (part,)) if p.dims is not None]
    given = use.option(*_DIM_OPTIONS, at=len(use.parts) - 1 if len(use.parts) > 1 else None)
    dims = use.dims_of(given, tensors[0]) if given and given.dims is None else None
    dim = dims[0] if dims else tensors[0].names[-1 if use.word == "hstack" else 0]
    at = [t.names.index(dim) for t in tensors]
    size = sum((t.dims or ())[i].size for t, i in zip(tensors, at, strict=True))
    whole = use.fresh(f"all_{dim}", size)
    return f"concat[{dim} -> {whole}]({', '.join(t.ref for t in tensors)})"


def _stacked(use: Use) -> str | None:
    tensors = [p for part in use.parts for p in (part.parts or (part,)) if p.dims is not None]
    dim = use.fresh("stacked", len(tensors))
    *others, text = (t.ref for t in tensors)
    for index in reversed(range(len(others))):
        text = f"where(iota[{dim}] == {index}, {others[index]}, {text})"
    use.order = (dim, *tensors[0].names)
    return text


def _parted(use: Use) -> str | None:
    """Equal parts, as one more dim."""
    x = use.parts[0]
    if x.dims is None:
        return None
    count, given = use.option("chunks", "split_size", at=1), use.option(*_DIM_OPTIONS, at=2)
    dims = use.dims_of(given, x) if given else x.names[:1]
    if count is None or not isinstance(count.number, int) or not dims:
        return None
    size = x.dims[x.names.index(dims[0])].size
    pieces = size // count.number if use.word == "split" else count.number
    if pieces < 1 or size % pieces:
        return None
    use.shifted = True  # a list, in which `[0]` is a piece
    names = use.fresh("pieces", pieces), use.fresh("part", size // pieces)
    return f"_0[{dims[0]} -> {_group(names)}]"


_SPATIAL = re.compile(r"([123])d$")
"""How many dims at the end of an image a window slides along: `conv2d`."""


def _option(use: Use, name: str, at: int, default: int) -> int:
    """A whole number; no number for each dim."""
    part = use.option(name, at=at)
    number = default if part is None or part.text == "None" else part.number
    if not isinstance(number, int):
        raise TypeError(part)
    return number


def _slides(
    use: Use, x: Part, windows: Sequence[tuple[str, int]], stride: int, pad: int, gap: int = 1
) -> str:
    """`h by kh -> ho, w by kw`: windows along the last dims, in their order."""
    made = []
    for dim, (window, size) in zip((x.dims or ())[-len(windows) :], windows, strict=True):
        count = (dim.size + 2 * pad - gap * (size - 1) - 1) // stride + 1
        new = "" if count == dim.size else f" -> {use.fresh(f'{dim.name}_out', count, x.names)}"
        made.append(f"{dim.name} by {window}{new}")
    return ", ".join(made)


def _options(stride: int, pad: int, gap: int, own: int = 1) -> str:
    given = (("stride", stride, own), ("pad", pad, 0), ("dilation", gap, 1))
    return "".join(f", {name}={number}" for name, number, default in given if number != default)


def _pooled(use: Use) -> str | None:
    """A pool along the last dims; its window is a number."""
    (x,), found = use.tensors, _SPATIAL.search(use.word)
    size = _option(use, "kernel_size", 1, 0)
    stride, pad = _option(use, "stride", 2, size), _option(use, "padding", 3, 0)
    if found is None or pad or len(use.parts) > 3 or "ceil_mode" in use.named:
        return None
    slides = _slides(use, x, [(str(size), size)] * int(found[1]), stride, pad)
    return f"{use.word[:8]}[{slides}]({x.ref}{_options(stride, pad, 1, size)})"


def _convolved(use: Use) -> str | None:
    """A convolution of an image [n, c, h, w] by a kernel [o, c, kh, kw], and a bias [o]."""
    (x, k, *_), found = use.tensors, _SPATIAL.search(use.word)
    if found is None or use.option("groups", at=6) or use.option("bias", at=2):
        return None
    along = int(found[1])
    stride, pad = _option(use, "stride", 3, 1), _option(use, "padding", 4, 0)
    gap = _option(use, "dilation", 5, 1)
    if len(x.names) != along + 2 or len(k.names) != along + 2:
        return None
    kernel: list[str] = []
    for index, dim in enumerate(k.dims or ()):
        hint, taken = dim.name, [*x.names, *kernel]
        if index == 1:
            kernel.append(x.names[1])
        else:
            kernel.append(hint if hint not in taken else use.fresh(f"k_{hint}", dim.size, taken))
    pairs = zip(k.names, kernel, strict=True)
    arrows = ", ".join(f"{old} -> {new}" for old, new in pairs if old != new)
    windows = [(n, d.size) for n, d in zip(kernel[2:], (k.dims or ())[2:], strict=True)]
    slides = _slides(use, x, windows, stride, pad, gap)
    renamed = f"{k.ref}[{arrows}]" if arrows else k.ref
    return f"conv[{slides}]({x.ref}, {renamed}{_options(stride, pad, gap)})"


def _sized(use: Use) -> str | None:
    """The size of a dim is its name."""
    x = use.parts[0]
    given = use.option("dim", "axis", at=1)
    if use.word in ("ndim", "dim"):
        return str(len(x.names))
    if use.word == "numel" or (use.word == "size" and given is None):
        return " * ".join(x.names) or "1"
    dims = use.dims_of(given, x) if given else x.names[:1] if use.word == "len" else None
    return dims[0] if dims else None


RULES: Mapping[str, Callable[[Use], str | None]] = {
    "contract": _contract,
    "linear": _linear,
    "einsum": _einsum,
    "clipped": _clipped,
    "converted": _converted,
    "like": _like,
    "along": _along,
    "spread": _spread,
    "norm": _norm,
    "attended": _attended,
    "greatest": _greatest,
    "numbered": _numbered,
    "one_hot": _one_hot,
    "looked_up": _looked_up,
    "triangle": _triangle,
    "transposed": _transposed,
    "reshaped": _reshaped,
    "flattened": _flattened,
    "rearranged": _rearranged,
    "squeezed": _squeezed,
    "widened": _widened,
    "indexed": _indexed,
    "joined": _joined,
    "stacked": _stacked,
    "parted": _parted,
    "pooled": _pooled,
    "convolved": _convolved,
    "sized": _sized,
}
"""The rules that the table names."""
