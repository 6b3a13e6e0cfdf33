"""The parameters that `--params` names, in any form: a file, a checkpoint, a model of others."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from meshdsl.backends.runtime.array_files import read_arrays
from meshdsl.backends.runtime.mapped_arrays import SUFFIX, mapped_text
from meshdsl.backends.runtime.user_files import Refused
from meshdsl.backends.weights.model_files import ModelRefused, ModelTensor, is_model, tensors_of
from meshdsl.backends.weights.reading import Mapped, mapped_params
from meshdsl.diagnostics import Diagnostics, advice, fail
from meshdsl.named.weights import WeightMap, weight_map
from meshdsl.option_edits import give, known_values, one_of, refuse
from meshdsl.pipeline import Compilation
from meshdsl.syntax import ast

WRITTEN_DTYPES = ("f64", "f32", "bf16")
"""What the floats of a model can be written as: dtypes of the range of f32 at least."""


def is_of_others(path: str, made: Compilation, names: Collection[str]) -> bool:
    """Whether `--params` names the model of another program, read by a block of weights.

    A .safetensors file is one where none of its keys is one of the parameters `names`.
    """
    if is_model(path):
        return True
    if not path.endswith(".safetensors") or not made.declarations.weights:
        return False
    try:
        return not any(key in names for key in read_arrays(path))
    except Refused:
        return False


@contextlib.contextmanager
def params_file(
    path: str | None,
    made: Compilation,
    names: Collection[str],
    block: str | None,
    diagnostics: Diagnostics,
) -> Iterator[str | None]:
    """The path of a file that `read_arrays` reads the parameters `names` from.

    Of another program's model it is a table of where they lie, by the `block` of weights of that
    name (the only one for None); of a checkpoint a file of them. Any other file stands for itself.
    Raises MD0550, MD0552 and MD0553 for models, else as `as_params`.
    """
    if path is None:
        yield None
    elif is_of_others(path, made, names):
        with tempfile.TemporaryDirectory(prefix="meshdsl-", ignore_cleanup_errors=True) as folder:
            mapped = mapped_model(path, made, block)
            diagnostics.add(*mapped.notes)
            file = os.path.join(folder, f"params{SUFFIX}")
            Path(file).write_text(mapped_text(mapped.arrays), encoding="utf-8")
            yield file
    elif not os.path.isdir(path):
        yield path
    else:
        from meshdsl.backends.train.exported_params import as_params  # needs torch

        with as_params(path, names) as file_of_checkpoint:
            yield file_of_checkpoint


def mapped_model(path: str, made: Compilation, block: str | None) -> Mapped:
    """The parameters of a program in a model. Raises MD0550, MD0552, MD0553, MD0145 to MD0148."""
    weights = chosen_weights(made, block)
    types = {str(p.value.name): p.value.type for p in made.named.params}
    return mapped_params(weights, types, read_model(path), path)


def read_model(path: str) -> dict[str, ModelTensor]:
    """The tensors of a model by key, none of whose values is read. Raises MD0553."""
    try:
        return tensors_of(os.path.abspath(path))
    except Refused as refused:
        help = "name a Hugging Face folder, a .safetensors file or a state dict of torch"
        if isinstance(refused, ModelRefused):
            help = refused.help
        fail("MD0553", str(refused), help=help)


def chosen_weights(made: Compilation, block: str | None) -> WeightMap:
    """The block of weights of a name, or the only one. Raises MD0552, MD0145 to MD0148."""
    return weight_map(_chosen(made, block), made.named, made.declarations)


def in_dtype(weights: WeightMap, dtype: str | None) -> WeightMap:
    """The block for models in which floats have the `dtype`; None: that of each parameter.

    Raises MD0554.
    """
    if dtype is not None and dtype not in WRITTEN_DTYPES:
        help = f"models are written in {', '.join(WRITTEN_DTYPES)}"
        help += "; f16 has a smaller range than parameters may have" if dtype == "f16" else ""
        fail("MD0554", f"no model is written in `{dtype}`", help=help)
    return replace(weights, dtype=dtype or "")


def written_as(made: Compilation, option: str | None) -> tuple[str | None, WeightMap | None]:
    """The block of weights that `--as hf:bf16` names, and how a model is written by it."""
    if option is None:
        return None, None
    block, _, dtype = option.replace(" ", "").partition(":")
    return block, in_dtype(chosen_weights(made, block), dtype or None)


def _chosen(made: Compilation, block: str | None) -> ast.WeightsDecl:
    blocks = made.declarations.weights
    listed = ", ".join(f"`{name}`" for name in blocks)
    if block is not None and block not in blocks:
        fixes, help = known_values("--as", block, blocks)
        name, _, dtype = block.partition(":")
        if dtype and name in blocks:
            fixes = (give("--as", name),)
            help = f"{advice(fixes)}: a dtype is only named for a model that is written"
        fail("MD0552", f"no `weights {block}` is declared", help=help, fixes=fixes)
    if not blocks:
        message = f"{made.source.name} declares no `weights` block to read or write a model by"
        help = 'declare one: `weights hf { NAME: "KEY"[dims in the order of the file] }`'
        fail("MD0552", message, help=help)
    if block is None and len(blocks) > 1:
        message = f"several blocks of weights are declared: {listed}"
        refuse("MD0552", message, one_of("--as", blocks))
    return blocks[block] if block is not None else next(iter(blocks.values()))
