"""`compress=topk(f)` and `compress=onebit`: oracles of n workers, bytes, what is refused."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.execution import check_reference
from meshdsl.backends.engines.in_process import as_array
from meshdsl.backends.engines.ranks import Ranks
from meshdsl.backends.engines.reference import reference_step
from meshdsl.backends.train.checkpoint import Checkpoints
from meshdsl.diagnostics import DiagnosticError
from meshdsl.named.workers import PER_WORKER, kept
from meshdsl.placed.placements import Mesh
from meshdsl.placed.printer import print_program
from meshdsl.report.explanation_document import compressed
from meshdsl.search.space import LayoutSpace
from tests.covering import in_turn
from tests.ir_text.placed import parse_program
from tests.programs.harness import Case
from tests.programs.harness import compiled as compiled_case
from tests.training.of_workers import LAYOUTS, NETWORK
from tests.training.stepping import Compiled, compiled_step, hold_to

TEXT = NETWORK.replace("OPTIMIZER", "sgd(lr=0.5, compress=HOW)")
STEPS, RATE = 5, 0.5
Slices = Any


# --- oracles: one slice of one parameter, the vectors of all workers -> what all receive ---------


class TopK:
    """Every worker sends the largest elements of its vector and its error, as pairs."""

    def __init__(self, workers: int, size: int, fraction: float = 0.1) -> None:
        self.k = next(k for k in range(size + 1) if 10 * k >= round(10 * fraction * size, 9))
        self.errors = [np.zeros(size) for _ in range(workers)]

    def __call__(self, vectors: list[Any]) -> Any:
        pairs = []
        for error, vector in zip(self.errors, vectors, strict=True):
            error += vector
            order = sorted(range(len(error)), key=lambda i: (-abs(error[i]), i))
            for i in order[: self.k]:
                pairs.append((i, error[i]))
                error[i] = 0.0
        found = np.zeros(len(vectors[0]))
        for i, value in pairs:
            found[i] += value
        return found

    def sent(self, size: int, workers: int) -> float:
        return 8 * self.k * (workers - 1)


class OneBit:
    """`compressed_allreduce` of 1-bit Adam: signs to the owners of blocks, and signs back."""

    def __init__(self, workers: int, size: int) -> None:
        words = -(-size // 32)
        ends = [0]
        for _ in range(workers):
            ends.append(min(ends[-1] + 32 * -(-words // workers), size))
        self.blocks = list(itertools.pairwise(ends))
        self.errors = [np.zeros(size) for _ in range(workers)]
        self.second = np.zeros(size)

    def __call__(self, vectors: list[Any]) -> Any:
        total = self.second.copy()
        for error, vector in zip(self.errors, vectors, strict=True):
            error += vector
            said = np.where(error < 0, -1.0, 1.0) * np.abs(error).mean()
            error -= said
            total += said
        found = np.zeros_like(total)
        for first, end in self.blocks:
            if first < end:
                part = total[first:end]
                found[first:end] = np.where(part < 0, -1.0, 1.0) * np.abs(part).mean()
        self.second = total - found
        return found


class Int8:
    """Bytes with a scale for each eight elements, added up, and bytes of the sums."""

    def __init__(self, workers: int, size: int) -> None:
        self.errors = [np.zeros(size) for _ in range(workers)]
        self.second = np.zeros(size)

    def __call__(self, vectors: list[Any]) -> Any:
        total = self.second.copy()
        for error, vector in zip(self.errors, vectors, strict=True):
            error += vector
            said = in_bytes(error)
            error -= said
            total += said
        found = in_bytes(total)
        self.second = total - found
        return found


def in_bytes(x: Any) -> Any:
    found = np.zeros_like(x)
    for first in range(0, len(x), 8):
        piece = x[first : first + 8]
        scale = float(np.float32(np.abs(piece).max() / 127))
        if scale:
            found[first : first + 8] = np.round(piece / scale) * scale
    return found


ORACLES: dict[str, tuple[str, Any]] = {
    "topk": ("topk(0.1)", TopK), "onebit": ("onebit", OneBit), "int8": ("int8(8)", Int8)
}  # fmt: skip


def test_every_compression_of_workers_has_an_oracle() -> None:
    assert set(ORACLES) == set(PER_WORKER)


HOWS = pytest.mark.parametrize("how", ORACLES)


def batches(kind: str = "normal") -> list[Any]:
    rng = np.random.default_rng(3)
    shapes = {"x": (8, 9, 7), "y": (8, 7)}
    if kind == "ties":  # -1, 0 and 1: most are equal, and some steps are nothing at all
        draw = lambda s, i: np.where(i % 2, 0.0, np.round(rng.uniform(-1.4, 1.4, s)))  # noqa: E731
    else:
        draw = lambda s, i: rng.normal(size=s)  # noqa: E731
    return [{n: draw(s, i) for n, s in shapes.items()} for i in range(STEPS)]


def made(how: str, layout: str = "dp", policy: str = "deferred", dtype: str = "f64") -> Compiled:
    name, mesh, _ = LAYOUTS.get(layout, (layout, layout, 0))
    return compiled_step(Case(TEXT.replace("HOW", ORACLES[how][0]), mesh, name, policy), dtype)


def begun() -> Slices:
    rng = np.random.default_rng(4)
    shapes = {"w": (9, 7), "c": (7,), "one": (), "u": (2, 9, 7)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


@in_turn(layout=LAYOUTS, kind=("normal", "ties"))
@HOWS
def test_the_steps_are_those_of_an_oracle_of_n_workers(how: str, layout: str, kind: str) -> None:
    compiled, n = made(how, layout), LAYOUTS[layout][2]
    wanted = begun()
    before = None
    sizes = {"w": 63, "c": 7, "u0": 63, "u1": 63}
    oracles = {name: ORACLES[how][1](n, size) for name, size in sizes.items()}
    for batch in batches(kind):
        step = compiled.step(batch, begun(), before)
        before, found = step.held, step.run.updated
        x = [part.sum(0).ravel() / 8 for part in np.split(batch["x"], n)]
        y = [part.sum(0) / 8 for part in np.split(batch["y"], n)]
        wanted["w"] = wanted["w"] - RATE * oracles["w"](x).reshape(9, 7)
        wanted["c"] = wanted["c"] - RATE * oracles["c"](y)
        wanted["one"] = wanted["one"] - RATE * batch["y"].mean()
        u = [oracles[f"u{i}"]([2 * g for g in x]).reshape(9, 7) for i in range(2)]
        wanted["u"] = wanted["u"] - RATE * np.stack(u)
        errors = {"w": sum(oracles["w"].errors).reshape(9, 7), "c": sum(oracles["c"].errors)}
        for name, array in {**wanted, **{f"{n}.error": e for n, e in errors.items()}}.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-12, err_msg=name)


ONE = """
dim batch = 8, a = 32, b = SIZE
layout dp { batch -> data }
program p(x[batch, a, b]) {
  param w[a, b]
  loss = mean(x * w)
  return loss
  minimize loss with sgd(lr=0.5, compress=HOW)
}
"""


@in_turn(columns=(4, 12), n=(2, 4))
@HOWS
def test_devices_send_what_the_formula_says(how: str, n: int, columns: int) -> None:
    elements = 32 * columns
    wanted = {
        "topk": 8 * math.ceil(elements / 10) * (n - 1),
        "onebit": 2 * (n - 1) * (elements // (8 * n) + 4),
        "int8": 2 * (n - 1) * (elements // (8 * n)) * (8 + 4),
    }
    text = ONE.replace("HOW", ORACLES[how][0]).replace("SIZE", str(columns))
    step = compiled_step(Case(text, f"data:{n}", "dp", "deferred"), "f32")
    step.step({}, {})  # compares what is counted with what was predicted
    sent = [c["wire_bytes"] for c in step.report["collectives"]]
    assert sum(sent) == wanted[how] + math.ceil(2 * (n - 1) / n * 4)  # the loss


@HOWS
def test_one_worker_is_the_reference(how: str) -> None:
    compiled = made(how, "one")
    params = begun()
    for batch in batches()[:1]:
        outputs, after = reference_step(compiled.named, batch, params, {})
        close = {n: a for n, a in after.items() if not n.endswith("server_error")}
        hold_to(compiled.step(batch, params), outputs, close, 1e-12)


@in_turn(layout=LAYOUTS, how=ORACLES)
def test_a_run_that_is_resumed_goes_on_bit_for_bit(how: str, layout: str, tmp_path: Path) -> None:
    compiled = made(how, layout, dtype="f32")
    first, second, third = batches()[:3]
    two = compiled.step(second, begun(), compiled.step(first, begun()).held)
    ranks = Ranks(two.run.mesh)
    blocks = {r: {n: torch.from_numpy(a) for n, a in b.items()} for r, b in enumerate(two.held)}
    store = Checkpoints(str(tmp_path))
    store.save(2, blocks, two.specs, {}, ranks)
    found = store.latest()
    assert found is not None
    again = tuple(
        {n: as_array(t) for n, t in store.load(found, two.specs, ranks.mesh, rank)}
        for rank in range(len(two.held))
    )
    for one, other in zip(
        compiled.step(third, begun(), two.held).held,
        compiled.step(third, begun(), again).held,
        strict=True,
    ):
        assert {n: a.tobytes() for n, a in one.items()} == {
            n: a.tobytes() for n, a in other.items()
        }


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_error_of_bytes_is_bounded(n: int) -> None:
    """A group of a worker is off by half a scale, and so is the sum; blocks are of several sizes.

    All that is off is kept: in the sum of the steps it is no more than that of the last one.
    """
    text = ONE.replace("HOW", "int8(20)").replace("SIZE", "3")  # 96 elements are 5 groups
    compiled = compiled_step(Case(text, f"data:{n}", "dp", "deferred"), "f32")
    rng = np.random.default_rng(8)
    start = np.zeros((32, 3), np.float32)
    exact, largest, before = start.astype(np.float64), 0.0, None
    for _ in range(4):
        x = rng.normal(size=(8, 32, 3)).astype(np.float32)
        step = compiled.step({"x": x}, {"w": start}, before)
        parts = [p.sum(0) / (8 * 96) for p in np.split(x, n)]
        exact -= 0.5 * sum(parts)
        largest = max(largest, *(np.abs(p).max() for p in parts))
        before = step.held
        error = np.abs(step.run.updated["w"] - exact).max()
        # Errors that are kept make what is sent next at most a hundredth larger.
        assert 0 < error <= 0.5 * 1.05 * (2 * n) * largest / 254


def test_bytes_of_nothing_and_of_no_number() -> None:
    text = ONE.replace("HOW", "int8(20)").replace("SIZE", "3")
    compiled = compiled_step(Case(text, "data:2", "dp", "deferred"), "f32")
    x, w = np.zeros((8, 32, 3), np.float32), np.ones((32, 3), np.float32)
    np.testing.assert_array_equal(compiled.step({"x": x}, {"w": w}).run.updated["w"], w)
    x[0, 0, 0] = np.nan
    assert np.isnan(compiled.step({"x": x}, {"w": w}).run.updated["w"][0, 0])


def test_what_bytes_do_not_make_smaller_is_sent_whole() -> None:
    text = ONE.replace("HOW", "int8").replace("SIZE", "2")  # 64 elements, and words for 256
    states = [str(s.value.name) for s in made_of(text).named.states]
    assert states == ["step"]


def made_of(text: str) -> Compiled:
    return compiled_step(Case(text, "data:2", "dp", "deferred"), "f32")


REFUSED = {
    "split by another axis": ("tp", "data:2,tp:2", "deferred", "", "is split over `tp`"),
    "summed where it is made": ("summed", "data:2", "deferred", "", "is split over `data`"),
    "reduced at once": ("dp", "data:2", "immediate", "", "is already whole"),
    "summed as in Mesh-TensorFlow": ("dp", "data:2", "mesh-tf", "", "is already whole"),
    "with a penalty": ("dp", "data:2", "deferred", "sum(w * w) + ", "is already whole"),
}


@pytest.mark.parametrize("case", REFUSED)
@HOWS
def test_layouts_without_parts_are_refused(how: str, case: str) -> None:
    layout, mesh, policy, penalty, said = REFUSED[case]
    text = TEXT.replace("HOW", ORACLES[how][0]).replace("total = mean", f"total = {penalty}mean", 1)
    with pytest.raises(DiagnosticError) as error:
        compiled_case(Case(text, mesh, layout, policy))
    (found,) = error.value.diagnostics
    assert found.code == "MD0316"
    assert found.span is not None
    assert found.span.text.startswith("minimize")
    assert said in found.message
    assert "powersgd" in str(found.help)


@HOWS
def test_the_optimum_leaves_gradients_in_parts(how: str) -> None:
    batch = batches()[0]
    wanted = made(how).step(batch, begun()).run.updated
    for name, array in made(how, policy="optimal").step(batch, begun()).run.updated.items():
        np.testing.assert_allclose(array, wanted[name], rtol=0, atol=1e-12)


@HOWS
def test_sums_over_batches_are_compressed_once(how: str) -> None:
    """Two batches of half the size have the parts of one: it is the mean that is compressed."""
    batch = batches()[0]
    text = TEXT.replace("HOW", ORACLES[how][0])
    halves = text.replace("batch = 8", "batch = 4").replace("lr=0.5", "lr=0.5, accumulate=2")
    order = np.arange(8).reshape(2, 2, 2).swapaxes(0, 1).reshape(8)  # each worker has its own half
    found = [
        compiled_step(Case(t, "data:2", "dp", "deferred"), "f64").step(b, begun()).run.updated
        for t, b in (
            (text, batch),
            (halves, {n: a[order].reshape(2, 4, *a.shape[1:]) for n, a in batch.items()}),
        )
    ]
    for name, array in found[0].items():
        np.testing.assert_allclose(found[1][name], array, rtol=0, atol=1e-12, err_msg=name)


@HOWS
def test_parts_in_a_narrow_dtype_are_those_of_workers(how: str) -> None:
    """Products in bf16 leave parts in bf16, which are widened before anything is added."""
    loss = "mean(square(einsum(x, w -> [batch, b])))"
    text = ONE.replace("HOW", ORACLES[how][0] + ', compute="bf16"').replace("SIZE", "4")
    text = text.replace("x[batch, a, b]", "x[batch, a]").replace("mean(x * w)", loss)
    step = compiled_step(Case(text, "data:2", "dp", "deferred"), None)
    assert step.report["workers"] == 2
    assert step.step({}, {}).specs["w.error"].dtype == "f32"


@HOWS
def test_explain_says_how_many_workers_there_are(how: str) -> None:
    report = made(how, "four").report
    assert (report["compress"], report["workers"]) == (ORACLES[how][0], 4)
    (said,) = compressed(report)
    assert "by each of 4 workers for itself" in str(said)


@HOWS
def test_the_reference_of_several_workers_is_refused(how: str) -> None:
    text = ONE.replace("HOW", ORACLES[how][0]).replace("SIZE", "4")
    several, alone = (compiled_case(Case(text, f"data:{n}", "dp", "deferred")) for n in (2, 1))
    check_reference(alone)
    with pytest.raises(DiagnosticError, match="MD0709"):
        check_reference(several)


@HOWS
def test_programs_of_workers_are_read_back(how: str) -> None:
    program = compiled_case(Case(TEXT.replace("HOW", ORACLES[how][0]), "data:2", "dp", "deferred"))
    text = print_program(program.placed)
    assert "w.error : f32[a 9, b 7] partial sum over data" in text
    assert print_program(parse_program(text)) == text


@HOWS
def test_layouts_are_searched_over_the_dims_of_the_program_alone(how: str) -> None:
    space = LayoutSpace(made(how).named, Mesh("two", (("data", 2),)))
    assert {dim.name for dim in space.dims} <= {"batch", "a", "b"}


@pytest.mark.parametrize(
    ("fraction", "elements", "k"),
    [(0.01, 300, 3), (0.01, 301, 4), (0.1, 7, 1), (1.0, 7, 7), (0.7, 10, 7), (1e-9, 5, 1)],
)
def test_the_elements_that_are_sent_are_rounded_up(fraction: float, elements: int, k: int) -> None:
    assert kept(fraction, elements) == k
