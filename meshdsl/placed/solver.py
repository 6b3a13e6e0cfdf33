"""HiGHS behind one interface: its Python package, or its WebAssembly where Python is in a browser.

HiGHS (Huangfu and Hall, 2018) solves the relaxation by the simplex method, and by branch and bound
where variables have to be whole numbers. Both builds are the same version with the same options.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from meshdsl.records import dataclass

if TYPE_CHECKING:
    import highspy

SOLVER = "highspy 1.15"
"""The solver and its version: another one may find another plan of the same cost."""

MOST_NODES = 200
"""Nodes of the branch and bound tree: nearly every program is solved without one."""

MOST_ITERATIONS = 50_000
"""Iterations of the simplex method on the relaxation."""

Status: TypeAlias = Literal["optimal", "infeasible", "unfinished"]

OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "random_seed": 0,
    "presolve": "off",  # choices of one option are constants already
    "simplex_iteration_limit": MOST_ITERATIONS,
    "mip_rel_gap": 0.0,
    "mip_abs_gap": 1e-6,
    "mip_max_nodes": MOST_NODES,
}
ONE_THREAD: dict[str, int | str] = {"threads": 1, "parallel": "off"}
"""Options of the Python package alone: WebAssembly has one thread."""


@dataclass(frozen=True, slots=True)
class LinearProgram:
    """Least costs of variables between 0 and 1 under constraints, row by row.

    Row r has the coefficients `values[starts[r]:starts[r + 1]]` of the variables in `indices`; its
    sum is between `lows[r]` and `highs[r]`, which may be infinite.
    """

    costs: Sequence[float]
    lows: Sequence[float]
    highs: Sequence[float]
    starts: Sequence[int]
    indices: Sequence[int]
    values: Sequence[float]


class Solver(Protocol):
    """A solver that has a program."""

    def run(self) -> tuple[Status, Sequence[float]]:
        """Solve the program; the values of the variables count only where the status is optimal."""

    def restrict(self, whole: Sequence[bool]) -> None:
        """Let these variables take whole numbers alone."""


def solving(program: LinearProgram) -> contextlib.AbstractContextManager[Solver]:
    """A solver of the program, to be left when it is no longer needed."""
    if sys.platform == "emscripten":
        return _in_the_browser(program)
    return contextlib.nullcontext(NativeSolver(program))


# --- the Python package ----------------------------------------------------------------------


class NativeSolver:
    """HiGHS by `highspy`."""

    def __init__(self, program: LinearProgram) -> None:
        self._highs = _highs()
        for option, value in {**OPTIONS, **ONE_THREAD}.items():
            self._highs.setOptionValue(option, value)
        self._highs.passModel(_model(program))

    def run(self) -> tuple[Status, Sequence[float]]:
        """Solve the program."""
        import highspy

        self._highs.run()
        statuses: dict[highspy.HighsModelStatus, Status] = {
            highspy.HighsModelStatus.kOptimal: "optimal",
            highspy.HighsModelStatus.kInfeasible: "infeasible",
        }
        status = statuses.get(self._highs.getModelStatus(), "unfinished")
        return status, self._highs.getSolution().col_value

    def restrict(self, whole: Sequence[bool]) -> None:
        """Let these variables take whole numbers alone."""
        import numpy as np

        self._highs.changeColsIntegrality(
            len(whole), np.arange(len(whole)), np.array(whole, np.uint8)
        )


def _model(program: LinearProgram) -> highspy.HighsLp:
    import highspy
    import numpy as np

    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(program.costs), len(program.lows)
    model.col_cost_ = np.array(program.costs)
    model.col_lower_, model.col_upper_ = np.zeros(model.num_col_), np.ones(model.num_col_)
    model.row_lower_, model.row_upper_ = np.array(program.lows), np.array(program.highs)
    matrix = model.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.array(program.starts)
    matrix.index_ = np.array(program.indices)
    matrix.value_ = np.array(program.values)
    return model


_FIRST = threading.Lock()
_first_is_made = False


def _highs() -> highspy.Highs:
    """A new solver.

    The first one of a process announces itself on the standard output, in some versions, before any
    option can be set that says not to.
    """
    global _first_is_made
    import highspy

    with _FIRST:
        if not _first_is_made:
            with _silenced():
                highspy.Highs()  # type: ignore[no-untyped-call]
            _first_is_made = True
    return highspy.Highs()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _silenced() -> Iterator[None]:
    """Whatever is written to the descriptors 1 and 2, by C code too, is lost.

    Those that are closed are closed again. It holds for all threads: what is inside is short.
    """
    import ctypes

    def flush() -> None:
        ctypes.CDLL(None).fflush(None)  # what C code has yet to write

    flush()
    copies = {number: _copied(number) for number in (1, 2)}
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # it may get a number that is closed
    try:
        for number in copies:
            os.dup2(nowhere, number)
        yield
        flush()
    finally:
        if copies.get(nowhere, 0) is not None:
            os.close(nowhere)
        for number, copy in copies.items():
            if copy is None:
                os.close(number)
            else:
                os.dup2(copy, number)
                os.close(copy)


def _copied(number: int) -> int | None:
    """A copy of a descriptor that is no standard stream; None where it is closed."""
    try:
        return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
    except OSError:
        return None


# --- WebAssembly -----------------------------------------------------------------------------


@contextlib.contextmanager
def _in_the_browser(program: LinearProgram) -> Iterator[Solver]:
    """A solver in the memory of HiGHS, which is given back at the end.

    The module `highs` is the JavaScript of HiGHS, which `docs/browser/worker.mjs` has loaded.
    """
    import highs

    model = highs.createModel()
    try:
        yield BrowserSolver(highs, model, program)
    finally:
        model.dispose()


class BrowserSolver:
    """HiGHS by its JavaScript."""

    def __init__(self, highs: Any, model: Any, program: LinearProgram) -> None:
        self._model = model
        statuses = highs.constants.modelStatus
        self._statuses: dict[int, Status] = {
            statuses.optimal: "optimal",
            statuses.infeasible: "infeasible",
        }
        model.options.set(_object(OPTIONS))
        count, rows = len(program.costs), len(program.lows)
        matrix = {
            "format": "csr",
            "numRows": rows,
            "numCols": count,
            "starts": _numbers("i", program.starts),
            "indices": _numbers("i", program.indices),
            "values": _numbers("d", program.values),
        }
        data = {
            "numCols": count,
            "numRows": rows,
            "colCost": _numbers("d", program.costs),
            "colLower": _numbers("d", [0.0] * count),
            "colUpper": _numbers("d", [1.0] * count),
            "rowLower": _numbers("d", program.lows),
            "rowUpper": _numbers("d", program.highs),
            "matrix": _object(matrix),
        }
        model.passModel(_object(data))

    def run(self) -> tuple[Status, Sequence[float]]:
        """Solve the program."""
        self._model.run()
        status = self._statuses.get(self._model.getModelStatus(), "unfinished")
        return status, list(self._model.getSolution().colValue.to_py())

    def restrict(self, whole: Sequence[bool]) -> None:
        """Let these variables take whole numbers alone."""
        columns = {"kind": "range", "from": 0, "to": len(whole) - 1}
        self._model.changeColsIntegrality(_object(columns), _numbers("i", whole))


def _object(entries: Mapping[str, object]) -> Any:
    """An object of JavaScript."""
    from js import Object
    from pyodide.ffi import to_js

    return to_js(entries, dict_converter=Object.fromEntries)


def _numbers(kind: str, numbers: Sequence[float]) -> Any:
    """A typed array of JavaScript: `d` of 64-bit floats, `i` of 32-bit integers."""
    from pyodide.ffi import to_js

    return to_js(array(kind, numbers))
