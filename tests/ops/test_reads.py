"""`Reads`: what a block of a loop reads of an operand, against the list of all that is read."""

import itertools

import pytest

from meshdsl.ops.opdef import Reads
from tests.together import together

BLOCKS = [(o0, o1) for o0 in range(5) for o1 in range(o0, 6)]


def _convolution(stride: int, dilation: int, kernel: int, before: int) -> Reads:
    """What a convolution reads of its image."""
    return Reads(mul=stride, lo=-before, hi=-before + (kernel - 1) * dilation)


CONVOLUTIONS: dict[str, tuple[int, ...]] = {
    "stride": (1, 2, 3), "dilation": (1, 2), "kernel": (1, 2, 4), "before": (0, 1, 3),
}  # fmt: skip


@together(**CONVOLUTIONS)
def test_a_convolution_reads_from_the_first_tap_to_the_last(
    stride: int, dilation: int, kernel: int, before: int
) -> None:
    reads = _convolution(stride, dilation, kernel, before)
    for (o0, o1), size in itertools.product(BLOCKS, (1, 4, 9)):
        taps = [o * stride - before + t * dilation for o in range(o0, o1) for t in range(kernel)]
        inside = [i for i in taps if 0 <= i < size]
        if taps:
            assert reads.span(o0, o1, size) == (min(taps), max(taps) + 1)
        start, stop = reads.interval(o0, o1, size)
        assert 0 <= start <= stop <= size
        assert not inside or start <= min(inside) <= max(inside) < stop
        assert taps or start == stop


@together(**CONVOLUTIONS)
def test_its_gradient_reads_every_result_that_an_element_went_into(
    stride: int, dilation: int, kernel: int, before: int
) -> None:
    reads = Reads(div=stride, lo=before - (kernel - 1) * dilation, hi=before)
    for (h0, h1), results in itertools.product(BLOCKS, (1, 3, 7)):
        used = [
            o
            for o, t in itertools.product(range(results), range(kernel))
            if h0 <= o * stride - before + t * dilation < h1
        ]
        start, stop = reads.interval(h0, h1, results)
        assert 0 <= start <= stop <= results
        assert not used or start <= min(used) <= max(used) < stop


@pytest.mark.parametrize("reads", [Reads(), Reads(lo=2, hi=2), Reads(lo=-1, hi=3), Reads(mul=2)])
def test_flipped_it_is_the_mirrored_interval(reads: Reads) -> None:
    flipped = Reads(reads.mul, reads.div, reads.lo, reads.hi, flip=True)
    for o0, o1 in BLOCKS:
        start, stop = reads.span(o0, o1, 7)
        assert flipped.span(o0, o1, 7) == (7 - stop, 7 - start)
    assert Reads(flip=True).interval(0, 3, 7) == (4, 7)


def test_without_a_fill_the_window_ends_at_the_border() -> None:
    assert Reads(lo=-2, hi=-2).window(0, 4, 4) == (-2, 2)
    assert Reads(lo=-2, hi=-2, fill=None).window(0, 4, 4) == (0, 2)
    assert Reads(lo=-2, hi=-2, fill=None).window(0, 1, 4) == (0, 0)
