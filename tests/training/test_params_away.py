"""`params: memory = host` and `disk`: the same bits, the bytes predicted, loads in time."""

from __future__ import annotations

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.device import offloaded_updates
from meshdsl.device.ir import DeviceLoop, Start, Wait
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.program import every
from meshdsl.pipeline import lower_placed
from meshdsl.report.explanation import explain
from tests.covering import in_turn
from tests.ir.test_text import read_again, statements
from tests.training.test_disk import DTYPES, OPTIMIZERS, TEXT, compiled, trained

LAYOUTS = {
    "one device": ("d:1", ""),
    "data": ("d:2", "b -> d"),
    "rows": ("d:2", "b -> d, params: m -> d, state: m -> d"),
    "columns": ("d:2", "b -> d, params: h -> d, state: h -> d, first: o -> none"),
    "uneven": ("d:4", "b -> d, params: h -> d, state: h -> d"),
    "layers": ("d:2", "b -> d, params: l -> d, state: l -> d"),
    "tensors": ("d:2,tp:2", "b -> d, h -> tp"),
    "gradients by another dim": ("d:2", "b -> d, grads: m -> d"),
}
TIERS = ("host", "disk")


def away(tier: str, rules: str, states: bool = True) -> str:
    """The rules with parameters, and states if there are any, in another memory."""
    settings = [f"params: memory = {tier}", *([f"state: memory = {tier}"] if states else [])]
    return ", ".join([*([rules] if rules else []), *settings])


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 16 numbers in f32, the fewest that vectors fill."""
    monkeypatch.setattr(offloaded_updates, "CHUNK", 64)


@pytest.mark.usefixtures("small")
@in_turn(layout=LAYOUTS, optimizer=("sgd(lr=0.1)", *OPTIMIZERS), dtype=DTYPES, tier=TIERS)
def test_the_numbers_are_the_same_bits_and_the_bytes_those_reported(
    layout: str, optimizer: str, dtype: str, tier: str
) -> None:
    mesh, rules = LAYOUTS[layout]
    kept, _ = trained(compiled(optimizer, dtype, mesh, rules))
    has_states = dtype == "bf16" or not optimizer.startswith("sgd")
    made = compiled(optimizer, dtype, mesh, away(tier, rules, has_states))
    found, stores = trained(made)
    for name, array in kept.items():
        np.testing.assert_array_equal(found[name], array, name)
    facts = explain(made.device)
    said = facts[tier]  # type: ignore[literal-required]
    assert said["bytes"] == max(each.size for each in stores) >= said["params"] > 0
    loaded = sum(each["count"] * each["bytes"] for each in said["transfers"])
    assert 0 < loaded <= said["read"]
    assert said["read"] == max(each.read for each in stores)
    assert said["written"] == max(each.written for each in stores)
    assert facts["memory"]["params"] == 0
    device = read_again("device", made.device)
    assert statements(device) == statements(made.device)
    assert statements(lower_placed(read_again("placed", made.placed))) == statements(made.device)


FORWARD = TEXT.partition("  minimize")[0] + "}\n"


@pytest.mark.parametrize("tier", TIERS)
def test_a_forward_pass_loads_each_layer_once_and_one_iteration_ahead(tier: str) -> None:
    plain = compiled("", "f32", "d:1", "", text=FORWARD)
    made = compiled("", "f32", "d:1", away(tier, "", states=False), text=FORWARD)
    run = run_local(made.text)
    (expected,) = run_local(plain.text).outputs.values()
    (loss,) = run.outputs.values()
    assert loss == expected
    elements = 4 * (6 * 10 + 10 * 6) + 6 * 6 + 6
    assert run.away == ((4 * elements, 0),)
    facts = explain(made.device)[tier]  # type: ignore[literal-required]
    assert facts == {**facts, "read": 4 * elements, "bytes": 4 * elements, "written": 0}
    (loop,) = (n for n in made.device.body if isinstance(n, DeviceLoop))
    assert len(loop.ahead) == 2
    assert [type(n) for n in every(loop.body) if isinstance(n, Start | Wait)] == [Wait, Start] * 2


def refusal(optimizer: str, dtype: str, mesh: str, rules: str, schedule: str = "") -> str:
    """The diagnostic of a layout that cannot be: its code, message and help."""
    with pytest.raises(DiagnosticError) as refused:
        compiled(optimizer, dtype, mesh, rules, schedule)
    (found,) = refused.value.diagnostics
    return f"{found.code}: {found.message}; {found.help}"


def test_what_cannot_be_in_another_memory_is_refused_with_a_way_out() -> None:
    host = "params: memory = host"
    states = refusal("adam(lr=0.1)", "f32", "d:1", host)
    assert states.startswith("MD0317: `params: memory = host`: states of `first` are stored in")
    assert states.endswith("add `state: memory = host`")
    split = refusal("adam(lr=0.1)", "f32", "d:2", f"b -> d, state: m -> d, {away('host', '')}")
    assert split.endswith("give `params:` and `state:` the same rules")
    piped = refusal("sgd(lr=0.1)", "f32", "pipe:2", f"l -> pipe, {host}", "gpipe[b](4)")
    assert piped.endswith("leave the setting out, or the schedule and the stages")
    whole = refusal("adafactor(lr=0.1)", "f32", "d:1", host)
    assert "MD0317" in whole
