"""meshdsl: tensor programs with named dimensions, compiled to one torch program per device.

The embedded language is this module: `import meshdsl as md`. Its names are looked up when they are
first used, so that the import itself costs nothing.

The grammar and the backends are beside this folder in a checkout and inside it in an installed
copy; they are `meshdsl.grammar` and `meshdsl.backends` in both.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from meshdsl.version import __version__ as __version__

if TYPE_CHECKING:
    from typing import Any

    from meshdsl.api.dims import (
        Dim,
        DType,
        bf16,
        bool,
        dim,
        dims,
        f16,
        f32,
        f64,
        i32,
        i64,
    )
    from meshdsl.api.errors import ProgramError, ProgramWarning
    from meshdsl.api.functions import Function, function
    from meshdsl.api.layouts import Layout, Mesh, layout, mesh
    from meshdsl.api.module import module
    from meshdsl.api.operator_packages import use
    from meshdsl.api.operators import *  # noqa: F403
    from meshdsl.api.plan import Plan
    from meshdsl.api.programs import Program, check, load, program, sizes
    from meshdsl.api.schedules import Schedule, schedule, scheduled
    from meshdsl.api.statements import grad, minimize, name, param, recompute, repeat, update
    from meshdsl.api.tensor import Tensor
    from meshdsl.api.timelines import ScheduleTimeline, SlicedTimeline, TimelineComparison
    from meshdsl.report.views.results import Comparison, Cost, Explanation, Outputs, Simulation

__all__ = [
    "Comparison", "Cost", "DType", "Dim", "Explanation", "Function", "Layout", "Mesh", "Outputs",
    "Plan", "Program", "ProgramError", "ProgramWarning", "Schedule", "ScheduleTimeline",
    "Simulation", "SlicedTimeline", "Tensor", "TimelineComparison", "bf16", "bool", "check", "dim",
    "dims", "f16", "f32", "f64", "function", "grad", "i32", "i64", "layout", "load", "mesh",
    "minimize", "module", "name", "param", "program", "recompute", "repeat", "schedule",
    "scheduled", "sizes", "update", "use",
]  # fmt: skip

_PUBLIC = {
    "dims": "Dim DType bf16 bool dim dims f16 f32 f64 i32 i64",
    "errors": "ProgramError ProgramWarning",
    "functions": "Function function",
    "layouts": "Layout Mesh layout mesh",
    "module": "module",
    "operator_packages": "use",
    "plan": "Comparison Cost Explanation Outputs Plan Simulation",
    "programs": "Program check load program sizes",
    "schedules": "Schedule schedule scheduled",
    "statements": "grad minimize name param recompute repeat update",
    "tensor": "Tensor",
    "timelines": "ScheduleTimeline SlicedTimeline TimelineComparison",
}
"""The names of the embedded language, by the module in `meshdsl/api` that has them."""

_HOME = {name: module for module, names in _PUBLIC.items() for name in names.split()}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """A name of the embedded language, else an operator of the registry."""
        if name.startswith("__"):
            raise AttributeError(name)
        from importlib import import_module

        home = import_module(f"meshdsl.api.{_HOME.get(name, 'operators')}")
        attribute = globals()[name] = getattr(home, name)
        return attribute

    class _Package(ModuleType):
        """This module, in which a name of the language is no subpackage: `schedule` is both.

        Importing `meshdsl.schedule` would set it to the folder.
        """

        def __setattr__(self, name: str, value: object) -> None:
            if name not in _HOME or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package


def load_ipython_extension(shell: "Any") -> None:
    """`%load_ext meshdsl`: `%%mdsl` cells and `%mdsl` lines (docs/notebooks.md)."""
    from meshdsl.notebook.magic import load_ipython_extension

    load_ipython_extension(shell)


def __dir__() -> list[str]:
    from meshdsl.api.signatures import names

    return sorted({*globals(), *_HOME, *names()})
