"""What a run leaves to look at: event files of TensorBoard, and the plot of its loss."""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.report.loss_plot import COLUMNS, FEWEST, ROWS, LossPlot

from .command import Cli, write

LINE = """
dim batch = 4, io = 2
mesh two = { data: 2 }
layout data { batch -> data }
program line(x[batch, io], y[batch]) {
  param w[io] = zeros()
  loss = mean((einsum(x, w -> [batch]) - y)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.fixture
def data(cli: Cli) -> None:
    x = np.random.default_rng(0).normal(size=(40, 2)).astype(np.float32)
    np.savez("d.npz", x=x, y=x.sum(-1))
    write(LINE, "f.mdsl")


def train(cli: Cli, *options: str, code: int = 0) -> str:
    done = cli("train", "f.mdsl", "--data", "d.npz", *options)
    assert done.code == code, done.out + done.err
    return done.out + done.err


def records(path: Path) -> Iterator[Any]:
    """The events of a file: each has its length before it, and checksums that are skipped."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2").Event
    rest = path.read_bytes()
    while rest:
        (size,) = struct.unpack("<Q", rest[:8])
        yield event.FromString(rest[12 : 12 + size])
        rest = rest[16 + size :]


def scalars(path: Path) -> list[dict[str, float]]:
    """The numbers of each step, as the log has them."""
    steps = [e for e in records(path) if e.HasField("summary")]
    return [{"step": e.step, **{v.tag: v.simple_value for v in e.summary.value}} for e in steps]


@pytest.mark.usefixtures("data")
def test_event_files_have_the_numbers_of_the_log(cli: Cli) -> None:
    pytest.importorskip("tensorboardX")
    given = ("--eval-every", "2", "--checkpoint", "ck", "--log", "log", "--tensorboard", "tb/a")
    train(cli, "--steps", "3", *given)
    train(cli, "--steps", "5", "--resume", *given)
    first, second = sorted(Path("tb/a").iterdir(), key=lambda path: path.suffix)
    lines = [json.loads(line) for line in Path("log").read_text().splitlines()]
    written = scalars(first) + scalars(second)
    assert [s["step"] for s in written] == [1, 2, 3, 4, 5]
    for line, found in zip(lines, written, strict=True):
        assert found.keys() == line.keys()
        assert all(np.float32(line[k]) == np.float32(found[k]) for k in line)
    (begun,) = (e for e in records(second) if e.HasField("session_log"))
    assert (begun.step, begun.session_log.status) == (4, begun.session_log.START)
    assert "MD0503" in train(cli, "--steps", "1", "--tensorboard", "tb/a", code=2)
    assert "MD0502" in train(cli, "--steps", "1", "--tensorboard", "log", code=2)
    again = ("--engine", "reference", "--tensorboard", "tb/a", "--force")
    train(cli, "--steps", "1", *again)
    (only,) = Path("tb/a").iterdir()
    assert [s["step"] for s in scalars(only)] == [1]
    plan = md.load("f.mdsl").compile()
    plan.train("d.npz", 2, tensorboard="tb/b", progress=False)
    (only,) = Path("tb/b").iterdir()
    assert [s["step"] for s in scalars(only)] == [1, 2]


@pytest.mark.usefixtures("data")
def test_without_the_package_nothing_is_trained(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    said = train(cli, "--steps", "1", "--tensorboard", "tb", code=2)
    assert "error[MD0508]" in said
    assert "meshdsl[tensorboard]" in said
    assert not Path("tb").exists()


@pytest.mark.usefixtures("data")
def test_the_ending_has_a_plot_of_the_loss(cli: Cli) -> None:
    assert "|" not in train(cli, "--steps", str(FEWEST - 1))
    said = train(cli, "--steps", "20", "--eval-every", "20")
    assert "loss over steps 1 to 20 (* trained on, o held out):" in said
    rows = re.findall(r"^ *(\S*) \|(.*)$", said, re.MULTILINE)
    assert len(rows) == ROWS
    assert rows[0][1].startswith("*")
    assert rows[-1][1].endswith("o")
    assert float(rows[0][0]) > float(rows[-1][0])


@pytest.mark.parametrize(
    ("losses", "rows"),
    [
        ([10.0 - n for n in range(10)], {0: 0, 9: ROWS - 1}),
        ([2.0] * 10, dict.fromkeys(range(10), 0)),
        ([float("nan")] * 9 + [1.0], {9: 0}),
        ([float("inf")] * 10, None),
        ([*[1.0] * 300, *[0.0] * 300], {0: 0, COLUMNS - 1: ROWS - 1}),
    ],
)
def test_each_column_is_the_mean_of_its_steps(
    losses: list[float], rows: dict[int, int] | None
) -> None:
    plot = LossPlot("l")
    for step, loss in enumerate(losses, 41):
        plot.hear({"kind": "step", "step": step, "values": {"l": loss}})
    lines = list(plot.lines())
    if rows is None:
        assert lines == []
        return
    assert lines[0] == f"l over steps 41 to {40 + len(losses)}:"
    bodies = [line.partition("|")[2] for line in lines[1:]]
    assert len(bodies) == ROWS
    assert max(map(len, bodies)) == min(COLUMNS, len(losses))
    for column, row in rows.items():
        assert [r for r, body in enumerate(bodies) if body[column : column + 1] == "*"] == [row]
