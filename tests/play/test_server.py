"""The server of the playground: what it answers, and whom it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from docs.browser import build
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.output_files import write_whole
from meshdsl.pipeline import Compilation, Options
from meshdsl.play import compile_queue
from meshdsl.play.compile_queue import Desk
from meshdsl.play.edited_file import EditedFile
from meshdsl.play.http_server import HOST, MAX_BODY, Play
from meshdsl.play.jobs import Jobs, job_of
from meshdsl.play.layout_search import LayoutSearch
from meshdsl.play.questions import HTTPRefused
from meshdsl.project import project
from meshdsl.report.document import human
from meshdsl.search.methods import best_plans
from meshdsl.search.request import SearchRequest
from meshdsl.syntax.format import format_source
from tests.project import ROOT
from tests.waiting import started, until

from .conftest import QUESTION, TEXT, Served

JOBS: dict[str, dict[str, Any]] = {"/search": {}, "/compare": {"columns": []}}


def test_a_program_is_answered_with_all_there_is_to_see(served: Served) -> None:
    found = served.compile()
    result = found["result"]
    assert found["diagnostics"] == []
    assert found["choices"] == {
        "programs": ["mlp"],
        "layouts": ["hybrid", "data_parallel", "megatron"],
        "sbps": [],
        "meshes": ["square", "line"],
        "dims": {"batch": 64, "io": 512, "hidden": 2048},
    }
    assert result["sentence"].endswith("2 collectives send 64 KiB per device.")
    assert ["memory per device", "4.63 MiB"] in result["totals"]
    assert "Choose a cluster" in result["time"]
    assert "all_reduce sum of y over cols" in result["report"]
    assert "remove it" in result["report"]
    assert {"x", "w", "b", "v", "h", "y"} <= {p["title"] for p in result["pictures"]}
    assert "all_reduce" in re.sub("<[^>]*>", "", result["code"]["bare"])
    assert "import torch" in result["code"]["whole"]


@pytest.mark.parametrize(
    ("chosen", "part"),
    [
        ({"layout": "megatron", "mesh": "line"}, "layout megatron on mesh { model: 4 }"),
        ({"layout": "batch:cols"}, "on mesh { rows: 2, cols: 2 }"),
        ({"mesh": "rows:4,cols:1"}, "on mesh { rows: 4, cols: 1 }"),
        ({"reduce": "immediate"}, "2 collectives"),
        ({"sizes": {"io": 64}}, "8 KiB per device"),
    ],
)
def test_the_choices_are_the_options_of_the_command(
    served: Served, chosen: dict[str, Any], part: str
) -> None:
    assert part in served.compile(**chosen)["result"]["sentence"]


def test_all_that_is_wrong_is_said_with_places_and_fixes(served: Served) -> None:
    text = "# 🙂\n" + TEXT.replace("einsum(h, v", "einsum(hh, v").replace("(y -", "(yy -")
    found = served.compile(text=text)
    assert found["result"] is None
    assert found["choices"]["layouts"]
    assert [d["code"] for d in found["diagnostics"]] == ["MD0102", "MD0102"]
    units = text.encode("utf-16-le")
    for diagnostic, wrong in zip(found["diagnostics"], ("hh", "yy"), strict=True):
        where = diagnostic["where"]
        assert units[2 * where["start"] : 2 * where["end"]].decode("utf-16-le") == wrong
        (edit,) = diagnostic["fixes"][0]["edits"]
        assert (edit["start"], edit["end"], edit["text"]) == (
            where["start"],
            where["end"],
            wrong[0],
        )


def test_a_choice_that_is_wrong_has_no_place_in_the_text(served: Served) -> None:
    (found,) = served.compile(layout="hybird")["diagnostics"]
    assert (found["code"], found["where"]["file"]) == ("MD0108", "--layout")


def test_a_choice_that_matches_nothing_is_said_once(served: Served) -> None:
    found = served.compile(layout="batch:rows,hiden:cols")["diagnostics"]
    assert [d["code"] for d in found] == list({d["code"] for d in found})


def test_an_expectation_that_fails_spoils_nothing(served: Served) -> None:
    found = served.compile(text=TEXT.replace("196608", "1"))
    assert [d["code"] for d in found["diagnostics"]] == ["MD0401"]
    assert found["result"]["report"]


def test_nothing_of_a_program_becomes_markup(served: Served) -> None:
    evil = "<img src=x onerror=alert(1)>"
    for text in (f"{TEXT}# {evil}", f"{TEXT}{evil}", TEXT.replace("# The", f"# {evil}")):
        assert "<img src=x" not in served.ask("/compile", QUESTION | {"text": text}).body.decode()
    served.path.write_text(f"# </script>{evil}\n{TEXT}", encoding="utf-8")
    page = served.ask(f"/?token={served.play.token}").body.decode()
    assert evil not in page
    assert page.count("</script>") == 2


def test_colours_cover_the_text(served: Served) -> None:
    for text in (TEXT, "# 🙂\nlet x = 3 ¶", "", "\n\n"):
        runs = served.ask("/colours", {"text": text}).json["runs"]
        assert sum(length for length, _ in runs) == len(text.encode("utf-16-le")) // 2
    assert [1, "nl"] not in runs


# --- who is refused --------------------------------------------------------------------------

QUESTIONS = {
    "/compile": QUESTION,
    "/colours": {"text": ""},
    "/save": {"text": "", "digest": ""},
    "/state": None,
}


@pytest.mark.parametrize("path", QUESTIONS)
@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer \xe9"},
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": ""},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1"},
    ],
    ids=str,
)
def test_strangers_are_refused(served: Served, path: str, headers: dict[str, str]) -> None:
    reply = served.ask(path, QUESTIONS[path], headers=headers)
    assert reply.status == 403
    assert set(reply.json) == {"error"}
    assert served.path.read_text(encoding="utf-8") == TEXT


def test_the_page_itself_needs_the_secret(served: Served) -> None:
    for path in ("/", "/?token=", "/?token=wrong", f"/?tokens={served.play.token}"):
        reply = served.ask(path)
        assert reply.status == 403
        assert served.play.token not in reply.body.decode()
    reply = served.ask(f"/?token={served.play.token}", headers={"Authorization": ""})
    assert reply.status == 200
    assert served.play.token not in reply.body.decode()
    port = served.server.server_port
    own = {"Host": f"localhost:{port}", "Origin": f"http://localhost:{port}"}
    assert served.ask("/state", headers=own).status == 200


def test_the_policy_allows_one_style_and_one_script(served: Served) -> None:
    reply = served.ask(f"/?token={served.play.token}")
    policy = reply.headers["Content-Security-Policy"]
    assert re.sub(r"'sha256-[\w+/=]+'", "HASH", policy) == (
        "default-src 'none'; style-src HASH; script-src HASH; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    page = reply.body.decode()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page)
    assert reply.headers["Referrer-Policy"] == "no-referrer"
    assert reply.headers["Cache-Control"] == "no-store"


BODIES = {
    "no JSON": (b"{", 400),
    "no object": (b"[]", 400),
    "deep": (b"[" * 100_000, 400),
    "no UTF-8": (b'{"text": "\xff"}', 400),
    "an entry too many": ({**QUESTION, "more": 1}, 400),
    "an entry too few": ({"text": ""}, 400),
    "another type": ({**QUESTION, "text": 1}, 400),
    "a size that is none": ({**QUESTION, "sizes": {"io": 1.5}}, 400),
    "a negative size": ({**QUESTION, "sizes": {"io": -1}}, 400),
    "half a character": ({**QUESTION, "text": "\ud83d"}, 400),
    "too large": (b" " * (MAX_BODY + 1), 413),
}


@pytest.mark.parametrize("case", BODIES)
def test_bodies_that_are_no_question(served: Served, case: str) -> None:
    body, status = BODIES[case]
    # Of what is too large no more than the length is sent: the server reads none of it.
    length = {"Content-Length": str(len(body))} if isinstance(body, bytes) else {}
    sent = b"" if case == "too large" else body
    assert served.ask("/compile", sent, headers=length).status == status


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("POST", "/compile", {"Content-Type": "text/plain"}, 415),
        ("POST", "/compile", {"Content-Type": ""}, 415),
        ("POST", "/compile", {"Content-Length": ""}, 411),
        ("POST", "/compile", {"Content-Length": "-1"}, 411),
        ("POST", "/", {}, 404),
        ("POST", "/../secret", {}, 404),
        ("GET", "/compile", {}, 404),
        ("GET", "/favicon.ico", {}, 404),
        ("PUT", "/save", {}, 501),
        ("DELETE", "/state", {}, 501),
        ("OPTIONS", "/compile", {}, 501),
        ("<b>", "/", {}, 501),
    ],
)
def test_other_requests_are_refused(
    served: Served, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    body = b"{}" if method == "POST" else None
    reply = served.ask(path, body, method, headers)
    assert (reply.status, set(reply.json)) == (status, {"error"})


def test_it_listens_on_this_machine_alone(served: Served) -> None:
    assert served.server.server_address[0] == HOST == "127.0.0.1"


# --- the file --------------------------------------------------------------------------------


def test_a_save_writes_the_file_if_it_is_the_one_that_was_read(served: Served) -> None:
    served.path.chmod(0o600)
    state = served.ask("/state").json
    assert (state["text"], state["writable"]) == (TEXT, True)
    reply = served.ask("/save", {"text": "# mine\n", "digest": state["digest"]})
    assert reply.json["digest"] == hashlib.sha256(b"# mine\n").hexdigest()
    assert served.path.read_text(encoding="utf-8") == "# mine\n"
    assert served.path.stat().st_mode & 0o777 == 0o600
    again = served.ask("/save", {"text": "# late\n", "digest": state["digest"]})
    assert again.status == 412
    assert served.path.read_text(encoding="utf-8") == "# mine\n"
    served.path.unlink()
    assert served.ask("/save", {"text": "", "digest": reply.json["digest"]}).status == 412
    assert served.ask("/state").status == 404
    assert not served.path.exists()
    assert os.listdir(served.path.parent) == []


def test_of_saves_at_once_of_one_text_only_one_writes(served: Served) -> None:
    """A write takes a while, here all too long: the others may not take the old file for theirs."""

    def slow(path: Path, text: str) -> None:
        time.sleep(0.05)
        write_whole(path, text)

    document = EditedFile(served.path, True, slow)
    _, digest = document.read()
    texts = [f"# {number}\n" for number in range(8)]
    with ThreadPoolExecutor(len(texts)) as pool:
        saved = list(pool.map(lambda text: document.save(text, digest), texts))
    (winner,) = (i for i, found in enumerate(saved) if found is not None)
    assert served.path.read_text(encoding="utf-8") == texts[winner]
    assert saved[winner] == hashlib.sha256(texts[winner].encode()).hexdigest()


@pytest.mark.parametrize("path", [None, Path("f.mdsl")])
def test_a_page_that_may_not_write_writes_nothing(
    path: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("f.mdsl").write_text(TEXT, encoding="utf-8")
    play = Play(EditedFile(path, False, lambda *_: pytest.fail("it wrote")), Options())
    state: Any = play.state()
    assert not state["writable"]
    assert state["text"] == (project("example")[0].text if path is None else TEXT)
    with pytest.raises(HTTPRefused, match="writes nothing") as refused:
        play.save({"text": "", "digest": state["digest"]})
    assert refused.value.status == 403


# --- one question after the other ------------------------------------------------------------

FAKE = """
import sys, time
for line in sys.stdin:
    if "forever" in line:
        time.sleep(1e6)
    if "crash" in line:
        sys.exit(7)
    print('{"done": true}', flush=True)
"""


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A desk whose process answers, hangs or crashes as it is asked to."""
    monkeypatch.setattr(compile_queue, "_START", FAKE)
    made = Desk()
    yield made
    made.close()


def _job(text: str) -> Any:
    return {"text": text}


def _meanwhile(desk: Desk, text: str) -> tuple[threading.Thread, list[Any]]:
    """A question that is being asked."""
    found: list[Any] = []
    before = desk._turn
    thread = threading.Thread(target=lambda: found.append(desk.ask(_job(text))))
    thread.start()
    until(lambda: desk._turn > before)
    return thread, found


def test_the_newest_question_is_answered_and_the_others_are_given_up(desk: Any) -> None:
    waiting = [_meanwhile(desk, f"forever {n}") for n in range(3)]
    assert desk.ask(_job("quick")) == {"done": True}
    for thread, found in waiting:
        thread.join()
        assert found == [None]


def test_a_process_that_ends_is_said_and_replaced(desk: Any) -> None:
    assert desk.ask(_job("crash")) == {"failed": "the compiling process ended with 7"}
    assert desk.ask(_job("quick")) == {"done": True}


def test_a_desk_that_closes_leaves_nobody_waiting(desk: Desk) -> None:
    thread, found = _meanwhile(desk, "forever")
    desk.close()
    thread.join()
    assert found == [None]


def test_the_process_ends_with_the_server() -> None:
    process = compile_queue._start()
    assert process.stdin
    process.stdin.write(
        json.dumps({"kind": "compile", "name": "f", "text": TEXT, "options": {}}) + "\n"
    )
    process.communicate()  # closes its standard input, as the end of the server does
    assert process.returncode == 0


def test_questions_at_once_are_answered_or_superseded(served: Served) -> None:
    replies = []
    ask = lambda: replies.append(served.ask("/compile", QUESTION))  # noqa: E731
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [reply.status for reply in replies]
    assert 200 in statuses
    assert set(statuses) <= {200, 409}


# --- other layouts ---------------------------------------------------------------------------


def test_a_search_goes_on_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshdsl.search.budget.SMALLEST", 30)
    search, source, options = LayoutSearch(), Source("f", TEXT), Options(cluster="h100")
    rounds = [search.answer(source, options)]
    while rounds[-1]["more"]:
        rounds.append(search.answer(source, options))
    assert len(rounds) > 1
    assert "proven the best" in rounds[-1]["sentence"]
    assert search.answer(source, options) == rounds[0]  # it is over, and begins anew
    figures = dict(zip(rounds[-1]["head"], rounds[-1]["layouts"][0]["figures"], strict=True))
    made = Compilation(source, options, Diagnostics())
    plan = best_plans(SearchRequest(cluster="h100"), made).plans[0]
    assert (figures["layout"], figures["sent"]) == (str(plan), human(plan.sent))


def test_what_is_found_can_be_used_and_compared(served: Served) -> None:
    text = TEXT.replace("megatron", "searched")
    found = served.ask("/search", QUESTION | {"text": text}).json
    columns = []
    for layout in found["layouts"]:
        assert layout["name"] == "searched2"
        (edit,) = layout["fix"]["edits"]
        used = text[: edit["start"]] + edit["text"] + text[edit["end"] :]
        assert format_source(Source("f", used)) == used
        columns.append({"kind": "layout", "name": layout["layout"]})
    chosen = QUESTION | {"text": used, "layout": "searched2"}
    assert served.ask("/compile", chosen).json["result"] is not None
    asked = chosen | {"columns": columns[:2]}
    compared = served.ask("/compare", asked).json
    assert (compared["columns"], compared["diagnostics"]) == (columns[:2], [])
    assert "Per device B sends" in compared["html"]
    others = served.ask("/compare", QUESTION | {"columns": []}).json
    assert others["columns"] == [{"kind": "layout", "name": "data_parallel"}]
    assert "4.38 MiB more than A." in others["html"]
    alone = served.ask("/compare", QUESTION | {"layout": "megatron", "columns": []}).json
    assert (alone["columns"], "mlp in 1 column" in alone["html"]) == ([], True)  # on another mesh


def test_where_nothing_can_be_compared_or_searched_is_said() -> None:
    broken = TEXT.replace("(h, v", "(hh, v")
    for path, more in JOBS.items():
        question: Any = QUESTION | {"text": broken} | more
        job = job_of(path, question, "f", Options())
        found: Any = Jobs().answer(job)
        assert [d["code"] for d in found["diagnostics"]] == ["MD0102"]
    for columns in ([{"kind": "layout", "name": "a"}] * 7, [{"kind": "mesh", "name": "a"}], [1]):
        question = QUESTION | {"columns": columns}
        with pytest.raises(HTTPRefused):
            job_of("/compare", question, "f", Options())


# --- the command -----------------------------------------------------------------------------


def test_it_serves_until_ctrl_c(tmp_path: Path, ctrl_c: None) -> None:
    for file in project("spiral"):
        (tmp_path / file.name).write_text(file.text, encoding="utf-8")
    (command,) = re.findall(
        "^meshdsl (play .*)", (tmp_path / "README.md").read_text(), re.MULTILINE
    )
    (tmp_path / "json.py").write_text("raise ImportError('of the folder, not of Python')")
    main = "from meshdsl.cli import main; main()"
    words = [sys.executable, "-P", "-c", main, *command.split(), "--no-open"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with started(words, cwd=tmp_path, env=environment, **pipes) as (process,):
        assert process.stdout
        address = process.stdout.readline().split()[-1]
        assert process.stdout.readline() == "Ctrl-C ends it.\n"
        with urllib.request.urlopen(address) as page:
            assert b"program spiral" in page.read()
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate()
        assert (process.returncode, rest) == (0, "\n")


def test_the_page_imports_nothing_that_the_browser_lacks(tmp_path: Path) -> None:
    """Neither torch and numpy, nor what the build of the browser page leaves out."""
    lacked = [name.replace("/", ".") for name in build.LEFT_OUT]
    lacked += ["torch", "numpy", "sklearn", "matplotlib", "rich", "opt_einsum"]
    text = TEXT.partition("\nexpect")[0]  # `optimal` needs the solver, which is another one there
    questions = {
        path: QUESTION | {"text": text, "reduce": "deferred", "cluster": "h100"} | more
        for path, more in {"/compile": {}, "/views": {}, **JOBS}.items()
    }
    code = (
        "import json, sys; lacked, questions = json.load(sys.stdin);"
        "sys.modules.update(dict.fromkeys(lacked));"  # importing one of these fails
        "from meshdsl.play.browser_worker import reply;"
        "replies = [json.loads(reply(p, json.dumps(q))) for p, q in questions.items()];"
        "assert all(s == 200 and 'failed' not in body for s, body in replies)"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        input=json.dumps([lacked, questions]),
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "MESHDSL_CACHE": str(tmp_path / "cache")},
    )
