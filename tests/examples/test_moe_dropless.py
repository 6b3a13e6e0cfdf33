"""The mixture of experts that drops no token: equal to the dense formula however it is routed."""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.runtime.values import Array
from meshdsl.device.ir import Compute
from meshdsl.diagnostics import DiagnosticError
from meshdsl.ir.program import every
from meshdsl.report.explanation import explain
from tests.compiling import compile_text, run_text
from tests.project import ROOT

TEXT = (ROOT / "examples/moe_dropless.mdsl").read_text("utf-8")
PAGE = (ROOT / "docs/howto/experts.md").read_text("utf-8")
SIZES = {"token": 8, "hidden": 6}
GROUPS, TOKENS, CHOICE, EXPERTS = 4, 8, 2, 8
GRADIENTS = TEXT.replace("adam(lr=1e-3)", "sgd(lr=1.0)")


def scores(routing: str) -> Array:
    """Scores of each token for the experts, which `input` has as its first numbers and more."""
    rng = np.random.default_rng(3)
    each = rng.normal(size=(GROUPS, TOKENS, EXPERTS))
    if routing == "one":  # all tokens go to the experts 5 and 2, six experts have none
        each[..., 5] += 20
        each[..., 2] += 10
    if routing == "balanced":
        token = np.arange(GROUPS * TOKENS).reshape(GROUPS, TOKENS, 1)
        first = (np.arange(EXPERTS) - token) % EXPERTS
        each = np.where(first == 0, 9.0, np.where(first == 3, 7.0, each / 10))
    return each


@functools.cache
def given(routing: str) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs and parameters; the router passes the scores on, which are part of the inputs."""
    rng = np.random.default_rng(0)
    model = EXPERTS + 2
    x = np.concatenate([scores(routing), rng.normal(size=(GROUPS, TOKENS, 2))], -1)
    params = {
        "wg": np.eye(model, EXPERTS),
        "expert.wi": rng.normal(size=(4, 2, model, 6)),
        "expert.wo": rng.normal(size=(4, 2, 6, model)),
    }
    return {"input": x, "target": rng.normal(size=x.shape)}, params


@functools.cache
def dense(routing: str) -> dict[str, Array]:
    """Every expert computed for every token: the outputs, and the parameters after a step."""
    inputs, params = ({n: torch.tensor(a) for n, a in side.items()} for side in given(routing))
    for weight in params.values():
        weight.requires_grad_()
    x = inputs["input"]
    gates = torch.softmax(x @ params["wg"], -1)
    best, which = gates.topk(CHOICE)
    wi, wo = (params[f"expert.{n}"].flatten(0, 1) for n in ("wi", "wo"))
    h = torch.relu(torch.einsum("gtm,emh->gteh", x, wi))
    every = torch.einsum("gteh,ehm->gtem", h, wo)
    chosen = every.gather(2, which[..., None].expand(*which.shape, every.shape[-1]))
    y = x + (chosen * (best / best.sum(-1, keepdim=True))[..., None]).sum(2)
    first = torch.nn.functional.one_hot(gates.argmax(-1), EXPERTS).double()
    balance = (gates.mean(1) * first.mean(1)).mean() * EXPERTS**2
    loss = ((y - inputs["target"]) ** 2).mean() + 0.01 * balance
    loss.backward()
    after = {n: (w.data - w.grad).numpy() for n, w in params.items() if w.grad is not None}
    assert len(after) == len(params)
    return {"loss": loss.detach().numpy(), "x": y.detach().numpy(), **after}


LAYOUTS = ["data on four", "expert_parallel on four", "expert_tensor on grid", "alone"]


@functools.cache
def built(layout: str, text: str = GRADIENTS) -> Any:
    name, _, mesh = layout.partition(" on ")
    layout, mesh = (name, mesh) if mesh else ("data", "one:1")
    sizes = {**SIZES, "model": EXPERTS + 2}
    return compile_text(text, dtype="f64", set_dims=sizes, layout=layout, mesh=mesh)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("routing", ["any", "one", "balanced"])
def test_it_is_the_dense_formula_and_its_gradients(layout: str, routing: str) -> None:
    made = built(layout)
    run = run_local(made.emitted.text, *given(routing), lines=made.emitted.places)
    assert run.disagreements() == []
    found = {**run.outputs, **run.updated}
    for name, expected in dense(routing).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-11, atol=1e-12, err_msg=name)


def test_no_row_is_computed_that_is_not_there() -> None:
    """Two products forward and three backward, each of as many rows as tokens have choices."""
    program = built("expert_parallel on four").device
    grouped = [n for n in every(program.body) if isinstance(n, Compute) and "grouped" in n.name]
    product = 2 * TOKENS * CHOICE * (EXPERTS + 2) * SIZES["hidden"]
    assert [n.flops for n in grouped] == [product] * 5


def exchanged(routing: str, layout: str) -> tuple[dict[str, Any], list[int], list[int]]:
    """The exchanges of rows as they are reported, and the bytes that each device sends in them."""
    made = built(layout)
    run = run_local(made.emitted.text, *given(routing), lines=made.emitted.places)
    facts = [c for c in explain(made.device)["collectives"] if "balanced_bytes" in c]
    sizes = [c for c in explain(made.device)["collectives"] if c["tensor"] == "sizes"]
    counted = [
        sum(s.payload * n for s, n in sent.items() if s.kind == "all_to_all" and s.exchanged)
        for sent in run.sent
    ]
    assert [c["kind"] for c in sizes] == ["all_to_all"]
    assert [s.kind for sent in run.sent for s in sent if s.exchanged] == ["all_to_all"] * 3 * 4
    return (
        {"most": sum(c["wire_bytes"] for c in facts), "room": [c["payload_bytes"] for c in facts]},
        [c["balanced_bytes"] for c in facts],
        counted,
    )


@pytest.mark.parametrize("layout", ["expert_parallel on four", "expert_tensor on grid"])
def test_only_rows_that_are_there_are_sent(layout: str) -> None:
    """Never more than was said, and just what was said where all experts have as many tokens."""
    for routing in ("any", "one"):
        said, _, counted = exchanged(routing, layout)
        assert max(counted) <= said["most"]
    said, balanced, counted = exchanged("balanced", layout)
    assert counted == [sum(balanced)] * 4
    assert sum(balanced) < said["most"] < sum(said["room"])


def test_the_most_is_sent_where_all_tokens_leave() -> None:
    """Each device's tokens go to experts of others: what is said of the way there is reached."""
    made = built("expert_parallel on four")
    inputs, params = given("any")
    away = np.zeros((GROUPS, TOKENS, EXPERTS))
    for group in range(GROUPS):  # a device has the experts 2 * group and 2 * group + 1
        away[group, :, [(2 * group + 2) % EXPERTS, (2 * group + 5) % EXPERTS]] = 9
    x = np.concatenate([away, inputs["input"][..., EXPERTS:]], -1)
    run = run_local(made.emitted.text, {**inputs, "input": x}, params)
    facts = {c["tensor"]: c["wire_bytes"] for c in explain(made.device)["collectives"]}
    lines = [[s.payload for s in sent if s.exchanged] for sent in run.sent]
    assert all(payloads[0] == facts["inside"] for payloads in lines)


def test_an_exchange_adds_up_as_one_device_does() -> None:
    """A device has all rows of its experts, in the order of one device: to the last bit."""
    runs = [run_local(built(layout).emitted.text, *given("any")) for layout in LAYOUTS[1::2]]
    for name in ("expert.wi", "expert.wo"):
        np.testing.assert_array_equal(runs[0].updated[name], runs[1].updated[name])


SLOTS = """
dim group = 4, token = 16, model = 32, choice = 2
dim experts = 8, slot = token, hidden = 64, slots = experts * slot
dim pairs = token * choice, places = slots + 1
mesh four = { e: 4 }
layout expert_parallel { group -> e, expert: experts -> e }
def expert(inside[group, experts, slot, model]) -> [group, experts, slot, model] {
  param wi[experts, model, hidden]
  param wo[experts, hidden, model]
  h = relu(einsum(inside, wi -> [group, experts, slot, hidden]))
  o = einsum(h, wo -> [group, experts, slot, model])
  return o
}
program moe(input[group, token, model], target[group, token, model]) {
  param wg[model, experts]
  scores = einsum(input, wg -> [group, token, experts])
  shares, to, from, full, balance = (
    top_k_routing[token, experts, choice, slot, pairs, slots, places](scores))
  inside = (input[token = from] * full)[slots -> (experts, slot)]
  out = expert(inside)
  x = input + sum[choice](shares * out[(experts, slot) -> slots][slots = to])
  loss = mean((x - target)^2) + 0.01 * balance
  return loss, x
  minimize loss with adam(lr=1e-3)
}
"""
"""The same model with a slot for every token, as `examples/moe.mdsl` has slots for some."""


def of_experts(node: Compute) -> bool:
    """Whether it is a product with the matrices of experts, or their gradient."""
    return node.name in ("einsum", "grouped_einsum", "grouped_outer") and any(
        v.local.has("hidden") for v in (*node.ins, *node.outs)
    )


def test_the_page_says_what_slots_and_sorted_rows_cost() -> None:
    slots = compile_text(SLOTS, layout="expert_parallel", mesh="four").device
    rows = compile_text(TEXT, layout="expert_parallel", mesh="four").device
    products = [
        sum(n.flops for n in every(program.body) if isinstance(n, Compute) and of_experts(n))
        for program in (slots, rows)
    ]
    facts = [
        [c for c in explain(program)["collectives"] if c["kind"] == "all_to_all"]
        for program in (slots, rows)
    ]
    most = [sum(c["wire_bytes"] for c in each) for each in facts]
    balanced = sum(c.get("balanced_bytes", c["wire_bytes"]) for c in facts[1])
    table = re.findall(r"^\| (?:FLOPs|bytes) .* \| ([\d,]+) \| ([\d,]+) \|$", PAGE, re.MULTILINE)
    said = [tuple(int(n.replace(",", "")) for n in row) for row in table]
    assert said == [tuple(products), (most[0], balanced), (most[0], most[1])]


@pytest.mark.parametrize(
    ("old", "new", "code"),
    [
        ("sizes, rows=pairs -> [group, blocks, row, hidden]", "sizes -> [group, blocks]", "MD0207"),
        ("(inside, wi, sizes", "(inside, wi[each = 0], sizes", "MD0207"),
        ("(inside, wi, sizes", "(inside, wi, cast(sizes, f32)", "MD0202"),
        ("rows=pairs -> [group, blocks, row, hidden]", "rows=0.5 -> [group, row]", "MD0213"),
        ("rows=pairs -> [group, blocks, row, hidden]", "rows=999 -> [group, row]", "MD0213"),
        ("mask_padding[row](input", "mask_padding[experts](input", "MD0204"),
        ("mask_padding[row](input", "mask_padding[blocks](input", "MD0207"),
    ],
)
def test_what_does_not_fit_is_refused(old: str, new: str, code: str) -> None:
    assert old in TEXT
    with pytest.raises(DiagnosticError) as raised:
        compile_text(TEXT.replace(old, new))
    assert code in [d.code for d in raised.value.diagnostics]
    assert all(d.help for d in raised.value.diagnostics)


def test_rows_without_room_are_an_error_when_the_program_runs() -> None:
    text = GRADIENTS.replace("row = pairs,", "row = 4,").replace("rows=pairs", "rows=16")
    made = built("expert_parallel on four", text)
    with pytest.raises(LocalRunError, match="out of range for dim `rows`"):
        run_local(made.emitted.text, *given("one"), lines=made.emitted.places)


CLIPPED = """
dim g = 2, blk = 2, row = 4, k = 3, m = 2
mesh two = { p: 2 }
layout whole { }
layout rows { row -> p }
layout blocks { blk -> p }
program q(x[blk, row, k], w[g, k, m], z[blk, g]: i32) {
  return grouped_einsum(x, w, z, rows=ROWS -> [blk, row, m])
}
"""


@pytest.mark.parametrize("layout", ["whole", "rows", "blocks"])
def test_sizes_are_clipped_and_more_rows_than_promised_are_refused(layout: str) -> None:
    """As the page says; of a batch here."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 4, 3)), rng.normal(size=(2, 3, 2))
    sizes = np.array([[-3, 2], [3, 5]], np.int32)
    expected = np.zeros((2, 4, 2))
    expected[0, :2] = x[0, :2] @ w[1]
    expected[1, :3], expected[1, 3] = x[1, :3] @ w[0], x[1, 3] @ w[1]
    given = {"x": x, "w": w, "z": sizes}
    found = run_text(CLIPPED.replace("ROWS", "4"), given, layout=layout, dtype="f64")
    np.testing.assert_allclose(found["out0"], expected, rtol=1e-12)
    made = compile_text(CLIPPED.replace("ROWS", "3"), layout=layout, dtype="f64")
    wrong = "^test.mdsl:8: 4 rows are more than `rows=3` promises$"
    with pytest.raises(LocalRunError, match=wrong) as refused:
        run_local(made.emitted.text, given, lines=made.emitted.places)
    assert refused.value.code == "MD0803"


@pytest.mark.usefixtures("forked_ranks")
def test_more_rows_than_promised_are_refused_before_they_are_sent() -> None:
    """No device has as many after the exchange. All engines say the same."""
    made = built("expert_parallel on e:2", GRADIENTS.replace("rows=pairs", "rows=15"))
    told = set()
    for engine in ("local", "torchrun", "reference"):
        with pytest.raises(DiagnosticError) as refused:
            run(made, engine, InputSource(seed=1))
        (diagnostic,) = refused.value.diagnostics
        told.add((diagnostic.code, diagnostic.message, diagnostic.help))
    assert len(told) == 1, told
    ((code, message, help),) = told
    assert (code, message) == ("MD0803", "test.mdsl:20: 16 rows are more than `rows=15` promises")
    assert "in total" in str(help)
