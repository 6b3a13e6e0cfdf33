"""`window[seq by 5 -> at](x, before=4)`: at each index of a dim the elements around it, a new dim.

Of index i, element t of the new dim is element i - before + t of the tensor, zero outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit, sliding


def _slides(attrs: kit.Attrs) -> sliding.Slide:
    (dim,), (size,) = attrs["source"], attrs["size"]
    return sliding.Slide(dim, dim, size, 1, 1, attrs["before"])


def _check(said: str, attrs: kit.Attrs) -> None:
    """MD0252 for several windows, MD0222 for an empty one, MD0209 for another size, MD0213."""
    if len(attrs["source"]) != 1 or attrs["source"] == attrs["target"]:
        help = "write `window[seq by 5 -> part](x)`, and once more for another dim"
        raise kit.OpError("MD0252", f"`{said}` takes one dim, and names a new one", help)
    (size,), (target,), before = attrs["size"], attrs["target"], attrs["before"]
    sliding.check_size(said, attrs["source"][0], size)
    if size != target.size:
        message = f"the window of `{said}` is of size {size}, and `{target}` of size {target.size}"
        help = f"declare `dim {target} = {size}`"
        raise kit.OpError("MD0209", message, help, kit.ResizeDim(target.name, size))
    if not isinstance(before, int) or not 0 <= before < size:
        message = f"a window of {size} elements cannot have {before} of them before its index"
        way = kit.SetOption("before", str(size - 1))
        also = f"`before` is a whole number from 0 to {size - 1}"
        raise kit.OpError("MD0213", message, None, way, also=also)


def _infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_dims("window", ins[0], attrs["source"])
    kit.need_kind("window", "number", ins[0])
    _check("window", attrs)
    (dim,), (target,) = attrs["source"], attrs["target"]
    at = ins[0].index(dim.name) + 1
    dims = (*ins[0].dims[:at], target, *ins[0].dims[at:])
    kit.need_distinct("window", dims)
    return (kit.TensorType(dims, ins[0].dtype),)


def _grad_infer(ins: kit.Types, attrs: kit.Attrs) -> kit.Types:
    kit.need_dims("window_grad", ins[0], (*attrs["source"], *attrs["target"]))
    _check("window_grad", attrs)
    return (ins[0].without(attrs["target"][0].name),)


def _factors(back: bool) -> Callable[[kit.Signature], kit.Factors]:
    """The loops; `back` for the gradient, which reads the windows that an element is in."""

    def factors(sig: kit.Signature) -> kit.Factors:
        slide, target = _slides(sig.attrs), sig.attrs["target"][0].name
        name = slide.fine.name
        reads = slide.read_back() if back else slide.reads()
        factor = kit.Factor(name, (name,), (name,), reads=(reads,) if reads else ())
        return kit.Factors(
            (*kit.loops(sig, without=(name, target)), factor),
            (frozenset({0}),),
            () if back else (0,),
        )

    return factors


def _numpy(call: kit.NumpyCall, x: kit.Array) -> kit.Array:
    slide = _slides(call.attrs)
    parts = [part for _, part in sliding.tap_parts(call, x, [slide])]
    return np.stack(parts, axis=call.ins[0].index(slide.fine.name) + 1)


def _grad_numpy(call: kit.NumpyCall, dy: kit.Array) -> kit.Array:
    slide, target = _slides(call.attrs), call.attrs["target"][0].name
    at = call.ins[0].index(target)
    assert call.outs[0].names == tuple(n for n in call.ins[0].names if n != target)
    parts = ((tap, dy.take(tap[0], axis=at)) for tap in sliding.taps([slide]))
    return sliding.spread_back(call, [slide], parts, dy.dtype)


def _text(call: kit.TorchCall) -> str:
    slide, names, x = _slides(call.attrs), call.ins[0].names, call.tensor(0)
    target = call.attrs["target"][0].name
    at = names.index(slide.fine.name)
    if not call.is_window(0, slide.fine.name) and slide.reach:
        x = kit.padded_at(x, len(names), at, slide.before, slide.reach - slide.before)
    text = f"{x}.unfold({at}, {slide.size}, 1)"
    return sliding.guarded(call, kit.permuted(text, (*names, target), call.outs[0].names))


def _scratch(sig: kit.Signature, numbers: Mapping[int, Any]) -> int:
    """The bytes of the padded operand, which the result shows; a window has its padding."""
    del numbers
    slide, x = _slides(sig.attrs), sig.ins[0]
    name, size = slide.fine.name, sig.outs[0].size(slide.fine.name)
    is_padded = slide.reach and x.size(name) == size
    return x.resized({name: size + slide.reach}).bytes if is_padded else 0


def _grad_text(call: kit.TorchCall) -> str:
    """Each window added where it was, through zeros behind it: a row longer, and flat again."""
    slide, names = _slides(call.attrs), call.ins[0].names
    fine, target = slide.fine.name, call.attrs["target"][0].name
    others = tuple(n for n in names if n not in (fine, target))
    dy = kit.permuted(call.tensor(0), names, (*others, fine, target))
    total = f"{call.use('window_sums')}({dy})"
    return kit.permuted(sliding.cut_out(call, total, [slide]), (*others, fine), call.outs[0].names)


def _grad_gradient(call: kit.Backward) -> kit.Grads:
    made = call.emit("window", kit.full_grad(call), **call.attrs)
    return {0: call.emit("transpose", made, dims=call.ins[0].dims)}


kit.operator(
    "window",
    kit.Surface("slide", (1, 1), (("before", 0),)),
    _infer,
    _factors(back=False),
    _numpy,
    _text,
    kit.samples(
        "b s=6 c=2 | source=(s) size=(3) target=(t=3) before=2",
        "s=6 | source=(s) size=(2) target=(p=2) before=0",
        "c=2 s=6 | source=(s) size=(3) target=(t=3) before=1",
        "s=6 b: i32 | source=(s) size=(2) target=(p=2) before=1",
    ),
    flops=kit.no_flops,
    gradient=lambda call: {0: call.emit("window_grad", kit.full_grad(call), **call.attrs)},
    shows=lambda ins, attrs: True,
    scratch=_scratch,
    relocates=True,
    meaning="For each index of a dim, the elements around it as a new dim: element `t` of "
    "index `i` is element `i - before + t` of the tensor, zero outside. The new dim stands "
    "behind the old one; `before` is less than its size.",
)
kit.operator(
    "window_grad",
    kit.Surface("view", (1, 1)),
    _grad_infer,
    _factors(back=True),
    _grad_numpy,
    _grad_text,
    kit.samples(
        "b s=6 t=3 c=2 | source=(s) size=(3) target=(t) before=2",
        "p=2 s=6 | source=(s) size=(2) target=(p) before=0",
        "c=2 s=6 t=3 | source=(s) size=(3) target=(t) before=1",
    ),
    gradient=_grad_gradient,
    meaning="The gradient of `window`: each element summed over the windows that it is in.",
)
