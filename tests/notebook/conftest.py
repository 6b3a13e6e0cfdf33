"""A shell of IPython in this process, with the extension loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

import meshdsl as md
from meshdsl import load_ipython_extension

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

BASE = """
dim batch = 8, io = 16
dim hidden = 4 * io
mesh square = { rows: 2, cols: 2 }
layout hybrid { batch -> rows, hidden -> cols }
"""
MLP = """
program mlp(x[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  h = relu(einsum(x, w -> [batch, hidden]))
  y = einsum(h, v -> [batch, io])
  return y
}
"""


class Notebook:
    """A shell with the extension loaded."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        gc.freeze()  # else a reset looks for garbage in all that thousands of tests have made
        shell.reset()
        load_ipython_extension(shell)

    def cell(self, text: str, line: str = "") -> Any:
        """The result of a `%%mdsl` cell; its error is raised here."""
        return self.python(f"%%mdsl {line}\n{text.strip()}\n")

    def line(self, text: str) -> Any:
        """The result of a `%mdsl` line."""
        return self.python(f"%mdsl {text}")

    def python(self, text: str) -> Any:
        """The result of a cell of Python."""
        done = self.shell.run_cell(text, store_history=True, silent=False)
        if done.error_in_exec is not None:
            raise done.error_in_exec
        assert done.error_before_exec is None
        return done.result

    def codes(self, text: str, line: str = "") -> list[str]:
        """The codes of what is wrong with a cell."""
        with pytest.raises(md.ProgramError) as told:
            self.cell(text, line)
        return [d.code for d in told.value.diagnostics]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InteractiveShell]:
    """The shell of this process; nothing of its history is kept."""
    folder = str(tmp_path_factory.mktemp("ipython"))
    pytest.importorskip("IPython", reason="IPython is missing (`pip install meshdsl[notebook]`)")
    from IPython.core.interactiveshell import InteractiveShell
    from traitlets.config import Config

    made = InteractiveShell.instance(
        ipython_dir=folder, config=Config(HistoryManager={"enabled": False})
    )
    yield made
    InteractiveShell.clear_instance()


@pytest.fixture
def notebook(shell: InteractiveShell) -> Notebook:
    """A notebook without cells."""
    return Notebook(shell)


@pytest.fixture
def defined(notebook: Notebook) -> Notebook:
    """With the program and its layout in two cells."""
    notebook.cell(BASE)
    notebook.cell(MLP)
    return notebook
