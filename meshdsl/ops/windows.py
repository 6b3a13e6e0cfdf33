"""`window[seq by 5 -> at](x, before=4)`: at each index of a dim the elements around it, a new dim.

Of index i, element t of the new dim is element i - before + t of the tensor, zero outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from meshdsl.ir.types import I32, Dim, TensorType
from meshdsl.named.ir import Value
from meshdsl.ops.opdef import (
    Attrs,
    Backward,
    Factor,
    Factors,
    NumpyCall,
    OpDef,
    OpError,
    Signature,
    Surface,
    TorchCall,
    register,
)
from meshdsl.ops.requirements import (
    Array,
    loops,
    need_dims,
    need_distinct,
    need_kind,
    no_flops,
    sample,
    tensor,
)
from meshdsl.ops.sliding import (
    Slide,
    Tap,
    check_size,
    cut_out,
    guarded,
    padded,
    spread_back,
    tapped,
    taps,
    widened,
)
from meshdsl.ops.torch_expressions import permuted


def _found(attrs: Attrs) -> Slide:
    (dim,), (size,) = attrs["source"], attrs["size"]
    return Slide(dim, dim, size, 1, 1, attrs["before"])


def _check(said: str, attrs: Attrs) -> None:
    """MD0252 for several windows, MD0222 for an empty one, MD0209 for another size, MD0213."""
    if len(attrs["source"]) != 1 or attrs["source"] == attrs["target"]:
        help = "write `window[seq by 5 -> part](x)`, and once more for another dim"
        raise OpError("MD0252", f"`{said}` takes one dim, and names a new one", help)
    (size,), (target,), before = attrs["size"], attrs["target"], attrs["before"]
    check_size(said, attrs["source"][0], size)
    if size != target.size:
        message = f"the window of `{said}` is of size {size}, and `{target}` of size {target.size}"
        raise OpError("MD0209", message, f"declare `dim {target} = {size}`")
    if not isinstance(before, int) or not 0 <= before < size:
        message = f"a window of {size} elements cannot have {before} of them before its index"
        raise OpError("MD0213", message, f"give a whole number from 0 to {size - 1}")


def _infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_dims("window", ins[0], attrs["source"])
    need_kind("window", "number", ins[0])
    _check("window", attrs)
    (dim,), (target,) = attrs["source"], attrs["target"]
    at = ins[0].index(dim.name) + 1
    dims = (*ins[0].dims[:at], target, *ins[0].dims[at:])
    need_distinct("window", dims)
    return (TensorType(dims, ins[0].dtype),)


def _grad_infer(ins: tuple[TensorType, ...], attrs: Attrs) -> tuple[TensorType, ...]:
    need_dims("window_grad", ins[0], (*attrs["source"], *attrs["target"]))
    _check("window_grad", attrs)
    return (ins[0].without(attrs["target"][0].name),)


def _factors(back: bool) -> Callable[[Signature], Factors]:
    """The loops; `back` for the gradient, which reads the windows that an element is in."""

    def factors(sig: Signature) -> Factors:
        slide, target = _found(sig.attrs), sig.attrs["target"][0].name
        name = slide.fine.name
        reads = slide.read_back() if back else slide.reads()
        factor = Factor(name, (name,), (name,), reads=(reads,) if reads else ())
        return Factors(
            (*loops(sig, without=(name, target)), factor), (frozenset({0}),), () if back else (0,)
        )

    return factors


def _numpy(call: NumpyCall, x: Array) -> Array:
    slide, names = _found(call.attrs), call.ins[0].names
    wide = widened(call, x, [slide])
    parts = [wide[tapped(call, tap, [slide], names)] for tap in taps([slide])]
    return np.stack(parts, axis=names.index(slide.fine.name) + 1)


def _grad_numpy(call: NumpyCall, dy: Array) -> Array:
    slide, at = _found(call.attrs), call.ins[0].index(call.attrs["target"][0].name)
    others = tuple(n for n in call.ins[0].names if n != call.attrs["target"][0].name)
    assert others == call.outs[0].names

    def parts() -> Iterator[tuple[Tap, Any]]:
        for tap in taps([slide]):
            yield tap, dy.take(tap[0], axis=at)

    return spread_back(call, [slide], parts(), dy.dtype)


def _text(call: TorchCall) -> str:
    slide, names, x = _found(call.attrs), call.ins[0].names, call.tensor(0)
    target = call.attrs["target"][0].name
    at = names.index(slide.fine.name)
    if not call.is_window(0, slide.fine.name) and slide.reach:
        widths = [(0, 0)] * len(names)
        widths[at] = (slide.before, slide.reach - slide.before)
        x = padded(x, widths[at:])
    text = f"{x}.unfold({at}, {slide.size}, 1)"
    return guarded(call, permuted(text, (*names, target), call.outs[0].names))


def _scratch(sig: Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of the padded operand, which the result shows; a window has its padding."""
    del numbers
    slide, x = _found(sig.attrs), sig.ins[0]
    name, size = slide.fine.name, sig.outs[0].size(slide.fine.name)
    is_padded = slide.reach and x.size(name) == size
    return x.resized({name: size + slide.reach}).bytes if is_padded else 0


def _grad_text(call: TorchCall) -> str:
    """Each window added where it was, through zeros behind it: a row longer, and flat again."""
    slide, names = _found(call.attrs), call.ins[0].names
    fine, target = slide.fine.name, call.attrs["target"][0].name
    others = tuple(n for n in names if n not in (fine, target))
    dy = permuted(call.tensor(0), names, (*others, fine, target))
    total = f"{call.use('window_sums')}({dy})"
    return permuted(cut_out(call, total, [slide]), (*others, fine), call.outs[0].names)


def _gradient(call: Backward) -> Mapping[int, Value]:
    grad = call.full(call.grad, call.outs[0].dims)
    return {0: call.emit("window_grad", grad, **call.attrs)}


def _grad_gradient(call: Backward) -> Mapping[int, Value]:
    grad = call.full(call.grad, call.outs[0].dims)
    made = call.emit("window", grad, **call.attrs)
    return {0: call.emit("transpose", made, dims=call.ins[0].dims)}


_B, _S, _C, _T, _P = Dim("b", 2), Dim("s", 6), Dim("c", 2), Dim("t", 3), Dim("p", 2)


def _along(target: Dim, before: int) -> dict[str, Any]:
    return {"source": (_S,), "size": (target.size,), "target": (target,), "before": before}


register(
    OpDef(
        "window",
        Surface("slide", (1, 1), (("before", 0),)),
        _infer,
        _factors(back=False),
        _numpy,
        _text,
        (
            sample(tensor(_B, _S, _C), **_along(_T, 2)),
            sample(tensor(_S), **_along(_P, 0)),
            sample(tensor(_C, _S), **_along(_T, 1)),
            sample(tensor(_S, _B, dtype=I32), **_along(_P, 1)),
        ),
        flops=no_flops,
        gradient=_gradient,
        shows=lambda ins, attrs: True,
        scratch=_scratch,
        relocates=True,
        meaning="For each index of a dim, the elements around it as a new dim: element `t` of "
        "index `i` is element `i - before + t` of the tensor, zero outside. The new dim stands "
        "behind the old one; `before` is less than its size.",
    )
)
register(
    OpDef(
        "window_grad",
        Surface("view", (1, 1)),
        _grad_infer,
        _factors(back=True),
        _grad_numpy,
        _grad_text,
        (
            sample(tensor(_B, _S, _T, _C), **_along(_T, 2)),
            sample(tensor(_P, _S), **_along(_P, 0)),
            sample(tensor(_C, _S, _T), **_along(_T, 1)),
        ),
        gradient=_grad_gradient,
        meaning="The gradient of `window`: each element summed over the windows that it is in.",
    )
)
