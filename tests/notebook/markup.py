"""Reading what notebooks are shown: HTML as XML, and the pictures inside it."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree as XML

SVG = "{http://www.w3.org/2000/svg}"
DATA = "data:image/svg+xml;base64,"
ELEMENTS = {
    "b", "br", "code", "details", "div", "img", "p", "pre", "span", "summary", "table", "tbody",
    "td", "th", "thead", "tr",
}  # fmt: skip
SHAPES = {"svg", "g", "rect", "circle", "text", "path", "defs", "pattern", "marker"}
_OTHERS = re.compile(r"https?://|url\((?!#)|@import", re.IGNORECASE)


def parsed(html: str) -> XML.Element:
    """The elements of HTML, which must be well-formed, known, and in need of nothing else."""
    root = XML.fromstring(f"<body>{html}</body>")
    for element in root.iter():
        assert element is root or element.tag in ELEMENTS, element.tag
        _harmless(element)
    return root


def pictures(html: str) -> list[XML.Element]:
    """The drawings in HTML, each of them described for who cannot see it."""
    found = []
    for image in parsed(html).iter("img"):
        assert image.get("alt")
        source = image.get("src", "")
        assert source.startswith(DATA)
        found.append(drawing(base64.b64decode(source.removeprefix(DATA)).decode("utf-8")))
    return found


def drawing(svg: str) -> XML.Element:
    """The elements of a drawing, all of them known and inside its frame."""
    root = XML.fromstring(svg)
    for element in root.iter():
        assert element.tag.removeprefix(SVG) in SHAPES, element.tag
        _harmless(element)
    width, height = (float(root.get(key, "0")) for key in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        right = float(box.get("x", "0")) + float(box.get("width", "0"))
        below = float(box.get("y", "0")) + float(box.get("height", "0"))
        assert right <= width, box.attrib
        assert below <= height, box.attrib
    return root


def _harmless(element: XML.Element) -> None:
    """No script, nothing that is fetched."""
    for key, value in element.attrib.items():
        assert not key.lower().startswith("on"), key
        assert not _OTHERS.search(value), value


def texts(root: XML.Element) -> list[str]:
    """The content of the text elements of a drawing."""
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def hatched(root: XML.Element) -> int:
    """The number of hatched blocks."""
    return sum(box.get("fill") == "url(#hatch)" for box in root.iter(f"{SVG}rect"))


def plain(html: str) -> str:
    """All text of HTML."""
    return "".join(parsed(html).itertext())
