"""`plan.simulate()`: figures, text, picture, trace."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import meshdsl as md
from meshdsl.report.gantt import gantt_picture
from meshdsl.simulate.engine import simulate
from tests.project import ROOT
from tests.simulate.flat import LAYOUTS, flat, layered
from tests.simulate.test_trace import checked


def plan() -> md.Plan:
    """The MLP on four devices."""
    return md.load(str(ROOT / "examples" / "mlp.mdsl")).compile("square", "hybrid")


def test_a_plan_in_time(tmp_path: Path) -> None:
    found = plan().simulate("h100")
    assert found.seconds == pytest.approx(found.compute + sum(found.exposed.values()))
    assert found.peak[0] == plan().cost().peak_memory
    assert 0 < found.mfu < 1
    assert "a step takes" in str(found)
    assert "<img" in found.html()
    found.trace(str(tmp_path / "t.json"))
    checked(json.loads((tmp_path / "t.json").read_text()))
    with pytest.raises(md.ProgramError, match="MD0501"):
        found.trace(str(tmp_path / "no" / "t.json"))
    assert plan().simulate("h100", unroll=True).json == found.json


def test_no_cluster_and_an_unknown_one() -> None:
    for cluster, code in ((None, "MD0630"), ("h1000", "MD0320")):
        with pytest.raises(md.ProgramError, match=code) as caught:
            plan().simulate(cluster)
        assert "test_python.py" in str(caught.value)


@pytest.mark.parametrize("layers", [3, 96])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pictures_stay_inside_and_small(layout: str, layers: int) -> None:
    """However deep the program: work narrower than a pixel is drawn together."""
    program = layered(layout, layers)
    drawn = gantt_picture(simulate(program, flat(program)))
    assert len(drawn) < 100_000
    root = ET.fromstring(drawn)
    width = float(root.attrib["width"])
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        assert 0 <= float(rect.attrib["x"]) <= width
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
    said = {text.text for text in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"compute", "forward", "0 B", "0 s"} <= said
    assert ("more iterations" in said) == (layers > 3)
