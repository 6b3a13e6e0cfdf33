"""Modules in one process: outputs of every kind, autograd's demands, and what is refused."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshdsl.api.errors import ProgramError
from meshdsl.api.module import module
from meshdsl.backends.module.program_module import ProgramModule, module_of
from meshdsl.named.ir import NamedOp, walk
from meshdsl.named.vjp import with_vjp
from tests.backends.module_cases import MLP, ODD, odd
from tests.compiling import compile_text, named
from tests.project import ROOT

Make = Callable[..., Any]
DIFFERENTIABLE = ("y", "same", "x", "w", "half", "rows")
"""The outputs of the odd program that depend on floats that are given."""


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes a module of a text, on one device."""

    def made(text: str, **options: Any) -> ProgramModule:
        path = tmp_path / "program.mdsl"
        path.write_text(text)
        return module(str(path), **options)

    return made


@pytest.fixture
def small(make: Make) -> tuple[Any, dict[str, torch.Tensor]]:
    """The MLP in float64, and inputs."""
    shown = make(MLP, layout="dp", dtype="f64")
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    return shown, {"x": x, "target": target}


def odd_inputs() -> dict[str, torch.Tensor]:
    x = torch.arange(8, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([3, 0, 3, 1], dtype=torch.int32)
    return {"x": x, "ids": ids, "mask": x.detach() > 3}


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("wanted", [*((n,) for n in DIFFERENTIABLE), DIFFERENTIABLE], ids="+".join)
def test_each_output_alone_and_all_together(make: Make, wanted: tuple[str, ...]) -> None:
    shown, inputs, again = make(ODD, dtype="f64"), odd_inputs(), odd_inputs()
    params = {n: p.detach().clone().requires_grad_() for n, p in shown.named_parameters()}
    outputs, right = shown(**inputs)._asdict(), odd(params, again)
    assert [n for n, t in outputs.items() if t.requires_grad] == list(DIFFERENTIABLE)
    for found in (outputs, right):
        weights = torch.linspace(1, 2, 8, dtype=torch.float64)
        total = sum((found[n] * weights[: found[n].numel()]).sum() for n in wanted)
        assert isinstance(total, torch.Tensor)
        total.backward()
    for name in DIFFERENTIABLE:
        assert torch.equal(outputs[name], right[name])
    assert shown.unused.grad is None
    pairs = [(p.grad, params[n].grad) for n, p in shown.named_parameters() if n != "unused"]
    for grad, other in [*pairs, (inputs["x"].grad, again["x"].grad)]:
        assert grad is not None
        assert torch.allclose(grad, other if other is not None else torch.zeros_like(grad))


def test_parameters_may_have_the_names_of_methods(make: Make) -> None:
    shown = make(ODD)
    assert [name for name, _ in shown.named_parameters()] == ["w", "unused", "table", "train"]
    assert torch.equal(shown.state_dict()["train"], torch.ones(4))
    assert shown.train() is shown


def test_only_the_gradients_that_are_asked_for_are_compiled(small: Any) -> None:
    shown, inputs = small
    assert "INPUT_GRADS = {}" in shown.code
    for param in shown.parameters():
        param.requires_grad_(False)
    inputs["x"].requires_grad_()
    shown(**inputs).y.sum().backward()
    assert inputs["x"].grad is not None
    assert all(param.grad is None for param in shown.parameters())
    inputs["x"].requires_grad_(False)
    assert not shown(**inputs).loss.requires_grad


def test_what_autograd_forbids_is_refused(small: Any) -> None:
    shown, inputs = small
    loss = shown(**inputs).loss
    with torch.no_grad():
        shown.v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = shown(**inputs).loss
    refused("MD0565", lambda: torch.autograd.grad(loss, shown.w, create_graph=True))


def test_an_output_that_is_saved_may_not_be_changed(make: Make) -> None:
    shown = make("dim n = 4\nprogram p(x[n]) { param w[n]\n y = exp(x * w)\n return y }")
    y = shown(torch.ones(4)).y
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_forward_pass_without_a_backward_pass_leaves_nothing(make: Make) -> None:
    """The saved value of `h` is a view: it must not keep the history of `h`, which keeps it."""
    text = "dim n = 4, m = 4\nprogram p(x[n, m]) { param w[n, m]\n param v[m, n]\n h = x * w\n"
    shown = make(text + "turned = einsum(h -> [m, n])\n y = turned * v\n return h, y }")
    out = shown(torch.ones(4, 4))
    left = weakref.ref(out.h.grad_fn)
    del out
    gc.collect()
    assert left() is None


def test_gradients_do_not_share_memory(make: Make) -> None:
    shown = make("dim n = 4\nprogram p(x[n]) { param a[n]\n param b[n]\n return x + a + b }")
    shown(torch.ones(4)).out0.backward(given := torch.ones(4))
    shown.a.grad.add_(1)
    assert torch.equal(shown.b.grad, torch.ones(4))
    assert torch.equal(given, torch.ones(4))


def test_autocast_does_not_change_what_the_program_says(small: Any) -> None:
    shown, inputs = small
    right = shown(**inputs).loss
    with torch.autocast("cpu"):
        assert torch.equal(shown(**inputs).loss, right)


def test_gradients_of_a_program_that_learns_nothing(make: Make) -> None:
    shown = make("dim n = 4\nprogram p(x[n]) { return sum(x^2) }")
    assert "def backward" not in shown.code
    x = torch.ones(4, requires_grad=True)
    shown(x).out0.backward()
    assert torch.equal(x.grad, 2 * torch.ones(4))  # type: ignore[arg-type]


def test_a_program_that_minimizes_is_its_forward_pass(make: Make) -> None:
    text = MLP.replace("  return loss, y\n", "  return y\n  minimize loss with sgd(0.1)\n")
    made = compile_text(text, layout="dp", mesh="a:1")
    assert made.named.updates
    for shown in (make(text, layout="dp"), module_of(made)):
        assert shown(torch.ones(8, 8), torch.ones(8, 8))._fields == ("y", "loss")


# --- the named program ---------------------------------------------------------------------------


def test_contributions_are_summed_before_they_are_reduced() -> None:
    program = named(ODD)
    made = with_vjp(program, ["w", "table", "train", "unused"], ["x", "ids"])
    assert made.cotangents == DIFFERENTIABLE
    assert made.params == ("w", "table", "train")
    assert made.inputs == ("x",)
    assert [o.name for o in made.program.outputs[len(program.outputs) :]] == [
        "d_w", "d_table", "d_train", "d_x"
    ]  # fmt: skip
    phases = [op.phase for op in walk(made.program.body) if isinstance(op, NamedOp)]
    assert phases == sorted(phases, reverse=True), "forward comes first"


# --- what is refused -----------------------------------------------------------------------------

INPUTS = {"x": torch.ones(8, 8), "target": torch.ones(8, 8)}
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "missing": ("without `target`", {"x": INPUTS["x"]}),
    "unknown": ("no input `y`", {**INPUTS, "y": INPUTS["x"]}),
    "shape": (r"holds \[8, 8\]", {**INPUTS, "x": torch.ones(8, 4)}),
    "dtype": ("torch.float64", {**INPUTS, "x": torch.ones(8, 8).double()}),
    "array": ("is a list", {**INPUTS, "x": [1.0]}),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_do_not_fit(make: Make, name: str) -> None:
    says, inputs = CALLS[name]
    told = refused("MD0561", lambda: make(MLP)(**inputs))
    assert says.replace("\\", "") in told.message


def test_more_inputs_than_there_are(make: Make) -> None:
    refused("MD0561", lambda: make(MLP)(*INPUTS.values(), torch.ones(1)))


def test_a_parameter_of_another_dtype(make: Make) -> None:
    refused("MD0561", lambda: make(MLP).double()(**INPUTS))


def test_an_index_out_of_range_names_its_line(make: Make) -> None:
    inputs = {**odd_inputs(), "ids": torch.tensor([0, 1, 8, 2], dtype=torch.int32)}
    with pytest.raises(IndexError, match=r"MD0801 .*program\.mdsl:9: index 8"):
        make(ODD, dtype="f64")(**inputs)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "values": ("MD0563", {"params": {"w": torch.ones(3)}}),
    "unknown values": ("MD0563", {"params": {"u": torch.ones(3)}}),
    "no DeviceMesh": ("MD0560", {"device_mesh": {"a": 2}}),
    "dtype": ("MD0602", {"dtype": "f31"}),
    "policy": ("MD0108", {"reduce": "never"}),
    "layout": ("MD0108", {"layout": "unheard"}),
    "dim": ("MD0115", {"dims": {"unheard": 3}}),
}


@pytest.mark.parametrize("name", WRONG)
def test_modules_that_cannot_be(make: Make, name: str) -> None:
    code, options = WRONG[name]
    refused(code, lambda: make(MLP, **options))


def test_a_plan_for_another_mesh() -> None:
    made = compile_text(MLP, layout="dp", mesh="a:2")
    refused("MD0560", lambda: module_of(made))


def test_an_sbp_block_is_no_layout() -> None:
    text = MLP + "\nsbp s { x: (B) }\n"
    made = compile_text(text, mesh="a:1", sbp="s")
    refused("MD0564", lambda: module_of(made))


def refused(code: str, call: Callable[[], Any]) -> Any:
    with pytest.raises(ProgramError) as caught:
        call()
    (told,) = (d for d in caught.value.diagnostics if d.severity == "error")
    assert told.code == code, told
    assert told.help
    return told


# --- large tensors, and torch.compile ------------------------------------------------------------


def test_large_gradients_are_carried_through_a_loop() -> None:
    """What a loop carries is not deleted at the end of an iteration, however large it is."""
    dims = {"batch": 4, "vocab": 8, "hidden": 8, "heads": 1, "key": 8, "layers": 2}
    shown = module(ROOT / "examples" / "transformer.mdsl", dims=dims, dtype="f64")
    generator = torch.Generator().manual_seed(1)
    tokens, targets = torch.randint(0, 8, (2, 4, 128), generator=generator, dtype=torch.int32)
    shown(tokens, targets).loss.backward()
    grads = {n: p.grad for n, p in shown.named_parameters() if p.grad is not None}
    slope = sum(float((g * g).sum()) for g in grads.values())
    losses = []
    for step in (1e-5, -1e-5):
        with torch.no_grad():
            moved = {n: p + step * grads[n] for n, p in shown.named_parameters()}
            losses.append(torch.func.functional_call(shown, moved, (tokens, targets)).loss.item())
    assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(slope, rel=1e-5)


# torch makes an instance of the function while it traces it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_torch_compile_sees_both_passes_as_one_graph(small: tuple[Any, Any]) -> None:
    shown, inputs = small
    found = []
    for called in (shown, torch.compile(shown, backend="aot_eager", fullgraph=True)):
        shown.zero_grad()
        loss = called(**inputs).loss
        loss.backward()
        found.append([loss, *(p.grad for p in shown.parameters())])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(eager, compiled)
