"""The playground in a real browser: typed into, mended, saved, light, dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from meshdsl.play.http_server import address
from tests.browser import NEEDED, browser
from tests.waiting import until

from .conftest import TEXT, Served

__all__ = ["browser"]

pytestmark = NEEDED
CONTRAST = 4.5
"""The least contrast of text, by the Web Content Accessibility Guidelines (AA)."""


class Page:
    """The page of a server in the browser."""

    def __init__(self, browser: Any, served: Served) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get("about:blank")
        browser.get(address(served.server, served.play))
        self.settled()

    def one(self, selector: str) -> Any:
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        found = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return [element.text for element in found]

    def script(self, text: str, *given: Any) -> Any:
        return self.browser.execute_script(text, *given)

    def settled(self) -> str:
        """Wait until what is shown is of what is typed; the sentence that says what came of it."""
        return str(until(lambda: self.script(SETTLED) or False))

    def replace(self, old: str, new: str) -> None:
        """Type over a part of the program.

        By the page's own command, as keys would: drivers differ in where these leave the caret, and
        some know no characters beyond the first plane. The click is a gesture, as keys would be.
        """
        self.one("#text").click()
        self.script(TYPE_OVER, old, new)

    def choose(self, field: str, label: str) -> str:
        Select(self.one(f"#{field}")).select_by_visible_text(label)
        return self.settled()

    @property
    def text(self) -> str:
        return str(self.one("#text").get_property("value"))


SETTLED = """
const busy = document.getElementById("outcome").ariaBusy !== "false";
return busy ? "" : document.getElementById("verdict").textContent;
"""
TYPE_OVER = """
const area = document.getElementById("text");
const [old, typed] = arguments;
const at = area.value.indexOf(old);
area.focus();
area.setSelectionRange(at, at + old.length);
document.execCommand(typed ? "insertText" : "delete", false, typed);
"""


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Page]:
    """The page on the example; the browser may have nothing to complain of."""
    shown = Page(browser, served)
    yield shown
    # A request that is refused, a save for instance, is told to the page and in the log.
    complaints = [e for e in browser.get_log("browser") if e["source"] != "network"]
    assert complaints == []
    loaded = shown.script("return performance.getEntriesByType('resource').map((e) => e.name)")
    own = f"http://127.0.0.1:{served.server.server_port}/"
    assert all(name.startswith((own, "data:")) for name in loaded)


def test_a_change_is_answered(page: Page) -> None:
    assert "2 collectives send 64 KiB per device." in page.settled()
    page.replace("io = 512", "io = 256")
    assert "send 32 KiB per device." in page.settled()
    assert "f32[batch@rows 64→32, io 256]" in page.one("#lines").text
    assert page.one("#saved").text == "edited, not saved"


def test_errors_are_listed_marked_and_mended(page: Page) -> None:
    page.replace("einsum(h, v", "einsum(hh, v")
    assert page.settled() == "1 error. Below is the outcome of the last program that had none."
    assert page.texts("#shown .mark.error") == ["hh"]
    assert page.texts("#numbers .bad") == ["18"]
    assert "stale" in page.one("#result").get_attribute("class")
    jump, fix = page.browser.find_elements(By.CSS_SELECTOR, "#problems button")
    jump.click()
    chosen = (
        "const t = document.activeElement; return t.value.slice(t.selectionStart, t.selectionEnd)"
    )
    assert page.script(chosen) == "hh"
    fix.click()
    assert "64 KiB" in page.settled()
    assert page.text == TEXT
    assert not page.one("#problems").is_displayed()
    page.one("#text").send_keys(Keys.CONTROL, "z")
    assert "1 error." in page.settled()


def test_choices_place_the_program_otherwise(page: Page) -> None:
    page.choose("mesh", "line")
    assert "layout megatron on mesh { model: 4 }" in page.choose("layout", "megatron")
    page.choose("layout", "other rules")
    page.one("#rules").send_keys("batch : model")
    assert "under layout batch:model on mesh { model: 4 }" in page.settled()
    page.choose("mesh", "other axes")
    page.one("#axes").send_keys("model:2")
    assert "mesh { model: 2 } (2 devices)" in page.settled()
    page.one("#sizes summary").click()
    page.one("#dims input[name='batch']").send_keys("6")
    page.settled()
    assert "batch@model 6→3" in page.one("#lines").text
    page.choose("layout", "hybrid (the first)")
    assert page.settled().startswith("1 error.")


def test_the_views_by_keyboard(page: Page) -> None:
    first = page.one("#tab-lines")
    page.one("#lines details summary").click()
    assert "why" in page.one("#lines details").text
    page.one("#lines th.line button").click()
    assert page.script("return document.activeElement.id") == "text"
    assert "program mlp" in page.one("#lines tbody.here").text
    first.send_keys(Keys.ARROW_RIGHT)
    assert page.one("#devices").is_displayed()
    assert not page.one("#lines").is_displayed()
    until(lambda: page.texts("#picture option"))
    Select(page.one("#picture")).select_by_visible_text("h")
    assert "h f32[batch@rows 64→32, hidden@cols 2048→1024]" in page.one("#pictured").text
    (picture,) = page.browser.find_elements(By.CSS_SELECTOR, "#pictured svg")
    assert picture.size["width"] > 100
    assert picture.get_attribute("aria-label")
    for tab in ("devices", "time", "compare"):
        page.one(f"#tab-{tab}").send_keys(Keys.ARROW_RIGHT)
    assert 'all_reduce(y_part, groups["cols"], "sum")' in page.one("#python").text
    page.one("#whole").click()
    assert "import torch" in page.one("#python").get_property("textContent")
    page.choose("cluster", "h100")
    page.one("#tab-time").click()
    until(lambda: "4 devices of h100): a step takes" in page.one("#time").text)
    assert page.one("#time svg").size["width"] > 500


def test_a_layout_that_is_alone_on_its_mesh_is_compared_with_none(page: Page) -> None:
    page.choose("layout", "megatron")
    page.one("#tab-compare").click()
    until(lambda: page.one("#compare-said").text.startswith("Choose a layout"))
    assert "mlp in 1 column" in page.one("#compared").text


def test_layouts_are_searched_used_and_compared(page: Page) -> None:
    page.one("#search").click()
    until(lambda: "proven the best" in page.one("#found-said").text)
    assert len(page.texts("#layouts .rules")) == 6
    use, compare = page.browser.find_elements(By.CSS_SELECTOR, "#layouts button")[:2]
    compare.click()
    until(lambda: page.texts("#compared p"))
    compared = page.one("#compared").text
    assert "B sends 64 KiB less and holds 3.88 MiB more" in compared
    assert compared.count("memory held") == 1
    assert compared.index("memory held") < compared.index("param w")
    assert page.script(UNDERLINED, page.one("#compared .mark")) == "none"
    assert page.texts("#columns button") == ["batch -> (rows, cols) ×"]
    page.one("#columns button").click()
    assert page.one("#compare-said").text.startswith("Choose a layout")
    Select(page.one("#beside")).select_by_visible_text("data_parallel")
    until(lambda: "holds 4.38 MiB more" in page.one("#compared").text)
    page.one("#columns button").click()
    Select(page.one("#beside")).select_by_visible_text("data_parallel")  # the same once more
    until(lambda: "holds 4.38 MiB more" in page.one("#compared").text)
    page.one("#tab-found").click()
    use.click()
    until(lambda: "under layout searched on mesh" in page.settled())
    assert "layout searched {" in page.text
    use.click()  # of a program that is no more
    assert page.one("#found-said").text == "The program has changed: search again."


def test_colours_follow_the_words(page: Page) -> None:
    colour = "return getComputedStyle(document.querySelector('#shown .kd')).color"
    until(lambda: page.script("return document.querySelectorAll('#shown .kd').length") > 8)
    assert page.script(colour) != page.script("return getComputedStyle(document.body).color")
    page.replace("dim batch", "dim 🙂 batch")
    page.settled()
    shown = page.script("return document.getElementById('shown').textContent")
    assert shown == f"{page.text}\n"


def test_a_save_is_made_once_and_never_over_others(page: Page, served: Served) -> None:
    assert not page.one("#save").is_enabled()
    page.replace("io = 512", "io = 256")
    page.one("#text").send_keys(Keys.CONTROL, "s")
    until(lambda: page.one("#saved").text == "saved")
    saved = TEXT.replace("io = 512", "io = 256")
    assert served.path.read_text(encoding="utf-8") == saved
    page.replace("io = 256", "io = 128")
    served.path.write_text("# another's\n", encoding="utf-8")
    page.one("#save").click()
    until(lambda: page.one("#saved").text.startswith("not saved"))
    assert served.path.read_text(encoding="utf-8") == "# another's\n"
    page.replace("io = 128", "io = 256")
    page.script("dispatchEvent(new Event('focus'))")
    until(lambda: page.text == "# another's\n")
    assert page.settled().startswith("1 error.")


def test_a_program_runs_nothing_in_the_page(page: Page) -> None:
    page.replace("# The two", "# <img src=x onerror=pwned=1></textarea><script>pwned=1</script> ")
    page.replace("(y -", "(<b>y</b> -")
    page.settled()
    assert page.script("return typeof pwned") == "undefined"
    assert not page.texts("#shown img, #problems b, #problems img")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [420, 900, 1600])
def test_it_fits_and_is_legible(page: Page, scheme: str, width: int) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.replace("(y -", "(yy -")
        page.settled()
        assert page.script("return document.documentElement.scrollWidth") <= width
        assert page.script("return document.getElementById('outcome').scrollWidth") <= width
        assert page.script(FAINT, CONTRAST) == []
        page.script("document.getElementById('tab-lines').click()")
        page.replace("(yy -", "(y -")
        page.settled()
        page.script("document.getElementById('tab-devices').click()")
        until(lambda: page.texts("#pictured svg"))
        back = page.script(FILL, page.one("#pictured svg rect"))
        assert back == {"light": "rgb(251, 251, 252)", "dark": "rgb(26, 29, 33)"}[scheme]
        assert page.script(FAINT, 20.0) != []
        left = page.script("return document.getElementById('outcome').getBoundingClientRect().left")
        assert (left > 300) == (width == 1600)
    finally:
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


UNDERLINED = "return getComputedStyle(arguments[0]).textDecorationLine"
FILL = "return getComputedStyle(arguments[0]).fill"
FAINT = """
const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
  .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = channels(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
};
const found = new Set();
for (const element of document.querySelectorAll("body *:not(textarea, script, noscript, option)")) {
  const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !element.offsetParent || element.closest(".stale, :disabled, noscript")) continue;
  const colour = getComputedStyle(element).color;
  const [high, low] = [light(channels(colour)), light(behind(element))].sort((a, b) => b - a);
  const contrast = (high + 0.05) / (low + 0.05);
  if (contrast < arguments[0]) found.add(`${element.className || element.id} ${colour}`);
}
return [...found];
"""
"""Texts with less contrast than that of the argument."""
