"""Displays in a real browser: every picture is drawn, in a light and in a dark notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import meshdsl as md
from tests.browser import NEEDED, browser

ROOT = Path(__file__).resolve().parents[2]
__all__ = ["browser"]

pytestmark = NEEDED
THEMES = {"light": "#ffffff;color:#000000", "dark": "#111111;color:#e0e0e0"}


@pytest.fixture(scope="module")
def displays() -> list[str]:
    """One display of each sort."""
    program = md.load(ROOT / "examples" / "transformer.mdsl")
    plan = program.compile("pod", "megatron")
    pod = md.mesh(data=2, tp=4, pipe=2)
    views = (
        pod,
        plan.tensor("attention.q"),
        plan.placements,
        plan.explain(all=True),
        plan.collectives,
    )
    shown = [view._repr_mimebundle_()["text/html"] for view in views]
    shown += [plan.memory.html(), plan.code.html()]
    compared = plan.compare("data_parallel")
    return [*shown, compared._repr_mimebundle_()["text/html"], compared.memory.html()]


@pytest.mark.parametrize("theme", THEMES)
def test_every_picture_is_drawn(
    browser: Any, displays: list[str], theme: str, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    head = f'<!doctype html><meta charset="utf-8"><body style="background:{THEMES[theme]}">'
    page.write_text(head + "\n".join(displays), encoding="utf-8")
    browser.get_log("browser")
    browser.set_window_size(900, 1000)
    browser.get(page.as_uri())
    widths = browser.execute_script(
        "return [...document.images].map(i => i.complete && i.naturalWidth)"
    )
    assert len(widths) > 50
    assert min(widths) >= 40
    assert browser.get_log("browser") == []
    fetched = "return performance.getEntriesByType('resource').map(r => r.name)"
    assert all(name.startswith("data:") for name in browser.execute_script(fetched))
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 900


TEXT_OUTSIDE = """
const svg = new DOMParser().parseFromString(atob(arguments[0]), 'image/svg+xml').documentElement;
document.body.replaceChildren(document.importNode(svg, true));
const drawn = document.body.firstChild;
const [width, height] = [drawn.width.baseVal.value, drawn.height.baseVal.value];
const frame = drawn.getBoundingClientRect();
return [...drawn.querySelectorAll('text')].filter(text => {
  const box = text.getBoundingClientRect();
  return box.left < frame.left || box.right > frame.left + width
      || box.top < frame.top || box.bottom > frame.top + height;
}).map(text => text.textContent);
"""


def test_no_text_leaves_its_picture(browser: Any, displays: list[str], tmp_path: Path) -> None:
    import re

    page = tmp_path / "empty.html"
    page.write_text('<!doctype html><meta charset="utf-8"><body></body>', encoding="utf-8")
    browser.get(page.as_uri())
    found = {data for html in displays for data in re.findall(r"base64,([\w+/=]+)", html)}
    assert len(found) > 10
    for data in sorted(found):
        assert browser.execute_script(TEXT_OUTSIDE, data) == []
