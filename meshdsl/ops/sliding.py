"""Windows that slide along dims: their geometry, what a block of them reads, checks, torch text.

A window of `size` elements, `dilation` apart, begins `before` elements before the dim, and moves on
by `stride`. `fine` is the dim that it slides along, `coarse` the dim of its positions: tap t of
position o is element o * stride - before + t * dilation. What lies outside is fill.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from meshdsl.backends.runtime.lazy_numpy import np
from meshdsl.ops import kit
from meshdsl.records import dataclass

MOST = 3
"""The most dims that windows slide along at once: torch has no more."""

Tap = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Slide:
    """A window that slides along one dim."""

    fine: kit.Dim
    coarse: kit.Dim
    size: int
    stride: int
    dilation: int
    before: int

    @property
    def reach(self) -> int:
        """The distance from the first tap of a window to its last."""
        return (self.size - 1) * self.dilation

    def covered(self, positions: int) -> int:
        """The elements from the first tap of the first of so many positions to the last tap."""
        return (positions - 1) * self.stride + self.reach + 1

    def reads(self, fill: float = 0.0) -> kit.Reads | None:
        """What positions read of the elements; None where each reads its own."""
        if self.is_identity:
            return None
        return kit.Reads(mul=self.stride, lo=-self.before, hi=self.reach - self.before, fill=fill)

    def read_back(self) -> kit.Reads | None:
        """The positions whose windows have the elements of a block."""
        if self.is_identity:
            return None
        return kit.Reads(div=self.stride, lo=self.before - self.reach, hi=self.before)

    @property
    def is_identity(self) -> bool:
        """Whether position i is element i alone."""
        alone = self.size == 1 and self.stride == 1 and self.before == 0
        return alone and self.fine.size == self.coarse.size


def slides(attrs: kit.Attrs, sizes: Sequence[int], *, back: bool = False) -> tuple[Slide, ...]:
    """The windows of a call. `back`: the source has the positions, the target the elements."""
    fine, coarse = ("target", "source") if back else ("source", "target")
    strides = attrs["stride"]
    if not isinstance(strides, tuple):
        strides = sizes if strides is None else (strides,) * len(sizes)
    dilation = attrs.get("dilation", 1)
    return tuple(
        Slide(f, c, size, stride, dilation, _before(attrs["pad"], f.size, size, stride, dilation))
        for f, c, size, stride in zip(attrs[fine], attrs[coarse], sizes, strides, strict=True)
    )


def _before(pad: str | int, fine: int, size: int, stride: int, dilation: int) -> int:
    """The elements before a dim; of "same", which may be odd in all, the smaller half."""
    if pad == "same":
        total = (-(-fine // stride) - 1) * stride + (size - 1) * dilation + 1 - fine
        return max(total, 0) // 2
    return 0 if pad == "valid" else int(pad)


def positions(slide: Slide, pad: str | int) -> int:
    """The number of positions of a window; 0 or less where it does not fit."""
    if pad == "same":
        return -(-slide.fine.size // slide.stride)
    return (slide.fine.size + 2 * slide.before - slide.reach - 1) // slide.stride + 1


# --- checks ----------------------------------------------------------------------------------


def check_options(said: str, attrs: kit.Attrs) -> None:
    """MD0220 for a stride or dilation that is no whole number from 1 on, MD0221 for a pad."""
    for option in ("stride", "dilation"):
        value = attrs.get(option, 1)
        numbers = value if isinstance(value, tuple) else (value,)
        if value is not None and not all(_is_whole(n, 1) for n in numbers):
            raise kit.OpError(
                "MD0220",
                f"`{said}` cannot have the {option} {value}",
                None,
                kit.SetOption(option, "1"),
                also=f"`{option}` is a whole number of 1 or more",
            )
    pad = attrs["pad"]
    if pad not in ("same", "valid") and not _is_whole(pad, 0):
        raise kit.OpError(
            "MD0221",
            f"`{said}` cannot pad by {pad!r}"
            if isinstance(pad, str)
            else f"`{said}` pads by {pad}",
            'write `pad="same"`, `pad="valid"` or the elements on either side, from 0 on',
            kit.SetOption("pad", '"same"'),
            also='or `pad="valid"`, or the elements on either side, from 0 on',
        )


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_windows(said: str, attrs: kit.Attrs, sizes: Sequence[object]) -> None:
    """The number of windows, their sizes and options; MD0220 to MD0222."""
    if len(sizes) > MOST:
        message = f"`{said}` slides along {len(sizes)} dims, and {MOST} are the most"
        raise kit.OpError("MD0252", message, "apply it to some of the dims, then to the others")
    for source, size in zip(attrs["source"], sizes, strict=True):
        check_size(said, source, size)
    check_options(said, attrs)


def check_size(said: str, source: kit.Dim, size: object) -> None:
    """MD0222 for a window that is no whole number of elements from 1 on."""
    if not _is_whole(size, 1):
        message = f"the window of `{said}` along `{source}` cannot be of size {size}"
        way, also = kit.WindowSize(source.name, 1), "its size is a whole number of 1 or more"
        raise kit.OpError("MD0222", message, None, way, also=also)


def check_sizes(
    said: str, windows: Sequence[Slide], attrs: kit.Attrs, *, back: bool = False
) -> None:
    """MD0222 for a window that is larger than its dim, MD0209 for a result of another size."""
    for slide in windows:
        fine, size, number = slide.fine, slide.fine.size, positions(slide, attrs["pad"])
        if number < 1:
            padded = size + 2 * slide.before
            of = f"{padded} elements with its padding" if slide.before else f"{size} elements"
            raise kit.OpError(
                "MD0222",
                f"a window of `{said}` spans {slide.reach + 1} elements, and `{fine}` has {of}",
                'make it smaller, or pad: `pad="same"`',
                kit.WindowSize(fine.name, (size + 2 * slide.before - 1) // slide.dilation + 1),
                also='or a smaller window; or pad: `pad="same"`',
            )
        if number != slide.coarse.size:
            raise _wrong_size(said, slide, number, attrs, back)


def _wrong_size(said: str, slide: Slide, number: int, attrs: kit.Attrs, back: bool) -> kit.OpError:
    """MD0209 for a dim that is not as large as the windows make it."""
    fine, coarse = slide.fine, slide.coarse
    if back:
        message = (
            f"`{said}` needs {coarse.size} windows in `{fine}`, one for each position of "
            f"`{coarse}`; `{fine}` has {fine.size} elements, enough for {number}"
        )
        least = (coarse.size - 1) * slide.stride + slide.reach + 1 - 2 * slide.before
        least = coarse.size * slide.stride if attrs["pad"] == "same" else least
        help = f"declare `dim {fine} = {least}`"
        return kit.OpError("MD0209", message, help, kit.ResizeDim(fine.name, least))
    message = (
        f"`{said}` makes {number} positions along `{fine}`, and `{coarse}` is of size {coarse.size}"
    )
    if fine == coarse:
        new = f"name the new dim, `[{fine} by … -> new]` with `dim new = {number}`"
        way = kit.SetOption("pad", '"same"')
        help = f'{new}, or keep the size by `pad="same"`'
        return kit.OpError("MD0209", message, help, way, also=f"or {new}")
    help = f"declare `dim {coarse} = {number}`"
    return kit.OpError("MD0209", message, help, kit.ResizeDim(coarse.name, number))


def replaced_dims(type_: kit.TensorType, attrs: kit.Attrs) -> tuple[kit.Dim, ...]:
    """The dims of `type_`, with the targets of the windows for their sources."""
    new = {s.name: t for s, t in zip(attrs["source"], attrs["target"], strict=True)}
    return tuple(new.get(d.name, d) for d in type_.dims)


# --- numpy -----------------------------------------------------------------------------------


def taps(windows: Sequence[Slide]) -> Iterator[Tap]:
    """The taps of a window over all dims, row-major."""
    return itertools.product(*(range(s.size) for s in windows))


def tap_parts(
    call: kit.NumpyCall, x: kit.Array, windows: Sequence[Slide], fill: float = 0.0
) -> Iterator[tuple[Tap, kit.Array]]:
    """Each tap, with what it is of operand 0 at every local position."""
    wide = _widened(call, x, windows, fill)
    for tap in taps(windows):
        yield tap, wide[_tapped(call, tap, windows, call.ins[0].names)]


def _widened(
    call: kit.NumpyCall, x: kit.Array, windows: Sequence[Slide], fill: float = 0.0
) -> kit.Array:
    """Operand 0 from the first tap of the first local position to the last tap of the last."""
    for slide in windows:
        name = slide.fine.name
        if call.is_window(0, name):
            continue
        at = call.ins[0].index(name)
        need = max(slide.covered(call.extent(slide.coarse.name)), 0)
        after = max(need - x.shape[at] - slide.before, 0)
        x = kit.numpy_padded(x, at, slide.before, after, fill)
        x = x[_along(x.ndim, {at: slice(0, need)})]
    return x


def _tapped(
    call: kit.NumpyCall, tap: Tap, windows: Sequence[Slide], dims: kit.Names
) -> tuple[slice, ...]:
    """The index of what a tap of every local position is in an array over `dims`, widened."""
    parts = {}
    for t, slide in zip(tap, windows, strict=True):
        start, count = t * slide.dilation, call.extent(slide.coarse.name)
        parts[dims.index(slide.fine.name)] = slice(
            start, start + max((count - 1) * slide.stride + 1, 0), slide.stride
        )
    return _along(len(dims), parts)


def _along(ndim: int, parts: dict[int, slice]) -> tuple[slice, ...]:
    return tuple(parts.get(i, slice(None)) for i in range(ndim))


def spread_back(
    call: kit.NumpyCall,
    windows: Sequence[Slide],
    parts: Iterator[tuple[Tap, kit.Array]],
    dtype: Any,
) -> kit.Array:
    """The local result, to whose elements the parts of the taps are added, by position."""
    names, shape = call.outs[0].names, call.local(call.outs[0]).shape
    out = np.zeros(shape, dtype)
    for tap, part in parts:
        into, of = {}, {}
        for t, slide in zip(tap, windows, strict=True):
            at, stride = names.index(slide.fine.name), slide.stride
            first = call.start(0, slide.coarse.name) * stride - slide.before
            first += t * slide.dilation - call.offset(slide.fine.name)
            # The positions whose element is here: neither before the first one nor after the last.
            low = max(0, -(first // stride))
            high = max(low, min(part.shape[at], -((first - shape[at]) // stride)))
            of[at] = slice(low, high)
            into[at] = slice(first + low * stride, first + high * stride, stride)
        out[_along(out.ndim, into)] += part[_along(part.ndim, of)]
    return out


# --- torch text --------------------------------------------------------------------------------


def number_of(call: kit.TorchCall, names: kit.Names) -> str:
    """The text of the number of local elements of dims."""
    sizes = [call.extent(n) for n in names]
    if all(s.isdigit() for s in sizes):
        return str(math.prod(map(int, sizes)))
    return " * ".join(sizes) or "1"


def margins(call: kit.TorchCall, slide: Slide) -> tuple[int, int]:
    """The elements to be added before and after operand 0 along a dim; none to a window."""
    if call.is_window(0, slide.fine.name) or slide.is_identity:
        return 0, 0
    after = slide.covered(slide.coarse.size) - slide.fine.size - slide.before
    return slide.before, max(after, 0)


def own_padding(
    call: kit.TorchCall,
    windows: Sequence[Slide],
    most: Callable[[Slide], bool] = lambda slide: True,
) -> tuple[int, ...] | None:
    """The padding on both sides that torch can add itself, and that makes all positions, or None.

    `most` says whether torch can pad so much.
    """
    padded = [not (call.is_window(0, s.fine.name) or s.is_identity) for s in windows]
    pairs = list(zip(windows, padded, strict=True))
    fits = (positions(s, s.before) == s.coarse.size and most(s) for s, pads in pairs if pads)
    return tuple(s.before if pads else 0 for s, pads in pairs) if all(fits) else None


def padded(text: str, widths: Sequence[tuple[int, int]], fill: float = 0.0) -> str:
    """`text` with margins along its last dims; torch lists them from the last dim backwards."""
    listed = [n for pair in reversed(widths) for n in pair]
    value = f', value=float("{fill}")' if fill else ""
    return (
        f"torch.nn.functional.pad({text}, {kit.tuple_text(listed)}{value})" if any(listed) else text
    )


def is_part(call: kit.TorchCall, slide: Slide) -> bool:
    """Whether operand 0 has some positions only: the first of them need not be that of a block."""
    return call.is_window(0, slide.coarse.name) or call.is_split(slide.coarse.name)


def cut_out(call: kit.TorchCall, text: str, windows: Sequence[Slide]) -> str:
    """The local elements of what windows of all given positions add up to.

    Zeros where no window has an element.
    """
    if not any(is_part(call, s) for s in windows):
        ends = [s.fine.size - s.covered(s.coarse.size) + s.before for s in windows]
        widths = [(-s.before, end) for s, end in zip(windows, ends, strict=True)]
        return padded(
            text, [(0, 0) if s.is_identity else w for s, w in zip(windows, widths, strict=True)]
        )
    starts = [_gap(call, slide) for slide in windows]
    sizes = [call.extent(slide.fine.name) for slide in windows]
    return f"{call.use('cut_out')}({text}, {kit.tuple_text(starts)}, {kit.tuple_text(sizes)})"


class Overlap(NamedTuple):
    """What windows of the given positions cover, and which of it a device has of the elements."""

    before: int
    elements: int
    covered: int


def overlap(call: kit.TorchCall, slide: Slide) -> Overlap | None:
    """The overlap along a dim, where it is the same on all devices."""
    fine, coarse = slide.fine, slide.coarse
    parts = call.parts(fine.name, coarse.name)
    if not is_part(call, slide) and not call.is_split(fine.name):
        parts = (((0, fine.size), (0, coarse.size)),)
    overlaps = {
        Overlap(e0 - p0 * slide.stride + slide.before, e1 - e0, slide.covered(p1 - p0))
        for (e0, e1), (p0, p1) in parts
    }
    return overlaps.pop() if len(overlaps) == 1 else None


def _gap(call: kit.TorchCall, slide: Slide) -> str:
    """Text of the elements from where the first window begins to the first element."""
    if (same := overlap(call, slide)) is not None:
        return str(same.before)
    offset, position = call.offset(slide.fine.name), call.start(0, slide.coarse.name)
    if offset.isdigit() and position.isdigit():
        return str(int(offset) - int(position) * slide.stride + slide.before)
    first = position if slide.stride == 1 else f"({position}) * {slide.stride}"
    return f"{offset} - ({first} - {slide.before})" if slide.before else f"{offset} - ({first})"


def guarded(call: kit.TorchCall, text: str, windows: Sequence[Slide] = ()) -> str:
    """`text`, but zeros on a device that has none of some dim: torch refuses empty images.

    `windows` are those whose positions operand 0 has; a device may be given none of them.
    """
    names = dict.fromkeys(n for t in (*call.outs, *call.ins[1:]) for n in t.names)
    sizes = [call.extent(n) for n in names]
    dtype = "" if call.outs[0].dtype == call.ins[0].dtype else f", dtype={call.outs[0].dtype.torch}"
    zeros = f"{call.tensor(0)}.new_zeros({call.shape(0)}{dtype})"
    if "0" in sizes:
        return zeros
    unknown = [s for s in sizes if not s.isdigit()]
    for slide in windows:
        if call.may_be_empty(slide.coarse.name, 0):
            unknown.append(f"{call.tensor(0)}.shape[{call.ins[0].index(slide.coarse.name)}]")
    return f"({text} if {' and '.join(dict.fromkeys(unknown))} else {zeros})" if unknown else text


def equal_or_tuple(numbers: Sequence[int]) -> str:
    """The number where all are equal, else a tuple."""
    return str(numbers[0]) if len(set(numbers)) == 1 else kit.tuple_text(numbers)
