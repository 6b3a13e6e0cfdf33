"""The texts of windows that slide along dims, in JAX and in OneFlow.

A convolution of XLA names the dims of its operands by letters, so that one dim for each role stands
where it is; where a role has none or several, as groups have, they are made one before.
OneFlow's functions are torch's by name and meaning, so its texts are those of the records.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from meshdsl.backends.peers.peer_call import PeerCall, Text
from meshdsl.backends.torch.line_breaks import quoted
from meshdsl.backends.torch.op_context import TorchText
from meshdsl.ir.types import TensorType
from meshdsl.ops.convolution import roles_of
from meshdsl.ops.opdef import Attrs, lookup
from meshdsl.ops.sliding import Slide, slides
from meshdsl.ops.torch_expressions import Names, tuple_text
from meshdsl.placed.placements import Placement

SLIDING = frozenset({"conv", "upconv", "max_pool", "avg_pool"})
"""Operators of which XLA exchanges the borders of blocks itself."""

# --- JAX -----------------------------------------------------------------------------------------


def spec_words(p: Placement, names: Sequence[str]) -> list[str]:
    """The entries of a `PartitionSpec` for dims: the axes each is split over, or None."""
    return [_axes(p.axes_of(n)) for n in names]


def _axes(axes: tuple[str, ...]) -> str:
    if not axes:
        return "None"
    return quoted(axes[0]) if len(axes) == 1 else tuple_text([quoted(a) for a in axes])


def jax_conv(call: PeerCall) -> str:
    """`conv` as XLA's convolution."""
    sliding = slides(call.attrs, _sizes(call))
    options = _listed("window_strides", [s.stride for s in sliding], always=True)
    padding = ", ".join(f"({s.before}, {_after(s)})" for s in sliding)
    return _convolution(call, sliding, f"{options}, padding=[{padding}]")


def jax_upconv(call: PeerCall) -> str:
    """`upconv`: the kernel turned round, over an image with gaps between its elements."""
    sliding = slides(call.attrs, _sizes(call), back=True)
    padding = []
    for s in sliding:
        first = s.reach - s.before
        last = s.fine.size - 1 - (s.coarse.size - 1) * s.stride - first + s.reach
        padding.append(f"({first}, {last})")
    options = _listed("window_strides", [1] * len(sliding), always=True)
    options += f", padding=[{', '.join(padding)}]"
    options += _listed(", lhs_dilation", [s.stride for s in sliding])
    return _convolution(call, sliding, options, turned=True)


def _after(slide: Slide) -> int:
    """The padding behind a dim that the last position needs."""
    return max(slide.covered(slide.coarse.size) - slide.fine.size - slide.before, 0)


def _sizes(call: PeerCall) -> list[int]:
    return [d.size for d in call.attrs["window"]]


def _listed(name: str, numbers: Sequence[int], *, always: bool = False) -> str:
    return f"{name}={tuple_text(numbers)}" if always or any(n != 1 for n in numbers) else ""


def channels(
    image: TensorType, kernel: TensorType, out: TensorType, attrs: Attrs
) -> tuple[Names, ...]:
    """The dims that are one for a convolution there: batch, channels of image and of result."""
    roles = roles_of(image, kernel, out, attrs)
    return roles.batch, (*roles.group, *roles.summed), (*roles.group, *roles.made)


def _convolution(
    call: PeerCall, found: tuple[Slide, ...], options: str, *, turned: bool = False
) -> str:
    """The convolution of both operands; `turned`: with its kernel turned round."""
    image, kernel = call.ins
    roles = roles_of(image, kernel, call.out, call.attrs)
    batch, of_image, of_out = channels(image, kernel, call.out, call.attrs)
    source, window, target = ([(d.name,) for d in call.attrs[k]] for k in _ALONG)
    space = "DHW"[-len(found) :]
    x, in_x = _joined(call, 0, [batch, of_image, *source], f"NC{space}")
    k, in_k = _joined(call, 1, [of_out, roles.summed, *window], f"OI{space}")
    groups = [batch, of_out, *target]
    names, in_out = _letters(call.out.names, groups, f"NC{space}")
    if turned:
        k = f"jnp.flip({k}, {tuple_text([in_k.index(c) for c in space])})"
    options += _listed(", rhs_dilation", [s.dilation for s in found])
    options += f", dimension_numbers={tuple_text([quoted(c) for c in (in_x, in_k, in_out)])}"
    count = math.prod(image.size(n) for n in roles.group)
    options += f", feature_group_count={count}" if count != 1 else ""
    options += f", out_sharding=P({', '.join(spec_words(call.yields, names))})"
    text = f"jax.lax.conv_general_dilated({x}, {k}, {options})"
    return text if names == call.out.names else _parted(call, text, groups)


_ALONG = ("source", "window", "target")


def _letters(names: Names, groups: Sequence[Names], letters: str) -> tuple[Names, str]:
    """The dims and their letters: as they are where each is a group, else the first of groups."""
    if all(len(g) == 1 for g in groups):
        letter = {g[0]: c for g, c in zip(groups, letters, strict=True)}
        return names, "".join(letter[n] for n in names)
    return tuple(g[0] if g else "" for g in groups), letters


def _joined(call: PeerCall, index: int, groups: Sequence[Names], letters: str) -> tuple[str, str]:
    """An operand with one dim for each group of dims, and the letters of those dims."""
    type_ = call.ins[index]
    names, letters = _letters(type_.names, groups, letters)
    if names == type_.names:
        return call.args[index], letters
    text = call.ordered(index, tuple(n for group in groups for n in group))
    sizes = tuple_text([math.prod(type_.size(n) for n in g) for g in groups])
    spec = ", ".join(spec_words(call.needs[index] if call.needs else Placement(), names))
    return f"jax.lax.reshape({text}, {sizes}, out_sharding=P({spec}))", letters


def _parted(call: PeerCall, text: str, groups: Sequence[Names]) -> str:
    """The inverse of `_joined`, for the result."""
    order = tuple(n for group in groups for n in group)
    sizes = tuple_text([call.out.size(n) for n in order])
    spec = ", ".join(spec_words(call.yields, order))
    text = f"jax.lax.reshape({text}, {sizes}, out_sharding=P({spec}))"
    return call.permuted(text, order, call.out.names)


def jax_pool(first: str, how: str, mean: bool) -> Text:
    """`reduce_window`, from the number `first` on."""

    def write(call: PeerCall) -> str:
        names, sliding = call.ins[0].names, slides(call.attrs, call.attrs["size"])
        by_name = {s.fine.name: s for s in sliding}
        each = [by_name.get(n) for n in names]
        windows = tuple_text([s.size if s else 1 for s in each])
        strides = tuple_text([s.stride if s else 1 for s in each])
        padding = ", ".join(f"({s.before}, {_after(s)})" if s else "(0, 0)" for s in each)
        options = f"{windows}, {strides}, [{padding}]"
        start = f"jnp.asarray({first}, dtype={call.dtype})"
        text = f"jax.lax.reduce_window({call.args[0]}, {start}, {how}, {options})"
        return f"{text} / {math.prod(s.size for s in sliding)}" if mean else text

    return write


def shifted_copies(call: PeerCall) -> str:
    """The shifted copies of a dim, side by side."""
    (dim,), (size,), (target,) = (call.attrs[k] for k in ("source", "size", "target"))
    at, before = call.ins[0].index(dim.name), call.attrs["before"]
    assert call.out.names.index(target.name) == at + 1
    return f"window({call.args[0]}, {at}, {size}, {before})"


# --- OneFlow -------------------------------------------------------------------------------------


def flow_as_torch(name: str) -> Text:
    """The torch text of the record, by OneFlow's names; None where it needs more than its API.

    Margins that are negative are not documented there.
    """

    def write(call: PeerCall) -> str | None:
        torch = TorchText(
            args=call.args,
            constants=tuple(i in call.literals for i in range(len(call.args))),
            ins=call.ins,
            outs=(call.out,),
            global_ins=call.ins,
            global_outs=(call.out,),
            attrs=call.attrs,
            fresh=lambda hint: hint,
        )
        text = lookup(name).torch(torch)
        if torch.used or torch.lines or re.search(r"\.pad\(.*-\d", text):
            return None
        for old, new in _FLOW_NAMES:
            text = text.replace(old, new)
        return text

    return write


_FLOW_NAMES = (
    ("torch.nn.functional.", "F."),
    ("torch.", "flow."),
    (".mT", ".transpose(-2, -1)"),
)
