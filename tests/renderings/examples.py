"""Every example under every layout and `sbp` block it declares, small, on a few devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshdsl.backends.draws import draws
from meshdsl.backends.engines.reference import made_up, run_reference, whole_specs
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.named.ir import NamedProgram
from meshdsl.pipeline import Compilation, Options, compile_source, front
from meshdsl.placed.layout import mesh_of
from tests.project import ROOT, examples

UNWRITTEN = ("dlrm", "clip", "mixtral", "mamba2", "linear_attention", "moe_dropless", "resnet50")
"""Examples that some system cannot write.

A gather of tables, an order of equal elements, a recurrence, products of groups; in `resnet50`
torch fails on a view of a DTensor whose rows are split.
"""

FILES = [path for path in examples() if path.stem not in UNWRITTEN]

_WIDE = {"batch": 4, "model": 8, "heads": 4, "key": 4, "hidden": 8}
_BLOCK = {**_WIDE, "seq": 4}
_SEQ2SEQ = {**_WIDE, "target": 4, "vocab": 8, "layers": 2}
_GROUPED = {
    "batch": 4,
    "seq": 4,
    "model": 8,
    "kv": 4,
    "half": 2,
    "hidden": 8,
    "vocab": 8,
    "layers": 2,
}
SIZES: dict[str, dict[str, int]] = {
    "alexnet": {"n": 4, "tower": 4, "classes": 8},
    "block": _BLOCK,
    "digits": {"batch": 8, "pixels": 16, "hidden": 8},
    "encdec": {**_WIDE, "source": 4, "target": 4, "vocab": 8, "layers": 2},
    "lm": {**_BLOCK, "vocab": 8, "layers": 2},
    "gpt2": {**_BLOCK, "context": 4, "vocab": 8, "layers": 2},
    "bert": {**_BLOCK, "context": 4, "vocab": 8, "layers": 2},
    "few_kv_heads": {
        "batch": 4,
        "seq": 4,
        "model": 8,
        "kv": 2,
        "group": 8,
        "key": 4,
        "hidden": 8,
        "vocab": 8,
        "layers": 2,
    },
    "llama": {**_GROUPED, "group": 1},
    "llama_lora": {**_GROUPED, "group": 1, "rank": 2},
    "llama_dpo": {**_GROUPED, "group": 1, "rank": 2},
    "gemma2": {**_GROUPED, "group": 1, "window": 2},
    "t5": {**_SEQ2SEQ, "source": 4, "buckets": 8, "reach": 4},
    "whisper": {**_SEQ2SEQ, "mel": 4, "time": 8, "context": 4, "decoders": 2},
    "llama3": {
        "batch": 4,
        "seq": 4,
        "model": 8,
        "kv": 4,
        "group": 2,
        "key": 4,
        "hidden": 8,
        "vocab": 8,
        "layers": 2,
    },
    "matmul": {"rows": 8, "inner": 16, "cols": 8},
    "resnet": {"batch": 4, "c": 4, "c2": 4},
    "unet": {"n": 4, "h": 64, "w": 16, "a": 2},
    "nmt": {"batch": 4, "source": 2, "target": 2, "vocab": 8, "model": 4, "hidden": 8},
    "transformer": {**_BLOCK, "vocab": 8, "layers": 2},
    "vgg": {"n": 4, "classes": 8},
    "vit": {**_WIDE, "height": 4, "width": 4, "rows": 2, "columns": 2, "classes": 4, "layers": 2},
}
"""Sizes that are small, and that every layout divides."""

LARGEST = 1 << 20
"""The most elements of a tensor: `SIZES` has smaller ones for an example with more."""


@dataclass(frozen=True, slots=True)
class Case:
    """An example under a layout, or under an `sbp` block."""

    file: Path
    mesh: str
    layout: str | None
    sbp: str | None
    reduce: str

    @property
    def name(self) -> str:
        """`mlp, hybrid, on { rows: 2, cols: 2 } with optimal`."""
        return f"{self.file.stem}, {self.layout or self.sbp}, on {self.mesh} with {self.reduce}"

    def compiled(self) -> Compilation:
        """The stages up to the placed program, of one that is trained its forward pass."""
        options = Options(
            mesh=self.mesh,
            layout=self.layout,
            sbp=self.sbp,
            reduce=self.reduce,
            set_dims=SIZES.get(self.file.stem, {}),
            evaluate=True,
            fused=False,
        )
        name = self.file.relative_to(ROOT).as_posix()
        source = Source(name, self.file.read_text(encoding="utf-8"))
        return compile_source(source, options, Diagnostics(), "placed")


def cases(devices: int, reduce: str) -> Iterator[Case]:
    """The cases on so many devices; layouts that do not fit a mesh are left out."""
    for file in FILES:
        source = Source(file.name, file.read_text(encoding="utf-8"))
        declared = front(source, {}, Diagnostics())
        names = {mesh_of(node, declared).names for node in declared.meshes.values()}
        for mesh in sorted({m for axes in names for m in _meshes(axes, devices)}):
            for layout in declared.layouts:
                yield Case(file, mesh, layout, None, reduce)
            for sbp in declared.sbps:
                yield Case(file, mesh, None, sbp, reduce)


def _meshes(axes: tuple[str, ...], devices: int) -> Iterator[str]:
    """Meshes of so many devices over one or two axes, as the command line takes them."""
    sizes: dict[tuple[int, int], list[tuple[int, ...]]] = {
        (1, 2): [(2,)],
        (1, 4): [(4,)],
        (2, 2): [(2, 1), (1, 2)],
        (2, 4): [(2, 2)],
    }
    for shape in sizes.get((len(axes), devices), []):
        yield ",".join(f"{a}:{n}" for a, n in zip(axes, shape, strict=True))


def accepted(found: Iterable[Case]) -> Iterator[tuple[Case, Compilation]]:
    """Those of the cases that the compiler accepts, with what it makes of them."""
    for case in found:
        made = _compiled(case)
        if made is not None:
            most = max(tensor.value.type.elements for tensor in made.placed.tensors)
            assert most <= LARGEST, f"{case.name} has {most:,} elements: SIZES lacks it"
            yield case, made


def _compiled(case: Case) -> Compilation | None:
    """None where the layout does not fit the mesh."""
    try:
        return case.compiled()
    except DiagnosticError as error:
        if all(d.code.startswith("MD03") for d in error.diagnostics):
            return None
        raise


def values(program: NamedProgram) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Made-up inputs and parameters, and the reference's outputs."""
    inputs, params = (made_up(specs) for specs in whole_specs(program, draws(program)))
    return inputs, params, run_reference(program, inputs, params)
