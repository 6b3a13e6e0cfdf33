"""Stages that update on the way, on devices: the numbers of the table, replayed in one process.

`schedule/test_replay.py` holds the replay to recursions that know no table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from benchmarks.training_memory import allocated
from meshdsl.backends.draws import draws
from meshdsl.backends.engines.asynchronous_reference import Replayed, replay_of
from meshdsl.backends.engines.in_process import LocalRun, run_local
from meshdsl.backends.engines.reference import made_up, whole_specs
from meshdsl.backends.runtime.versions import Versions
from meshdsl.columns import Wish, compile_columns
from meshdsl.device.printer import print_program
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from meshdsl.report.checks import check_source
from meshdsl.report.comparison import column_as_json
from meshdsl.report.explanation import explain
from meshdsl.schedule.registry import generate
from meshdsl.schedule.table import row_text
from meshdsl.schedule.verification import verify
from tests.cli.command import Cli
from tests.cli.conftest import cli
from tests.covering import in_turn
from tests.device.alone import first_device
from tests.ir_text.device import parse_program
from tests.pipelines.test_programs import hold_bytes

__all__ = ["cli"]

MLP = """
dim batch = 32, model = 4, out = model, l = 4
program p(x[batch, model], t[batch, model]) {
  repeat l {
    param w[model, out] = normal(0.6)
    param b[out] = normal(0.3)
    x = tanh(einsum(x, w -> [batch, out]) + b)[out -> model]
  }
  loss = mean(square(x - t))
  return loss
  minimize loss with OPT
}
"""

ENDS = MLP.replace(
    "  repeat l", "  param a[model, out] = normal(0.6)\n  x = tanh(einsum(x, a -> [batch, out]))"
    "[out -> model]\n  repeat l",
).replace(
    "  loss =", "  param h[model, out]\n  x = einsum(x, h -> [batch, out])[out -> model]\n  loss =",
)  # fmt: skip
"""With a parameter before the loop, of the first stage, and one behind it, of the last."""

WEIGHTED = ENDS.replace(
    "mean(square(x - t))", "sum(square(x - t) * abs(t)) / sum(abs(t)) + 0.01 * sum(square(h))"
)
"""No mean over samples: micro-batches are no parts of the whole batch, but batches."""

MADE_OF = ENDS.replace("einsum(x, w ->", "einsum(x, (w * 0.5 + w * w) ->").replace(
    "einsum(x, a ->", "einsum(x, (a + a * 1.5) * 0.5 ->"
)
"""Something is made of parameters first: before the loop too, and kept for backward passes."""

LOOPED = MLP.replace("dim batch = 32", "dim k = 3, batch = 32").replace(
    "    x =", "    repeat k {\n      param a[model] = normal(0.6)\n      s = tanh(a)\n    }\n"
    "    x = x * sum[k](s * s)\n    x =",
)  # fmt: skip
"""A loop that only parameters determine yields a stack, of which more is made."""

AGAIN = MLP.replace("    x =", "    recompute {\n    x =").replace(
    "model]\n  }", "model]\n    }\n  }"
)

NORMED = ENDS.replace("+ b)[out -> model]\n", "+ b)[out -> model]\n    x = x - mean[batch](x)\n")
"""With the mean of a micro-batch: in a drained pipeline it is of the whole batch (MD0332)."""

DROPPED = ENDS.replace("square(x - t)", "square(dropout(x, 0.5) - t)")

TOKENS = """
dim batch = 16, seq = 6, model = 8, hidden = 12, l = 4, vocab = 16
program p(tokens[batch, seq]: i32, targets[batch, seq]: i32) {
  param embed[vocab, model]
  param head[model, vocab]
  x = embed[vocab = tokens]
  mask = where(tokens > 3, 1.0, 0.5)
  repeat l {
    param a[model, hidden]
    param c[hidden, model]
    x = x + mask * einsum(gelu(einsum(x, a -> [batch, seq, hidden])), c -> [batch, seq, model])
  }
  logits = einsum(rms_norm[model](x), head -> [batch, seq, vocab])
  loss = mean(cross_entropy[vocab](logits, targets))
  largest = mean(max[vocab](logits))
  return loss, largest
  minimize loss with OPT
}
"""

PROGRAMS = {
    "mlp": MLP, "ends": ENDS, "weighted": WEIGHTED, "made of": MADE_OF, "tokens": TOKENS,
}  # fmt: skip
RULES = ("ampnet", "pipedream", "two_bw", "pipemare")
OPTIMIZERS = ("sgd(lr=0.1)", "momentum(0.1)", "adamw(lr=0.01)")
LAYOUTS = {
    "pipe:2": "l -> pipe",
    "pipe:4": "l -> pipe",
    "data:2,pipe:2": "l -> pipe, batch -> data",
    "pipe:2,tp:2": "l -> pipe, model -> tp",
    "data:2,pipe:4": "l -> pipe, batch -> data, state: model -> data",
    "pipe:2,tp:2,data:2": "l -> pipe, batch -> data, model -> tp, grads: model -> data",
    "pipe:2,data:2": "l -> pipe, batch -> data, params: model -> data",
}
CLOSE = 1e-11


def compiled(
    text: str, schedule: str, opt: str, mesh: str = "pipe:2", dtype: str | None = "f64"
) -> Compilation:
    layout = f"layout chosen {{ {LAYOUTS[mesh]} }} with {schedule}\n"
    source = Source("p.mdsl", f"{text.replace('OPT', opt)}\n{layout}")
    return Compilation(source, Options(mesh=mesh, layout="chosen", dtype=dtype))


@dataclass(frozen=True)
class Step:
    """A step on threads, and the same table replayed."""

    made: Compilation
    run: LocalRun
    replayed: Replayed

    @property
    def worst(self) -> float:
        """The largest difference of any result, relative to the largest value of it."""
        found = {**self.run.outputs, **self.run.updated}
        wanted = {**self.replayed.outputs, **self.replayed.updated}
        assert found.keys() == wanted.keys()
        return max(_apart(found[name], array) for name, array in wanted.items())


def _apart(found: Any, wanted: Any) -> float:
    most = np.abs(np.asarray(wanted, "f8")).max(initial=0)
    return float(np.abs(found.astype("f8") - wanted).max(initial=0) / max(most, 1e-30))


def stepped(made: Compilation, seed: int = 3) -> Step:
    emitted = made.emitted
    done = run_local(emitted.text, seed=seed, lines=emitted.places)
    specs = whole_specs(made.named, draws(made.named))
    replay = replay_of(made)
    assert replay is not None
    inputs, params = (made_up(spec, seed=seed) for spec in specs)
    return Step(made, done, replay.step(inputs, params, {}))


def holds(step: Step, close: float = CLOSE) -> None:
    assert step.worst < close
    assert not step.run.disagreements()
    hold_bytes(step.run, step.made)


# --- the numbers ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_an_input_may_be_left_unread(mesh: str) -> None:
    """It is given whole, as the others are."""
    text = MLP.replace("t[batch, model])", "t[batch, model], u[batch], v[model])")
    made = compiled(text, "pipedream[batch](8)", "sgd(0.1)", mesh)
    assert "accumulate" not in made.text.partition("PARAMS")[0]
    holds(stepped(made))


@in_turn(mesh=LAYOUTS, name=PROGRAMS, rule=RULES, opt=OPTIMIZERS)
def test_devices_make_the_numbers_of_the_table(name: str, rule: str, mesh: str, opt: str) -> None:
    anneal = ", anneal=5" if rule == "pipemare" else ""
    holds(stepped(compiled(PROGRAMS[name], f"{rule}[batch](8{anneal})", opt, mesh)))


OTHERS = {
    "uneven": (ENDS, 'RULE[batch](8, layers="3 1")', "adamw(lr=0.01)", "pipe:2"),
    "uneven, made of": (MADE_OF, 'RULE[batch](8, layers="1 3")', "adamw(lr=0.01)", "pipe:2"),
    "made of in a loop": (LOOPED, "RULE[batch](8)", "sgd(lr=0.1)", "pipe:2"),
    "each": (ENDS, "RULE[batch](8, reduce=each)", "momentum(0.1)", "data:2,pipe:2"),
    "following rate": (ENDS, "RULE[batch](8)", "adamw(lr=cosine(0.01, 30))", "pipe:2"),
    "factored": (ENDS, "RULE[batch](8)", "adafactor(0.1)", "pipe:2"),
    "accumulated": (ENDS, "RULE", "adamw(lr=0.01, accumulate=8)", "data:2,pipe:2"),
    "normed": (NORMED, "RULE[batch](8)", "adamw(lr=0.01)", "data:2,pipe:2"),
    "dropped": (DROPPED, "RULE", "adamw(lr=0.01, accumulate=8)", "data:2,pipe:2"),
    "recompute": (AGAIN, "RULE[batch](8)", "momentum(0.1)", "pipe:4"),
}  # fmt: skip


@in_turn(case=OTHERS, rule=RULES)
def test_other_steps(case: str, rule: str) -> None:
    text, schedule, opt, mesh = OTHERS[case]
    holds(stepped(compiled(text, schedule.replace("RULE", rule), opt, mesh)))


@pytest.mark.parametrize("rule", ["pipedream", "two_bw"])
def test_what_a_stage_received_may_be_all_that_it_keeps(rule: str) -> None:
    holds(stepped(compiled(ENDS, f"{rule}[batch](8, recompute=stage)", "momentum(0.1)", "pipe:4")))


HALVES = """
schedule mine(stages=2, micro=4, weights=RULE) {
  0: F0 F1 I0 I1 W0 U0 F2 W1 U1 I2 F3 W2 U2 I3 W3 U3
  1: F0 I0 F1 W0 U0 I1 W1 U1 F2 I2 W2 U2 F3 I3 W3 U3
}
"""
DEEP = ENDS.replace(
    "(einsum(x, a ->", "(einsum(tanh(einsum(x, c -> [batch, out]))[out -> model], a ->"
)
DEEP = DEEP.replace("  param a", "  param c[model, out]\n  param a")
"""The gradient of a parameter of the first stage needs another one."""


@pytest.mark.parametrize("rule", ["latest", "stashed", "corrected"])
def test_a_declared_table_with_halves(rule: str) -> None:
    rows = HALVES.replace("RULE", rule)
    holds(stepped(compiled(ENDS + rows, "mine[batch]", "adamw(lr=0.01)")))


def test_a_second_half_behind_an_update_reads_the_version_of_the_first() -> None:
    stashed, latest = (DEEP + HALVES.replace("RULE", rule) for rule in ("stashed", "latest"))
    holds(stepped(compiled(stashed, "mine[batch]", "momentum(0.1)")))
    with pytest.raises(DiagnosticError, match="in the second half of a backward pass"):
        _ = compiled(latest, "mine[batch]", "momentum(0.1)").device


@pytest.mark.parametrize("rule", RULES)
def test_in_f32(rule: str) -> None:
    holds(stepped(compiled(ENDS, f"{rule}[batch](8)", "adamw(lr=0.01)", dtype=None)), 1e-5)


@pytest.mark.parametrize("rule", ["ampnet", "pipedream"])
def test_parameters_in_bf16_have_their_copy_on_the_stage_that_updates_them(rule: str) -> None:
    made = compiled(ENDS, f"{rule}[batch](8)", "adamw(lr=0.01, compute=bf16)", dtype=None)
    holds(stepped(made), 0.05)


def test_one_data_device_of_two_has_half_of_every_micro_batch() -> None:
    made = compiled(MLP, "ampnet[batch](4)", "sgd(lr=0.1)", "data:2,pipe:2")
    assert '"x": "f64[batch=32:0-3.8-11.16-19.24-27.4-7.12-15.20-23.28-31@data' in made.text


# --- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [4, 8])
@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("name", ["pipedream", "two_bw"])
def test_as_many_copies_are_made_as_the_table_needs(name: str, devices: int, batch: int) -> None:
    import torch

    table = verify(generate(name, devices, 16, {"batch": batch} if name == "two_bw" else {}))
    for stage, row in enumerate(table.schedule.rows):
        kept = Versions(row_text(stage, row), table.schedule.weights, torch.zeros(1))
        counts = []
        made = 0
        for action in row:
            if action.kind == "U":
                (tensor,) = kept.next()
                assert float(tensor) == made
                made += 1
                tensor.fill_(made)
                counts.append(len(kept.kept) + len(kept.room))
            else:
                (tensor,) = kept.read(action.micro)
                assert float(tensor) == table.versions[stage].forward[action.micro]
        assert tuple(counts) == table.kept(stage)
        assert counts[-1] == table.versions[stage].copies


WIDE = ENDS.replace("batch = 32, model = 4", "batch = 512, model = 256")


@in_turn(rule=RULES, opt=("sgd(lr=0.1)", "adamw(lr=0.01)"))
def test_the_memory_that_is_reported_is_what_torch_allocates(rule: str, opt: str) -> None:
    made = compiled(WIDE, f"{rule}[batch](16)", opt, "pipe:4", dtype=None)
    peak, *_ = explain(made.device)["pipeline"]["peak"]
    held, run = first_device(made)
    assert held + allocated(run) == pytest.approx(peak, rel=0.02)


def test_the_report_says_which_versions_are_read() -> None:
    made = compiled(ENDS, "pipedream[batch](8)", "sgd(lr=0.1)", "pipe:4")
    report = explain(made.device)["pipeline"]
    assert report["weights"] == "stashed"
    assert report["updates_behind"] == [3, 2, 1, 0]
    assert report["copies"] == [4, 3, 2, 1]
    assert (
        "weights" not in explain(compiled(ENDS, "gpipe[batch](8)", "sgd(0.1)").device)["pipeline"]
    )


def test_other_stages_are_told_what_one_has_updated() -> None:
    """The two parameters outside of the loop, with their two states each, from stage to stage."""
    report = explain(compiled(ENDS, "ampnet[batch](8)", "adamw(lr=0.01)").device)
    told = [c for c in report["collectives"] if "alone updates it" in str(c)]
    assert told
    plain = explain(compiled(MLP, "ampnet[batch](8)", "adamw(lr=0.01)").device)
    assert not [c for c in plain["collectives"] if "alone updates it" in str(c)]


@pytest.mark.parametrize("rule", RULES)
def test_the_device_program_is_read_back(rule: str) -> None:
    """With batches that are accumulated: one that is cut has two sizes, which a text has not."""
    made = compiled(ENDS, rule, "adamw(lr=0.01, accumulate=8)", "data:2,pipe:2")
    text = print_program(made.device)
    assert print_program(parse_program(text)) == text


# --- engines -------------------------------------------------------------------------------------


def test_a_step_is_compared_with_the_replay_of_its_table() -> None:
    from meshdsl.backends.engines.execution import InputSource, run, verify

    made = compiled(ENDS, "pipemare[batch](8)", "adamw(lr=0.01)", "data:2,pipe:2")
    for engine in ("local", "reference"):
        result = run(made, engine, InputSource(seed=4))
        assert all(c.ok for c in verify(made, InputSource(seed=4), result.outputs, result.updated))
    other = run(compiled(ENDS, "ampnet[batch](8)", "adamw(lr=0.01)"), "local", InputSource(seed=4))
    assert not all(c.ok for c in verify(made, InputSource(seed=4), other.outputs, other.updated))


@pytest.mark.parametrize("weights", ["latest", "stashed", "buffered", "corrected"])
def test_a_penalty_is_added_behind_the_update_before(weights: str) -> None:
    """What parameters alone add to a gradient belongs to the backward pass, not to the forward."""
    rows = "F0 F1 B0 U0 F2 B1 U1 F3 B2 U2 B3 U3"
    table = f"schedule own(stages=2, micro=4, weights={weights}) {{\n 0: {rows}\n 1: {rows}\n}}\n"
    text = ENDS.replace("batch = 32", "batch = 16") + table
    penalty = text.replace(
        "  return loss", "  loss = loss + 0.5 * sum(square(h))\n  return loss", 1
    )
    assert penalty != text
    holds(stepped(compiled(penalty, "own[batch]", "sgd(0.1)")))


def test_the_rate_is_that_of_the_last_update_of_a_step(tmp_path: Path, cli: Cli) -> None:
    program, data, log = tmp_path / "p.mdsl", tmp_path / "d.npz", tmp_path / "log.jsonl"
    program.write_text(_source("sgd(lr=linear(0.1, 30, warmup=3))"), encoding="utf-8")
    made = Compilation(Source("p.mdsl", program.read_text()), Options(mesh="pipe:2"))
    inputs = made.named.inputs
    arrays: Any = {v.name: np.zeros([d.size for d in v.type.dims], "f4") for v in inputs}
    np.savez(data, **arrays)
    words = ("--data", str(data), "--steps", "2", "--mesh", "pipe:2", "--log", str(log))
    assert cli("train", str(program), *words).code == 0
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    goal = made.named.goal
    assert goal is not None
    wanted = [goal.optimizer.lr.at(update) for update in (7, 15)]
    assert [line["lr"] for line in lines if "lr" in line] == pytest.approx(wanted)


LATER = {
    ("pipedream[batch](8)", "pipedream[batch](8)", "data:2,pipe:2"): "sums in another order",
    ("ampnet[batch](8)", "pipedream[batch](8)", "pipe:2"): (
        "by other steps: updates on the way by pipedream[batch](8) in 2 stages; before, updates on "
        "the way by ampnet[batch](8) in 2 stages"
    ),
    ("pipedream[batch](8)", "pipedream[batch](8)", "pipe:4"): "in 4 stages; before, ",
    ("gpipe[batch](8)", "ampnet[batch](8)", "pipe:2"): "before, one update a step",
    ("ampnet[batch](8)", "one_f_one_b[batch](4)", "pipe:2"): "other steps: one update a step; ",
    ("gpipe[batch](8)", "one_f_one_b[batch](4)", "pipe:2"): "sums in another order",
}


@pytest.mark.parametrize(("before", "now", "mesh"), LATER)
def test_a_run_that_goes_on_says_whether_its_steps_are_others(
    before: str, now: str, mesh: str, tmp_path: Path
) -> None:
    (tmp_path / "p.mdsl").write_text(MLP.replace("OPT", "sgd(0.1)"), encoding="utf-8")
    program = md.load(tmp_path / "p.mdsl")
    data = {name: np.zeros((64, 4), "f4") for name in ("x", "t")}
    notes: list[Any] = []
    for steps, use, on in ((1, before, "pipe:2"), (2, now, mesh)):
        rules = "l -> pipe" + (", batch -> data" if "data" in on else "")
        schedule = md.scheduled(use.split("[")[0], "batch", micro=int(use[-2]))
        plan = program.compile(on, md.layout(rules.split(", "), schedule=schedule))
        done = plan.train(
            data, steps, checkpoint=str(tmp_path / "run"), resume=steps > 1, progress=False
        )
        notes += done.notes
    (note,) = notes
    assert note.code == "MD0519"
    assert LATER[before, now, mesh] in str(note.help)


def _source(opt: str) -> str:
    return f"{MLP.replace('OPT', opt)}\nlayout chosen {{ l -> pipe }} with pipedream[batch](8)\n"


def test_a_column_of_a_comparison() -> None:
    made = Compilation(Source("p.mdsl", _source("sgd(0.1)")), Options(mesh="pipe:2"))
    (column,) = compile_columns(made, [Wish("layout", "chosen", "deferred")])
    facts = column_as_json(column)
    assert "tensors" in facts
    assert facts["tensors"]


# --- what is refused -----------------------------------------------------------------------------


TIED = ENDS.replace("einsum(x, h ->", "einsum(x, a ->").replace("  param h[model, out]\n", "")
SKIP = ENDS.replace("  repeat l", "  y = x\n  repeat l").replace("x, h ->", "x + y, h ->")
TWICE = """
schedule two(stages=4, micro=2) {
  0: F0 F1 F0@2 F1@2 B0@2 U0@2 B1@2 U1@2 B0 U0 B1 U1
  1: F0 F1 F0@3 B0@3 U0@3 F1@3 B1@3 U1@3 B0 U0 B1 U1
}
"""
THIRDS = ENDS.replace("batch = 32", "batch = 12")
UNEQUAL = """
schedule own(stages=2, micro=3) {
  0: F0 F1 F2 B0 U0 B1 B2 U2
  1: F0 B0 F1 B1 FIRST F2 B2 U2
}
"""


@pytest.mark.parametrize(
    ("text", "schedule", "opt", "code", "said"),
    [
        (ENDS, "ampnet[batch](8)", "sgd(0.1, clip=1.0)", "MD0337", "`clip` needs the norm"),
        (TIED, "ampnet[batch](8)", "sgd(0.1)", "MD0337", "`a` is read on stages 0 and 1"),
        (ENDS, "ampnet[batch](1)", "sgd(0.1)", "MD0335", "with one micro-batch"),
        (ENDS, "pipemare[batch](8, recompute=stage)", "sgd(0.1)", "MD0335", "already updated"),
        (ENDS, "pipemare[batch](8)", "adamw(lr=0.1, compute=bf16)", "MD0335", "a copy in f32"),
        (SKIP, "pipedream[batch](8)", "sgd(0.1)", "MD0335", "other stages read it"),
        (ENDS.replace("return loss", "return loss, x"), "ampnet[batch](8)", "sgd(0.1)", "MD0335",
         "devices cannot join yet"),
        (ENDS.replace("batch = 32", "batch = 24"), "ampnet[batch](8)", "sgd(0.1)", "MD0331",
         "does not divide over 2 devices"),
        (ENDS + TWICE, "two[batch]", "sgd(0.1)", "MD0335", "several stages on a device"),
        (THIRDS + UNEQUAL.replace("FIRST", ""), "own[batch]", "sgd(0.1)", "MD0337", "different"),
        (THIRDS + UNEQUAL.replace("FIRST", "U1"), "own[batch]", "sgd(0.1)", "MD0335", "different"),
        (MLP.replace("square(x", "square(dropout(x, 0.5)"), "ampnet[batch](8)", "sgd(0.1)",
         "MD0335", "random numbers"),
    ],
)  # fmt: skip
def test_what_no_device_does_is_refused(
    text: str, schedule: str, opt: str, code: str, said: str
) -> None:
    mesh = "data:2,pipe:2" if code == "MD0331" else "pipe:2"
    with pytest.raises(DiagnosticError) as caught:
        _ = compiled(text, schedule, opt, mesh, dtype=None).device
    (found,) = caught.value.diagnostics
    assert (found.code, bool(found.help), bool(found.span)) == (code, True, True)
    assert said in found.message


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ("params: l -> data", "is not stored where its stage updates it"),
        ("state: model -> (data, pipe)", "an update needs all stages"),
    ],
)
def test_what_is_stored_over_the_stages_is_refused(rule: str, said: str) -> None:
    text = f"{ENDS.replace('OPT', 'adamw(lr=0.01)')}\nlayout chosen {{ l -> pipe, batch -> data, "
    source = Source("p.mdsl", f"{text}{rule} }} with pipedream[batch](8)\n")
    with pytest.raises(DiagnosticError, match=said) as caught:
        _ = Compilation(source, Options(mesh="data:2,pipe:2", layout="chosen")).device
    assert [d.code for d in caught.value.diagnostics] == ["MD0335"]


@pytest.mark.parametrize("where", ["disk", "host"])
def test_states_elsewhere_are_refused(where: str) -> None:
    layout = "layout chosen { l -> pipe, state: memory = WHERE } with pipedream[batch](8)"
    layout = layout.replace("WHERE", where)
    source = Source("p.mdsl", f"{ENDS.replace('OPT', 'adamw(lr=0.01)')}\n{layout}\n")
    with pytest.raises(DiagnosticError, match=f"they are stored on the {where}") as caught:
        _ = Compilation(source, Options(mesh="pipe:2", layout="chosen")).device
    assert [d.code for d in caught.value.diagnostics] == ["MD0335"]


def test_check_says_what_stages_cannot_update_apart() -> None:
    """What no device does yet is a note: the reference engine trains by such a table."""

    def told(schedule: str, opt: str) -> list[tuple[str, str]]:
        text = f"{ENDS.replace('OPT', opt)}\nmesh m = {{ pipe: 2 }}\n"
        source = Source("p.mdsl", f"{text}layout late {{ l -> pipe }} with {schedule}\n")
        found = Diagnostics()
        check_source(source, Options(), found)
        return [(d.code, d.severity) for d in found]

    assert told("pipedream[batch](8)", "sgd(0.1)") == []
    assert told("pipedream[batch](8)", "sgd(0.1, clip=1.0)") == [("MD0337", "error")]
    assert told("pipedream[batch](1)", "sgd(0.1)") == [("MD0335", "note")]
