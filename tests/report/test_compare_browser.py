"""The page in a real browser: hovered, clicked, stepped through, light, dark, and under attack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.actions.wheel_input import ScrollOrigin
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from tests.browser import NEEDED, browser
from tests.report.comparing import EVIL, example_page, page_of

__all__ = ["browser"]

pytestmark = NEEDED
LIGHT, DARK = "rgb(255, 255, 255)", "rgb(20, 23, 28)"


class Shown:
    """One page in the browser."""

    def __init__(self, browser: Any, path: Path, text: str) -> None:
        path.write_text(text, encoding="utf-8")
        self.browser = browser
        browser.get_log("browser")
        browser.get(path.as_uri())

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        found = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return [element.text for element in found]

    def hover(self, selector: str) -> None:
        element = self.one(selector)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        ActionChains(self.browser).move_to_element(element).perform()

    def script(self, text: str) -> Any:
        return self.browser.execute_script(text)

    def media(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    @property
    def back(self) -> str:
        found: str = self.script("return getComputedStyle(document.body).backgroundColor")
        return found

    @property
    def log(self) -> list[Any]:
        found: list[Any] = self.browser.get_log("browser")
        return found


@pytest.fixture
def mlp(browser: Any, tmp_path: Path) -> Iterator[Shown]:
    """The MLP under two layouts; nothing may be complained of, and nothing loaded."""
    shown = Shown(browser, tmp_path / "mlp.html", example_page("mlp", "hybrid,megatron"))
    yield shown
    assert shown.log == []
    assert shown.script("return performance.getEntriesByType('resource').length") == 0


ROUTE = "tr.route[data-row='5']"
"""The reduction of y, in line 18."""


def test_lines_placements_and_collectives_light_up_together(mlp: Shown) -> None:
    mlp.hover(ROUTE)
    assert mlp.texts("#source li.hot code") == ["  y = einsum(h, v -> [batch, io])"]
    assert [text.split("\n")[0] for text in mlp.texts("tr.hot > th")] == ["≠ y", "≠ ⇒ y"]
    mlp.hover("tr.tensor[data-row='4']")
    assert [text.split()[1] for text in mlp.texts("tr.hot > th")] == ["h"]
    rules = mlp.texts("#source li.rule code")
    assert rules == [
        "layout hybrid { batch -> rows, hidden -> cols }",
        "layout megatron { hidden -> model }",
    ]


def test_a_rule_lights_up_what_it_splits(mlp: Shown) -> None:
    mlp.hover("#source li[data-line='10']")
    names = [text.split()[-1].removesuffix("◂") for text in mlp.texts("tr.tensor.hot > th code")]
    assert names == ["w", "b", "v", "h"]


def test_a_click_draws_who_holds_what(mlp: Shown) -> None:
    mlp.one("tr.tensor[data-row='4']").click()
    assert mlp.one("#pictures h3").text == "h"
    assert mlp.one("tr.picked").get_attribute("aria-current") == "true"
    assert mlp.texts("#pictures figure:nth-of-type(1) svg g text") == ["0", "1", "2", "3"]
    assert len(mlp.texts("#pictures figure")) == 2
    assert mlp.one("#slider").get_property("value") == "4"


def test_partial_values_are_hatched_and_copies_stacked(mlp: Shown) -> None:
    mlp.one(ROUTE).click()
    captions = mlp.texts("#pictures figcaption")
    assert [text.split(":")[0] for text in captions] == [
        "A before",
        "A after",
        "B before",
        "B after",
    ]
    before, after = "figure:nth-of-type(1) ", "figure:nth-of-type(2) "
    assert mlp.texts(f"{before} svg g text") == ["0 + 1", "2 + 3"]
    assert mlp.texts(f"{after} svg g text") == ["0 = 1", "2 = 3"]
    assert len(mlp.texts(f"{before} .hatched")) == 2
    assert not mlp.texts(f"{after} .hatched")
    assert mlp.texts(f"{after} rect.copy")
    fill = mlp.script("return getComputedStyle(document.querySelector('.hatched')).fill")
    assert "#hatch" in fill


def test_the_slider_steps_through_the_statements(mlp: Shown) -> None:
    slider = mlp.one("#slider")
    assert mlp.one("#step").text.startswith("1 of 7, line 12: program mlp")
    for _ in range(5):
        slider.send_keys(Keys.ARROW_RIGHT)
    assert mlp.one("#step").text == "6 of 7, line 18: y = einsum(h, v -> [batch, io])"
    assert mlp.one("#pictures h3").text == "y"
    assert [text.split("\n")[-1] for text in mlp.texts("#sent > div")] == ["64 KiB", "192 KiB"]
    assert len(mlp.texts("tbody.later")) == 1
    mlp.one("#back").click()
    assert mlp.one("#step").text.startswith("5 of 7, line 17:")
    slider.send_keys(Keys.END)
    assert not mlp.one("#next").is_enabled()


def test_the_keyboard_is_enough(mlp: Shown) -> None:
    mlp.script("document.querySelector('tr.picked').focus()")
    for _ in range(2):
        mlp.browser.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert mlp.one("#pictures h3").text == "w"
    active = mlp.script("return document.activeElement.className")
    assert "picked" in active
    assert len(mlp.texts("tr.item[tabindex='0']")) == 1


def test_light_and_dark(mlp: Shown) -> None:
    mlp.media("dark")
    assert mlp.back == DARK
    mlp.media("light")
    assert mlp.back == LIGHT
    mlp.one("#theme").click()
    assert mlp.back == DARK
    assert mlp.one("#theme").text == "Light"
    mlp.one("#theme").click()
    assert mlp.back == LIGHT


OVERFULL = """
return [...document.querySelectorAll("#rows th, #rows td")].filter((cell) => {
  const inside = document.createRange();
  inside.selectNodeContents(cell);
  return inside.getBoundingClientRect().right > cell.getBoundingClientRect().right + 1;
}).map((cell) => cell.textContent)
"""
"""Cells whose text is wider than they are."""


@pytest.mark.parametrize("width", [1600, 900, 420])
def test_the_page_fits_the_window_and_names_their_cells(mlp: Shown, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    mlp.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert mlp.script("return document.documentElement.scrollWidth") <= width
        assert mlp.script(OVERFULL) == []
        assert mlp.script(
            "const at = document.getElementById('rows'); return at.scrollWidth <= at.clientWidth"
        )
    finally:
        mlp.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_only_what_differs(browser: Any, tmp_path: Path) -> None:
    page = example_page("mlp", "hybrid,data_parallel")
    shown = Shown(browser, tmp_path / "mlp.html", page)
    whole = [text.removesuffix(" ◂") for text in shown.texts("tr.item > th")]
    shown.one("#only").click()
    left = [text.removesuffix(" ◂") for text in shown.texts("tr.item > th") if text]
    assert left == [text for text in whole if text.startswith("≠")]
    assert 0 < len(left) < len(whole)
    assert shown.one("#step").text.startswith("1 of 5 that differ, line 13:")
    shown.one("#next").click()
    assert shown.one("#step").text.startswith("2 of 5 that differ, line 14:")
    shown.one("#slider").send_keys(Keys.END)
    assert shown.one("#step").text.startswith("5 of 5 that differ, line 18:")
    assert not shown.one("#next").is_enabled()
    shown.one("#only").click()
    assert len([text for text in shown.texts("tr.item > th") if text]) == len(whole)
    assert shown.one("#step").text.startswith("6 of 7, line 18:")
    assert shown.log == []


IN_VIEW = """
const [frame, edge] = [document.getElementById("source"), document.getElementById("stepper")];
const box = frame.getBoundingClientRect();
const lines = [...document.querySelectorAll("#source li")].filter((li) => {
  const at = li.getBoundingClientRect();
  return at.top >= box.top - 1 && at.bottom <= box.bottom + 1;
});
const from = edge.getBoundingClientRect().bottom;
const first = [...document.querySelectorAll("tbody[data-row]")].find((body) =>
  body.getBoundingClientRect().bottom > from + 8
);
const number = Number(first.querySelector(".number").textContent);
return [lines.map((li) => Number(li.dataset.line)), number];
"""
"""The lines of the source in view, and the line of the first statement in view."""


def test_source_and_statements_follow_each_other(browser: Any, tmp_path: Path) -> None:
    browser.set_window_size(1600, 500)
    shown = Shown(browser, tmp_path / "long.html", example_page("transformer", "megatron,fsdp"))
    wheel = ActionChains(browser, duration=0)

    def scrolled(selector: str, by: int) -> None:
        wheel.scroll_from_origin(ScrollOrigin.from_element(shown.one(selector)), 0, by).perform()

    def comes(holds: Callable[[list[int], int], bool]) -> None:
        WebDriverWait(browser, 60, 0.05).until(lambda _: holds(*shown.script(IN_VIEW)))

    try:
        comes(lambda lines, first: lines[0] == 1 and first == 13)
        scrolled("#rows", 1200)
        comes(lambda lines, first: lines[0] > 1 and first > 15 and first in lines)
        scrolled("#source", -5000)
        comes(lambda lines, first: lines[0] == 1 and first == 13)
        scrolled("#source", 5000)
        comes(lambda lines, first: first > 25 and first in lines)
        shown.one("#next").click()
        assert shown.one("#step").text.startswith("2 of 20, line 14:")
        comes(lambda lines, first: 14 in lines)
    finally:
        browser.set_window_size(1440, 1000)
    assert shown.log == []


def test_without_javascript_the_table_is_there(browser: Any, tmp_path: Path) -> None:
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        shown = Shown(browser, tmp_path / "mlp.html", example_page("mlp", "hybrid"))
        assert not shown.one("#stepper").is_displayed()
        assert "[batch@rows, hidden@cols]" in shown.one("#rows").text
        assert "(S(0), S(1))" in shown.one("#rows").text
        assert "all_reduce over cols: 64 KiB" in shown.one("#rows").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_a_file_cannot_run_anything(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path / "evil.html", page_of(EVIL))
    for row in shown.browser.find_elements(By.CSS_SELECTOR, "tr.item"):
        row.click()
    assert shown.script("return typeof window.pwned") == "undefined"
    assert not shown.texts("img")
    assert shown.log == []


def test_three_dims_are_drawn_in_layers(browser: Any, tmp_path: Path) -> None:
    shown = Shown(browser, tmp_path / "lm.html", example_page("transformer", "megatron"))
    row = next(
        r
        for r in shown.browser.find_elements(By.CSS_SELECTOR, "tr.tensor")
        if "attention.o" in r.text
    )
    row.click()
    assert shown.texts("#pictures svg g text") == [str(rank) for rank in range(8)]
    notes = " ".join(shown.texts("#pictures .hint"))
    assert "one layer for each part of batch; not drawn: seq (whole)" in notes
    assert shown.log == []
