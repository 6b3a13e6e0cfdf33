"""The values of number and string literals."""

from __future__ import annotations

import math

from meshdsl.diagnostics import Fix, Span, advice, fail

MAX_DIGITS = 20
"""Digits of an integer literal: more than any size or index needs."""

_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def number_value(text: str, span: Span) -> int | float:
    """An int for digits alone, a float for anything with a point or an exponent.

    Raises:
        DiagnosticError: too many digits, or a float beyond the largest (MD0007).
    """
    digits = text.replace("_", "")
    if digits.isdecimal():
        if len(digits) > MAX_DIGITS:
            message = f"an integer of {len(digits)} digits; at most {MAX_DIGITS} fit"
            nearest = float(digits)
            fixes = () if math.isinf(nearest) else (Fix.write(span, repr(nearest), safe=False),)
            smaller = "choose a smaller number"
            help = advice(fixes, f"or {smaller}") if fixes else smaller
            fail("MD0007", message, span, help=help, fixes=fixes)
        return int(digits)
    value = float(digits)
    if math.isinf(value):
        largest = (Fix.write(span, "1.7e308", safe=False),)
        help = advice(largest, "the largest is about 1.8e308")
        message = "this number is larger than any float"
        fail("MD0007", message, span, help=help, fixes=largest)
    return value


def string_value(text: str, span: Span) -> str:
    r"""The text between the quotes, with `\n`, `\t`, `\"` and `\\` resolved.

    Raises:
        DiagnosticError: another character after a backslash (MD0009).
    """
    out: list[str] = []
    chars = iter(enumerate(text[1:-1]))
    for at, char in chars:
        if char != "\\":
            out.append(char)
            continue
        _, escaped = next(chars)
        if escaped not in _ESCAPES:
            place = Span(span.source, span.start + 1 + at, span.start + 3 + at)
            fixes = (Fix.write(place, f"\\\\{escaped}", safe=False),)
            help = advice(fixes, r"a backslash itself is written `\\`")
            message = f"`\\{escaped}` means nothing in a string"
            fail("MD0009", message, place, help=help, fixes=fixes)
        out.append(_ESCAPES[escaped])
    return "".join(out)
