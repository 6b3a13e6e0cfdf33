"""Pasted definitions are self-contained, complete, and the same every time."""

from __future__ import annotations

import ast
import builtins
import json
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.torch import inliner
from meshdsl.backends.torch.inliner import SupportDefinitions, defined, merge_imports, paste
from meshdsl.diagnostics import DiagnosticError
from tests.compiling import compile_text
from tests.together import together

STANDARD = sorted(defined())


def bound(tree):
    """Every name that a program binds anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[0]
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


@together(name=STANDARD)
def test_every_definition_comes_with_all_it_needs(name):
    pasted = paste({name})
    assert pasted.names[-1] == name or name in pasted.names
    tree = ast.parse("\n".join([*pasted.imports, *pasted.texts]))
    known = {*bound(tree), *dir(builtins), "np", "torch", "dist"}
    used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    assert not used - known
    assert "meshdsl" not in "\n".join(pasted.imports)
    assert "type: ignore" not in "\n".join(pasted.texts)


def test_names_are_found_without_parsing():
    trees = [ast.parse(text) for _, text in inliner._texts()]
    nodes = [node for tree in trees for node in tree.body]
    assert inliner.defined() == {n for node in nodes for n in inliner._defined(node)}
    assert inliner.imported() == {n for t in trees for n, line in inliner._imported(t) if line}


def test_only_modules_that_are_asked_for_are_parsed():
    known = SupportDefinitions()
    assert known["Spec"].name == "Spec"
    assert "all_reduce" not in known
    assert set(known) < defined()


def test_only_what_is_asked_for_is_pasted():
    every = ("all_reduce", "as_numbers", "as_sent", "as_received", "reduce_op")
    assert paste({"all_reduce"}).names == every
    assert paste({"Spec"}).names == ("Spec",)
    assert paste({"Spec"}).imports == ("from typing import Any, NamedTuple",)
    assert paste({"all_reduce"}, without={"reduce_op"}).names == every[:-1]


def test_pasted_text_can_be_executed_in_its_order():
    pasted = paste(set(STANDARD))
    assert set(pasted.names) == defined()
    assert len(set(pasted.names)) == len(pasted.names)
    head = ["import numpy as np", "import torch", "import torch.distributed as dist"]
    code = "\n".join([*pasted.imports, *head, *pasted.texts])
    exec(compile(code, "<pasted>", "exec", dont_inherit=True), {"__name__": "pasted"})


def test_the_order_does_not_depend_on_hashing():
    code = (
        "from meshdsl.backends.torch.inliner import paste\n"
        "print(paste({'main', 'drawn_part', 'all_to_all'}))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
        ).stdout
        for seed in (1, 2)
    }
    assert len(texts) == 1


def test_unknown_names_are_our_mistake():
    with pytest.raises(AssertionError, match="has no nonsense"):
        paste({"nonsense"})


def test_imports_are_merged():
    lines = {"from typing import Any", "import os", "from typing import IO", "import json"}
    assert merge_imports(lines) == ("import json", "import os", "from typing import IO, Any")


def test_a_program_runs_where_there_is_no_meshdsl(emit, tmp_path):
    text = emit(
        "return {'y': inputs['x'] @ inputs['x'].T, 'n': inputs['x'].sum()}",
        {"r": 1},
        inputs="{'x': Spec('f32', {'a': 2, 'b': 3}, {}, ('ones',))}",
        outputs="{'y': Spec('f32', {'a': 2, 'c': 2}, {}), 'n': Spec('f32', {}, {})}",
    )
    (tmp_path / "prog.py").write_text(text)
    block = "import runpy, sys; sys.modules['meshdsl'] = None; sys.argv = sys.argv[1:]; "
    run = "runpy.run_path('prog.py', run_name='__main__')"
    result = subprocess.run(
        [sys.executable, "-I", "-c", block + run, "prog.py", "--out", "out.npz"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "y: f32[2, 2]\nn: f32[] = 6.0\n"
    with np.load(tmp_path / "out.npz") as archive:
        np.testing.assert_array_equal(archive["y"], np.full((2, 2), 3))


STEP = """
dim batch = 4, io = 3
program line(x[batch, io], y[batch]) {
  param w[io]
  loss = mean((einsum(x, w -> [batch]) - y)^2)
  return loss
  minimize loss with momentum(lr=0.1)
}
"""


COUNTER = """
dim a = 4
program counter(x[a]) {
  param w[a]
  param seen[a] = ones()
  y = x * w + seen
  seen := seen + x
  return y
}
"""


@pytest.mark.parametrize("kept", [("w",), ("w", "seen"), ("seen",)])
def test_a_state_that_a_file_lacks_begins_anew_and_a_parameter_does_not(kept, forks, tmp_path):
    """As `meshdsl run` has it."""
    made = compile_text(COUNTER, layout=None, mesh="r:1")
    arrays: Any = {name: np.array([3, 1, 4, 1], "<f4") for name in kept}
    (tmp_path / "prog.py").write_text(made.text)
    np.savez(tmp_path / "p.npz", **arrays)
    command = ["prog.py", "--params", "p.npz", "--updated", "new.npz"]
    with forks.ranks(1, command, tmp_path, tmp_path / "log") as leader:
        code = leader.wait()
    given = InputSource(params=str(tmp_path / "p.npz"))
    if "w" not in kept:
        with pytest.raises(DiagnosticError):
            run(made, "local", given)
        assert code == 2
        return
    expected = run(made, "local", given).updated
    with np.load(tmp_path / "new.npz") as found:
        np.testing.assert_array_equal(found["seen"], expected["seen"])


def test_a_training_step_reads_safetensors_and_writes_what_it_updates(forks, tmp_path):
    w = np.array([1, 2, 3], "<f4")
    header = json.dumps({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}}).encode()
    data = len(header).to_bytes(8, "little") + header + w.tobytes()
    (tmp_path / "w.safetensors").write_bytes(data)
    text = compile_text(STEP, layout=None, mesh="r:1").text
    (tmp_path / "prog.py").write_text(text)
    command = ["prog.py", "--params", "w.safetensors", "--updated", "new.npz"]
    with forks.ranks(1, command, tmp_path, tmp_path / "log") as leader:
        assert leader.wait() == 0
    expected = run_local(text, params={"w": w}).updated
    with np.load(tmp_path / "new.npz") as found:
        assert set(found) == set(expected) == {"w", "w.v", "step"}
        for name, array in expected.items():
            np.testing.assert_array_equal(found[name], array)
