"""The page without a server: Python's side of its worker, and the page with a stand-in for it."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import threading
import types
import zlib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import highspy
import pytest
from docutils import nodes
from docutils.utils import new_document

import docs._ext as extension
from docs._ext.in_browser import CLASS, only_sbp, program_of, text_of
from docs.browser import build
from meshdsl.analysis import analyse
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Options
from meshdsl.placed import solver, zero_one
from meshdsl.placed.solver import LinearProgram, NativeSolver, solving
from meshdsl.play.browser_worker import reply, warming
from meshdsl.play.page import fragment, static_page
from tests.browser import NEEDED, browser
from tests.project import ROOT
from tests.waiting import until

from .conftest import QUESTION, TEXT

__all__ = ["browser"]


COLUMN = {"kind": "layout", "name": "data_parallel"}
MEGATRON = {"kind": "layout", "name": "megatron"}
JOBS: dict[str, dict[str, object]] = {"search": {}, "compare": {"columns": []}}


def asked(path: str, more: dict[str, object]) -> Any:
    """What the worker answers."""
    status, body = json.loads(reply(path, json.dumps(QUESTION | more)))
    assert status == 200, body
    return body


def compiled(text: str, **more: object) -> Any:
    """What the worker answers for a text."""
    return asked("/compile", {"text": text} | more)


# --- Python's side of the worker -------------------------------------------------------------


def test_the_worker_answers_as_the_server_does() -> None:
    found = compiled(TEXT, layout="megatron", mesh="line")
    assert found["result"]["sentence"].startswith("mlp under layout megatron on mesh { model: 4 }")
    assert found["choices"]["meshes"] == ["square", "line"]
    assert [d["code"] for d in compiled(TEXT.replace("(h, v", "(hh, v"))["diagnostics"]]
    status, body = json.loads(reply("/colours", json.dumps({"text": "dim a = 2\n"})))
    assert (status, sum(length for length, _ in body["runs"])) == (200, 10)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/compile", {"text": ""}, 400),
        ("/compile", QUESTION | {"sizes": {"io": -1}}, 400),
        ("/colours", [], 400),
        ("/save", {"text": "", "digest": ""}, 404),
    ],
)
def test_what_is_no_question_is_refused(path: str, body: object, status: int) -> None:
    assert json.loads(reply(path, json.dumps(body)))[0] == status


def test_the_worker_has_called_the_solver_before_the_first_edit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solved: list[LinearProgram] = []

    def noted(program: LinearProgram) -> Any:
        solved.append(program)
        return solving(program)

    monkeypatch.setattr(zero_one, "solving", noted)
    assert len([*warming(TEXT)]) == 4  # questions are answered between them
    assert solved  # although the plan is in the cache
    snapshot = (build.HERE / "snapshot.mjs").read_text(encoding="utf-8")
    worker = (build.HERE / "worker.mjs").read_text(encoding="utf-8")
    assert "warming = prepared(program)" in snapshot
    assert 'python.globals.get("warming")' in worker


# --- the solver ------------------------------------------------------------------------------

PROGRAM = LinearProgram(
    costs=[-5.0, -4.0, -3.0],
    lows=[-float("inf"), 1.0],
    highs=[5.0, 3.0],
    starts=[0, 3, 6],
    indices=[0, 1, 2, 0, 1, 2],
    values=[2.0, 3.0, 1.0, 1.0, 1.0, 1.0],
)


class JavaScriptModel:
    """A model of the JavaScript of HiGHS, as far as it is used, by the Python package."""

    def __init__(self) -> None:
        self._highs = highspy.Highs()
        self.options = types.SimpleNamespace(set=self._set)
        self.is_disposed = False

    def _set(self, options: dict[str, Any]) -> None:
        assert not {"threads", "parallel"} & set(options)  # refused: WebAssembly has one thread
        for name, value in options.items():
            assert self._highs.setOptionValue(name, value) == highspy.HighsStatus.kOk

    def passModel(self, data: dict[str, Any]) -> None:
        matrix = data["matrix"]
        given = {"colLower": [0.0] * data["numCols"], "colUpper": [1.0] * data["numCols"]}
        assert {name: list(data[name]) for name in given} == given
        assert (matrix["format"], matrix["numCols"]) == ("csr", data["numCols"])
        assert matrix["numRows"] == data["numRows"]
        program = LinearProgram(
            *(list(data[name]) for name in ("colCost", "rowLower", "rowUpper")),
            *(list(matrix[name]) for name in ("starts", "indices", "values")),
        )
        self._highs.passModel(solver._model(program))

    def changeColsIntegrality(self, columns: dict[str, Any], kinds: list[int]) -> None:
        assert columns == {"kind": "range", "from": 0, "to": len(kinds) - 1}
        for column, kind in enumerate(kinds):
            self._highs.changeColIntegrality(column, highspy.HighsVarType(kind))

    def run(self) -> None:
        self._highs.run()

    def getModelStatus(self) -> int:
        return int(self._highs.getModelStatus())

    def getSolution(self) -> Any:
        values = self._highs.getSolution().col_value
        return types.SimpleNamespace(colValue=types.SimpleNamespace(to_py=lambda: values))

    def dispose(self) -> None:
        self.is_disposed = True


def test_both_solvers_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model = JavaScriptModel()
    statuses = types.SimpleNamespace(optimal=7, infeasible=8)
    highs: Any = types.ModuleType("highs")
    highs.createModel = lambda: model
    highs.constants = types.SimpleNamespace(modelStatus=statuses)
    ffi: Any = types.ModuleType("pyodide.ffi")
    ffi.to_js = lambda value, **_: value
    js: Any = types.ModuleType("js")
    js.Object = types.SimpleNamespace(fromEntries=dict)
    modules = {"highs": highs, "pyodide": types.ModuleType("pyodide"), "pyodide.ffi": ffi, "js": js}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "platform", "emscripten")
    native = NativeSolver(PROGRAM)
    with solving(PROGRAM) as other:
        assert not isinstance(other, NativeSolver)
        relaxed = native.run()
        assert relaxed[0] == other.run()[0] == "optimal"
        assert any(0.01 < value < 0.99 for value in relaxed[1])
        for each in (native, other):
            each.restrict([True] * 3)
            status, values = each.run()
            assert (status, [round(value) for value in values]) == ("optimal", [1, 1, 0])
    assert model.is_disposed


# --- what it is built of ---------------------------------------------------------------------


def test_what_it_is_built_of_is_pinned() -> None:
    lock = json.loads((build.HERE / "package-lock.json").read_text(encoding="utf-8"))
    packages = {name: entry for name, entry in lock["packages"].items() if name}
    assert {f"node_modules/{name}" for name in build.LOADED} <= set(packages)
    for name, entry in packages.items():
        assert entry["integrity"].startswith("sha512-"), name
        assert "resolved" not in entry, name
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8").lower()
    for library in (*build.LIBRARIES, *build.BUILT):
        assert re.search(rf"^{library}==", constraints, re.MULTILINE), library
    native = re.search(r"^highspy==(\d+\.\d+)", constraints, re.MULTILINE)
    versions = {packages["node_modules/highs"]["version"].rpartition(".")[0], native and native[1]}
    assert versions == {solver.SOLVER.removeprefix("highspy ")}  # the plans are the same


@pytest.mark.parametrize(
    ("text", "is_whole"),
    [(TEXT, True), ("dim a = 2\n", False), (TEXT.replace("(h, v", "(hh, v"), False)],
)
def test_pages_lead_here_from_whole_programs(text: str, is_whole: bool) -> None:
    assert (program_of(text) is not None) == is_whole
    block = nodes.literal_block(text, text, language="mdsl")
    cell = nodes.literal_block(text, f"%%mdsl\n{text}", language="python")
    assert text_of(block) == text_of(cell) == text
    assert not text_of(nodes.literal_block(text, text, language="python"))


SBP = "sbp by_position {\n  x: (S(0))\n}\n"


@pytest.mark.parametrize(
    ("text", "name"),
    [("", None), (SBP, "by_position"), (f"{SBP}layout l {{ batch -> data }}\n", None)],
)
def test_a_program_with_sbp_blocks_alone_is_placed_by_the_first(text: str, name: str) -> None:
    assert only_sbp(analyse(Source("", text), Options()).declarations) == name
    code = base64.urlsafe_b64decode(f"{fragment(TEXT, name).removeprefix('#code=')}===")
    wanted = {"text": TEXT, "sbp": name} if name else {"text": TEXT}
    assert json.loads(zlib.decompress(code, -15)) == wanted


# --- the page --------------------------------------------------------------------------------

EDITED = TEXT.replace("io = 512", "io = 256")
STAND_IN = """
const replies = REPLIES;
addEventListener("message", ({ data: { id, path, question } }) => {
  const { text, columns } = JSON.parse(question);
  postMessage({ progress: "Loading" });
  postMessage({ ready: true });
  const body = path === "/colours" ? { runs: [[text.length, ""]] } : replies[path + text];
  const more = columns?.length ? { columns } : {};
  const reply = body ? { ...body, ...more } : { error: "not foreseen" };
  postMessage({ id, reply: [body ? 200 : 500, reply] });
});
"""
"""A worker that knows what Python answers for two texts."""
STATE = """
const shown = (id) => document.getElementById(id);
const [said, text] = [shown("verdict").textContent, shown("text").value];
return [shown("outcome").ariaBusy, said, location.href, text];
"""
SAID = "return document.querySelector(arguments[0]).textContent"
PRESS = "document.querySelector(arguments[0]).click()"
TYPE_OVER = """
const area = document.getElementById("text");
area.focus();
area.select();
document.execCommand("insertText", false, arguments[0]);
"""


class Silent(SimpleHTTPRequestHandler):
    """A server of files that prints nothing."""

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that is served."""
    return tmp_path_factory.mktemp("site")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """The address of a page under a path of its own, with the stand-in for the worker."""
    inner = folder / "some/path"
    (inner / "play").mkdir(parents=True)
    examples = build._examples()
    (inner / "play.html").write_text(static_page([*examples]), encoding="utf-8")
    answers = {f"/compile{text}": compiled(text) for text in (TEXT, EDITED)}
    answers |= {f"/{job}{TEXT}": asked(f"/{job}", more) for job, more in JOBS.items()}
    answers[f"/search{TEXT}"]["more"] = True  # until it is stopped
    replies = json.dumps(answers)
    worker = STAND_IN.replace("REPLIES", replies)
    (inner / "play/worker.mjs").write_text(worker, encoding="utf-8")
    with serving(folder) as address:
        yield f"{address}some/path/play.html"


class serving:
    """A server of the files of a folder; its address."""

    def __init__(self, folder: Path) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Silent, directory=str(folder)))
        poll = {"poll_interval": 0.02}
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs=poll)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_port}/"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def settled(driver: Any) -> Any:
    """Wait for the answer: what is said, the address, and the text."""

    def done() -> Any:
        busy, *rest = driver.execute_script(STATE)
        return rest if busy == "false" else False

    return until(done)


@NEEDED
def test_the_page_asks_its_worker_and_its_address_has_the_program(browser: Any, site: str) -> None:
    browser.get(site)
    said, address, text = settled(browser)
    assert (address, text) == (site, TEXT)
    assert "2 collectives send 64 KiB per device." in said
    for tab, shown in (("tab-compare", "compared"), ("search", "layouts")):
        browser.execute_script(PRESS, f"#{tab}")
        until(partial(browser.find_elements, "css selector", f"#{shown} td"))
    browser.execute_script(PRESS, "#search")
    found = browser.execute_script("return document.getElementById('found-said').textContent")
    assert found == f"{asked('/search', {})['sentence']} The search was stopped."
    _, before, _ = settled(browser)
    browser.execute_script(TYPE_OVER, EDITED)
    said, address, _ = until(lambda: (s := settled(browser))[1] != before and s)
    assert "send 32 KiB per device." in said
    assert address.startswith(f"{site}#code=")
    for link in (address, site + fragment(EDITED)):
        browser.get("about:blank")
        browser.get(link)
        said, _, text = settled(browser)
        assert ("32 KiB" in said, text) == (True, EDITED)
    _columns_and_sizes_are_in_the_address(browser, site)
    broken = f"{address[:-9]}!"
    browser.get("about:blank")
    browser.get(broken)
    _, _, text = settled(browser)
    assert text == TEXT
    what = browser.execute_script("return document.getElementById('saved').textContent")
    assert what == "the address of this page has no program that can be read"
    for width in (420, 900, 1600):
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    names = "return performance.getEntriesByType('resource').map((e) => e.name)"
    own = site.rpartition("/")[0]
    assert all(name.startswith((own, "data:")) for name in browser.execute_script(names))
    assert browser.get_log("browser") == []


CHOOSE = """
const [selector, value, kind] = arguments;
const field = document.querySelector(selector);
field.value = value;
field.dispatchEvent(new Event(kind, { bubbles: true }));
"""


def _columns_and_sizes_are_in_the_address(browser: Any, site: str) -> None:
    browser.get("about:blank")
    browser.get(site)
    settled(browser)
    browser.execute_script(PRESS, "#tab-compare")
    until(partial(browser.find_elements, "css selector", "#compared td"))
    assert _said(browser, "#columns") == "data_parallel ×"
    browser.execute_script(CHOOSE, "#beside", "layout:megatron", "change")
    browser.execute_script(CHOOSE, "#dims input[name=io]", "96", "input")
    wanted = {"sizes": {"io": 96}, "view": "compare", "columns": [COLUMN, MEGATRON]}
    found = until(lambda: (e := entries(settled(browser)[1])).items() >= wanted.items() and e)
    for more, columns in (
        ({}, "data_parallel ×megatron ×"),
        ({"columns": [COLUMN] * 7}, "data_parallel ×"),  # more than are compared: those of the file
        ({"columns": [{"kind": "mesh", "name": "a"}], "view": "found"}, ""),
    ):
        browser.get("about:blank")
        browser.get(site + coded({**found, **more}))
        settled(browser)
        if more.get("view") is None:
            until(partial(browser.find_elements, "css selector", "#compared td"))
        assert _said(browser, "#columns") == columns
        sizes = "return document.querySelector('#dims input[name=io]').value"
        assert browser.execute_script(sizes) == "96"


def coded(found: dict[str, Any]) -> str:
    """The part of an address that has these entries."""
    code = zlib.compress(json.dumps(found).encode(), wbits=-15)
    return f"#code={base64.urlsafe_b64encode(code).decode()}"


def entries(address: str) -> dict[str, Any]:
    """The entries of an address; none of one without a program."""
    code = address.partition("#code=")[2]
    if not code:
        return {}
    packed = base64.urlsafe_b64decode(code + "=" * (-len(code) % 4))
    found: dict[str, Any] = json.loads(zlib.decompress(packed, wbits=-15))
    return found


PAGE = """<!doctype html><link rel="icon" href="data:,"><title>page</title><body>
<div class="highlight-mdsl"><pre>one</pre></div><p class="in-browser"><a href="LINK">open</a></p>
<div class="highlight-mdsl"><pre>two</pre></div><p class="in-browser"><a href="LINK">open</a></p>
<script>SCRIPT</script>
"""
"""A page of the site with a program twice, as `docs/_ext/in_browser.py` writes it."""
IN_PLACE = """
const frame = document.querySelector("iframe");
const blocks = [...document.querySelectorAll("div")].map((block) => block.hidden);
const [link] = document.querySelectorAll("a");
const ground = frame && getComputedStyle(frame.contentDocument.body).backgroundColor;
return [frame?.contentDocument.activeElement.id, blocks, link.href, ground];
"""


@NEEDED
def test_a_program_of_the_site_is_edited_where_it_is(browser: Any, site: str, folder: Path) -> None:
    script = (ROOT / "docs/_static/edit_here.js").read_text(encoding="utf-8")
    page = PAGE.replace("LINK", f"../play.html{fragment(TEXT)}").replace("SCRIPT", script)
    (folder / "some/path/docs").mkdir()
    (folder / "some/path/docs/page.html").write_text(page, encoding="utf-8")
    browser.get(site.replace("play.html", "docs/page.html"))
    loaded = "return performance.getEntriesByType('resource').map((e) => e.name)"
    assert not [name for name in browser.execute_script(loaded) if "play" in name]
    button, other = browser.find_elements("css selector", "p button")

    def press(pressed: Any) -> tuple[Any, ...]:
        pressed.click()
        until(lambda: browser.execute_script(IN_PLACE)[0] == "text")
        browser.switch_to.frame(browser.find_element("css selector", "iframe"))
        said, *_ = until(lambda: "per device." in (s := settled(browser))[0] and s)
        return said, *browser.find_elements("css selector", "h1, #choices, #lines table")

    said, title, choices, lines, *_ = press(button)
    assert "send 64 KiB per device." in said
    shown = [each.is_displayed() for each in (title, choices, lines)]
    assert shown == [False, True, True]
    browser.execute_script(TYPE_OVER, EDITED)
    until(lambda: "32 KiB" in settled(browser)[0])
    browser.switch_to.default_content()
    for theme, ground in (("dark", "rgb(20, 23, 28)"), ("light", "rgb(255, 255, 255)")):
        browser.execute_script("document.body.dataset.theme = arguments[0]", theme)
        until(partial(_is_on, browser, ground))
    assert browser.execute_script(IN_PLACE)[1] == [True, False]
    assert "send 64 KiB per device." in press(other)[0]  # of which there is one at a time
    browser.switch_to.default_content()
    _, hidden, link, _ = browser.execute_script(IN_PLACE)
    assert (hidden, entries(link)["text"]) == ([False, True], EDITED)
    other.click()
    assert browser.execute_script(IN_PLACE)[1] == [False, False]
    assert not browser.find_elements("css selector", "iframe")
    assert browser.get_log("browser") == []


def _is_on(browser: Any, ground: str) -> bool:
    return bool(browser.execute_script(IN_PLACE)[3] == ground)


def test_pages_with_a_program_alone_have_the_script_of_its_button() -> None:
    added: list[str] = []
    app: Any = types.SimpleNamespace(add_js_file=lambda name, **_: added.append(name))
    for classes in ([], [CLASS]):
        tree = new_document("page")
        tree += nodes.paragraph("", "text", classes=classes)
        extension._follow(app, "page", "page.html", {}, tree)
    extension._follow(app, "search", "search.html", {}, None)
    assert added == ["edit_here.js"]


SLOW = """
const setTimeout = (step) => timers.push(step);
const [timers, seen] = [[], { workers: 0, ended: 0 }];
class Worker {
  constructor() { seen.workers += 1; }
  addEventListener(kind, heard) { if (kind === "message") seen.heard = heard; }
  postMessage() {}
  terminate() { seen.ended += 1; }
}
const ask = inWorker(() => {});
ask("/compile", {});
ask("/compile", {});
timers.shift()();
const whileLoading = seen.ended;
seen.heard({ data: { ready: true } });
timers.shift()();
return [whileLoading, seen.ended, seen.workers];
"""


SNAPSHOT = """
import sys
from docs.browser.snapshot import prepared
steps = prepared(sys.argv[1])
assert not {"msgspec", "highspy", "numpy"} & sys.modules.keys()
print(len([*steps]))
"""


def test_the_memory_that_the_page_begins_with_can_be_made(tmp_path: Path) -> None:
    """Without libraries of C; the steps that are left have the solver."""
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT, TEXT],
        cwd=ROOT,
        env=os.environ | {"MESHDSL_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


@NEEDED
def test_a_worker_that_loads_is_not_ended_for_being_slow(browser: Any) -> None:
    engine = (ROOT / "meshdsl/play/engine.js").read_text(encoding="utf-8")
    assert browser.execute_script(engine + SLOW) == [0, 1, 2]


@NEEDED
@pytest.mark.skipif(
    not (ROOT / "build/site/play/snapshot.gz").is_file(),
    reason="the page is not built here (`make browser`)",
)
def test_the_built_page_compiles_by_itself(browser: Any) -> None:
    """Python and the solver in the browser find what they find here, the optimal plan too."""
    with serving(ROOT / "build/site") as address:
        browser.get(f"{address}play.html")
        said, *_ = settled(browser)
        result = compiled(TEXT)["result"]
        assert said == result["sentence"]
        browser.execute_script(PRESS, "#whole")
        python = "return document.getElementById('python').textContent"
        browser.execute_script(PRESS, "#tab-emitted")
        text = asked("/views", {})["views"]["code"]["whole"]
        until(lambda: browser.execute_script(python) == text)
        browser.execute_script(TYPE_OVER, TEXT.replace("io = 512", "io = 96"))
        said, *_ = until(lambda: "12 KiB" in (s := settled(browser))[0] and s)
        _search_and_compare(browser)
        assert browser.get_log("browser") == []


def _search_and_compare(browser: Any) -> None:
    """Search the layouts of the program on the page, use the best one, and compare two others."""
    text = settled(browser)[-1]
    best, second, *_ = asked("/search", {"text": text})["layouts"]
    rows = partial(browser.find_elements, "css selector", "#layouts tr:has(td)")
    browser.execute_script(PRESS, "#search")
    until(lambda: rows() and settled(browser)[0] and _said(browser, "#search") == "Search layouts")
    assert best["layout"] in rows()[0].text
    browser.execute_script(PRESS, "#layouts tr:nth-child(2) button + button")  # Compare
    until(partial(browser.find_elements, "css selector", "#compared td"))
    browser.execute_script(PRESS, "#layouts tr:nth-child(3) button + button")
    until(lambda: "in 3 columns" in _said(browser, "#compared"))
    assert all(each["layout"] in _said(browser, "#columns") for each in (best, second))
    browser.execute_script(PRESS, "#layouts tr:nth-child(2) button")  # Use
    said, _, text = until(lambda: "layout searched" in (s := settled(browser))[0] and s)
    assert said.endswith(compiled(text, layout="searched")["result"]["sentence"])
    until(lambda: "layout searched" in _said(browser, "#compared"))


def _said(browser: Any, selector: str) -> str:
    return str(browser.execute_script(SAID, selector))
