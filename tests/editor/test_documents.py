"""Documents without a client: what a keystroke does, and what is left to the quiet."""

from __future__ import annotations

import asyncio
import threading

import pytest

from meshdsl.diagnostics import Diagnostic, Source
from meshdsl.editor import completion, documents, facts
from meshdsl.editor.documents import Documents
from meshdsl.editor.facts import Wishes
from meshdsl.editor.text import LineMap, Text
from tests.project import ROOT

LM = (ROOT / "examples/lm.mdsl").read_text()
URI = "file:///lm.mdsl"


class Shown:
    """What documents tell: the diagnostics of versions, and failures."""

    def __init__(self, quiet: float = 0.0) -> None:
        self.told: list[tuple[int | None, tuple[Diagnostic, ...]]] = []
        self.failures: list[Exception] = []
        self.documents = Documents(self.publish, lambda _: None, self.failed, quiet=quiet)

    def publish(self, document, version, diagnostics) -> None:
        self.told.append((version.number, diagnostics))

    def failed(self, error: Exception) -> Diagnostic:
        self.failures.append(error)
        return Diagnostic("MD0799", str(error))

    def type(self, text: str, number: int) -> None:
        self.documents.set(URI, Text.of("lm.mdsl", text, "utf-16"), number)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every placement and every search for a plan that is begun."""
    begun: list[object] = []

    def begin(*given: object) -> None:
        begun.append(given)
        raise AssertionError("nothing is placed here")

    monkeypatch.setattr("meshdsl.placed.place.solve", begin)
    monkeypatch.setattr("meshdsl.placed.from_named.Placer.__init__", begin)
    return begun


def test_a_keystroke_places_nothing(searches: list[object]) -> None:
    """All that is waited for while someone types is `read`, and requests answer from it."""
    shown = Shown(quiet=1e9)

    async def type_some() -> None:
        for number in range(3):
            shown.type(LM + "#" * number, number)
            known = await shown.documents.facts(URI)
            assert known is not None
            assert known.text.source.text == LM + "#" * number
            found = list(completion.complete(known, LM, LM.index("softmax[mem]") + 8))
            assert {item.label for item in found} >= {"mem", "seq"}
        shown.documents.close(URI)

    asyncio.run(type_some())
    assert not searches
    assert not shown.failures


def test_of_many_versions_the_last_is_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    placed: list[str] = []

    def place(known, wishes, stale):
        placed.append(known.text.source.text)
        return facts.Placing(known.text)

    monkeypatch.setattr(documents, "place", place)
    shown = Shown()

    async def type_much() -> None:
        for number in range(30):
            shown.type(LM + "#" * number, number)
        shown.type(LM, 3)  # late
        await shown.documents.placing(URI)
        following = shown.documents.open[URI].following
        assert following is not None
        await following

    asyncio.run(type_much())
    assert placed == [LM + "#" * 29]
    assert [number for number, _ in shown.told] == [29]


def test_a_placing_does_not_wait_for_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a hover shows is of one layout; what is wrong, of all of the file."""
    asked = threading.Event()

    def checked(known, placing, stale):
        assert asked.wait(60)
        return placing

    monkeypatch.setattr(documents, "checked", checked)
    shown = Shown()

    async def ask() -> None:
        shown.type(LM, 1)
        placing = await shown.documents.placing(URI)
        assert placing is not None
        assert placing.reports
        assert not shown.told
        asked.set()
        following = shown.documents.open[URI].following
        assert following is not None
        await following
        assert shown.told

    asyncio.run(ask())


def test_our_mistake_is_a_diagnostic_and_the_next_keystroke_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(text: Text) -> None:
        raise ZeroDivisionError("a mistake")

    shown = Shown()

    async def type_twice() -> None:
        with monkeypatch.context() as wrong:
            wrong.setattr(documents, "read", fail)
            shown.type(LM, 1)
            assert await shown.documents.facts(URI) is None
            assert await shown.documents.placing(URI) is None
        shown.type(LM + "program", 2)
        assert await shown.documents.facts(URI) is not None

    asyncio.run(type_twice())
    assert shown.told[0][1][0].code == "MD0799"
    assert len(shown.failures) == 1


def test_a_layout_that_a_file_does_not_have_is_not_wished_for() -> None:
    known = facts.read(Text.of("m.mdsl", (ROOT / "examples/mlp.mdsl").read_text(), "utf-16"))
    found = facts.place(known, Wishes("zero9", "none such", "deferred"), lambda: False)
    assert (found.layout, found.missing) == ("hybrid", "zero9")
    assert found.reports["mlp"]["reduce"] == "deferred"
    assert found.reports["mlp"]["devices"] == 4
    stale = facts.place(known, Wishes(), lambda: True)
    assert not stale.reports


# --- positions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32"])
def test_positions_and_offsets_are_inverse(encoding: str) -> None:
    text = Text.of("t", "\ufeffä🧮b\r\n\ud800x\r🧮\n", encoding)
    for offset in range(len(text.source.text) + 1):
        assert text.offset(text.position(offset)) == offset
    units = {"utf-8": 3, "utf-16": 1, "utf-32": 1}
    assert text.position(0).character == units[encoding]


def test_lines_are_found_again_around_edits() -> None:
    old, new = Source("", "a\nb\nc\nd\ne\nf"), Source("", "new\na\nB\nc\nd\nmore\nf\n")
    lines = LineMap.between(old, new)
    assert [lines.now(n) for n in range(1, 7)] == [2, None, 4, 5, None, 7]
    assert [lines.then(n) for n in range(1, 9)] == [None, 1, None, 3, 4, None, 6, None]


# --- completion ----------------------------------------------------------------------------------

HEAD = "dim batch = 4, io = 8\nmesh m = { rows: 2, cols: 2 }\nlayout base { batch -> rows }\n"
BODY = HEAD + "program p(x[batch, io]) {\n  param w[io]\n  h = relu(x)\n  "
OFFERED = {
    "": ({"dim", "program", "layout"}, {"batch", "relu"}),
    HEAD + "layout l { ": ({"batch", "io", "params"}, {"rows", "relu"}),
    HEAD + "layout l { batch -> ": ({"rows", "cols", "none"}, {"batch", "relu"}),
    HEAD + "layout l { batch -> (rows, ": ({"cols", "none"}, {"batch"}),
    HEAD + "layout l { params: ": ({"batch", "io"}, {"params", "rows", "gather"}),
    HEAD + "layout l { ac": ({"activations", "params"}, {"rows"}),
    HEAD + "layout l { activations: ": ({"batch", "gather", "memory"}, {"reduce"}),
    HEAD + "layout l { grads: re": ({"reduce"}, {"gather"}),
    HEAD + "layout l { batch -> rows, mlp.h: gather = ": ({"again", "once"}, {"batch", "bf16"}),
    HEAD + "layout l { state: memory = ": ({"disk", "host"}, {"again"}),
    HEAD + "layout l extends ": ({"base"}, {"batch"}),
    HEAD + "expect base on ": ({"m"}, {"base"}),
    HEAD + "program p(x[batch]) {\n}\nexpect base ": ({"for", "on", "with"}, {"p"}),
    HEAD + "program p(x[batch]) {\n}\nexpect base for ": ({"p"}, {"m", "base", "for"}),
    HEAD + "program p(x[batch]) {\n}\nexpect base for p ": ({"on", "with"}, {"for", "p"}),
    HEAD + "expect base with ": ({"optimal", "deferred"}, {"m"}),
    HEAD + "program p(x[": ({"batch", "io"}, {"relu", "rows"}),
    HEAD + "program p(x[batch@": ({"rows", "none"}, {"batch"}),
    HEAD + "program p(x[batch]: ": ({"bf16", "i32"}, {"batch"}),
    BODY: ({"param", "return", "relu", "h", "x", "w", "io"}, {"rows", "base"}),
    BODY + "y = sum[": ({"batch", "io"}, {"h", "relu"}),
    BODY + "y = h + re": ({"relu", "h", "x"}, {"return", "rows"}),
    BODY + "y = einsum(h, w -> [": ({"batch", "io"}, {"h"}),
    BODY + "y = h[io = ": ({"h", "x"}, {"relu"}),
    BODY + "minimize h with ": ({"adamw", "sgd"}, {"h"}),
    BODY + "minimize h with adamw(": ({"lr=", "clip=", "cosine"}, {"relu"}),
    BODY + "minimize h with adamw(lr=1) { ": ({"params", "w"}, {"relu", "h", "io"}),
    BODY + "minimize h with adamw(lr=1) { w: ": ({"frozen", "weight_decay"}, {"relu", "clip"}),
    BODY + "minimize h with adamw(lr=1) { w: lr = ": ({"cosine"}, {"relu", "lr"}),
    BODY + "param v[io] = ": ({"zeros", "normal"}, {"relu", "h"}),
    BODY + "repeat ": ({"io"}, {"h"}),
    BODY + "# ": (set(), {"relu", "io"}),
}
"""By the text before the cursor: what has to be offered, and what must not."""


@pytest.mark.parametrize("text", OFFERED)
def test_what_is_offered_is_what_may_stand_there(text: str) -> None:
    wanted, unwanted = OFFERED[text]
    known = facts.read(Text.of("t.mdsl", text, "utf-16"))
    found = {item.label for item in completion.complete(known, text, len(text))}
    assert found >= wanted
    assert not found & unwanted


def test_the_form_of_a_call_is_shown() -> None:
    text = BODY + "y = where(h > 0, h, "
    known = facts.read(Text.of("t.mdsl", text, "utf-16"))
    found = completion.signature(known, text, len(text))
    assert found is not None
    assert found.signatures[0].label.startswith("where(")
    assert found.active_parameter == 2
