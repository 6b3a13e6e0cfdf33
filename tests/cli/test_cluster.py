"""`meshdsl cluster`, and `--cluster` of commands that place a program."""

from __future__ import annotations

import json

import pytest

from tests.cli.command import Cli, write

PROGRAM = """
dim batch = 64, io = 512, hidden = 2048
mesh four = { data: 2, tp: 2 } on a100_dgx
layout both { batch -> data, hidden -> tp }
program mlp(x[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  return einsum(relu(einsum(x, w -> [batch, hidden])), v -> [batch, io])
}
"""


def test_list_and_show(cli: Cli) -> None:
    found = json.loads(cli("cluster", "show", "h100", "--json").out)
    assert [c["name"] for c in found["clusters"]] == ["h100"]
    assert "h100" in cli("cluster", "list").out
    wrong = cli("cluster", "show", "h10")
    assert (wrong.code, wrong.codes) == (2, ["error[MD0320]"])
    assert "did you mean `h100`?" in wrong.err
    assert cli("cluster", "show").codes == ["error[MD0604]"]
    assert cli("cluster", "list", "h100").codes == ["error[MD0604]"]


def test_the_cluster_of_the_mesh_unless_another_is_named(cli: Cli) -> None:
    file = write(PROGRAM)
    for options, name in (((), "a100-dgx"), (("--cluster", "h100"), "h100")):
        report = json.loads(cli("explain", file, "--json", *options).out)
        assert report["time"]["cluster"] == name
        assert f"Predicted on {name}: " in cli("explain", file, *options).out
    plain = json.loads(cli("explain", file, "--json", "--mesh", "data:2,tp:2").out)
    assert "time" not in plain


def test_a_profile_of_ones_own(cli: Cli) -> None:
    text = cli("cluster", "show", "h100", "--json").out
    device = json.loads(text)["clusters"][0]["device"]
    lines = [f"{k} = {v}" for k, v in device.items() if k != "flops" and v is not None]
    level = '[[levels]]\nkind = "ring"\nalpha = 1e-6\nbandwidth = 1e9\nnominal = 1e9\n'
    write("\n".join(["[device]", "flops = { f32 = 1e12 }", *lines, level]), "own.toml")
    file = write(PROGRAM)
    report = json.loads(cli("explain", file, "--json", "--cluster", "own.toml").out)
    assert report["time"]["cluster"] == "own"
    write("[device]\nlaunch = 0\n", "wrong.toml")
    wrong = cli("explain", file, "--cluster", "wrong.toml")
    assert set(wrong.codes) == {"error[MD0321]"}
    assert "the field `flops` is missing" in wrong.err


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--mesh", "data:2,tp:2", "--objective", "time"), "error[MD0324]"),
        (("--objective", "memory"), "error[MD0602]"),
        (("--cluster", "nowhere.toml"), "error[MD0320]"),
        (("--cluster", "h100", "--mesh", "data:2,tp:12"), "error[MD0323]"),
    ],
)
def test_what_cannot_be(cli: Cli, options: tuple[str, ...], code: str) -> None:
    found = cli("explain", write(PROGRAM), *options)
    assert found.code
    assert found.codes == [code]


def test_the_objective_is_said(cli: Cli) -> None:
    file = write(PROGRAM)
    assert "predicted time" in cli("explain", file).out
    bytes_ = cli("explain", file, "--objective", "bytes").out
    assert "bytes + 8 KiB for each collective" in bytes_
    assert "Predicted on a100-dgx" in bytes_


def test_compare_has_rows_of_time(cli: Cli) -> None:
    file = write(PROGRAM + "layout one { batch -> data }")
    columns = ("--layouts", "both,one", "--no-run")
    out = cli("compare", file, *columns).out
    assert [out.count(row) for row in ("computing", "waiting", "time in all")] == [1, 1, 1]
    found = json.loads(cli("compare", file, *columns, "--json").out)["columns"]
    assert found[0]["time"]["seconds"] != found[1]["time"]["seconds"]
    assert "computing" not in cli("compare", file, *columns, "--mesh", "data:2,tp:2").out
