"""The rules of `foreign.toml` about positions, shapes, and windows along the last dims."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from meshdsl.ir.types import Dim
from meshdsl.named.foreign_use import DIM_OPTIONS, ForeignOperand, Use


def transposed(use: Use) -> str | None:
    """A tensor as it is, with another order of positions."""
    names = list(use.parts[0].names)
    order = [p for part in use.parts[1:] for p in (part.parts or (part,))]
    places = [use.dims_of(p, use.parts[0]) for p in order]
    if None in places:
        return None
    said = [n for each in places for n in each or ()]
    if use.word in ("permute", "transpose") and len(said) == len(names) and said != names:
        names = said if len(names) > 2 or order[0].dim or use.word == "permute" else names[::-1]
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


def reshaped(use: Use) -> str | None:
    """A shape of other libraries: dims split and merged."""
    x = use.parts[0]
    shape = [p for part in use.parts[1:] for p in (part.parts or (part,))]
    if use.word == "unflatten":
        dims = use.dims_of(shape[0], x)
        sizes = [*x.dims] if x.dims else []
        if not dims:
            return None
        at = x.names.index(dims[0])
        old = [ForeignOperand("", dim=d) for d in sizes]
        shape = [*old[:at], *shape[1:], *old[at + 1 :]]
    return _into(use, shape)


def _into(use: Use, shape: Sequence[ForeignOperand]) -> str | None:
    """Operand 0 in another shape: groups of its dims become groups of the shape's."""
    x = use.parts[0]
    if x.dims is None:
        return None
    numbers = [p.dim.size if p.dim is not None else p.number for p in shape]
    total = math.prod(d.size for d in x.dims)
    explicit = math.prod(n for n in numbers if isinstance(n, int) and n > 0)
    sizes = [total // explicit if n == -1 else n for n in numbers]
    known_sizes = [n for n in sizes if isinstance(n, int)]
    if len(known_sizes) < len(sizes) or math.prod(known_sizes) != total:
        return None
    groups = _grouped([d.size for d in x.dims], known_sizes)
    views: list[str] = []
    order: list[str] = []
    for old, new in groups:
        old_names = [x.names[i] for i in old]
        wanted = [_shape_dim(use, shape[i], known_sizes[i], old_names, order) for i in new]
        order += wanted
        views += _arrows(use, old_names, wanted, [x.dims[i].size for i in old])
    use.order = tuple(order)
    return x.ref + "".join(f"[{v}]" for v in views)


def _shape_dim(
    use: Use, part: ForeignOperand, size: int, own: Sequence[str], taken: Sequence[str]
) -> str:
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
    merged = use.fresh("_".join(own), math.prod(sizes))
    return [f"{_group(own)} -> {merged}", f"{merged} -> {_group(wanted)}"]


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


def flattened(use: Use) -> str | None:
    """Neighbouring dims merged."""
    names = use.parts[0].names
    ends = [use.dims_of(p, use.parts[0]) for p in use.parts[1:3]]
    if None in ends or len(names) < 2:
        return "_0" if len(names) < 2 else None
    first = names.index((ends[0] or names)[0]) if ends else 0
    last = names.index((ends[1] or names)[0]) if len(ends) > 1 else len(names) - 1
    merged = names[first : last + 1]
    sizes = [d.size for d in (use.parts[0].dims or ())[first : last + 1]]
    return f"_0[({', '.join(merged)}) -> {use.fresh('flat', math.prod(sizes))}]"


def rearranged(use: Use) -> str | None:
    """einops: its names are bound to the dims by position; groups are split and merged."""
    x = use.parts[0]
    text = next((p.text for p in use.parts if p.text and "->" in p.text), None)
    if text is None or x.dims is None:
        return None
    left, right = (_pattern(side) for side in text.split("->"))
    same = sorted(n for names in left for n in names) == sorted(n for parts in right for n in parts)
    if len(left) != len(x.dims) or not same:
        return None
    sizes = {n: int(p.number or (p.dim.size if p.dim else 0)) for n, p in use.named.items()}
    bound: dict[str, str] = {}
    splits = []
    for names, dim in zip(left, x.dims, strict=True):
        if len(names) == 1:
            bound[names[0]] = dim.name
            continue
        product = math.prod(sizes[n] for n in names if n in sizes)
        for n in names:
            bound[n] = use.fresh(n, sizes.get(n, dim.size // product), x.names)
            sizes[n] = (use.known.get(bound[n]) or use.new[bound[n]]).size
        splits.append(f"[{dim.name} -> {_group([bound[n] for n in names])}]")
    for n, name in bound.items():
        sizes.setdefault(n, next((d.size for d in x.dims if d.name == name), 1))
    merges: list[str] = []
    order: list[str] = []
    for names in right:
        parts = [bound[n] for n in names]
        if len(parts) > 1:
            merged = use.fresh("_".join(names), math.prod(sizes[n] for n in names))
            merges.append(f"[{_group(parts)} -> {merged}]")
            parts = [merged]
        order += parts
    use.order = tuple(order)
    return x.ref + "".join(splits + merges)


def _pattern(side: str) -> list[list[str]]:
    found = re.findall(r"\(([^)]*)\)|(\w+)", side)
    return [group.split() if group else [name] for group, name in found]


def widened(use: Use) -> str:
    """A tensor as it is, with dims of size 1 in other libraries."""
    use.shifted = True
    return "_0"


def squeezed(use: Use) -> str:
    """Dims of size 1 picked."""
    x = use.parts[0]
    ones = [d.name for d in x.dims or () if d.size == 1]
    return f"_0[{', '.join(f'{n} = 0' for n in ones)}]" if ones else "_0"


def indexed(use: Use) -> str | None:
    """`x[0, :, 1:4]`, position by position; integers index as tensors do."""
    x, *places = use.parts
    if x.dims is None:
        return None
    use.shifted = any(p.text == "None" for p in places)
    places = [p for p in places if p.text != "None"]
    dots = [i for i, p in enumerate(places) if p.text == "..."]
    if dots:
        everything = ForeignOperand("", bounds=(None, None))
        missing = len(x.dims) - len(places) + 1
        places[dots[0] : dots[0] + 1] = [everything] * missing
    if len(places) > len(x.dims):
        return None
    items = [_item(use, d, p) for d, p in zip(x.dims, places, strict=False)]
    bounds = [item for item in items if item]
    return f"_0[{', '.join(bounds)}]" if bounds else "_0"


def _item(use: Use, dim: Dim, part: ForeignOperand) -> str:
    if part.bounds is not None:
        start, stop = (None if n is None else n + dim.size * (n < 0) for n in part.bounds)
        first, last = start or 0, dim.size if stop is None else min(stop, dim.size)
        if (first, last) == (0, dim.size):
            return ""
        return f"{dim.name} = {first}:{last} -> {use.fresh('part', last - first)}"
    if isinstance(part.number, int):
        return f"{dim.name} = {part.number + dim.size * (part.number < 0)}"
    return f"{dim.name} = {part.ref}"


def joined(use: Use) -> str | None:
    """Tensors one behind the other along a dim."""
    tensors = [p for part in use.parts for p in (part.parts or (part,)) if p.dims is not None]
    along = use.option(*DIM_OPTIONS, at=len(use.parts) - 1 if len(use.parts) > 1 else None)
    dims = use.dims_of(along, tensors[0]) if along and along.dims is None else None
    dim = dims[0] if dims else tensors[0].names[-1 if use.word == "hstack" else 0]
    at = [t.names.index(dim) for t in tensors]
    size = sum((t.dims or ())[i].size for t, i in zip(tensors, at, strict=True))
    joined_dim = use.fresh(f"all_{dim}", size)
    return f"concat[{dim} -> {joined_dim}]({', '.join(t.ref for t in tensors)})"


def stacked(use: Use) -> str | None:
    """Tensors side by side, along a new dim."""
    tensors = [p for part in use.parts for p in (part.parts or (part,)) if p.dims is not None]
    dim = use.fresh("stacked", len(tensors))
    *others, text = (t.ref for t in tensors)
    for index in reversed(range(len(others))):
        text = f"where(iota[{dim}] == {index}, {others[index]}, {text})"
    use.order = (dim, *tensors[0].names)
    return text


def parted(use: Use) -> str | None:
    """Equal parts, as one more dim."""
    x = use.parts[0]
    if x.dims is None:
        return None
    count, along = use.option("chunks", "split_size", at=1), use.option(*DIM_OPTIONS, at=2)
    dims = use.dims_of(along, x) if along else x.names[:1]
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
    use: Use,
    x: ForeignOperand,
    windows: Sequence[tuple[str, int]],
    stride: int,
    pad: int,
    gap: int = 1,
    *,
    back: bool = False,
) -> str:
    """`h by kh -> ho, w by kw`: windows along the last dims, in their order.

    `back`: the dims have the positions of windows, and become the elements.
    """
    slides = []
    for dim, (window, size) in zip((x.dims or ())[-len(windows) :], windows, strict=True):
        reach = gap * (size - 1) + 1
        count = (dim.size + 2 * pad - reach) // stride + 1
        count = (dim.size - 1) * stride + reach - 2 * pad if back else count
        new = "" if count == dim.size else f" -> {use.fresh(f'{dim.name}_out', count, x.names)}"
        slides.append(f"{dim.name} by {window}{new}")
    return ", ".join(slides)


def _options(stride: int, pad: int, gap: int, own: int = 1) -> str:
    given = (("stride", stride, own), ("pad", pad, 0), ("dilation", gap, 1))
    return "".join(f", {name}={number}" for name, number, default in given if number != default)


def pooled(use: Use) -> str | None:
    """A pool along the last dims; its window is a number."""
    (x,), spatial = use.tensors, _SPATIAL.search(use.word)
    size = _option(use, "kernel_size", 1, 0)
    stride, pad = _option(use, "stride", 2, size), _option(use, "padding", 3, 0)
    if spatial is None or pad or len(use.parts) > 3 or "ceil_mode" in use.named:
        return None
    slides = _slides(use, x, [(str(size), size)] * int(spatial[1]), stride, pad)
    return f"{use.word[:8]}[{slides}]({x.ref}{_options(stride, pad, 1, size)})"


def convolved(use: Use) -> str | None:
    """A convolution of an image [n, c, h, w] by a kernel [o, c, kh, kw], without a bias.

    That of a transposed one is [c, o, kh, kw].
    """
    (x, k, *_), spatial = use.tensors, _SPATIAL.search(use.word)
    back = use.word.startswith("conv_transpose")
    # conv_transpose2d(x, k, bias, stride, padding, output_padding, groups, dilation)
    more = use.option("output_padding", at=5) if back else None
    if spatial is None or use.option("groups", at=6) or use.option("bias", at=2) or more:
        return None
    along = int(spatial[1])
    stride, pad = _option(use, "stride", 3, 1), _option(use, "padding", 4, 0)
    gap = _option(use, "dilation", 7 if back else 5, 1)
    if len(x.names) != along + 2 or len(k.names) != along + 2:
        return None
    kernel: list[str] = []
    for index, dim in enumerate(k.dims or ()):
        hint, taken = dim.name, [*x.names, *kernel]
        if index == (0 if back else 1):
            kernel.append(x.names[1])
        else:
            kernel.append(hint if hint not in taken else use.fresh(f"k_{hint}", dim.size, taken))
    pairs = zip(k.names, kernel, strict=True)
    arrows = ", ".join(f"{old} -> {new}" for old, new in pairs if old != new)
    windows = [(n, d.size) for n, d in zip(kernel[2:], (k.dims or ())[2:], strict=True)]
    slides = _slides(use, x, windows, stride, pad, gap, back=back)
    renamed = f"{k.ref}[{arrows}]" if arrows else k.ref
    name, options = "upconv" if back else "conv", _options(stride, pad, gap)
    return f"{name}[{slides}]({x.ref}, {renamed}{options})"


def sized(use: Use) -> str | None:
    """The size of a dim is its name."""
    x = use.parts[0]
    along = use.option("dim", "axis", at=1)
    if use.word in ("ndim", "dim"):
        return str(len(x.names))
    if use.word == "numel" or (use.word == "size" and along is None):
        return " * ".join(x.names) or "1"
    dims = use.dims_of(along, x) if along else x.names[:1] if use.word == "len" else None
    return dims[0] if dims else None
