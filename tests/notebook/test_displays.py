"""Every display of every example: well-formed, harmless, and with the same facts as its text."""

from __future__ import annotations

import colorsys
import contextlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import meshdsl as md
from meshdsl.api.programs import Program, read
from meshdsl.report import palette as look
from meshdsl.report.html import TINTS, join, tag
from meshdsl.report.memory_kinds import KINDS
from meshdsl.report.page import colours
from meshdsl.report.views.parts import Code
from tests.notebook.markup import drawing, parsed, pictures, plain, texts
from tests.project import ROOT
from tests.report.comparing import ATTACK, EVIL
from tests.report.golden import SIZES, SOME, layouts


def plans(example: str) -> Iterator[Any]:
    """The example under each of its layouts."""
    path = ROOT / "examples" / f"{example}.mdsl"
    program = md.load(path, dims=SIZES.get(example, {}))
    for layout in layouts(example):
        with contextlib.suppress(md.ProgramError):  # sizes that do not divide
            yield program.compile(layout=layout)


def shown(view: Any) -> str:
    """The HTML of a display, which always comes with text."""
    bundle: dict[str, str] = view._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == (
        view.device + view.rest if isinstance(view, Code) else str(view)
    )
    assert bundle["text/plain"].strip()
    return bundle["text/html"]


@pytest.mark.filterwarnings("ignore::meshdsl.ProgramWarning")
@pytest.mark.parametrize("example", SOME)
def test_every_display_of_every_example(example: str) -> None:
    seen = 0
    for plan in plans(example):
        report = plan.explain(all=True)
        for view in (report, plan.placements, plan.collectives, plan.memory, plan.code):
            pictures(shown(view))
        text = plain(shown(report))
        for c in report.json["collectives"]:
            assert all(sent["why"] in text for sent in c["parts"] or [c])
        for tensor in plan.placements.values():
            assert len(pictures(shown(tensor))) == 1
        for collective, told in zip(plan.collectives, report.json["collectives"], strict=True):
            assert len(pictures(shown(collective))) == 3
            assert (collective.kind, collective.wire_bytes) == (told["kind"], told["wire_bytes"])
        seen += 1
    assert seen


def mlp() -> Any:
    return md.load(ROOT / "examples" / "mlp.mdsl").compile("square", "hybrid")


def test_explain_names_lines_tensors_and_what_is_sent() -> None:
    html = shown(mlp().explain())
    text = plain(html)
    assert "f32[batch@rows 64→32, hidden@cols 2048→1024]" in text
    assert "⇒ all_reduce sum of y over cols: 64 KiB sent per device" in text
    assert "  h = relu(einsum(x, w -> [batch, hidden]) + b)" in text
    assert len(list(parsed(html).iter("details"))) == 2


def test_a_comparison_marks_what_differs() -> None:
    found = mlp().compare("data_parallel")
    text = plain(shown(found))
    assert "≠ [io, hidden]" in text
    assert "≠ ⇒ y" in text
    assert "all_reduce over cols: 64 KiB" in text.replace("\xa0", " ")
    assert "Nothing was executed" in text
    assert shown(mlp().compare(reduce="deferred")).count("≠") == 0


def test_a_column_that_does_not_compile_says_why() -> None:
    found = mlp().compare({"io": "rows", "hidden": "rows"})
    assert "not compiled" in plain(shown(found))


def test_one_collective_before_on_the_mesh_and_after() -> None:
    collective = mlp().collectives[0]
    before, mesh, after = pictures(collective.html())
    assert "0 + 1" in texts(before)
    assert "0 = 1" in texts(after)
    assert collective.groups == [[0, 1], [2, 3]]
    assert collective.sends == [(0, 1), (2, 3)]
    arrows = [path for path in mesh.iter() if path.get("marker-end")]
    assert len(arrows) == len(collective.sends)


@pytest.mark.parametrize(
    ("kind", "count", "heads"),
    [("all_reduce", 4, 2), ("all_gather", 4, 1), ("reduce_scatter", 4, 1), ("all_to_all", 6, 2)],
)
def test_arrows_of_a_group_of_four(kind: str, count: int, heads: int) -> None:
    from meshdsl.placed.placements import Mesh
    from meshdsl.report.pictures import collective_picture, pairs

    group = [0, 1, 2, 3]
    root = drawing(
        collective_picture(Mesh("m", (("a", 4),)), kind, [group], pairs(kind, group), "note")
    )
    arrows = [path for path in root.iter() if path.get("marker-end")]
    assert len(arrows) == count
    assert all((path.get("marker-start") is not None) == (heads == 2) for path in arrows)


@pytest.mark.parametrize(
    ("axes", "told"),
    [
        ({"model": 3}, ["model 0  model 1  model 2", "0        1        2", "3 devices"]),
        ({"a": 2, "b": 2}, ["     b 0  b 1", "a 0  0    1", "a 1  2    3", "4 devices"]),
        (
            {"p": 2, "a": 1, "b": 2},
            ["p 0:", "     b 0  b 1", "a 0  0    1", "p 1:", "     b 0  b 1", "a 0  2    3"],
        ),
        ({}, ["0", "1 device"]),
    ],
)
def test_meshes(axes: dict[str, int], told: list[str]) -> None:
    mesh = md.mesh(axes)
    assert str(mesh).splitlines()[1:][: len(told)] == told
    (picture,) = pictures(shown(mesh))
    assert {str(rank) for rank in range(mesh.devices)} <= set(texts(picture))
    assert set(axes) <= set(texts(picture)) or "p 0" in texts(picture)


def test_memory_of_zero() -> None:
    program = md.load(ROOT / "examples" / "lm.mdsl")
    first, *others = ("data_parallel", "zero1", "zero2", "zero3")
    held = {name: program.compile("four", name).memory for name in (first, *others)}
    table = held[first].beside(**{name: held[name] for name in others})
    assert [line[0] for line in table.table()[1:]] == [first, *others]
    assert held["zero3"]["params"] * 4 == held[first]["params"]
    assert {"gradients", "state"} <= set(texts(pictures(shown(table))[0]))


def test_code_is_text_and_shows_what_a_device_does() -> None:
    code = mlp().code
    assert isinstance(code, Code)
    assert str(code) == code
    assert code.device.startswith("def device(")
    assert code.device in code
    (block,) = parsed(shown(code)).iter("pre")
    assert "".join(block.itertext()) == code.device + code.rest


def test_a_name_in_a_loop_is_that_of_what_comes_out() -> None:
    path = ROOT / "examples" / "transformer.mdsl"
    plan = md.load(path).compile("pod", "megatron")
    loop = plan.tensor("x").json["loop"]
    assert loop is not None
    assert loop["as"] == "result"
    assert plan.tensor("attention.wq").shape == (4, 256, 8, 32)
    assert plan.tensor("attention.q").dims == ("batch", "heads", "seq", "key")


def test_unknown_tensors_are_told() -> None:
    with pytest.raises(md.ProgramError, match="did you mean `h`") as told:
        mlp().tensor("hh")
    assert told.value.diagnostics[0].code == "MD0102"


# --- nothing of a program becomes markup -----------------------------------------------------


def evil() -> Program:
    return read(EVIL, "p", {})


def test_a_file_that_does_its_worst_is_text() -> None:
    plan = evil().compile("m", "l")
    for view in (plan.explain(), plan.compare(reduce="deferred"), plan.code, plan.placements):
        html = shown(view)
        pictures(html)
        assert "<script" not in html
        assert "\x07" not in html
        assert "\u202e" not in html
    assert ATTACK in plain(shown(plan.explain()))


def test_names_and_notes_are_escaped() -> None:
    made = join(tag("td", ATTACK, title=ATTACK), ATTACK)
    root = parsed(f"<table><tbody><tr>{made}</tr></tbody></table>")
    cell = next(root.iter("td"))
    assert cell.text == cell.get("title") == cell.tail == ATTACK


# --- colours ---------------------------------------------------------------------------------

LIGHT, DARK = ("#ffffff", "#000000"), ("#111111", "#e0e0e0")
"""Back and text of notebooks."""


def rgb(colour: str) -> tuple[float, float, float]:
    found = re.findall(r"..", colour.lstrip("#"))
    return tuple(int(part, 16) / 255 for part in found)  # type: ignore[return-value]


def luminance(colour: tuple[float, float, float]) -> float:
    """Relative luminance of WCAG 2."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: tuple[float, float, float], other: tuple[float, float, float]) -> float:
    """Contrast of WCAG 2: 4.5 is what text needs."""
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


FILLS = dict.fromkeys([*look.PARTS, *look.WORK.values(), *look.MEMORY.values(), look.BACK])


@pytest.mark.parametrize("fill", FILLS)
def test_labels_can_be_read(fill: str) -> None:
    assert contrast(rgb(look.INK), rgb(fill)) >= 7
    assert colorsys.rgb_to_hls(*rgb(fill))[1] > 0.6


@pytest.mark.parametrize("fill", FILLS)
def test_labels_can_be_read_on_dark_pages(fill: str) -> None:
    assert contrast(rgb(look.DARK[look.INK]), rgb(look.DARK[fill])) >= 4.5


def test_pages_have_the_colours_of_pictures() -> None:
    light, dark, system = colours().split("--c0: ")[1:]
    for sheet, fills in ((light, look.PARTS), (dark, [look.DARK[c] for c in look.PARTS])):
        assert re.findall(r"#\w{6}", f"{sheet}")[: len(fills)] == [*fills]
    assert system.startswith(dark[:60])


def test_a_fill_has_one_meaning() -> None:
    parts, work, memory = set(look.PARTS), set(look.WORK.values()), set(look.MEMORY.values())
    assert not parts & (work | memory)
    assert (len(parts), len(work), len(memory)) == (
        len(look.PARTS), len(look.WORK), len(look.MEMORY),
    )  # fmt: skip
    assert set(look.MEMORY) == set(KINDS)


def test_soft_text_can_be_read() -> None:
    assert contrast(rgb(look.SOFT), rgb(look.BACK)) >= 4.5


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("tint", TINTS)
def test_tints_can_be_read_in_both_themes(tint: str, theme: tuple[str, str]) -> None:
    red, green, blue, alpha = (float(n) for n in re.findall(r"[\d.]+", tint))
    back, text = map(rgb, theme)
    over = zip(back, (red, green, blue), strict=True)
    mixed = tuple((1 - alpha) * b + alpha * c / 255 for b, c in over)
    assert contrast(text, mixed) >= 4.5  # type: ignore[arg-type]


def test_code_can_be_read() -> None:
    spans = [e for e in parsed(mlp().code.html()).iter("span") if "".join(e.itertext()).strip()]
    found = {c for e in spans for c in re.findall(r"(?<!-)color: #(\w+)", e.get("style", ""))}
    assert len(found) >= 4
    for colour in found:
        wide = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
        assert contrast(rgb(wide), rgb(look.BACK)) >= 4.5, colour


# --- the import ------------------------------------------------------------------------------


@pytest.mark.parametrize("heavy", ["IPython", "pygments", "torch"])
def test_the_import_loads_nothing(heavy: str, tmp_path: Path) -> None:
    code = f"import sys, meshdsl; meshdsl.mesh; assert {heavy!r} not in sys.modules"
    command = [sys.executable, "-c", code]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})


# --- programs and plans themselves ---------------------------------------------------------------


def test_a_plan_and_a_program_draw_themselves() -> None:
    plan = mlp()
    for found, told in ((plan, plan.explain().html()), (plan.program, "einsum")):
        bundle = found._repr_mimebundle_()
        assert bundle["text/plain"] == repr(found)
        assert told in bundle["text/html"]
        assert list(parsed(bundle["text/html"]).iter())


# --- files ---------------------------------------------------------------------------------------


def test_a_view_is_saved_as_pictures_or_as_a_page(tmp_path: Path) -> None:
    """Pictures have what the display has, and their captions; an older file is replaced."""
    plan = mlp()
    schedule = md.schedule("gpipe", stages=2, micro=2)
    views = {
        "h: f32": plan.tensor("h"),
        "loss: f32": plan.placements,
        "all_reduce": plan.collectives,
        "parameters": plan.memory,
        "a step takes": plan.simulate("h100"),
        "slow": schedule.beside(slow=schedule),
        "mesh { rows: 2 }": md.mesh(rows=2),
    }
    for number, (told, view) in enumerate(views.items()):
        out = tmp_path / f"{number % 2}.SVG"
        view.save(out)
        root = drawing(out.read_text(encoding="utf-8"))
        assert told in " ".join(texts(root))
        drawn = pictures(view._repr_mimebundle_()["text/html"])
        assert set().union(*map(texts, drawn)) <= set(texts(root))
        for picture in root.iter("{http://www.w3.org/2000/svg}svg"):
            drawing(ElementTree.tostring(picture, encoding="unicode"))
    page, script = tmp_path / "report.html", tmp_path / "compared.html"
    plan.explain().save(str(page))
    body = page.read_text(encoding="utf-8")
    assert str(plan.explain().html()) in body
    assert "<script" not in body
    plan.compare("data").save(script)
    assert "<script" in script.read_text(encoding="utf-8")


def test_a_view_that_cannot_be_saved_says_the_way_out(tmp_path: Path) -> None:
    """Nothing is written; what the help says works."""
    plan, wrong = mlp(), {"h.png": "MD0602", "h": "MD0602", "a/h.svg": "MD0501"}
    for name, code in wrong.items():
        with pytest.raises(md.ProgramError) as error:
            plan.tensor("h").save(tmp_path / name)
        assert [d.code for d in error.value.diagnostics] == [code]
    with pytest.raises(md.ProgramError, match="no picture") as error:
        plan.compare("data").save(tmp_path / "c.svg")
    assert not list(tmp_path.iterdir())
    (saved,) = re.findall(r'save\("(.*)"\)', error.value.diagnostics[0].help or "")
    plan.compare("data").save(saved)
    assert list(tmp_path.iterdir()) == [tmp_path / "c.html"]
