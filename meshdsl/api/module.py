"""`md.module`: a program as a `torch.nn.Module`, for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshdsl.api.dims import check_seed
from meshdsl.api.errors import told
from meshdsl.diagnostics import fail
from meshdsl.ir.types import DTYPES
from meshdsl.pipeline import Options

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from meshdsl.api.programs import Program
    from meshdsl.backends.module.program_module import ProgramModule


@told
def module(
    program: Program | str | Path,
    device_mesh: DeviceMesh | None = None,
    layout: Any = None,
    *,
    reduce: str = "optimal",
    dtype: str | None = None,
    seed: int = 0,
    params: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
) -> ProgramModule:
    """A program of Python, or of a `.mdsl` file, as a module on `device_mesh`.

    The dims of the DeviceMesh are the axes that the layout names; without a mesh, there is one
    device. `params` are whole tensors, arrays or DTensors; missing ones are drawn from the seed,
    the same under every mesh and layout. `dims` are other sizes for those of a file.

    Raises:
        ProgramError: the mesh does not fit the layout (MD0560), the layout the program (MD03xx), or
            values the parameters (MD0563).
    """
    from meshdsl.api.layouts import ArgumentPlace, with_layout
    from meshdsl.api.programs import load
    from meshdsl.api.source_location import here
    from meshdsl.backends.module.compiler import compiler
    from meshdsl.backends.module.mesh import MeshRanks
    from meshdsl.backends.module.program_module import ProgramModule

    if dtype is not None and (dtype not in DTYPES or DTYPES[dtype].kind != "float"):
        fail("MD0602", f"`{dtype}` is no float type", help="there are f32, f64, bf16 and f16")
    ranks = MeshRanks(device_mesh)
    loaded = load(program, dims=dims) if isinstance(program, str | Path) else program
    place = ArgumentPlace(here(), "layout", 2)
    declarations, name = with_layout(loaded.declarations, layout, place)
    options = Options(program=loaded.name, layout=name, reduce=reduce, dtype=dtype, evaluate=True)
    compilation = loaded.compilation(declarations, options)
    return ProgramModule(compiler(compilation, ranks.mesh), ranks, check_seed(seed), params)
