"""What other libraries write, in the words of this language: the rules of `foreign.toml`.

A rule writes the expression from the types of its operands: `x @ w` is `einsum(_0, _1 -> [batch,
hidden])`, with `_0`, `_1`, … for the operands. It is None where the operands leave it open.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

from meshdsl.ir.types import DTYPES, Dim
from meshdsl.named.foreign_shapes import (
    convolved,
    flattened,
    indexed,
    joined,
    parted,
    pooled,
    rearranged,
    reshaped,
    sized,
    squeezed,
    stacked,
    transposed,
    widened,
)
from meshdsl.named.foreign_use import DIM_OPTIONS, ForeignOperand, Use
from meshdsl.records import dataclass
from meshdsl.syntax import ast
from meshdsl.syntax.foreign_words import table
from meshdsl.syntax.parse import parse_expression


@dataclass(frozen=True, slots=True)
class ForeignRow:
    """One row of the table: words of other libraries, and what is written here instead."""

    words: tuple[str, ...]
    code: str
    write: str | None
    rule: str | None
    help: str | None
    mdsl: str
    python: str
    means: str


@functools.cache
def rows() -> tuple[ForeignRow, ...]:
    """The table."""
    table_rows = []
    for row in table()["row"]:
        texts = {name: row.get(name) for name in ("write", "rule", "help")}
        examples = {name: row.get(name, "") for name in ("mdsl", "python", "means")}
        table_rows.append(
            ForeignRow(tuple(row["words"]), row.get("code", "MD0125"), **texts, **examples)
        )
    return tuple(table_rows)


@functools.cache
def row_of(word: str) -> ForeignRow | None:
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


def written(use: Use) -> ast.Expr | None:
    """What to write instead of a foreign expression; None where its operands leave it open."""
    text = _written(use)
    return None if text is None else parse_expression(text)


def _written(use: Use) -> str | None:
    row = row_of(use.word)
    if row is None or row.help is not None:
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
    "joined", "parted", "triangle", "pooled", "convolved", "turned", "rolled",
})  # fmt: skip
"""The rules that count positions."""


def _same_name(use: Use) -> str | None:
    """A function of this name (or one that means it), called as functions are here."""
    from meshdsl.ops.opdef import load_all

    name = RENAMED.get(use.word, use.word)
    refs = [p.ref for p in use.parts]
    use.shifted = len(refs) == 1 and use.parts[0].shifted
    if name == use.word and not name.isidentifier():
        return None  # a sign that the language does not have
    if not name.isidentifier() or name in ("and", "or", "not"):
        if len(refs) == 2 and name != "not":
            return f"{refs[0]} {name} {refs[1]}"
        return f"{name} {refs[0]}" if len(refs) == 1 and name == "not" else None
    opdef = load_all().get(name)
    if opdef is None or opdef.surface.items not in ("none", "dims?"):
        return None
    low, high = opdef.surface.arity
    low += sum(default is ... for _, default in opdef.surface.options)
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


def _met_by_name(use: Use, one: ForeignOperand, other: ForeignOperand) -> str | None:
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


def _product(
    use: Use, one: ForeignOperand, other: ForeignOperand, to: Mapping[str, str], out: Sequence[str]
) -> str:
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
    subscripts = left.split(",")
    if len(subscripts) != len(use.tensors) or "." in text:
        return None
    dim_of: dict[str, Dim] = {}
    operands = []
    for letters, part in zip(subscripts, use.tensors, strict=True):
        if part.dims is None or len(letters) != len(part.dims):
            return None
        renames = []
        for letter, dim in zip(letters, part.dims, strict=True):
            old = dim_of.setdefault(letter, _apart(use, letter, dim, dim_of))
            if old.name != dim.name:
                renames.append(f"{dim.name} -> {old.name}")
        operands.append(part.ref + (f"[{', '.join(renames)}]" if renames else ""))
    if not set(right) <= set(dim_of):
        return None
    out = ", ".join(dim_of[letter].name for letter in right)
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


def _own_dims(use: Use, at: int = 1) -> tuple[str, ...] | None:
    """The dims that a reduction names or counts; empty for none, None for others."""
    arguments = [*use.parts[at:], *(use.named[n] for n in DIM_OPTIONS if n in use.named)]
    if not arguments:
        return ()
    dims = [use.dims_of(p, use.parts[0]) for p in arguments]
    return None if None in dims else tuple(n for each in dims for n in each or ())


def _along(use: Use) -> str | None:
    """A reduction or a normaliser, with its dims in `[ ]`."""
    name = RENAMED.get(use.word, use.word)
    if name in ("max", "min") and len(use.tensors) == 2:
        return f"{name}imum({use.tensors[0].ref}, {use.tensors[1].ref})"
    dims = _own_dims(use)
    if dims is None or use.parts[0].dims is None:
        return None
    keeps = use.option("keepdim", "keepdims")
    pair = use.word in ("max", "min", "cummax", "median") and bool(dims)  # and the indices
    use.shifted = pair or (keeps is not None and keeps.text in ("True", "true"))
    return f"{name}[{', '.join(dims)}](_0)" if dims else f"{name}(_0)"


def _spread(use: Use) -> str | None:
    """The variance: torch's, by n - 1, unless an `axis` or `ddof` speaks of numpy's, by n."""
    dims = _own_dims(use)
    if dims is None or "unbiased" in use.named:
        return None
    less = use.option("ddof", "correction")
    fewer = (0 if "axis" in use.named else 1) if less is None else less.number
    sizes = {d.name: d.size for d in use.parts[0].dims or ()}
    count = math.prod(sizes[name] for name in dims or sizes)
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
    along = use.option(*DIM_OPTIONS, at=2)
    dims = use.dims_of(along, use.parts[0]) if along else use.parts[0].names[-1:]
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


def _sized_dim(use: Use, part: ForeignOperand, hint: str, taken: Sequence[str] = ()) -> str:
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
    dims = [use.dims_of(p, table) for p in (*use.parts, *use.named.values()) if p.dims is None]
    dim = next((d[0] for d in dims if d), table.names[0])
    return f"{table.ref}[{dim} = {ids.ref}]"


def _triangle(use: Use) -> str | None:
    rows, columns = use.parts[0].names[-2:]
    sign = ">=" if use.word == "tril" else "<="
    shift = use.option("diagonal", "k", at=1)
    right = f"iota[{columns}]" if shift is None else f"iota[{columns}] - {shift.ref}"
    return f"where(iota[{rows}] {sign} {right}, _0, 0)"


def _turned(use: Use) -> str | None:
    """Dims turned round; numpy's `flip` without dims turns all."""
    x = use.parts[0]
    axes = [p for p in (*use.parts[1:], *use.named.values()) if p.text != "None"]
    named = [use.dims_of(p, x) for p in axes]
    if None in named:
        return None
    dims = [n for each in named for n in each or ()]
    if not axes:
        dims = list({"flipud": x.names[:1], "fliplr": x.names[1:2]}.get(use.word, x.names))
    text = x.ref
    for name in dims:
        text = f"reverse[{name}]({text})"
    return text


def _rolled(use: Use) -> str | None:
    """Dims rolled, each by a number of its own; without dims others roll all elements as one."""
    x, by = use.parts[0], use.option("shifts", "shift", at=1)
    dims = use.dims_of(use.option(*DIM_OPTIONS, at=2), x)
    if by is None or not dims:
        return None
    numbers = [p.number for p in by.parts or (by,)]
    if len(numbers) not in (1, len(dims)) or not all(isinstance(n, int) for n in numbers):
        return None
    text = x.ref
    for name, number in zip(dims, numbers * (len(dims) // len(numbers)), strict=True):
        text = f"roll[{name}]({text}, {number})"
    return text


# --- random numbers --------------------------------------------------------------------------


def _drawn(use: Use) -> str | None:
    """Random numbers with the dims of a tensor, or with dims by name; seeds are others."""
    name = "normal" if use.word.startswith("randn") or "normal" in use.word else "uniform"
    if use.word.endswith("_like"):
        return f"{name}[{', '.join(use.parts[0].names)}]()" if not use.named else None
    sizes = [p for part in use.parts for p in (part.parts or (part,))]
    dims = [p.dim.name for p in sizes if p.dim is not None]
    return f"{name}[{', '.join(dims)}]()" if dims and len(dims) == len(sizes) else None


def _flipped(use: Use) -> str | None:
    """1 with the probability that a tensor has for each of its elements, else 0."""
    if len(use.parts) != 1 or not use.tensors:
        return None
    x = use.tensors[0]
    return f"cast(uniform[{', '.join(x.names)}]() < {x.ref}, {x.dtype})"


def _dropped(use: Use) -> str | None:
    """Elements that become 0 with some probability; whole channels are another matter."""
    rate, training = use.option("p", "rate", at=1), use.option("training")
    if rate is None or use.word != "dropout" or (training and training.text != "True"):
        return None
    return f"dropout({use.parts[0].ref}, {rate.ref})" if use.tensors else None


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
    "transposed": transposed,
    "reshaped": reshaped,
    "flattened": flattened,
    "rearranged": rearranged,
    "squeezed": squeezed,
    "widened": widened,
    "indexed": indexed,
    "joined": joined,
    "stacked": stacked,
    "parted": parted,
    "pooled": pooled,
    "convolved": convolved,
    "sized": sized,
    "turned": _turned,
    "rolled": _rolled,
    "drawn": _drawn,
    "flipped": _flipped,
    "dropped": _dropped,
}
"""The rules that the table names."""
