"""`explain`: which part of the report is shown, and options that contradict each other."""

from __future__ import annotations

import json

import pytest

from tests.project import ROOT

from .command import Cli

MLP, TRANSFORMER = (ROOT / "examples" / f"{name}.mdsl" for name in ("mlp", "transformer"))


def test_a_long_report_says_how_to_see_the_rest(cli: Cli) -> None:
    cut, whole = cli("explain", TRANSFORMER), cli("explain", TRANSFORMER, "--all")
    assert cut.out.splitlines()[-1].startswith("--all shows every line")
    assert "--all" not in whole.out
    assert len(whole.out) > len(cut.out) * 1.5
    assert cli("explain", MLP).out == cli("explain", MLP, "--all").out


def test_json_is_always_whole(cli: Cli) -> None:
    found = json.loads(cli("explain", TRANSFORMER, "--json").out)
    assert len(found["collectives"]) == 6
    assert len(found["tensors"]) > 24


def test_options_choose_the_part(cli: Cli) -> None:
    assert cli("explain", TRANSFORMER, "--top", "1").out.count("=>") == 1
    assert "attention.wo" in cli("explain", TRANSFORMER, "--line", "16").out
    assert "attention.q" in cli("explain", TRANSFORMER, "--tensor", "q").out


TOGETHER = (
    "--all --top 3",
    "--json --line 3",
    "--tensor h --print-after named",
    "--print-after placed --json",
)


@pytest.mark.parametrize("options", TOGETHER)
def test_one_of_two_options_that_would_do_nothing_is_refused(options: str, cli: Cli) -> None:
    done = cli("explain", MLP, *options.split())
    assert done.code == 2
    assert "MD0601" in done.out + done.err
    assert "are both given" in done.out + done.err


def test_a_tensor_that_is_not_there(cli: Cli) -> None:
    done = cli("explain", MLP, "--tensor", "targt")
    assert (done.code, done.codes) == (2, ["error[MD0607]"])
    assert "write `--tensor target`" in done.err


def test_an_option_with_one_value_is_given_once(cli: Cli) -> None:
    done = cli("explain", MLP, "--layout", "hybrid", "--layout", "megatron")
    assert (done.code, done.codes) == (2, ["error[MD0604]"])
    assert "option '--layout' is given 2 times, but takes one value" in done.err
    assert cli("explain", MLP, "--json", "--json", "--set", "batch=8", "--set", "io=8").code == 0


def test_a_refusal_is_one_line(cli: Cli) -> None:
    missing, wrong = cli("render", MLP), cli("render", MLP, "--as", "jx")
    assert "choose from" in missing.err.lower()
    assert "sbp, scaling-book, gshard, oneflow, dtensor, jax" in missing.err
    assert "'jx' is not one of 'sbp'" in wrong.err
    for done in (missing, wrong):
        assert len(done.err.splitlines()) == 3
        assert "\\x" not in done.err
        assert "Value error" not in done.err


def test_a_layout_that_is_written_out_has_the_name_it_is_given(cli: Cli) -> None:
    named = cli("explain", MLP, "--layout", "layout other { batch -> rows }")
    assert named.out.startswith("mlp under layout other on mesh ")
    unnamed = cli("explain", MLP, "--layout", "{ batch -> rows }")
    assert unnamed.out.startswith("mlp under layout { batch -> rows } on mesh ")
