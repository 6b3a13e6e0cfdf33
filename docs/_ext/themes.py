"""Pictures in the colours of the page: light on a light page and dark on a dark one.

A drawing that is an image has one set of colours, or asks the system for its theme, which the
reader may have changed on the page. So drawings of the program become part of the page, where
`pictures.css` has a dark colour for each of theirs; one with its own dark colours becomes two
images.
"""

from __future__ import annotations

import base64
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from meshdsl.report.page import picture_colours

_DRAWN = re.compile(
    r'<img(?P<rest>[^>]*?) src="data:image/svg\+xml;base64,(?P<data>[^"]+)"(?P<more>[^>]*)>'
)
_FILE = re.compile(
    r'<img(?P<rest>[^>]*?) src="(?P<to>[^":]*_images/(?P<name>[^"/]+\.svg))"(?P<more>[^>]*)>'
)
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_DARK = re.compile(r"@media \(prefers-color-scheme: dark\) \{(.*?\})\s*\}", re.DOTALL)


def write(app: Sphinx) -> None:
    """Write the style sheet of drawings: each colour of the palette, on light and dark pages."""
    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pictures.css").write_text(picture_colours() + "\n", encoding="utf-8")
    app.add_css_file("pictures.css")


def themed(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: object) -> None:
    """Replace the drawings in the text of a page."""
    body = context.get("body") or ""
    if "svg" in body:
        context["body"] = _FILE.sub(_twice(app), _DRAWN.sub(_inside, body))


def _inside(match: re.Match[str]) -> str:
    """A drawing as a part of the page, with the description and the style of the image."""
    drawing = base64.b64decode(match["data"]).decode("utf-8")
    given = dict(_ATTRIBUTE.findall(match["rest"] + match["more"]))
    style = f' style="{given["style"]}"' if "style" in given else ""
    label = f'class="picture" role="img" aria-label="{given.get("alt", "")}"{style}'
    return drawing.replace("<svg ", f"<svg {label} ", 1)


def _twice(app: Sphinx) -> Any:
    """An image with its own dark colours as two, each with one set of colours."""
    names = {to: Path(app.srcdir, source) for source, (_, to) in app.env.images.items()}

    def images(match: re.Match[str]) -> str:
        source = names.get(unescape(match["name"]))
        drawing = source.read_text(encoding="utf-8") if source else ""
        if not _DARK.search(drawing):
            return match[0]
        given = dict(_ATTRIBUTE.findall(match["rest"] + match["more"]))
        alike = {"only-light": _DARK.sub("", drawing), "only-dark": _DARK.sub(r"\1", drawing)}
        return "".join(_image(text, kind, given.get("alt", "")) for kind, text in alike.items())

    return images


def _image(drawing: str, kind: str, described: str) -> str:
    data = base64.b64encode(drawing.encode("utf-8")).decode("ascii")
    text = escape(unescape(described))
    return f'<img class="{kind}" alt="{text}" src="data:image/svg+xml;base64,{data}">'
