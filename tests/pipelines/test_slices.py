"""Slices of a sequence as micro-batches: the numbers of one device, or a refusal before it runs."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction

import pytest

from benchmarks.training_memory import allocated
from meshdsl.backends.engines.in_process import run_local
from meshdsl.device.costs import flops_in_all
from meshdsl.device.ir import Compute, walk
from meshdsl.diagnostics import DiagnosticError, Source
from meshdsl.ops.opdef import lookup
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.explanation import explain
from meshdsl.schedule.times import Times, timed
from tests.device.alone import first_device
from tests.pipelines.test_programs import compiled, hold, hold_text, hold_to, results

MODEL = """
dim batch = 2, seq = 8, mem = seq, model = 6, heads = 2, key = 3, vocab = 5, layers = 4
program lm(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model] = normal(0.5)
  param position[seq, model] = normal(0.5)
  x = embed[vocab = tokens] + position
  repeat layers {
    param wq[model, heads, key]
    param wk[model, heads, key]
    param wv[model, heads, key]
    param wo[heads, key, model]
    q = einsum(x, wq -> [batch, heads, seq, key])
    k = einsum(x, wk -> [batch, heads, seq, key])
    v = einsum(x, wv -> [batch, heads, seq, key])
    ATTENTION
    x = rms_norm[model](x + einsum(o, wo -> [batch, seq, model]))
  }
  logits = einsum(x, embed -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  return loss
  minimize loss with adamw(lr=0.01, clip=0.5)
}
"""
ATTENTION = """
    s = einsum(q, k[seq -> mem] -> [batch, heads, seq, mem]) / sqrt(key)
    s = where(iota[seq] >= iota[mem], s, -1e9)
    o = einsum(softmax[mem](s), v[seq -> mem] -> [batch, heads, seq, key])"""
TEXT = MODEL.replace("ATTENTION", ATTENTION)
HALVES = """
schedule mine(stages=2, micro=4) {
  0: F0 F1 F2 F3 I3 I2 W3 W2 I1 W1 I0 W0
  1: F0 F1 F2 F3 I3 W3 I2 W2 I1 W1 I0 W0
}
"""
CHUNKS = """
schedule mine(stages=4, micro=2) {
  0: F0 F1 F0@2 F1@2 B1@2 B0@2 B1 B0
  1: F0 F1 F0@3 F1@3 B1@3 B0@3 B1 B0
}
"""
HEADS = "heads -> tp, vocab -> tp"
CASES = {
    "two": ("pipe:2", "layers -> pipe", "terapipe[seq](4)"),
    "data and tensors": (
        "data:2,pipe:2,tp:2", f"layers -> pipe, batch -> data, {HEADS}", "terapipe[seq](2)",
    ),
    "halves": ("pipe:2", "layers -> pipe", "mine[seq]"),
    "chunks": ("pipe:2", "layers -> pipe", 'mine[seq](slices="3 5")'),
    "unequal slices": ("pipe:4", "layers -> pipe", 'terapipe[seq](3, slices="1 5 2")'),
    "unequal and data": (
        "data:2,pipe:2", "layers -> pipe, batch -> data, grads: model -> data",
        'terapipe[seq](4, slices="3 2 2 1", layers="3 1", reduce=each, backward=split)',
    ),
}  # fmt: skip
TABLES = {"halves": HALVES, "chunks": CHUNKS}


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_of_one_device(case: str) -> None:
    """Loss, parameters and states after a step; and each device sends what is told of it."""
    mesh, rules, schedule = CASES[case]
    made = compiled(TEXT + TABLES.get(case, ""), mesh, rules, f"with {schedule}")
    hold(made, TEXT)
    if case == "unequal slices":
        hold_text(made)


def test_unequal_parts_of_a_batch_both_ways() -> None:
    """A device that has some of the micro-batches of a stage sends those, each of its size."""
    text = TEXT.replace("dim batch = 2", "dim batch = 3")
    hold(compiled(text, "pipe:2", "layers -> pipe", 'with chimera[batch](2, slices="2 1")'), text)


def test_narrow_numbers() -> None:
    """Gradients of keys and values are added up in f32, as those of parameters are."""
    found = []
    for mesh, use in (("pipe:2", "with terapipe[seq](4)"), ("pipe:1", "")):
        text = f"{TEXT}\nlayout chosen {{ layers -> pipe }} {use}\n"
        options = Options(mesh=mesh, layout="chosen", dtype="bf16")
        made = Compilation(Source("lm.mdsl", text), options)
        assert ("d_k_slices = torch.zeros" in made.text) == bool(use)
        assert not re.search("d_k_slices = torch.zeros.*bfloat16", made.text)
        found.append(results(run_local(made.text, seed=4)))
    narrow, alone = found
    hold_to(narrow, alone, part=0.02)


def test_a_forward_pass_takes_any_schedule() -> None:
    """Slices are taken in order by all of them; only the way back has to be in reverse."""
    text = re.sub("  minimize.*", "", TEXT)
    hold(compiled(text, "pipe:2", "layers -> pipe", "with gpipe[seq](4)"), text)


def test_the_bubble() -> None:
    """That of so many micro-batches: (D - 1) / (N + D - 1) with whole backward passes."""
    made = compiled(TEXT, "pipe:4", "layers -> pipe", "with terapipe[seq](8)")
    assert made.device.pipeline is not None
    assert Fraction(explain(made.device)["pipeline"]["bubble"]) < Fraction(3, 11)
    whole = Times(weights=(Fraction(0),), early=False)
    assert timed(made.device.pipeline.known, whole).bubble == Fraction(3, 11)


def test_keys_and_values_are_kept_once() -> None:
    """A stage has buffers of its iterations, and no slice keeps what it has put into them."""
    text = compiled(TEXT, "pipe:2", "layers -> pipe", "with terapipe[seq](4)").text
    assert "k_slices = torch.zeros((2, 2, 2, 8, 3)" in text
    (kept,) = re.findall(r"saved_layers.append\(\((.*)\)\)", text)
    assert not {"k", "v", "k_2", "v_2"} & {*kept.split(", ")}


TWO_NAMES = """
dim batch = 2, seq = 4, mem = seq, heads = 2, key = heads, other = heads, layers = 2
program lm(x[batch, heads, seq, key], target[batch, heads, seq, key]) {
  repeat layers {
    param w[heads, key]
    k = (x * w)[seq -> mem]
    o = attention[key, mem](x, k, VALUES, iota[seq] >= iota[mem])
    x = x + BACK
  }
  loss = mean(square(x - target))
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


@pytest.mark.parametrize(
    ("values", "back"),
    [
        ("k[key -> other]", "o[other -> key]"),
        ("k[heads -> other, key -> heads][other -> key]", "o"),
    ],
    ids=["relabelled", "exchanged"],
)
def test_a_value_that_is_read_under_two_names(values: str, back: str) -> None:
    """Keys that are the values, too, under another dim, or with two dims of one size exchanged.

    The queries are what the loop carries, which begins as an input: whole, and read by slices.
    """
    text = TWO_NAMES.replace("VALUES", values).replace("BACK", back)
    hold(compiled(text, "pipe:2", "layers -> pipe", "with terapipe[seq](2)"), text)


WIDE = {"batch": 8, "seq": 64, "model": 64, "heads": 4, "key": 16, "vocab": 50}


def test_the_memory_that_is_reported_is_what_torch_allocates() -> None:
    """Of slices that are unequal, each is counted as large as it is.

    What the kernel of an attention takes beside its results is known less well where it has a mask.
    """
    use = 'terapipe[seq](3, slices="12 20 32")'
    text = f"{TEXT}\nlayout chosen {{ layers -> pipe }} with {use}\n"
    options = Options(mesh="pipe:2", layout="chosen", set_dims=WIDE)
    made = Compilation(Source("lm.mdsl", text), options)
    peak, *_ = explain(made.device)["pipeline"]["peak"]
    held, run = first_device(made)
    assert held + allocated(run) == pytest.approx(peak, rel=0.1)


def test_what_is_told_of_unequal_slices() -> None:
    """As many FLOPs as in equal ones, and idle time by the law of the longest slice."""
    shares, work = {}, {}
    for slices in ("2 2 2 2", "3 2 2 1"):
        use = f'with terapipe[seq](4, slices="{slices}")'
        made = compiled(TEXT, "pipe:4", "layers -> pipe", use)
        assert made.device.pipeline is not None
        sizes = [*map(int, slices.split())]
        whole = Times((Fraction(2),), (Fraction(2),), (Fraction(0),), early=False)
        rows = made.device.pipeline.rows
        of = {a: (Fraction(sizes[a.micro]),) * 2 for row in rows for a in row}
        shares[slices] = timed(made.device.pipeline.known, replace(whole, unlike=of)).bubble
        assert shares[slices] == Fraction(3 * max(sizes), 8 + 3 * max(sizes))
        nodes = walk(made.device.body)
        work[slices] = sum(
            flops_in_all(node, times, made.device)
            for node, times in nodes
            if isinstance(node, Compute)
        )
    assert len({*work.values()}) == 1


def test_nothing_behind_a_slice_is_computed() -> None:
    """Of 8 positions in slices of 3, 3 and 2: 3 * 3 + 3 * 6 + 2 * 8 scores of 64."""
    made = compiled(TEXT, "pipe:2", "layers -> pipe", 'with terapipe[seq](3, slices="3 3 2")')
    nodes = [node for node, _ in walk(made.device.body) if isinstance(node, Compute)]
    parts = [of(n.local) for n in nodes if (of := lookup(n.name).attended) is not None]
    assert parts == [43 / 64] * 2
    assert made.text.count(".narrow(2, 0, end)") == 4


RECOMPUTED = TEXT.replace("q = einsum", "recompute {\n q = einsum").replace(
    "x = rms", "}\n x = rms"
)
REFUSED = {
    "order": (TEXT, "pipe:2", "gpipe[seq](4)", "MD0342", "write `terapipe`"),
    "alternating": (TEXT, "pipe:2", "one_f_one_b[seq](2)", "MD0342", "write `terapipe`"),
    "stage": (
        TEXT, "pipe:2", "terapipe[seq](4, recompute=stage)", "MD0342", "`recompute=stage` out",
    ),
    "recompute": (RECOMPUTED, "pipe:2", "terapipe[seq](4)", "MD0342", "the `recompute` around it"),
    "split": (TEXT, "pipe:2,tp:2", "terapipe[seq](4)", "MD0342", "leave the rule for it out"),
    "too few": (
        TEXT, "pipe:2", 'terapipe[seq](4, slices="3 2 2")', "MD0534", 'slices="2 2 2 2"',
    ),
    "an empty one": (
        TEXT, "pipe:2", 'terapipe[seq](4, slices="4 2 2 0")', "MD0534", 'slices="2 2 2 2"',
    ),
    "no dim": (
        TEXT.replace("clip=0.5", "clip=0.5, accumulate=2"), "pipe:2", 'gpipe(slices="1 1")',
        "MD0534", "leave `slices=` out",
    ),
    "updates": (
        TEXT, "pipe:2", 'pipedream[batch](2, slices="1 3")', "MD0534", "leave `slices=` out",
    ),
    "other blocks": (
        TEXT, "pipe:2,tp:2", 'gpipe[batch](1, slices="3")', "MD0534", 'slices="2"',
    ),
    "no mask": (
        TEXT.replace("    s = where(iota[seq] >= iota[mem], s, -1e9)\n", ""),
        "pipe:2", "terapipe[seq](4)", "MD0332",
        "mask that is causal and nothing else, `iota[seq] >= iota[mem]`",
    ),
    "no mask, unequal": (
        TEXT.replace("    s = where(iota[seq] >= iota[mem], s, -1e9)\n", ""),
        "pipe:2", 'terapipe[seq](4, slices="3 2 2 1")', "MD0331",
        "mask that is causal and nothing else, `iota[seq] >= iota[mem]`",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    text, mesh, schedule, code, help = REFUSED[case]
    rules = "layers -> pipe, seq -> tp" if "tp" in mesh else "layers -> pipe"
    with pytest.raises(DiagnosticError) as caught:
        compiled(text, mesh, rules, f"with {schedule}").checked()
    (found,) = caught.value.diagnostics
    assert found.code == code
    assert help in (found.help or "")
