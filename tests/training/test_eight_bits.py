"""`compute=f8`: steps against an oracle that quantises by torch's casts, bytes, what is refused."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.runtime import eight_bits
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import EIGHT_BIT
from meshdsl.named.ir import walk
from meshdsl.ops.eight_bits import rounded
from meshdsl.placed.printer import print_program
from tests.covering import in_turn
from tests.ir_text.placed import parse_program
from tests.programs.harness import Case, compiled
from tests.training.stepping import Compiled, compiled_step

TEXT = """
dim batch = 12, a = 10, heads = 3, d = 4, c = 6, e = 5, layers = 2
layout one { }
layout dp { batch -> p }
layout tp { heads -> p }
layout both { batch -> q, heads -> p }
layout zero { batch -> (p, q), params: d -> p, state: a -> q }
layout pieces { layers -> p } with gpipe[batch](3)
program f(x[batch, a], y[batch, c]) {
  param w[a, heads, d]
  param v[heads, d, a]
  param head[a, c]: f32
  param last[a, c]
  z = x
  repeat layers {
    param s[a, e]
    param u[e, a]
    z = z + einsum(tanh(einsum(z, s -> [batch, e])), u -> [batch, a])
  }
  h = relu(einsum(z, w -> [batch, heads, d]))
  t = einsum(h, v -> [batch, a])
  loss = mean(square(einsum(t, head -> [batch, c]) + einsum(t, last -> [batch, c]) - y))
  return loss
  minimize loss with sgd(lr=0.5, compute=HOW)
}
"""
SHAPES = {
    "w": (10, 3, 4), "v": (3, 4, 10), "head": (10, 6), "last": (10, 6), "s": (2, 10, 5),
    "u": (2, 5, 10),
}  # fmt: skip
HOWS = {"tensor": "f8(rest=f32)", "rows": "f8(rest=f32, rowwise=true)"}
LAYOUTS = {
    "one": "p:1", "dp": "p:4", "tp": "p:2", "both": "p:2,q:2", "zero": "p:2,q:2", "odd": "p:5"
}  # fmt: skip


def made(how: str, layout: str, mesh: str = "", dtype: str | None = None) -> Compiled:
    name = "dp" if layout == "odd" else layout
    text = TEXT.replace("HOW", HOWS.get(how, how))
    return compiled_step(Case(text, mesh or LAYOUTS[layout], name, "optimal"), dtype)


def numbers() -> tuple[dict[str, Any], dict[str, Any]]:
    rng = np.random.default_rng(6)
    draw = lambda *shape: np.asarray(rng.normal(size=shape), np.float32)  # noqa: E731
    inputs = {"x": draw(12, 10), "y": draw(12, 6)}
    return inputs, {n: draw(*shape) * np.float32(0.3) for n, shape in SHAPES.items()}


# --- the oracle ----------------------------------------------------------------------------------


def quantised(m: torch.Tensor, dtype: torch.dtype, by_row: bool) -> torch.Tensor:
    """What a matrix is in 8 bits, in float64; each row has a scale, or all of it one."""
    extreme = m.abs().amax(1, keepdim=True) if by_row else m.abs().max()
    scale = extreme.clamp(min=1e-12) / torch.finfo(dtype).max
    return (m / scale).to(torch.float32).to(dtype).to(torch.float64) * scale


class Product(torch.autograd.Function):
    """x @ w with operands in 8 bits, and the two products of its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, how: str) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.how, e4m3 = how, torch.float8_e4m3fn
        return quantised(x, e4m3, how == "rows") @ quantised(w.T, e4m3, how == "rows").T

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        (x, w), e4m3 = ctx.saved_tensors, torch.float8_e4m3fn
        if ctx.how == "rows":
            return quantised(g, e4m3, True) @ quantised(w, e4m3, True).T, x.T @ g, None
        g = quantised(g, torch.float8_e5m2, False)
        return g @ quantised(w, e4m3, False).T, quantised(x, e4m3, False).T @ g, None


def oracle(how: str) -> tuple[float, dict[str, Any]]:
    """The loss and the parameters after a step, in float64."""
    inputs, params = numbers()
    p = {n: torch.tensor(a, dtype=torch.float64, requires_grad=True) for n, a in params.items()}
    x, y = (torch.tensor(inputs[n], dtype=torch.float64) for n in "xy")
    product = (lambda a, b: a @ b) if how == "exact" else lambda a, b: Product.apply(a, b, how)
    for s, u in zip(p["s"], p["u"], strict=True):
        x = x + product(torch.tanh(product(x, s)), u)
    h = torch.relu(product(x, p["w"].reshape(10, 12)))
    t = product(h, p["v"].reshape(12, 10))
    loss = (t @ p["head"] + product(t, p["last"]) - y).square().mean()
    loss.backward()
    after = {}
    for name, tensor in p.items():
        assert tensor.grad is not None
        after[name] = (tensor - 0.5 * tensor.grad).detach().numpy()
    return loss.item(), after


# --- numbers -------------------------------------------------------------------------------------


@in_turn(how=HOWS, layout=LAYOUTS)
def test_every_layout_has_the_step_of_the_oracle(how: str, layout: str) -> None:
    inputs, params = numbers()
    found = made(how, layout).step(inputs, params).run  # bytes are counted, too
    loss, after = oracle(how)
    assert abs(float(found.outputs["loss"]) - loss) < 1e-5 * loss
    for name, wanted in after.items():
        np.testing.assert_allclose(found.updated[name], wanted, rtol=0, atol=2e-5, err_msg=name)


@pytest.mark.parametrize(("how", "most"), [("tensor", 0.25), ("rows", 0.125)])
def test_the_error_is_that_of_8_bits(how: str, most: float) -> None:
    """A step differs from that of exact products, by no more than the distance of two numbers."""
    _, begun = numbers()
    _, exact = oracle("exact")
    _, after = oracle(how)
    for name in SHAPES:
        change = np.linalg.norm(exact[name] - begun[name])
        error = np.linalg.norm(after[name] - exact[name]) / change
        assert 1e-3 < error < most, (name, error)


def test_micro_batches_have_the_numbers_of_the_batch_by_rows() -> None:
    inputs, params = numbers()
    found = made("rows", "pieces", "p:2").step(inputs, params).run.updated
    for name, wanted in oracle("rows")[1].items():
        np.testing.assert_allclose(found[name], wanted, rtol=0, atol=2e-5, err_msg=name)


def test_zeros_and_what_is_no_number() -> None:
    """Zeros stay zeros; NaN and infinities are no less in 8 bits than they were."""
    inputs, params = numbers()
    step_of = made("tensor", "dp")
    zeros = {n: np.zeros_like(a) for n, a in params.items()}
    assert np.isfinite(step_of.step(inputs, zeros).run.outputs["loss"])
    for strange in (np.nan, np.inf):
        inputs["x"][3, 4] = strange
        assert not np.isfinite(step_of.step(inputs, params).run.outputs["loss"])


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_numbers_are_rounded_as_by_torch(name: str) -> None:
    """All numbers of bf16, and those between two of 8 bits."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    dtype = getattr(torch, EIGHT_BIT[name].torch.removeprefix("torch."))
    every = torch.cat([every[~every.isnan()], torch.tensor([torch.nan])])
    largest = torch.finfo(dtype).max
    wanted = every.clamp(-largest, largest).to(dtype).float().numpy()
    np.testing.assert_array_equal(rounded(every.numpy(), EIGHT_BIT[name]), wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_units_for_8_bits_have_the_same_product(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's product in 8 bits, which CPUs have too, of sizes that are no multiples of 16."""
    rng = torch.Generator().manual_seed(1)
    a, b = (torch.randn(n, 21, generator=rng) for n in (5, 19))
    for dims in ((0, 1), (1,)):
        scales = [eight_bits.f8_scale(x, dims, torch.float8_e4m3fn) for x in (a, b)]
        aligned = [s[:, None] if s.dim() else s for s in scales]
        narrow = [
            eight_bits.to_f8(x, s, torch.float8_e4m3fn)
            for x, s in zip((a, b), aligned, strict=True)
        ]
        (one, other), (first, second) = narrow, scales
        product = partial(eight_bits.f8_einsum, "rk,ck->cr", one, other, first, second, dtype)
        plain = product()
        with monkeypatch.context() as patched:
            patched.setattr(eight_bits, "has_f8_units", lambda x: True)
            found = product()
        assert found.dtype == dtype
        most = 1e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(found, plain, rtol=most, atol=most)


# --- what is computed in 8 bits, and what is sent ------------------------------------------------


def test_parameters_with_a_dtype_and_the_gradients_of_weights_by_row_stay_wide() -> None:
    counts = {how: names(made(how, "one")).count("f8_einsum") for how in HOWS}
    # s, u, w, v and last: a product forward, two backward (x has no gradient); by rows one less.
    assert counts == {"tensor": 15, "rows": 10}
    wide = [op for op in walk(made("f8", "one").named.body) if op.name == "f8_einsum"]
    assert {op.outs[0].type.dtype.name for op in wide} == {"bf16"}


def names(made: Compiled) -> list[str]:
    return [op.name for op in walk(made.named.body)]


def test_scales_are_reduced_over_the_axes_that_split_and_weights_are_sent_in_8_bits() -> None:
    """Beside its weight a split operand costs the all_reduce of one number."""
    for how, scales in (("tensor", 4.0), ("rows", 0.0)):
        text = """
        dim batch = 8, a = 32, c = 16
        layout zero { batch -> p, params: a -> p }
        program f(x[batch, a]) {
          param w[a, c]
          loss = mean(square(einsum(x, w -> [batch, c])))
          return loss
          minimize loss with sgd(compute=HOW)
        }
        """
        report = compiled_step(
            Case(text.replace("HOW", HOWS[how]), "p:2", "zero", "optimal"), None
        ).report
        gathers = [c for c in report["collectives"] if c["kind"] == "all_gather"]
        assert [c["wire_bytes"] for c in gathers] == [16 * 16]
        reduced = [c["wire_bytes"] for c in report["collectives"] if c["kind"] == "all_reduce"]
        # The loss; of the tensor, x and the gradient; of w along a, one number or one for each row.
        wanted = [4] + ([4, 4, 4] if scales else [16 * 4])
        assert sorted(reduced) == sorted(wanted)


def test_printed_programs_are_read_back() -> None:
    case = Case(TEXT.replace("HOW", HOWS["rows"]), "p:2,q:2", "zero", "optimal")
    program = compiled(case, None).placed
    text = print_program(program)
    assert "e4m3[" in text
    assert print_program(parse_program(text)) == text


REFUSED = {
    "micro-batches": ("f8", "pieces", "MD0332", "f8(rowwise=true)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_a_way_out(case: str) -> None:
    how, layout, code, help = REFUSED[case]
    with pytest.raises(DiagnosticError) as error:
        made(how, layout, "p:2")
    (found,) = error.value.diagnostics
    assert found.code == code
    assert help in str(found.help)
