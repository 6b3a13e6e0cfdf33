"""Every rendering of every example, looked at: its form, its names, and what it says of tensors."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import keyword
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshdsl.backends.peers.dtensor import DTensorText
from meshdsl.backends.peers.gshard import tiles
from meshdsl.backends.peers.jax import JaxText
from meshdsl.backends.peers.notation import entries
from meshdsl.backends.peers.oneflow import OneFlowText
from meshdsl.backends.peers.operator_tables import (
    BECOMES,
    EXTREMES,
    REASONS,
    SUMS,
    TABLE,
    spelling,
)
from meshdsl.backends.peers.peer import MARK, Peer
from meshdsl.backends.peers.peer_call import PeerCall
from meshdsl.backends.peers.renderings import RENDERINGS, render
from meshdsl.backends.peers.sbp_notation import entry_text
from meshdsl.device.from_placed import lower
from meshdsl.device.ir import Compute, Var, walk
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.ops.opdef import load_all, lookup
from meshdsl.pipeline import Options, compile_source
from meshdsl.placed.ir import PlacedProgram
from tests.covering import some
from tests.project import ROOT
from tests.renderings import gradients, operators
from tests.renderings.examples import Case, accepted, cases
from tests.together import together

CODE: dict[str, type[Peer]] = {"dtensor": DTensorText, "jax": JaxText, "oneflow": OneFlowText}


@functools.cache
def every() -> list[tuple[Case, PlacedProgram]]:
    """Every example under every other of all it declares, on four devices; pipelines aside."""
    by_file = itertools.groupby(cases(4, "deferred"), lambda case: case.file)
    chosen = (case for _, of_file in by_file for case in some(of_file))
    found = [(case, made.placed) for case, made in accepted(chosen)]
    return [(case, program) for case, program in found if program.pipe is None]


@functools.cache
def rendered(notation: str) -> list[tuple[Case, PlacedProgram, str]]:
    """All of them in a notation."""
    return [(case, program, render(program, notation)) for case, program in every()]


HOSTILE = '''\
dim torch = 8, jax = 4, print = 4
mesh flow = { P: 2, Shard: 2 }
layout F { torch -> P, jax -> Shard }
program main(inputs[torch, jax], device[jax, print]) {
  param w[print] = zeros()
  jnp = einsum(inputs, device -> [torch, print])
  reshard = jnp * 2.0 + w
  flow = relu(reshard)  # """ \\n import os
  DTensor = sum[torch](flow)
  placement = max[torch](flow)
  return DTensor, placement
}
'''
"""Names that mean something in Python and in every system."""


def placed(text: str, name: str = "test.mdsl", **options: Any) -> PlacedProgram:
    """The placed program of a text."""
    made = compile_source(Source(name, text), Options(**options), Diagnostics(), "placed")
    found = made.placed
    assert isinstance(found, PlacedProgram)
    return found


def computed(program: PlacedProgram) -> list[Var]:
    """The results of operators other than constants."""
    nodes = (node for node, _ in walk(lower(program).body))
    found = (n for n in nodes if isinstance(n, Compute) and n.name != "constant")
    return [var for node in found for var in node.outs]


@functools.cache
def every_computed() -> list[list[Var]]:
    """Those of every program."""
    return [computed(program) for _, program in every()]


# --- all notations -----------------------------------------------------------------------------


@functools.cache
def quoted() -> list[set[str]]:
    """The source lines that stand in the text of every program, but for those of functions."""
    every_span = (
        {v.value.span for v in found if not v.value.functions} for found in every_computed()
    )
    return [
        {f"# {s.file}:{s.line}  {s.source.line(s.line).strip()}" for s in spans}
        for spans in every_span
    ]


@pytest.mark.parametrize("notation", RENDERINGS)
def test_each_source_line_stands_over_its_statements(notation: str) -> None:
    for lines, (_, _, text) in zip(quoted(), rendered(notation), strict=True):
        assert not [line for line in lines if line not in text]
        assert text.isprintable() or "\n" in text
        assert text.endswith("\n")
        assert not text.endswith("\n\n")


PIPELINE = """\
dim batch = 4, d = 4, d2 = d, layers = 4
layout staged { layers -> pipe } with gpipe[batch](2)
layout whole { batch -> pipe }
program p(x[batch, d]) {
  repeat layers {
    param w[d, d2]
    x = tanh(einsum(x, w -> [batch, d2]))[d2 -> d]
  }
  return x
}
"""


@pytest.mark.parametrize("notation", RENDERINGS)
@pytest.mark.parametrize("devices", [2, 4])
def test_pipelines_are_refused(notation: str, devices: int) -> None:
    """A device there runs all iterations: of four layers one of four stages ran the first only."""
    mesh = f"pipe:{devices}"
    with pytest.raises(DiagnosticError) as caught:
        render(placed(PIPELINE, mesh=mesh, layout="staged"), notation)
    (found,) = caught.value.diagnostics
    assert (found.code, found.span and found.span.line) == ("MD0910", 2)
    for layout, mesh_ in (("whole", mesh), ("staged", "pipe:1")):
        shown = render(placed(PIPELINE, mesh=mesh_, layout=layout), notation)
        assert "range(4)" in shown or "layers 4" in shown, shown


@pytest.mark.parametrize("notation", CODE)
def test_code_is_code(notation: str) -> None:
    for case, _, text in rendered(notation):
        tree = ast.parse(text, case.name)
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
        assert functions[-1] == "program"
        imports = [n for n in ast.walk(tree) if isinstance(n, ast.Import | ast.ImportFrom)]
        assert all(n in tree.body for n in imports)


@pytest.mark.parametrize("notation", CODE)
def test_no_name_of_a_file_becomes_code(notation: str) -> None:
    name = 'a"""\n__import__("os").abort()\n#.mdsl'
    text = render(placed(HOSTILE, name), notation)
    tree = ast.parse(text)
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "program")
    stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)
              if isinstance(n.ctx, ast.Store)}  # fmt: skip
    taken = {*CODE[notation].taken, *dir(builtins), *keyword.kwlist, "inputs", "params", "program"}
    assert stored
    assert not stored & taken
    assert "abort" not in ast.unparse(tree)


@pytest.mark.parametrize("notation", sorted(set(RENDERINGS) - set(CODE)))
def test_notations_stay_on_their_lines(notation: str) -> None:
    text = render(placed(HOSTILE, "a\n__import__('os')\n.mdsl"), notation)
    assert not re.search(r"^__import__", text, re.MULTILINE)


def test_a_loop_that_collects_and_one_that_runs_backwards() -> None:
    _, text = next(case for case in gradients.texts() if case[0] == "loop")
    program = gradients.compiled(text, "both", "p:2,q:2", "deferred").placed
    for notation in RENDERINGS:
        shown = render(program, notation)
        assert re.search(r"^ *for n in range\(3\):\n", shown, re.MULTILINE)
        assert re.search(r"for n_\d in reversed\(range\(3\)\):\n", shown), notation
        assert "  [backward]\n" in shown
        if notation in CODE:
            assert re.search(r"= \w+\.stack\(\w+_list\)", shown), shown
            assert re.search(r"stack\(\w+_list\[::-1\]\)", shown), shown
        else:
            assert "empty()" in shown


STEP = """
dim a = 4, n = 2
mesh m = { x: 2 }
layout l { a -> x }
program p(u[a, n]) {
  param w[n]
  loss = sum(square(einsum(u, w -> [a])))
  return loss
  minimize loss with adam(lr=0.1)
}
"""


@pytest.mark.parametrize("notation", sorted(set(RENDERINGS) - set(CODE)))
def test_a_training_step_is_shown_whole(notation: str) -> None:
    shown = render(placed(STEP), notation)
    states = re.findall(r"^(w_[mv]|step)\b.*[#;] state", shown, re.MULTILINE)
    assert states == ["step", "w_m", "w_v"]
    for number, name in enumerate(("w", "w_m", "w_v")):
        (made,) = re.findall(rf"^# in the next step {name} = (\w+)$", shown, re.MULTILINE)
        assert re.search(rf"^{made}\b.* = .*adam_update\(.*\)\[{number}\]", shown, re.MULTILINE)


def test_the_command_leaves_out_what_is_there_to_train(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from meshdsl.cli.app import app

    file = tmp_path / "step.mdsl"
    file.write_text(STEP, encoding="utf-8")
    for notation in RENDERINGS:
        plain = CliRunner().invoke(app, ["render", str(file), "--as", notation])
        assert plain.exit_code == 0, plain.output
        assert "adam_update" not in plain.output
        whole = CliRunner().invoke(app, ["render", str(file), "--as", notation, "--step"])
        assert whole.exit_code == (notation in CODE), whole.output
        assert ("step_update" if notation in CODE else "adam_update") in whole.output
        assert ("leave out `--step`" in whole.output) is (notation in CODE)


def test_loops_are_loops() -> None:
    text = "dim n = 3, a = 4\nmesh m = { x: 2 }\nlayout l { a -> x }\n"
    text += "program p(x[a], w[a, n]) {\n  repeat n { x = x * w }\n  return x\n}\n"
    for notation in RENDERINGS:
        shown = render(placed(text), notation)
        assert "for n in range(3):\n" in shown, notation
        if notation != "scaling-book":
            assert "w[:, n]" in shown or "w_stack[:, n]" in shown, shown


# --- one notation each -------------------------------------------------------------------------


def test_sbp_is_positional() -> None:
    for found, (case, program, text) in zip(every_computed(), rendered("sbp"), strict=True):
        for var in found:
            parts = entries(var.value.type, program.mesh, var.placement)
            sbp = ", ".join(map(entry_text, parts))
            dims = ", ".join(map(str, var.value.type.shape))
            assert f": {var.value.type.dtype}[{dims}] ({sbp})" in text, case.name


def test_another_order_of_axes_is_written_with_ranks() -> None:
    text = "dim a = 8\nmesh m = { x: 2, y: 2 }\nlayout l { a -> (y, x) }\n"
    program = placed(f"{text}program p(t[a]) {{ return relu(t) }}\n")
    assert "t: f32[8] (S(0)/2, S(0)/1)" in render(program, "sbp")
    assert 'P(("y", "x"))' in render(program, "jax")
    for notation in ("dtensor", "oneflow"):
        assert f"{MARK}: held as [a@(x, y)], ours [a@(y, x)]" in render(program, notation)
    assert "{devices=[4]0,2,1,3}" in render(program, "gshard")


def test_the_scaling_book_has_a_letter_for_each() -> None:
    for _, _, text in rendered("scaling-book"):
        head = re.findall(r"^# (?:axes|dims): .*(?:\n# \S+=.*)*", text, re.MULTILINE)
        letters = re.findall(r"(\w+)=\w+:\d+", " ".join(head))
        assert len(letters) == len(set(letters))
        assert "U" not in letters


def test_the_scaling_book_says_what_is_unreduced() -> None:
    text = "dim b = 8, k = 4\nmesh m = { data: 2, tp: 2 }\nlayout l { b -> data, k -> tp }\n"
    text += "program p(x[b, k], w[k]) { return einsum(x, w -> [b]) }\n"
    shown = render(placed(text), "scaling-book")
    assert "[B_X] {U_Y} = x[B_X, K_Y] *_K w[K_Y]\n" in shown
    assert "AllReduce_Y(" in shown


def test_gshard_tiles_cover_every_device_once() -> None:
    for found, (_, program) in zip(every_computed(), every(), strict=True):
        for var in found:
            shape, order, replicated = tiles(var.value.type, var.placement, program.mesh)
            assert sorted(order) == list(range(program.mesh.devices))
            parts = shape[:-1] if replicated else shape
            sizes = zip(var.value.type.shape, parts, strict=True)
            assert tuple(size // n for size, n in sizes) == var.local.shape


# --- what other systems cannot hold ------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "marked"),
    [
        ("-p", {"jax", "oneflow"}),
        ("p * 2", set()),
        ("p + p", set()),
        ("p - p", {"jax"}),
        ("einsum(p, v -> [a, c])", {"jax"}),
        ("p[a -> b]", set()),
        ("cast(p, f64)", set()),
        ("cumsum[a](p)", {"jax", "dtensor", "oneflow"}),
    ],
)
def test_what_carries_partial_sums(expression: str, marked: set[str]) -> None:
    text = "dim a = 8, b = 8, k = 4, m = 4, c = 2\nmesh four = { x: 2 }\nlayout l { k -> x }\n"
    text += "program q(u[a, k], w[k, m], v[m, c]) {\n  p = einsum(u, w -> [a, m])\n"
    program = placed(f"{text}  z = {expression}\n  s = z * 3\n  return s\n}}\n", reduce="deferred")
    found = {name for name in CODE if MARK in render(program, name)}
    assert found == marked


def test_maxima_are_reduced_where_there_is_no_partial_maximum() -> None:
    text = "dim a = 8, b = 8\nmesh m = { x: 2 }\nlayout l { a -> x }\n"
    program = placed(f"{text}program p(t[a, b]) {{ return relu(max[a](t)) }}\n", reduce="deferred")
    assert 'Partial("max")' in "".join(
        DTensorText(program).spec(v, v.placement) for v in computed(program)
    )
    assert MARK not in render(program, "dtensor")
    for notation in ("jax", "oneflow"):
        assert MARK in render(program, notation)


@together(system=("jax", "oneflow"), name=sorted(TABLE))
def test_every_sample_has_a_text(name: str, system: str) -> None:
    opdef, known = load_all()[name], {*CODE[system].taken, "float"}
    for sample in opdef.samples:
        attrs = dict(sample.attrs)
        out = opdef.infer(sample.ins, attrs)[0]
        operands = tuple(f"x{i}" for i in range(len(sample.ins)))
        call = PeerCall(CODE[system].library, operands, {}, sample.ins, out, attrs, "()")
        text = call.write(spelling(name, system).text)
        nodes = [*ast.walk(ast.parse(text or ""))]
        read = {n.id for n in nodes if isinstance(n, ast.Name)}
        bound = {a.arg for n in nodes if isinstance(n, ast.Lambda) for a in n.args.args}
        assert read - bound <= known | {*operands, "x"}, text
        spelled = "grad" in name or name in ("unpick", "gather", "put")
        assert text or spelled or REASONS[system].get(name), text


def test_the_table_is_of_operators() -> None:
    said = (*SUMS.values(), *EXTREMES.values(), *BECOMES.values(), *REASONS.values())
    for names in (TABLE, *said):
        assert set(names) <= set(load_all()) - {"constant"}
    for name in load_all():
        own = lookup(name).spelled
        assert set(own) <= set(CODE)
        assert not own or name not in TABLE, f"{name} is spelled twice"


GRADIENTS_AND_UPDATES = {
    "jax": "grouped_outer sgd_update momentum_update adam_update step_update learning_rate",
    "oneflow": "grouped_outer gelu_grad layer_norm_grad rms_norm_grad cross_entropy_grad unpick "
    "sgd_update momentum_update adam_update step_update learning_rate",
}
"""Operators that are refused: these systems differentiate by themselves."""

SLIDING = "conv_kernel max_pool_at max_pool_grad max_pool_take window_grad"
"""What gradients of windows are made of."""

OTHERS = (
    "constant attention attention_lse attention_grad"
    " batch_norm_stats batch_norm_grad batch_norm_sums batch_norm_input_grad frozen_batch_norm"
)
"""Renderings have attention and batch norms in primitives."""

OF_WORKERS = "parts scatter_parts pack_signs unpack_signs pack_int8 unpack_int8 block_index"
"""What gradients are compressed with, by each device for itself."""

OF_SCALED = "f8_scale to_f8 f8_einsum"
"""What products in 8 bits are computed with, in training steps."""

OF_STAGES = "stage_index"
"""What tensors in the order of stages are read with: renderings have no stages."""

OF_GROUPS = "mask_padding"
"""What is read of rows of groups, which renderings do not have."""

UNSAID = {
    "dtensor": "linear_recurrence grouped_einsum",
    "jax": "grouped_einsum",
    "oneflow": "top_k sort put logaddexp linear_recurrence grouped_einsum",
}
"""Operators that a system does not say, or nobody has written there."""


@pytest.mark.parametrize("system", GRADIENTS_AND_UPDATES)
def test_what_is_refused(system: str) -> None:
    refused = {name for name in load_all() if spelling(name, system).text is None}
    inner = set(GRADIENTS_AND_UPDATES[system].split())
    drawn = {name for name, record in load_all().items() if record.surface.seeded}
    others = {*OTHERS.split(), *SLIDING.split(), *OF_WORKERS.split(), OF_STAGES, OF_GROUPS}
    others |= {*UNSAID[system].split(), *OF_SCALED.split()}
    assert refused == inner | others | drawn
    assert all(lookup(name).surface.items == "view" for name in inner)


@pytest.mark.parametrize("notation", CODE)
def test_every_name_of_a_text_is_defined(notation: str) -> None:
    refused: set[str] = set()
    for name, made, _ in operators.cases(4, "deferred"):
        try:
            tree = ast.parse(render(made.placed, notation), name)
        except DiagnosticError as error:
            (found,) = error.diagnostics
            assert found.code == "MD0910"
            refused.add(found.message.split("`")[1])
            continue
        names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
        made_here = {n.id for n in names if isinstance(n.ctx, ast.Store)} | {*dir(builtins)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                made_here |= {node.name, *(a.arg for a in node.args.args)}
            if isinstance(node, ast.Import | ast.ImportFrom):
                made_here |= {a.asname or a.name.split(".")[0] for a in node.names}
            if isinstance(node, ast.Lambda):
                made_here |= {a.arg for a in node.args.args}
        assert {n.id for n in names} <= made_here, name
    cut = {"upconv"} if notation == "oneflow" else set()
    assert refused == {*UNSAID.get(notation, "").split()} | cut


@pytest.mark.parametrize("notation", ["dtensor", "jax"])
def test_equal_positions_are_refused_with_the_reason(notation: str) -> None:
    text = "dim n = 8, l = 4\nprogram p(x[n], y[l], i[l]: i32) { return put[n = i](x, y) }\n"
    with pytest.raises(DiagnosticError, match="leaves open which of equal positions is written"):
        render(placed(text), notation)


@pytest.mark.parametrize("notation", CODE)
def test_an_update_is_refused(notation: str) -> None:
    text = "dim a = 4\nprogram p(x[a]) {\n  param w[a]\n  loss = sum(x * w)\n  return loss\n"
    program = placed(f"{text}  minimize loss with adam(lr=0.1)\n}}\n")
    with pytest.raises(DiagnosticError, match=f"`step_update` cannot be written as {notation} yet"):
        render(program, notation)


def test_an_operator_without_an_entry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(TABLE, "relu")
    program = placed("dim a = 4\nprogram p(x[a]) { return relu(x) }\n")
    with pytest.raises(DiagnosticError, match="MD0910: `relu` cannot be written as jax yet"):
        render(program, "jax")


# --- the command -------------------------------------------------------------------------------


def test_rendering_imports_no_tensors() -> None:
    code = (
        "import sys\nfrom meshdsl.cli.app import app\nfrom typer.testing import CliRunner\n"
        f"for name in {list(RENDERINGS)}:\n"
        "    done = CliRunner().invoke(app, ['render', 'examples/mlp.mdsl', '--as', name])\n"
        "    assert done.exit_code == 0, done.output\n"
        "heavy = {'torch', 'jax', 'oneflow'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_command_writes_a_file(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from meshdsl.cli.app import app

    target = tmp_path / "mlp.py"
    file = str(ROOT / "examples/mlp.mdsl")
    arguments = ["render", file, "--as", "jax", "--layout", "hybrid", "-o", str(target)]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    ast.parse(target.read_text(encoding="utf-8"))
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2
    assert "MD0503" in again.output
