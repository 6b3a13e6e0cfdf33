"""Streams of random numbers: their keys, and what is made of their words. Pasted as text.

Every operation here is exact or rounds once, as IEEE 754 says: torch and numpy, processors and GPUs
get the same bits. A `library` is torch or numpy.
"""

import math
from typing import Any

GOLDEN = -0x61C8864680B583EB
"""2^64 divided by the golden ratio, as a signed number."""

MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def stream_key(stream: int, *numbers: Any) -> Any:
    """The key of a stream of random numbers: of a call, its seed and the indices of its loops.

    `stream` and the key are signed numbers of 64 bits; the key is a tensor where a number is on a
    GPU, which nothing waits for.
    """
    for number in numbers:
        number = number.long() if getattr(number, "is_cuda", False) else int(number)
        stream = hashed(wrapped(stream + wrapped((number + 1) * GOLDEN)))
    return stream


def hashed(z: Any) -> Any:
    """The hash of an integer, or of every element of an int64 tensor or array."""
    for shift, factor in MIX:
        z = wrapped((z ^ (z >> shift & (1 << 64 - shift) - 1)) * factor)
    return z ^ (z >> 31 & (1 << 33) - 1)


def wrapped(z: Any) -> Any:
    """An integer as a signed one of 64 bits; a tensor has no others."""
    return (z + 2**63) % 2**64 - 2**63 if isinstance(z, int) else z


def keeping(rate: float) -> tuple[int, float]:
    """The last of the int32 words that keep an element, from the least on, and its factor."""
    last = max(round((1 - rate) * 2**32) - 1, 0) - 2**31
    return last, 1 / (1 - rate) if rate < 1 else 0.0


def uniform_of(words: Any, library: Any) -> Any:
    """For every int32 word a number between 0 and 1, neither of them, in f32: 2^23 of them."""
    return (as_float(words >> 9, library) + (2.0**22 + 0.5)) * 2.0**-23


def as_float(x: Any, library: Any) -> Any:
    """Numbers in f32."""
    return library.asarray(x, dtype=library.float32)


def normal_of(words: Any, library: Any) -> Any:
    """Normal numbers in f32 (Box and Muller 1958), two of every two int32 words along the last dim.

    The polynomials are those of Cephes (Moshier 1984): a library's own `log` and `cos` may round
    otherwise where it works on several elements at once.
    """
    first, second = words[..., 0::2], words[..., 1::2]
    square = -2.0 * natural_log(uniform_of(first, library), library)
    # Torch's root of f32 is not always the nearest number; one of f64, rounded, is.
    radius = as_float(library.sqrt(library.asarray(square, dtype=library.float64)), library)
    quarter = second >> 30
    turn = as_float((second & 0x3FFFFFFF) >> 7, library) + (0.5 - 2.0**22)
    angle = turn * (2.0**-24 * math.pi)  # from -pi/4 to pi/4
    z = angle * angle
    sine = (z * -1.9515295891e-4 + 8.3321608736e-3) * z - 1.6666654611e-1
    sine = sine * z * angle + angle
    cosine = (z * 2.443315711809948e-5 - 1.388731625493765e-3) * z + 4.166664568298827e-2
    cosine = cosine * z * z - z * 0.5 + 1.0
    odd, half = (quarter & 1) == 1, as_float(1 - (quarter & 2), library)
    cosines = library.where(odd, -sine, cosine) * half
    sines = library.where(odd, cosine, sine) * half
    pairs = library.stack((radius * cosines, radius * sines), -1)
    return pairs.reshape(words.shape)


def natural_log(x: Any, library: Any) -> Any:
    """The logarithm of positive numbers of f32."""
    mantissa, exponent = library.frexp(x)
    small = mantissa < math.sqrt(0.5)
    x = library.where(small, mantissa + mantissa, mantissa) - 1.0
    exponent = as_float(exponent, library) - as_float(small, library)
    y = x * 7.0376836292e-2 - 1.1514610310e-1
    for term in (
        1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1, 2.0000714765e-1,
        -2.4999993993e-1, 3.3333331174e-1,
    ):  # fmt: skip
        y = y * x + term
    z = x * x
    return (exponent * 0.69314718056 + (y * x * z - z * 0.5)) + x
