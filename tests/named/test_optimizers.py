"""Optimizers: options and their errors, schedules, and updates equal to those of torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.codes import CODES
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.types import BF16, F16, F32, F64, I32, Dim, DType, TensorType
from meshdsl.named.optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    Arithmetic,
    LearningRate,
    emit_rate,
    resolve,
)
from tests.named.updating import Engine, optimizer, optimizer_call, param, program_optimizer

A, B, LAYERS = Dim("a", 4), Dim("b", 6), Dim("layers", 3)

# --- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_has_a_default_that_is_fine(name: str) -> None:
    found = optimizer(f"{name}()")
    assert found.name == name
    assert set(found.options) == set(OPTIMIZERS[name])
    given = [f"{n}={o.shown}" for n, o in OPTIMIZERS[name].items() if o.default is not None]
    assert optimizer(f"{name}({', '.join(given)})") == found
    assert (found.clip, found.accumulate, found.compute, found.seed) == (None, 1, None, 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_options_are_what_is_written(name: str) -> None:
    found = optimizer(f'{name}(lr=cosine(3e-4, 1000), accumulate=4, clip=1.5, compute="bf16")')
    assert found.lr == LearningRate("cosine", 3e-4, 1000)
    assert (found.clip, found.accumulate, found.compute) == (1.5, 4, BF16)
    assert optimizer(f"{name}(0.5, weight_decay=0.1, seed=7)").option("weight_decay") == 0.1
    assert optimizer(f"{name}(0.5)").lr == LearningRate("constant", 0.5)


def test_flags_are_words() -> None:
    assert optimizer("momentum(nesterov=true)").option("nesterov") is True
    assert optimizer("adafactor(relative=false)").option("relative") is False


WRONG = [
    ("adan()", "MD0270", "adan", "did you mean `adam`?"),
    ("lion()", "MD0270", "lion", "there are `sgd`, `momentum`"),
    ("adam(lr=cosin(1e-3, 10))", "MD0271", "cosin", "did you mean `cosine`?"),
    ("adam(lr=steps(1e-3))", "MD0271", "steps", "there are `constant`"),
    ("adam(beta=0.9)", "MD0272", "beta", "did you mean `beta"),
    ("sgd(nesterov=true)", "MD0272", "nesterov", "there are `lr`"),
    ("adam(1e-3, 0.9)", "MD0272", "0.9", "write `adam(lr=0.001)`"),
    ("adam[a](1e-3)", "MD0272", "adam[a](1e-3)", "write `adam(lr=0.001)`"),
    ("adam(1e-3 -> [a])", "MD0272", "adam(1e-3 -> [a])", "write `adam(lr=0.001)`"),
    ("adam(lr=cosine(1e-3, 10, 1, 0, 2))", "MD0272", "2", "write `cosine(3e-4, 1000)`"),
    ("adam(lr=linear(1e-3, 10, rise=1))", "MD0272", "rise", "there are `peak`"),
    ("adam(1e-3, lr=1e-3)", "MD0273", "lr=1e-3", "remove it"),
    ("adam(lr=cosine(1e-3, 10, steps=9))", "MD0273", "steps=9", "remove it"),
    ("adam(lr=cosine(1e-3))", "MD0274", "cosine(1e-3)", "add `steps=1000`"),
    ("adam(lr=constant())", "MD0274", "constant()", "write `constant(3e-4)`"),
    ("adam(lr=linear_warmup(1.0))", "MD0274", "linear_warmup(1.0)", "add `warmup=100`"),
    ('adam(lr="fast")', "MD0275", '"fast"', "write `lr=0.001`"),
    ("adam(lr=x)", "MD0275", "x", "write `lr=0.001`"),
    ("adam(beta1=x)", "MD0275", "x", "write `beta1=0.9`"),
    ("adam(accumulate=2.0)", "MD0275", "2.0", "write `accumulate=1`"),
    ("adam(seed=0.5)", "MD0275", "0.5", "write `seed=0`"),
    ("momentum(nesterov=1)", "MD0275", "1", "write `nesterov=false`"),
    ("momentum(nesterov=yes)", "MD0275", "yes", "write `nesterov=false`"),
    ("adafactor(relative=1)", "MD0275", "1", "write `relative=true`"),
    ('adam(compute="i32")', "MD0275", '"i32"', 'write `compute="bf16"`'),
    ("adam(compute=16)", "MD0275", "16", 'write `compute="bf16"`'),
    ("adam(compute=int8)", "MD0275", "int8", 'write `compute="bf16"`'),
    ("adam(compute=fp8)", "MD0275", "fp8", "did you mean `f8`?"),
    ("adam(compute=f9(rowwise=true))", "MD0275", "f9(rowwise=true)", 'write `compute="bf16"`'),
    ("adam(lr=true)", "MD0275", "true", "write `lr=0.001`"),
    ("adam(compute=f8(true))", "MD0272", "true", 'write `f8(rowwise=false, rest="f32")`'),
    ("adam(compute=f8(row=true))", "MD0272", "row", "did you mean `rowwise`?"),
    ("adam(compute=f8(rowwise=1))", "MD0275", "1", "write `rowwise=false`"),
    ("adam(compute=f8(rest=f8))", "MD0275", "f8", 'write `rest="f32"`'),
    ("adam(lr=cosine(1e-3, 10.5))", "MD0275", "10.5", "write `steps=1000`"),
    ("adam(lr=cosine(linear(1, 2), 10))", "MD0275", "linear(1, 2)", "write `peak=3e-4`"),
    ("adam(lr=0)", "MD0276", "0", "write `lr=0.001`"),
    ("adam(lr=-1e-3)", "MD0276", "-1e-3", "write `lr=0.001`"),
    ("adam(beta1=1)", "MD0276", "1", "write `beta1=0.9`"),
    ("adam(beta2=-0.5)", "MD0276", "-0.5", "write `beta2=0.999`"),
    ("adam(eps=0)", "MD0276", "0", "write `eps=1e-08`"),
    ("adam(weight_decay=-1)", "MD0276", "-1", "write `weight_decay=0.0`"),
    ("adam(clip=0.0)", "MD0276", "0.0", "write `clip=1.0`"),
    ("adam(accumulate=0)", "MD0276", "0", "write `accumulate=1`"),
    ("adam(seed=-1)", "MD0276", "-1", "write `seed=0`"),
    ("momentum(beta=1.5)", "MD0276", "1.5", "write `beta=0.9`"),
    ("adafactor(threshold=0)", "MD0276", "0", "write `threshold=1.0`"),
    ("adam(lr=cosine(0, 10))", "MD0276", "0", "write `peak=3e-4`"),
    ("adam(lr=cosine(1.0, 0))", "MD0276", "0", "write `steps=1000`"),
    ("adam(lr=linear_warmup(1.0, 0))", "MD0276", "0", "write `warmup=100`"),
    ("sgd(compress=powersdg(2))", "MD0280", "powersdg", "did you mean `powersgd`?"),
    ("sgd(compress=int4)", "MD0280", "int4", "did you mean `int8`?"),
    ("sgd(compress=2)", "MD0280", "2", "there are `powersgd`, `topk`, `onebit`, `int8`"),
    ("adam(compress=onebit_momentum)", "MD0274", "onebit_momentum", "write `onebit_momentum(100)`"),
    ("adam(compress=onebit_momentum(0))", "MD0276", "0", "write `warmup=100`"),
    ("sgd(compress=onebit_momentum(9))", "MD0281", "compress=onebit_momentum(9)", "or `adam`"),
    ("adam(clip=1.0, compress=onebit_momentum(9))", "MD0281", "clip=1.0", "leave `clip` out"),
    ("sgd(compress=int8(6))", "MD0276", "6", "write `group=256`"),
    ("sgd(compress=int8(true))", "MD0275", "true", "write `group=256`"),
    ("sgd(compress=topk(0))", "MD0276", "0", "write `fraction=0.01`"),
    ("sgd(compress=topk(1.5))", "MD0276", "1.5", "write `fraction=0.01`"),
    ("sgd(compress=onebit(1))", "MD0272", "1", "write `onebit()`"),
    ("sgd(compress=powersgd(0))", "MD0276", "0", "write `rank=2`"),
    ("adam(lr=cosine(1.0, 10, 10))", "MD0276", "cosine(1.0, 10, 10)", "less than `steps`"),
    ("adam(lr=linear(1.0, 10, final=2))", "MD0276", "linear(1.0, 10, final=2)", "at most the"),
]


@pytest.mark.parametrize(("text", "code", "place", "help"), WRONG)
def test_a_wrong_option_is_reported_where_it_stands(
    text: str, code: str, place: str, help: str
) -> None:
    with pytest.raises(DiagnosticError) as raised:
        resolve(optimizer_call(text))
    (found,) = raised.value.diagnostics
    assert found.span is not None
    assert found.help is not None
    assert (found.code, found.span.text) == (code, place)
    assert help in found.help


def test_a_compression_is_a_call_a_name_or_a_string() -> None:
    """As a dtype is: without arguments all three are the same."""
    written = [optimizer(f"sgd(compress={text})") for text in ("int8()", "int8", '"int8"')]
    assert [str(o.compress) for o in written] == ["int8(256)"] * 3


def test_everything_wrong_is_reported_at_once() -> None:
    with pytest.raises(DiagnosticError) as raised:
        resolve(optimizer_call("adam(lr=cosin(1, 2), beta=0.5, beta2=2, clip=0, seed=0.5)"))
    codes = [d.code for d in raised.value.diagnostics]
    assert codes == ["MD0272", "MD0271", "MD0276", "MD0276", "MD0275"]


OF_GROUPS = ("MD0277", "MD0278", "MD0279")  # tests/named/test_groups.py
OF_TRAINING = [
    record
    for code, record in CODES.items()
    if code.startswith(("MD027", "MD028")) and code not in OF_GROUPS
]


@pytest.mark.parametrize("record", OF_TRAINING, ids=lambda record: record.code)
def test_the_wrong_example_of_a_code_is_wrong_in_this_way(record: Any) -> None:
    assert record.code in {code for _, code, _, _ in WRONG}
    with pytest.raises(DiagnosticError) as raised:
        resolve(program_optimizer(record.wrong))
    assert [d.code for d in raised.value.diagnostics] == [record.code]


# --- schedules ---------------------------------------------------------------------------------

RATES = [
    "constant(0.3)",
    "linear_warmup(0.3, 7)",
    "cosine(0.3, 40)",
    "cosine(0.3, 40, 9)",
    "cosine(0.3, 40, warmup=1, final=0.1)",
    "linear(0.3, 40)",
    "linear(0.3, 40, 9)",
    "linear(0.3, 40, warmup=1, final=0.1)",
    "linear(0.3, 40, final=0.3)",
]


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("text", RATES)
def test_the_operators_of_a_schedule_yield_its_numbers(text: str, in_torch: bool) -> None:
    schedule = optimizer(f"sgd(lr={text})").lr
    for t in [*range(60), 1000]:
        engine = Engine(in_torch)
        step = engine.state("step", TensorType((), I32), None)
        engine.give(step, np.asarray(t + 1, np.int32))
        found = emit_rate(schedule, Arithmetic(engine, F64), step)
        assert found.type == TensorType((), F64)
        assert float(engine.known[found]) == pytest.approx(schedule.at(t), rel=1e-12, abs=1e-15)


def test_every_schedule_is_tried() -> None:
    assert {text.split("(")[0] for text in RATES} == set(SCHEDULES)


def test_schedules_rise_and_fall_as_said() -> None:
    warm, cosine, linear = (optimizer(f"sgd(lr={RATES[i]})").lr for i in (1, 4, 7))
    assert warm.at(0) == pytest.approx(0.3 / 7)
    assert warm.at(6) == warm.at(100) == 0.3
    for falling in (cosine, linear):
        assert falling.at(1) == pytest.approx(0.3)
        assert falling.at(40) == falling.at(99) == pytest.approx(0.1)
        assert all(falling.at(t + 1) < falling.at(t) for t in range(1, 40))
    assert linear.at(14) == pytest.approx(0.3 - 0.2 * 13 / 39)
    assert cosine.at(14) == pytest.approx(0.1 + 0.2 * 0.75)


def test_cosine_without_warming_up_is_that_of_torch() -> None:
    tensor = torch.zeros(1, requires_grad=True)
    trained = torch.optim.SGD([tensor], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(trained, T_max=20, eta_min=0.1)
    ours = optimizer("sgd(lr=cosine(0.3, 20, final=0.1))").lr
    for t in range(21):
        assert ours.at(t) == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        trained.step()
        theirs.step()


# --- updates -----------------------------------------------------------------------------------

Torch = Callable[[list[torch.Tensor]], torch.optim.Optimizer]

LIKE_TORCH: list[tuple[str, Torch]] = [
    ("sgd(0.1)", lambda w: torch.optim.SGD(w, 0.1)),
    ("sgd(0.1, weight_decay=0.2)", lambda w: torch.optim.SGD(w, 0.1, weight_decay=0.2)),
    ("momentum(0.1)", lambda w: torch.optim.SGD(w, 0.1, momentum=0.9)),
    (
        "momentum(0.1, beta=0.7, nesterov=true, weight_decay=0.2)",
        lambda w: torch.optim.SGD(w, 0.1, momentum=0.7, nesterov=True, weight_decay=0.2),
    ),
    ("adam(0.1)", lambda w: torch.optim.Adam(w, 0.1)),
    (
        "adam(0.1, beta1=0.5, beta2=0.7, eps=0.01, weight_decay=0.2)",
        lambda w: torch.optim.Adam(w, 0.1, (0.5, 0.7), 0.01, weight_decay=0.2),
    ),
    ("adam(0.1, beta1=0, beta2=0)", lambda w: torch.optim.Adam(w, 0.1, (0.0, 0.0))),
    ("adamw(0.1)", lambda w: torch.optim.AdamW(w, 0.1)),
    (
        "adamw(0.1, beta1=0.5, beta2=0.7, eps=0.01, weight_decay=0.2)",
        lambda w: torch.optim.AdamW(w, 0.1, (0.5, 0.7), 0.01, weight_decay=0.2),
    ),
    ("adafactor()", lambda w: torch.optim.Adafactor(w)),
    (
        "adafactor(0.9, decay=0.6, eps2=0.1, threshold=1.1, weight_decay=0.2)",
        lambda w: torch.optim.Adafactor(
            w, 0.9, beta2_decay=-0.6, eps=(None, 0.1), d=1.1, weight_decay=0.2
        ),
    ),
]
DIMS: list[tuple[Dim, ...]] = [(A, B), (B,), (), (LAYERS, B, A)]


def _arrays(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.normal(size=tuple(d.size for d in dims)) for dims in DIMS]


@pytest.mark.parametrize("clip", [None, 2.5, 1000.0])
@pytest.mark.parametrize("in_torch", [False, True], ids=["numpy", "torch"])
@pytest.mark.parametrize(("text", "theirs"), LIKE_TORCH, ids=[text for text, _ in LIKE_TORCH])
def test_five_steps_are_those_of_torch(
    text: str, theirs: Torch, in_torch: bool, clip: float | None
) -> None:
    rng = np.random.default_rng(3)
    ours = optimizer(text.replace(")", f", clip={clip})").replace("(,", "(") if clip else text)
    params = [param(f"w{i}", *dims) for i, dims in enumerate(DIMS)]
    engine, tensors = Engine(in_torch), []
    for value, array in zip(params, _arrays(rng), strict=True):
        engine.give(value, array)
        tensors.append(torch.tensor(array, requires_grad=True))
    trained = theirs(tensors)
    for _ in range(5):
        grads = _arrays(rng)
        engine.step(ours, params, grads)
        for tensor, grad in zip(tensors, grads, strict=True):
            tensor.grad = torch.tensor(grad)
        if clip:
            torch.nn.utils.clip_grad_norm_(tensors, clip)
        trained.step()
        for value, tensor in zip(params, tensors, strict=True):
            np.testing.assert_allclose(engine.array(value), tensor.detach().numpy(), rtol=1e-9)
    assert int(engine.kept["step"]) == 5


@pytest.mark.parametrize("dtypes", [(F32, F64), (F64, F32)])
def test_the_norm_of_gradients_is_as_exact_as_the_widest_parameter(
    dtypes: tuple[DType, DType],
) -> None:
    params = [param(f"w{i}", A, dtype=dtype) for i, dtype in enumerate(dtypes)]
    grads = [np.linspace(1, i + 2, 4).astype(d.numpy) / 3 for i, d in enumerate(dtypes)]
    engine = Engine(in_torch=True)
    for value in params:
        engine.give(value, np.zeros(4, value.type.dtype.numpy))
    engine.step(optimizer("sgd(lr=1.0, clip=1.0)"), params, grads)
    norm = np.sqrt(sum(np.sum(np.float64(g) ** 2) for g in grads))
    for value, grad in zip(params, grads, strict=True):
        exact = value.type.dtype == F64
        expected = -grad / (norm + 1e-6)
        found = engine.array(value)
        np.testing.assert_allclose(found, expected, rtol=1e-14 if exact else 1e-6)


@pytest.mark.parametrize("in_torch", [False, True], ids=["numpy", "torch"])
def test_the_rate_of_each_step_is_that_of_the_schedule(in_torch: bool) -> None:
    ours, w = optimizer("sgd(lr=linear(0.5, 4, warmup=2))"), param("w", A)
    engine = Engine(in_torch)
    engine.give(w, np.zeros(4))
    for t in range(5):
        before = engine.array(w).copy()
        engine.step(ours, [w], [np.ones(4)])
        np.testing.assert_allclose(before - engine.array(w), ours.lr.at(t), atol=1e-15)


def test_adafactor_with_an_absolute_rate() -> None:
    """The first step takes `lr` along the sign of a gradient that is of rank one."""
    ours, w = optimizer("adafactor(0.25, relative=false)"), param("w", A, B)
    rng, engine = np.random.default_rng(5), Engine()
    before = rng.normal(size=(4, 6))
    grad = np.outer(rng.normal(size=4), rng.normal(size=6))
    engine.give(w, before)
    engine.step(ours, [w], [grad])
    np.testing.assert_allclose(engine.array(w), before - 0.25 * np.sign(grad), rtol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_slices_of_a_stacked_parameter_are_parameters_of_their_own(name: str) -> None:
    rng, ours = np.random.default_rng(7), optimizer(f"{name}(0.3, weight_decay=0.1)")
    together, apart = Engine(), Engine()
    shapes = ((LAYERS, A, B), (LAYERS, B))
    stacks = [param(f"w{i}", *dims) for i, dims in enumerate(shapes)]
    slices = [[param(f"w{i}.{n}", *dims[1:]) for n in range(3)] for i, dims in enumerate(shapes)]
    for stack, parts in zip(stacks, slices, strict=True):
        array = rng.normal(size=stack.type.shape)
        together.give(stack, array)
        for n, part in enumerate(parts):
            apart.give(part, array[n])
    for _ in range(3):
        grads = [rng.normal(size=stack.type.shape) for stack in stacks]
        together.step(ours, stacks, grads, {stack: ("layers",) for stack in stacks})
        apart.step(ours, [p for ps in slices for p in ps], [g[n] for g in grads for n in range(3)])
    for stack, parts in zip(stacks, slices, strict=True):
        found = np.stack([apart.array(part) for part in parts])
        np.testing.assert_allclose(together.array(stack), found, rtol=1e-12)


# --- states ------------------------------------------------------------------------------------

STATES = {"sgd": [], "momentum": ["v"], "adam": ["m", "v"], "adamw": ["m", "v"]}


@pytest.mark.parametrize("dtype", [F32, F64, BF16, F16], ids=str)
@pytest.mark.parametrize("name", STATES)
def test_states_of_each_optimizer(name: str, dtype: Any) -> None:
    w, engine = param("mlp.w", A, B, dtype=dtype), Engine()
    engine.give(w, np.ones((4, 6)))
    engine.step(optimizer(f"{name}(clip=1.0)"), [w], [np.ones((4, 6))])
    master = F32 if dtype.bytes < 4 else dtype
    expected: dict[str, tuple[Any, ...]] = {
        f"mlp.w.{s}": (TensorType((A, B), master), w, False) for s in STATES[name]
    }
    if master != dtype:
        expected["mlp.w.master"] = TensorType((A, B), master), w, True
    expected["step"] = TensorType((), I32), None, False
    assert {n: (v.type, v.rules_from, c) for n, (v, c) in engine.states.items()} == expected


def test_the_memory_of_mixed_precision_adam() -> None:
    """A parameter of 2 bytes has 12 of state: its master copy, `m` and `v`."""
    w, engine = param("w", A, B, dtype=BF16), Engine()
    engine.give(w, np.ones((4, 6)))
    engine.step(optimizer("adamw(1e-3)"), [w], [np.ones((4, 6))])
    states = [v for v, _ in engine.states.values() if v.name != "step"]
    assert sum(v.type.bytes for v in states) == 12 * w.type.elements


def test_the_states_of_adafactor_are_rows_and_columns() -> None:
    shapes = {"w": (LAYERS, A, B), "b": (B,), "s": (), "stack": (LAYERS, A)}
    params = [param(name, *dims) for name, dims in shapes.items()]
    engine = Engine()
    for value in params:
        engine.give(value, np.ones(value.type.shape))
    grads = [np.ones(value.type.shape) for value in params]
    engine.step(optimizer("adafactor()"), params, grads, {params[3]: ("layers",)})
    dims = {name: value.type.names for name, (value, _) in engine.states.items()}
    assert dims == {
        "step": (),
        "w.row": ("layers", "a"),
        "w.col": ("layers", "b"),
        "b.v": ("b",),
        "s.v": (),
        "stack.v": ("layers", "a"),
    }


@pytest.mark.parametrize("in_torch", [False, True], ids=["numpy", "torch"])
def test_steps_too_small_for_a_narrow_parameter_add_up_in_its_master_copy(in_torch: bool) -> None:
    """One step of 1e-3 from 1.0 is lost in bf16, 16 of them are not."""
    w, engine = param("w", A, dtype=BF16), Engine(in_torch)
    engine.give(w, np.ones(4))
    for n in range(16):
        engine.step(optimizer("sgd(lr=1e-3)"), [w], [np.ones(4)])
        if in_torch:
            assert engine.known[w].dtype == torch.bfloat16
            assert (engine.array(w) == 1).all() == (n < 1), n
    np.testing.assert_allclose(np.asarray(engine.kept["w.master"]), 1 - 16e-3, rtol=1e-6)
    np.testing.assert_allclose(engine.array(w), 1 - 16e-3, rtol=2**-8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_belongs_to_a_parameter_follows_it(name: str) -> None:
    """Layouts bind states by their parameter; scalars belong to none, nor do they need one."""
    w, engine = param("w", A, B, dtype=BF16), Engine()
    engine.give(w, np.ones((4, 6)))
    engine.step(optimizer(f"{name}(lr=cosine(0.1, 10), clip=1.0)"), [w], [np.ones((4, 6))])
    for op, outs, of in engine.emitted:
        assert of is w or not any(v.type.dims for v in outs), op


# --- the page ----------------------------------------------------------------------------------

PAGE = Path(__file__).resolve().parents[2] / "docs/training.md"
ROW = re.compile(r"^\| `(\w+)` \| (off|`[^`]+`) \| ([\w, ]+) \|", re.MULTILINE)


def test_the_page_lists_every_option_with_its_default() -> None:
    written = {
        (optimizer, option, default.strip("`"))
        for option, default, whose in ROW.findall(PAGE.read_text(encoding="utf-8"))
        for optimizer in (OPTIMIZERS if whose == "all" else whose.split(", "))
    }
    assert written == {
        (name, option, "off" if known.default is None else known.shown)
        for name, options in OPTIMIZERS.items()
        for option, known in options.items()
    }


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_page_shows_how_each_schedule_is_called(name: str) -> None:
    arguments = [
        option if known.default is ... else f"{option}={known.shown}"
        for option, known in SCHEDULES[name].items()
    ]
    assert f"| `{name}({', '.join(arguments)})` |" in PAGE.read_text(encoding="utf-8")
