"""`meshdsl schedule`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshdsl.diagnostics import Source
from meshdsl.report.schedule_charts import chart, described
from meshdsl.report.schedule_picture import in_flight, phases, schedule_picture
from meshdsl.schedule.csv_files import read
from meshdsl.schedule.registry import generate, schedules
from meshdsl.schedule.times import Times, timed
from meshdsl.schedule.verification import verify
from tests.cli.command import Cli, write
from tests.cli.conftest import cli
from tests.work import counted

__all__ = ["cli"]


@pytest.mark.parametrize("name", schedules())
def test_every_schedule_is_drawn_and_told(name: str, cli: Cli) -> None:
    done = cli("schedule", name, "--stages", "4", "--micro", "8")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith(f"{name}: ")
    told = json.loads(cli("schedule", name, "--stages", "4", "--micro", "8", "--json").out)
    found = verify(generate(name, 4, 8))
    assert told["sends"] == found.sends
    assert [d["in_flight"] for d in told["devices"]] == list(found.peaks)
    assert Fraction(told["bubble"]) == timed(found).bubble
    assert len(told["versions"]) == (4 if found.schedule.updates else 0)


@pytest.mark.parametrize("name", schedules())
@pytest.mark.parametrize("width", [40, 80, 1000])
def test_the_chart_has_every_action_where_it_is(name: str, width: int) -> None:
    made = timed(verify(generate(name, 4, 8)))
    lines = chart(made, width).text.splitlines()
    assert all(len(line) <= width for line in lines if line[:6] in ("time  ", "device"))
    for device, row in enumerate(made.rows):
        text = "".join(
            line[10:].ljust(width - 10) for line in lines if line[:8] == f"device {device}"
        )
        drawn = re.findall(r"[A-Za-z]\d+", text)
        wanted = [f"{s.action.kind}{s.action.micro}" for s in row if s.end > s.start]
        if width == 1000:
            assert [label.upper() for label in drawn] == wanted


def test_the_chart_of_a_schedule() -> None:
    made = timed(verify(generate("one_f_one_b", 2, 3)), Times(send=(Fraction(1),)))
    assert chart(made, 80).text == (
        "time      0           4           8           12\n"
        "device 0  F0 F1          B0--- F2 B1---       B2---\n"
        "device 1        F0 B0--- F1 B1---    F2 B2---"
    )


def test_a_chart_that_is_too_large_is_not_printed() -> None:
    assert "`--svg FILE`" in chart(timed(verify(generate("gpipe", 16, 128))), 80).text


@pytest.mark.parametrize("name", schedules())
def test_the_picture_has_every_action(name: str) -> None:
    made = timed(verify(generate(name, 4, 8)))
    root = ElementTree.fromstring(schedule_picture(made))
    tag = "{http://www.w3.org/2000/svg}"
    rects = [e for e in root.iter(f"{tag}rect") if e.get("height") == "24"]
    drawn = [slot for row in made.rows for slot in row if slot.end > slot.start]
    assert len(rects) == len(drawn)
    assert len({r.get("y") for r in rects}) == 4
    ends = [float(r.get("x", "")) + float(r.get("width", "")) for r in rects]
    assert max(ends) < float(root.get("width", ""))
    words = [e.text for e in root.iter(f"{tag}text")]
    assert {"0", "7", "idle", "device 0", str(made.makespan)} <= set(words)
    assert f"{max(made.verified.peaks)} in flight" in words
    for row, peak in zip(made.rows, made.verified.peaks, strict=True):
        curve = in_flight(row)
        assert (max(count for _, count in curve), curve[-1][1]) == (peak, 0)
        until = [end for _, _, end in phases(row)]
        assert until == sorted(until)
        assert until[-1] == row[-1].end


def test_the_facts_of_many_devices_take_work_in_proportion() -> None:
    with counted() as work:
        facts = described(timed(verify(generate("one_f_one_b", 300, 1))))
    assert len(facts["devices"]) == 300
    assert work.calls < 300_000, "for each device all devices are looked at"


def test_files_are_written_and_read(cli: Cli) -> None:
    size = ("--stages", "4", "--micro", "4")
    done = cli(
        "schedule", "zb_v", *size, "--csv", "a.csv", "--torch-csv", "b.csv", "--svg", "c.svg"
    )
    assert done.code == 0
    assert done.out.endswith("wrote c.svg\nwrote a.csv\nwrote b.csv\n")
    rows = generate("zb_v", 4, 4).rows
    for name in ("a.csv", "b.csv"):
        text = Path(name).read_text(encoding="utf-8")
        assert read(Source(name, text)).schedule.rows == rows
        shown = cli("schedule", name)
        assert shown.code == 0
        assert shown.out.partition("\n")[2] in done.out
    assert ElementTree.fromstring(Path("c.svg").read_text(encoding="utf-8"))
    assert cli("schedule", "zb_v", *size, "--csv", "a.csv").codes == ["error[MD0503]"]
    assert cli("schedule", "zb_v", *size, "--csv", "a.csv", "--force").code == 0
    assert cli("schedule", "a.csv", "--csv", "a.csv", "--force").codes == ["error[MD0502]"]


def test_updates_of_a_file_read_what_is_said(cli: Cli) -> None:
    cli("schedule", "ampnet", "--stages", "3", "--micro", "6", "--csv", "a.csv")
    for weights, copies in (("latest", 1), ("stashed", 3)):
        told = json.loads(cli("schedule", "a.csv", "--weights", weights, "--json").out)
        assert (told["weights"], told["versions"][0]["copies"]) == (weights, copies)
        assert [v["staleness"][-1] for v in told["versions"]] == [2, 1, 0]


def test_ampnet_follows_the_times(cli: Cli) -> None:
    """Another order where a stage is slow: the table of it is written, and read as it is."""
    size = ("--stages", "3", "--micro", "6")
    slow = "F=1:3:1,I=1:3:1,W=1:3:1"
    told = json.loads(cli("schedule", "ampnet", *size, "--times", slow, "--json").out)
    equal = json.loads(cli("schedule", "ampnet", *size, "--json").out)
    rows = [device["row"] for device in told["devices"]]
    assert rows != [device["row"] for device in equal["devices"]]
    assert cli("schedule", "ampnet", *size, "--times", slow, "--csv", "slow.csv").code == 0
    again = json.loads(cli("schedule", "slow.csv", "--times", slow, "--json").out)
    assert [device["row"] for device in again["devices"]] == rows
    assert again["makespan"] == told["makespan"]
    one = json.loads(cli("schedule", "ampnet", *size, "--active", "1", "--json").out)
    assert {n for v in one["versions"] for n in v["staleness"]} == {0}


def test_messages_and_sums_out_of_order_are_told(cli: Cli) -> None:
    path = write("F0,F1,F2,B2,B1,B0\nF2,F1,F0,B2,B1,B0\n", "t.csv")
    out = cli("schedule", path).out
    assert "From device 0 to device 1 (F), 3 messages are kept at once" in out
    assert "Gradients are added up in another order than on one device" in out


SIZE = "--stages 4 --micro 8"
REFUSED = {
    f"gpip {SIZE}": "MD0528",
    "gpipe": "MD0532",
    "gpipe --stages 4": "MD0532",
    f"gpipe {SIZE} --chunks 2": "MD0529",
    f"gpipe {SIZE} --batch 2": "MD0529",
    f"gpipe {SIZE} --weights stashed": "MD0532",
    f"two_bw {SIZE} --batch 2": "MD0529",
    f"two_bw {SIZE} --batch 5": "MD0529",
    "chimera --stages 3 --micro 4": "MD0529",
    "chimera --stages 4 --micro 6": "MD0529",
    "chimera --stages 4 --micro 3": "MD0529",
    "interleaved --stages 4 --micro 9": "MD0529",
    "dualpipe_v --stages 4 --micro 7": "MD0529",
    "gpipe --stages 100000 --micro 100000": "MD0529",
    "interleaved --stages 4 --micro 8 --chunks 1000000000": "MD0529",
    f"gpipe {SIZE} --times F=1:2": "MD0530",
    f"gpipe {SIZE} --times F=1,F=2": "MD0530",
    f"gpipe {SIZE} --torch-csv none/t.csv": "MD0502",
    f"gpipe {SIZE} --csv -": "MD0502",
    f"pipedream {SIZE} --torch-csv t.csv": "MD0531",
    f"chimera {SIZE} --torch-csv t.csv": "MD0531",
    "bad.csv": "MD0525",
    "bad.csv --stages 2": "MD0532",
    "bad.csv --weights old": "MD0602",
    "good.csv --weights stashed": "MD0532",
    "spaces.csv": "MD0520",
    "none.csv": "MD0010",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused(command: str, cli: Cli) -> None:
    write("F0,B0,F1,B1\nF0,F1,B0,B1\n", "bad.csv")
    write("F0,F1,B0,B1\nF0,B0,F1,B1\n", "good.csv")
    write("F0 F1 B0 B1\nF0 B0 F1 B1\n", "spaces.csv")
    done = cli("schedule", *command.split())
    in_file = command.startswith(("bad", "spaces"))
    code = 1 if REFUSED[command] < "MD0527" and in_file else 2
    assert (done.code, done.codes) == (code, [f"error[{REFUSED[command]}]"])
    assert "help: " in done.err
    assert not done.out
    told = json.loads(cli("schedule", *command.split(), "--json").out)
    assert [d["code"] for d in told["diagnostics"]] == [REFUSED[command]]
    assert not Path("t.csv").exists()
