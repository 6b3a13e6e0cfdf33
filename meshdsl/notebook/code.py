"""Program text, highlighted."""

from __future__ import annotations

import ast as python
from typing import Any

from meshdsl.notebook.look import BACK, EDGE, INK, MONO
from meshdsl.notebook.svg import Markup, tag

CARD = (
    f"background:{BACK};color:{INK};border:1px solid {EDGE};border-radius:6px;padding:8px 12px;"
    f"max-height:32em;overflow:auto;font-family:{MONO};font-size:12.5px;line-height:1.4;margin:0;white-space:pre"
)
STYLE = "default"
"""A style of Pygments whose colours can be read on the card."""


class Code(str):
    """The text of a program in Python: a `str`, and highlighted in a notebook."""

    __slots__ = ()

    @property
    def device(self) -> str:
        """The function that every device runs; the rest reads values and starts it."""
        lines = self.splitlines()
        for node in python.parse(self).body:
            if isinstance(node, python.FunctionDef) and node.name == "device":
                return "\n".join(lines[node.lineno - 1 : node.end_lineno]) + "\n"
        return str(self)

    @property
    def rest(self) -> str:
        """What is said of the lines that a notebook does not show."""
        return f"# print(plan.code) has the whole program, {len(self.splitlines()):,} lines\n"

    def html(self) -> str:
        """What every device runs, in colours, on a card of its own."""
        return highlighted(self.device + self.rest, "python")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": self.device + self.rest, "text/html": self.html()}


def highlighted(text: str, language: str) -> Markup:
    """`text` in a frame, with the colours in the elements themselves."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter

    formatter = HtmlFormatter(noclasses=True, nowrap=True, style=STYLE)
    inside = highlight(text, _lexer(language), formatter)
    return tag("pre", Markup(inside), style=CARD)


def _lexer(language: str) -> Any:
    if language == "python":
        from pygments.lexers import PythonLexer

        return PythonLexer(stripnl=False)
    from meshdsl.lexer import MdslLexer

    return MdslLexer(stripnl=False)
