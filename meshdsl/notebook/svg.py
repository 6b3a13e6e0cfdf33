"""A writer of elements for SVG and HTML. Whatever is no `Markup` goes in as text, escaped.

The result is well-formed XML, so that a test can parse it. Pictures are images with all of their
data inside: such an image runs no script and loads nothing, and it is shown where notebooks strip
`<svg>` itself (GitHub's viewer, JupyterLab before a notebook is trusted).
"""

from __future__ import annotations

import base64
from html import escape

from meshdsl.render import _safe

NAMESPACE = "http://www.w3.org/2000/svg"
_ALONE = frozenset({"img", "br", "rect", "line", "path", "circle"})
"""Elements that are written without an end tag when they are empty."""


class Markup(str):
    """Text that is markup already; only the functions of this module make any."""

    __slots__ = ()


Child = str | int | Markup
Attribute = str | int | float | None


def tag(name: str, /, *children: Child, **attributes: Attribute) -> Markup:
    """One element. `_` in the name of an attribute is written `-`; one that is None is left out.

    >>> tag("td", "a < b", title='"', colspan=2)
    '<td title="&quot;" colspan="2">a &lt; b</td>'
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    inside = join(*children)
    if not inside and name in _ALONE:
        return Markup(f"<{name}{given}/>")
    return Markup(f"<{name}{given}>{inside}</{name}>")


def join(*children: Child) -> Markup:
    """Several pieces, one behind the other."""
    return Markup("".join(c if isinstance(c, Markup) else text(str(c)) for c in children))


def text(plain: str) -> Markup:
    """Text from anywhere: control characters shown as escapes, then the signs of HTML."""
    return Markup(escape("\n".join(map(_safe, plain.split("\n"))), quote=True))


def _number(value: str | int | float) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def drawing(width: float, height: float, *children: Child) -> Markup:
    """A whole SVG, `width` by `height` pixels."""
    return tag(
        "svg",
        *children,
        xmlns=NAMESPACE,
        width=float(width),
        height=float(height),
        viewBox=f"0 0 {_number(float(width))} {_number(float(height))}",
    )


def image(picture: Markup, described: str) -> Markup:
    """A drawing as an HTML image; `described` stands in where it cannot be shown."""
    data = base64.b64encode(picture.encode("utf-8")).decode("ascii")
    style = "max-width:100%;height:auto"
    return tag("img", src=f"data:image/svg+xml;base64,{data}", alt=described, style=style)
