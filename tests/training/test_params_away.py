"""Parameters and activations on the host or on disk: the same bits, the bytes predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.runtime.offloading import Store
from meshdsl.cluster.profile import load
from meshdsl.cluster.timing import Timing
from meshdsl.device import offloaded_updates
from meshdsl.device.ir import DeviceLoop, Start, Wait
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.ir.program import every
from meshdsl.pipeline import Compilation, lower_placed
from meshdsl.report.explanation import explain
from meshdsl.simulate.engine import simulate
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
ROUNDED = {"f64": 2e-6, "f32": 2e-6, "bf16": 1e-2}  # products are in f32, also of f64 parameters


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
        # In memory, layers are gathered once for all batches; elsewhere for each of them, so that
        # products read weights that lie otherwise.
        if layout == "layers" and "accumulate" in optimizer:
            close = ROUNDED[dtype]
            np.testing.assert_allclose(found[name], array, rtol=close, atol=close, err_msg=name)
        else:
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


@pytest.mark.usefixtures("small")
@in_turn(
    layout=[name for name in LAYOUTS if name != "layers"],
    optimizer=("sgd(lr=0.1)", OPTIMIZERS[4], OPTIMIZERS[5]),
    dtype=DTYPES,
    tiers=[("host", ""), ("disk", ""), ("host", "disk"), ("disk", "host")],
)
def test_activations_are_the_same_bits_and_their_bytes_those_reported(
    layout: str, optimizer: str, dtype: str, tiers: tuple[str, str]
) -> None:
    """Also with parameters in another memory of another kind."""
    mesh, rules = LAYOUTS[layout]
    tier, of_params = tiers
    kept, _ = trained(compiled(optimizer, dtype, mesh, rules))
    has_states = dtype == "bf16" or not optimizer.startswith("sgd")
    more = away(of_params, rules, has_states) if of_params else rules
    of_all = f"activations: memory = {tier}"
    made = compiled(optimizer, dtype, mesh, f"{more}, {of_all}" if more else of_all)
    stores: list[Store] = []
    found, _ = trained(made, of_steps=stores)
    for name, array in kept.items():
        np.testing.assert_array_equal(found[name], array, name)
    said = explain(made.device)[tier]  # type: ignore[literal-required]
    assert said["bytes"] == said["activations"] > 0
    assert len(stores) == 3 * made.device.mesh.devices
    assert {(said["read"], said["written"])} == {(each.read, each.written) for each in stores}
    if tier == "disk":
        # Batches of a step take the same place in the file.
        assert said["bytes"] == max(each.size for each in stores)


def test_memory_falls_by_the_activations_of_all_layers_but_few() -> None:
    text = TEXT.replace("l = 4", "l = 40")
    plain = explain(compiled("sgd(lr=0.1)", "f32", "d:1", "", text=text).device)
    host = "activations: memory = host"
    less = explain(compiled("sgd(lr=0.1)", "f32", "d:1", host, text=text).device)
    of_layer = 4 * (8 * 6 + 8 * 10)
    assert less["host"]["activations"] == 40 * of_layer
    saved = plain["memory"]["activations"] - less["memory"]["activations"]
    assert 36 * of_layer <= saved <= 39 * of_layer


def test_a_name_moves_one_tensor_and_a_setting_without_effect_is_noted() -> None:
    one = compiled("sgd(lr=0.1)", "f32", "d:1", "w: memory = host")
    assert {v.name for v in one.device.away} == {"w_stack"}
    forward = compiled("", "f32", "d:1", "activations: memory = host", text=FORWARD)
    assert [d.code for d in forward.diagnostics if "memory" in d.message] == ["MD0306"]
    for name, is_told in (("x", False), ("loss", True)):
        setting = f"{name}: memory = host"
        made = compiled("sgd(lr=0.1)", "f32", "d:1", setting)
        assert bool(made.placed.kept) != is_told
        told = [d.message for d in made.diagnostics]
        said = f"`{setting}` changes nothing: no loop keeps `{name}` for a backward pass"
        assert told == [said] * is_told


SLOW = """
[device]
flops = { f32 = 1e9 }
mm_eff = 1.0
gemm_half = [0, 0]
hbm = 1e15
hbm_eff = 1.0
launch = 0.0
memory = 1e9
overlap_slowdown = 1.0
host = RATE

[[levels]]
kind = "switch"
alpha = 0.0
bandwidth = 1e9
nominal = 1e9
"""


@pytest.mark.parametrize("rate", [1e3, 1e7, 1e9])
def test_loads_are_simulated_beside_computing(rate: float, tmp_path: Path) -> None:
    """A link that is busy to the end sets the pace; of a fast one only the first loads are seen."""
    profile = tmp_path / "slow.toml"
    profile.write_text(SLOW.replace("RATE", str(rate)))
    made = compiled("", "f32", "d:1", away("host", "", states=False), text=FORWARD)
    timeline = simulate(made.device, Timing(load(str(profile)), made.device.mesh))
    moved = explain(made.device)["host"]["read"] / rate
    assert timeline.sending["from host"] == pytest.approx(moved)
    assert timeline.seconds == pytest.approx(by_hand(rate), rel=1e-3)
    assert timeline.seconds == pytest.approx(timeline.compute + timeline.exposed["from host"])
    if rate == 1e3:
        assert timeline.seconds == pytest.approx(moved, rel=0.01)
    if rate == 1e9:
        assert timeline.exposed["from host"] < 0.5 * moved


def by_hand(rate: float) -> float:
    """The seconds of the forward pass, at 1e9 FLOP/s: a link in order, and waits before uses."""
    now = free = 0.0

    def issued(elements: int) -> float:
        nonlocal free
        free = max(free, now) + 4 * elements / rate
        return free

    now = issued(6 * 6)  # first
    scale = issued(6)
    now = max(now + 576e-9, scale) + 96e-9
    w, v = issued(60), issued(60)
    for layer in range(4):
        now = max(now, w)
        w = issued(60) if layer < 3 else w
        now = max(now + 1040e-9, v)
        v = issued(60) if layer < 3 else v
        now += 1008e-9
    return now + 144e-9


def refusal(optimizer: str, dtype: str, mesh: str, rules: str, schedule: str = "") -> str:
    """The diagnostic of a layout that cannot be: its code, message and help."""
    with pytest.raises(DiagnosticError) as refused:
        compiled(optimizer, dtype, mesh, rules, schedule)
    (found,) = refused.value.diagnostics
    return f"{found.code}: {found.message}; {found.help}"


ASSIGNED = """
dim b = 2, m = 2
mesh one = { d: 1 }
program p(x[b, m]) {
  param w[m]
  param count[m] = zeros()
  count := count + mean[b](x)
  loss = mean(square(x * w + stop_gradient(count)))
  return loss
  minimize loss with sgd(lr=0.1OPTIONS)
}
"""


def test_what_cannot_be_in_another_memory_is_refused_with_a_way_out() -> None:
    host = "params: memory = host"
    states = refusal("adam(lr=0.1)", "f32", "d:1", host)
    assert states.startswith("MD0317: `params: memory = host`: states of `first` are stored in")
    assert states.endswith("add `state: memory = host`")
    split = refusal("adam(lr=0.1)", "f32", "d:2", f"b -> d, state: m -> d, {away('host', '')}")
    assert split.endswith("give `params:` and `state:` the same rules")
    piped = refusal("sgd(lr=0.1)", "f32", "pipe:2", f"l -> pipe, {host}", "gpipe[b](4)")
    assert piped.endswith("leave the setting out; or the schedule and the stages")
    whole = refusal("adafactor(lr=0.1)", "f32", "d:1", host)
    assert "MD0317" in whole
    for options in ("", ", accumulate=2"):
        text = ASSIGNED.replace("OPTIONS", options)
        with pytest.raises(DiagnosticError) as refused:
            assert Compilation(Source("p.mdsl", f"{text}\nlayout l {{ {host} }}")).placed
        (found,) = refused.value.diagnostics
        assert "the program assigns `count`" in found.message
        assert "name other parameters in place of `params`" in (found.help or "")
        assert Compilation(Source("p.mdsl", f"{text}\nlayout l {{ w: memory = host }}")).placed
