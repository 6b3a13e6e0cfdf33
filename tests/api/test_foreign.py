"""What other libraries write about tensors: refused with the line of Python to write instead."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import meshdsl as md
from meshdsl.backends.engines.reference import run_reference
from tests.named.foreign import POSITIONS, ROWS, SHAPES, SIZES, arrays, check_meaning, nested
from tests.project import ROOT

HEAD = (
    "import numpy as np, torch\nimport meshdsl as md\nT = md.Tensor\n"
    f"{', '.join(SIZES)} = md.dims({', '.join(f'{n}={s}' for n, s in SIZES.items())})\n"
)
PROGRAM = (
    HEAD + "@md.program\ndef p(x: T[batch, io], z: T[batch, io], w: T[io, hidden], v: T[hidden], "
    "s: T[batch, seq, io], ids: md.i32[batch]):\n    {line}\n    return y\np.named()\n"
)
PYTHON = [row for row in ROWS if row.python]
WRITE = re.compile(r"write `([^`]+)`")
_NAMES = iter(range(10**6))


def run(text: str) -> dict[str, Any]:
    """Execute a Python file; its names."""
    name, scope = f"<foreign {next(_NAMES)}>", {"__name__": "foreign"}
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), scope)
    return scope


def refused(text: str) -> md.ProgramError:
    with pytest.raises(md.ProgramError) as raised:
        run(text)
    return raised.value


def line_of(error: md.ProgramError) -> str:
    """The line that the help of the only diagnostic has to write."""
    (diagnostic,) = error.diagnostics
    found = WRITE.match(diagnostic.help or "")
    assert found is not None, diagnostic.help
    return found[1]


@pytest.mark.parametrize("row", PYTHON, ids=lambda row: row.python)
def test_the_line_in_the_help_runs_and_means_the_same(row: Any) -> None:
    error = refused(PROGRAM.format(line=row.python))
    assert error.diagnostics[0].code == row.code or "md.einsum" in row.python
    line = line_of(error)
    assert line.startswith("y = ")
    check_meaning(row, run(PROGRAM.format(line=line))["p"].named())
    (fix,) = error.diagnostics[0].fixes
    (edit,) = fix.edits
    mended = row.python.replace(edit.span.text, edit.text)
    assert mended == line


LINES = {
    "y = x if x > 0 else z": "y = md.where(x > 0, x, z)",
    "if x > 0: y = x\n    else: y = z": "y = md.where(x > 0, x, z)",
    "y = md.relu(x) * ((x > 0) and (z > 0))": "y = md.relu(x) * ((x > 0) & (z > 0))",
    "y = not (x > 0)": "y = ~(x > 0)",
    "y = 0 < x < 1": "y = (0 < x) & (x < 1)",
    "y = x * len(x)": "y = x * batch",
    "y = md.matmul(x, w)": "y = md.einsum(x, w, out=[batch, hidden])",
    "y = x; y @= w": "y = x; y = md.einsum(y, w, out=[batch, hidden])",
    "y = x[0]": "y = x.pick(batch, 0)",
    "y = w[ids]": "y = w.gather(io, ids)",
    "y = torch.relu(x)": "y = md.relu(x)",
    "y = np.exp(x)": "y = md.exp(x)",
    "y = md.softmax(x, 1)": "y = md.softmax[io](x)",
    "y = md.sum(x, dim=io)": "y = md.sum[io](x)",
    "y = torch.floor_divide(2, x)": "y = 2 // x",
    "y = x.split(2, 1)": 'y = x[io >> (md.dim("pieces", 3), md.dim("part", 2))]',
    "y = md.sum(v.unsqueeze(0)) * x": "y = md.sum(v) * x",
}


@pytest.mark.parametrize(("line", "written"), LINES.items())
def test_lines(line: str, written: str) -> None:
    assert line_of(refused(PROGRAM.format(line=line))) == written


OPEN = {
    "y = x + torch.ones(6)": "as inputs",
    "y = torch.ones(3, 6) @ w": "as inputs",
    "y = [row for row in x]": "md.repeat",
    "y = x * float(x)": "return the tensor",
    "y = x.reshape(7, 7)": "split by `x[model >> (heads, key)]`",
    "y = x.topk(2)": "`md.top_k[io >> k](x)`",
    "y = x.index_copy(1, ids, z)": "`md.put[io](x, new, ids)`",
    "y = x[batch]": "`x.pick(a, 0)`",
    "y = x.squeeze(unknown=1, other=x).matmul()": "md.einsum(x, w, out=[batch, hidden])",
}


@pytest.mark.parametrize(("line", "wanted"), OPEN.items())
def test_what_stays_open_has_a_form_to_follow(line: str, wanted: str) -> None:
    (diagnostic,) = refused(PROGRAM.format(line=line)).diagnostics
    assert wanted in (diagnostic.help or "") or line.startswith("y = x.squeeze")


def test_the_traceback_has_the_users_frames_alone() -> None:
    error = refused(PROGRAM.format(line="y = x @ w"))
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if Path(f.filename).is_relative_to(ROOT / "meshdsl")]
    assert [f.name for f in ours] == ["wrapper"]
    assert "p" in [f.name for f in frames]


def test_members_of_others_are_not_there() -> None:
    line = "y = x + (hasattr(x, 'T') or hasattr(x, 'foo') or hasattr(x, '__len__') - 1)"
    assert run(PROGRAM.format(line=line))["p"].outputs == ("y",)
    with pytest.raises(AttributeError, match="a tensor has no `foo`"):
        run(PROGRAM.format(line="y = x.foo()"))


CALLS = HEAD + "@md.program\ndef p(x: {type}):\n    y = x + 1\n    return y\n{line}\n"


def test_a_program_that_is_called() -> None:
    error = refused(CALLS.format(type="T[batch, io]", line="z = p(np.ones((3, 6), np.float32))"))
    assert error.diagnostics[0].code == "MD0822"
    scope = run(CALLS.format(type="T[batch, io]", line=line_of(error)))
    assert scope["z"].y.shape == (3, 6)


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
def test_dims_in_a_string(future: str) -> None:
    error = refused(future + CALLS.format(type='"batch io"', line="p.named()"))
    assert error.diagnostics[0].code == "MD0823"
    type_ = line_of(error).removeprefix("x: ")
    assert run(future + CALLS.format(type=type_, line="p.named()"))["p"].inputs


def test_positions_are_counted_as_numpy_counts_them() -> None:
    head = "import numpy as np, torch\nimport meshdsl as md\nT = md.Tensor\n"
    head += "".join(f'{n} = md.dim("{n}", {s})\n' for n, s in POSITIONS.items())
    inputs = ", ".join(f"{n}: T[{', '.join(dims)}]" for n, dims in SHAPES.items())
    compared = 0
    for seed in range(60):
        line = f"r = {nested(seed)}"
        try:
            with np.errstate(invalid="ignore"):  # BLAS may raise the flag beside small matrices
                wanted = eval(line[4:], {"np": np, **arrays()})
        except (ValueError, IndexError):
            continue  # numpy has no such value
        for _ in range(12):
            try:
                text = f"{head}@md.program\ndef p({inputs}):\n    {line}\n    return r\np.named()\n"
                found = run(text)["p"].named()
            except md.ProgramError as error:
                help = WRITE.match(error.diagnostics[0].help or "")
                if not error.diagnostics[0].fixes or help is None:
                    break
                line = help[1]
                continue
            (value,) = run_reference(found, arrays(), {}).values()
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5, err_msg=line)
            compared += 1
            break
    assert compared > 20


@pytest.mark.parametrize("line", ["x.max(1)[0]", "x.unsqueeze(0)[:, 1]", "x.chunk(3, 1)[0]"])
def test_what_positions_count_in_other_libraries_alone_is_left_open(line: str) -> None:
    (error,) = refused(PROGRAM.format(line=f"y = {line}")).diagnostics
    assert not error.fixes
