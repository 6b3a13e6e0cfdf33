"""Models of other programs: read by keys and dims, each device its own bytes; written the same."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import os
import random
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from typer.testing import CliRunner

import meshdsl as md
from meshdsl.analysis import analyse
from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import load, local_tensors
from meshdsl.backends.runtime.array_files import Refused, read_arrays
from meshdsl.backends.train.exported_params import export_params
from meshdsl.backends.weights import writing
from meshdsl.backends.weights.model_files import ModelTensor, tensors_of
from meshdsl.backends.weights.params import chosen_weights, mapped_model, params_file
from meshdsl.backends.weights.patterns import patterns_of
from meshdsl.backends.weights.reading import cast_notes, mapped_params
from meshdsl.backends.weights.writing import check_writable, write_model
from meshdsl.cli.app import app
from meshdsl.diagnostics import DiagnosticError, Diagnostics, Source
from meshdsl.pipeline import Compilation, Options
from tests.compiling import compile_text

PROGRAM = """
dim batch = 4, vocab = 8, model = 8, kv = 2, group = 2, key = 2, layers = 4, hidden = 12
mesh four = { data: 2, tp: 2 }
layout data { batch -> (data, tp) }
layout tensor { batch -> data, kv -> tp, hidden -> tp, vocab -> tp }
layout zero3 { batch -> (data, tp), params: model -> (data, tp) }
layout stages { batch -> data, layers -> tp } with gpipe[batch](2)
weights hf {
  embed: "wte.weight"[vocab, model]
  wq: "h.{layers}.q.weight"[(kv, group, key), model]
  (wk, wv): "h.{layers}.kv.weight"[model, (kv, key) + (kv, key)]
  up: "h.{2 * layers + 1}.up"[hidden, model, 1]
  head: "lm_head.weight"[vocab, model] or embed
  extra: init
  ignore "*.bias"
  ignore "sizes[*]"
}
program p(ids[batch]: i32) {
  param embed[vocab, model]
  x = embed[vocab = ids]
  param extra[model] = ones()
  repeat layers {
    param wq[model, kv, group, key]
    param wk[model, kv, key]
    param wv[model, kv, key]
    param up[model, hidden]
    q = einsum(x, wq -> [batch, kv, group, key])
    k = einsum(x, wk -> [batch, kv, key])
    v = einsum(x, wv -> [batch, kv, key])
    s = einsum(q, k -> [batch, kv, group])
    h = einsum(x, up -> [batch, hidden])
    x = x + 0.1 * sum[kv, group](s) + 0.1 * einsum(h, up -> [batch, model]) + mean[kv, key](v)
  }
  param head[vocab, model]
  return einsum(x * extra, head -> [batch, vocab])
}
"""

LAYOUTS = ("data", "tensor", "zero3", "stages")


def params_and_model() -> tuple[dict[str, Any], dict[str, Any]]:
    """Values of the parameters, and the tensors of a model that has them, made by hand."""
    draw = np.random.default_rng(0)
    shapes = {
        "embed": (8, 8), "wq": (4, 8, 2, 2, 2), "wk": (4, 8, 2, 2), "wv": (4, 8, 2, 2),
        "up": (4, 8, 12),
    }  # fmt: skip
    params = {n: (0.3 * draw.standard_normal(s)).astype(np.float32) for n, s in shapes.items()}
    model = {"wte.weight": params["embed"]}
    for layer in range(4):
        model[f"h.{layer}.q.weight"] = params["wq"][layer].reshape(8, 8).T
        both = (params["wk"][layer].reshape(8, 4), params["wv"][layer].reshape(8, 4))
        model[f"h.{layer}.kv.weight"] = np.concatenate(both, axis=1)
        model[f"h.{2 * layer + 1}.up"] = params["up"][layer].T[:, :, None]
        model[f"h.{layer}.q.bias"] = np.zeros(3, np.float32)
    model["sizes[0]"] = np.zeros(3, np.float32)
    params |= {"head": params["embed"], "extra": np.ones(8, np.float32)}
    return params, model


def write_folder(folder: Path, model: dict[str, Any], shards: int = 1) -> Path:
    """A folder as `transformers` writes it, by the library of the format."""
    folder.mkdir(exist_ok=True)
    model = {key: np.ascontiguousarray(tensor) for key, tensor in model.items()}
    if shards == 1:
        safetensors.numpy.save_file(model, folder / "model.safetensors")
        return folder
    where = {
        key: f"model-{n % shards + 1:05}-of-{shards:05}.safetensors" for n, key in enumerate(model)
    }
    for file in set(where.values()):
        inside = {key: tensor for key, tensor in model.items() if where[key] == file}
        safetensors.numpy.save_file(inside, folder / file)
    index = {"metadata": {"total_size": 0}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write_torch(path: Path, model: dict[str, Any]) -> Path:
    """A state dict, whose tensors are views of others where they were transposed."""
    torch.save({key: torch.from_numpy(tensor) for key, tensor in model.items()}, path)
    return path


def compiled(layout: str | None = None, text: str = PROGRAM, **options: Any) -> Compilation:
    return compile_text(text, layout=layout, **options)


def read(path: Path, made: Compilation) -> dict[str, Any]:
    """The whole parameters of a program in a model."""
    return {name: array[()] for name, array in mapped_model(str(path), made, None).arrays.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The values, and the model in each form that is read."""
    params, model = params_and_model()
    folder = tmp_path_factory.mktemp("models")
    return params, {
        "folder": write_folder(folder / "whole", model),
        "shards": write_folder(folder / "shards", model, 3),
        "torch": write_torch(folder / "state.bin", model),
        "file": write_folder(folder / "file", model) / "model.safetensors",
    }


@pytest.mark.parametrize(
    ("layout", "kind"), [*zip(LAYOUTS, ("folder", "shards", "torch", "file"), strict=True)]
)
def test_a_run_on_a_model_is_that_on_its_values(tmp_path, models, layout, kind):
    params, paths = models
    made = compiled(layout)
    ids = np.array([1, 7, 0, 2], np.int32)
    np.savez(tmp_path / "ids.npz", ids=ids)
    np.savez(tmp_path / "params.npz", **params)
    names = [str(p.value.name) for p in made.named.params]
    outputs: list[Any] = []
    for path in (str(tmp_path / "params.npz"), str(paths[kind])):
        with params_file(path, made, names, None, Diagnostics()) as file:
            result = run(made, "local", InputSource(str(tmp_path / "ids.npz"), file))
        outputs += result.outputs.values()
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize("kind", ["folder", "shards", "torch", "file"])
def test_what_is_written_is_what_was_read(tmp_path, models, kind, monkeypatch):
    """Forth by this program and back by the library: equal tensors, and no others."""
    params, paths = models
    _, model = params_and_model()
    monkeypatch.setattr(writing, "SHARD_BYTES", 2000 if kind == "shards" else 10**9)
    made = compiled()
    assert {n: a.tobytes() for n, a in read(paths[kind], made).items()} == {
        n: a.tobytes() for n, a in params.items() if n != "extra"
    }
    program = load(made.emitted.text)
    tensors = {name: torch.from_numpy(params[name]) for name in program.PARAMS}
    out = tmp_path / {"torch": "m.bin", "file": "m.safetensors"}.get(kind, "m")
    export_params({0: tensors}, str(out), program.PARAMS, {}, chosen_weights(made, None))
    written = theirs(out)
    assert (out / "model.safetensors.index.json").exists() == (kind == "shards")
    ignored = ("bias", "sizes")
    wanted = {k: v for k, v in model.items() if not any(word in k for word in ignored)}
    wanted["lm_head.weight"] = params["head"]
    assert written.keys() == wanted.keys()
    for key, tensor in wanted.items():
        np.testing.assert_array_equal(written[key], tensor, err_msg=key)


def test_a_failure_to_write_leaves_the_older_model(tmp_path, monkeypatch):
    """The disk is full at the second shard of the new model."""
    params, _ = params_and_model()
    monkeypatch.setattr(writing, "SHARD_BYTES", 1000)
    made = compiled()
    specs, weights = load(made.emitted.text).PARAMS, chosen_weights(made, None)
    out = tmp_path / "m"

    def write(values: dict[str, Any]) -> None:
        tensors = {name: torch.from_numpy(values[name]) for name in specs}
        export_params({0: tensors}, str(out), specs, {}, weights)

    write(params)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert len(before) > 3
    written: list[Path] = []

    def full(path: Path, *rest: Any) -> None:
        if written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(path)
        write_shard(path, *rest)

    write_shard = writing._write
    monkeypatch.setattr(writing, "_write", full)
    with pytest.raises(DiagnosticError, match="No space left"):
        write({name: value + 1 for name, value in params.items()})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def theirs(out: Path) -> dict[str, Any]:
    """The tensors of a model as the libraries of the formats read them."""
    if out.suffix == ".bin":
        return {k: t.numpy() for k, t in torch.load(out, weights_only=True).items()}
    files = [out] if out.is_file() else sorted(out.glob("*.safetensors"))
    return {k: t for file in files for k, t in safetensors.numpy.load_file(file).items()}


# --- bytes ---------------------------------------------------------------------------------------

LARGE = """
dim io = 48, hidden = 64, layers = 100
mesh four = { x: 2, y: 2 }
layout cut { io -> x, hidden -> y }
layout deep { layers -> (x, y) }
weights hf {
  w: "h.{layers}.w"[hidden, io]
  v: "h.{layers}.v"[io, hidden]
}
program p(a[io]) {
  param w[layers, io, hidden]
  param v[layers, hidden, io]
  return sum(w) + sum(v) + sum(a)
}
"""


@pytest.mark.parametrize("layout", ["cut", "deep"])
def test_four_devices_read_each_byte_once_and_hold_their_parts(tmp_path, monkeypatch, layout):
    """Of 200 tensors; neither a whole parameter nor a whole tensor of the file is in memory."""
    zeros = np.zeros((2, 48, 64), np.float32)
    model = {f"h.{n}.{w}": t for n in range(100) for w, t in (("w", zeros[0].T), ("v", zeros[1]))}
    folder = write_folder(tmp_path / "m", model, 4)
    made = compiled(layout, LARGE)
    specs, mesh = load(made.emitted.text).PARAMS, {"x": 2, "y": 2}
    names = list(specs)
    counted = 0

    def counting(handle: int, rooms: Any, start: int) -> int:
        nonlocal counted
        counted += sum(room.nbytes for room in rooms)
        return preadv(handle, rooms, start)

    with params_file(str(folder), made, names, None, Diagnostics()) as path:
        assert path is not None
        arrays = read_arrays(path)
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", counting)
        peaks = []
        for rank in range(4):
            tracemalloc.start()
            for name in names:
                local_tensors(mesh, {name: specs[name]}, arrays, 0, [rank])
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    total = sum(tensor.nbytes for tensor in model.values())
    assert counted == total
    assert max(peaks) < 0.4 * total / 2  # a whole parameter; a quarter of it is the device's


# --- any map -------------------------------------------------------------------------------------


def random_entry(draw: random.Random) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A program with an entry for some parameters, their values, and the tensors of the file."""
    sizes = {"a": 2, "b": 3, "c": 2, "d": 4, "e": 2}
    dims = draw.sample(list(sizes), draw.randint(1, 4))
    numbered = draw.sample(dims, draw.randint(0, min(2, len(dims) - 1)))
    rest = [dim for dim in dims if dim not in numbered]
    draw.shuffle(rest)
    count = draw.choice((1, 1, 2, 3))
    joined = draw.randrange(len(rest)) if count > 1 else -1  # the dim that differs
    terms = [rest[joined]] * count
    factors: list[Any] = [*rest]
    if count > 1:
        others = [d for d in sizes if d not in dims]
        terms = [draw.choice([rest[joined], *others]) for _ in range(count)]
    cuts = sorted(draw.sample(range(1, len(rest)), draw.randint(0, len(rest) - 1)))
    groups = [factors[i:j] for i, j in itertools.pairwise([0, *cuts, len(rest)])]

    stored = sizes | ({draw.choice(list(sizes)): draw.randint(1, 4)} if count == 1 else {})

    def text_of(dim: str) -> str:
        size = f" = {stored[dim]}" if stored[dim] != sizes[dim] else ""
        return " + ".join(terms) if count > 1 and dim == rest[joined] else f"{dim}{size}"

    merged = [f"({', '.join(map(text_of, g))})" if len(g) > 1 else text_of(g[0]) for g in groups]
    key = "t" + "".join(f".{{{dim} + 1}}" for dim in numbered)
    in_group = draw.randrange(len(key) + 1)
    while key[:in_group].count("{") != key[:in_group].count("}"):
        in_group -= 1
    own = [[terms[n] if dim == rest[joined] else dim for dim in dims] for n in range(count)]
    own = own if count > 1 else [dims]
    orders = [draw.sample(each, len(each)) for each in own]
    declared = "\n".join(f"  param p{n}[{', '.join(o)}]" for n, o in enumerate(orders))
    names = ", ".join(f"p{n}" for n in range(count))
    total = " + ".join(f"sum(p{n})" for n in range(count))
    text = (
        f"dim {', '.join(f'{d} = {n}' for d, n in sizes.items())}\n"
        f'weights w {{ under "{key[:in_group]}" or "other.{key[:in_group]}" {{\n'
        f'  ({names}): "{key[in_group:]}"[{", ".join(merged)}]\n}} }}\n'
        f"program p(x[]) {{\n{declared}\n  return x + {total}\n}}\n"
    )
    values = {
        f"p{n}": np.random.default_rng(draw.randrange(999)).random(
            [sizes[d] for d in o], np.float32
        )
        for n, o in enumerate(orders)
    }
    for name, order in zip(values, orders, strict=True):
        for axis, dim in enumerate(order):
            if dim not in numbered:  # what the file lacks is 0
                values[name][(slice(None),) * axis + (slice(stored[dim], None),)] = 0
    blocks = []
    for n, order in enumerate(orders):
        wanted = [terms[n] if count > 1 and dim == rest[joined] else dim for dim in rest]
        axes = [order.index(dim) for dim in (*numbered, *wanted)]
        blocks.append(values[f"p{n}"].transpose(axes))
    model = random_tensors(blocks, joined, [stored[dim] for dim in rest], groups)
    return text, values, model


def random_tensors(
    blocks: list[Any], joined: int, sizes: list[int], groups: list[list[str]]
) -> dict[str, Any]:
    """The tensors of the file: of a block of `sizes`, or of several joined along a dim.

    The first dims of a block are numbers of the key. The others are merged by groups.
    """
    model = {}
    for at in np.ndindex(*blocks[0].shape[: -len(sizes)]):
        parts = [block[at] for block in blocks]
        tensor = parts[0]
        if len(parts) > 1:
            tensor = np.concatenate(parts, axis=joined)
        else:
            lacks = zip(sizes, tensor.shape, strict=True)
            ends = [(0, max(size - own, 0)) for size, own in lacks]
            tensor = np.pad(tensor, ends)[tuple(map(slice, sizes))]
        widths = iter(tensor.shape)
        shape = [int(np.prod([next(widths) for _ in group])) for group in groups]
        model["t" + "".join(f".{index + 1}" for index in at)] = tensor.reshape(shape)
    return model


@pytest.mark.parametrize("seed", range(int(os.environ.get("MESHDSL_CASES", "25"))))
def test_any_map_reads_any_part_and_writes_it_back(tmp_path, seed):
    draw = random.Random(seed)
    text, values, model = random_entry(draw)
    made = compile_text(text)
    weights = chosen_weights(made, None)
    types = {str(p.value.name): p.value.type for p in made.named.params}
    path = write_torch(tmp_path / "m.bin", model)
    arrays = mapped_params(weights, types, tensors_of(str(path)), str(path)).arrays
    for name, value in values.items():
        part = tuple(
            slice(*sorted(draw.choices(range(n + 1), k=2))) if draw.random() < 0.7
            else sorted(draw.sample(range(n), draw.randint(0, n)))
            for n in value.shape
        )  # fmt: skip
        expected = value
        for axis, entry in enumerate(part):
            expected = expected[(slice(None),) * axis + (entry,)]
        np.testing.assert_array_equal(arrays[name][part], expected, err_msg=text)
    specs = load(made.emitted.text).PARAMS
    write_model(str(tmp_path / "m"), weights, specs, lambda name: torch.from_numpy(values[name]))
    written = theirs(tmp_path / "m")
    assert written.keys() == model.keys(), text
    assert all(np.array_equal(written[key], tensor) for key, tensor in model.items()), text


# --- models that do not fit ----------------------------------------------------------------------


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 40)


WRONG: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "missing": (
        {"h.2.q.weight": None},
        "MD0550",
        ["h.2.q.weight", "wq", "f32[8, 8]", "missing"],
    ),
    "misspelt": (
        {"wte.weight": None, "wte.weihgt": np.zeros((8, 8), np.float32)},
        "MD0550",
        ["wte.weight", "nearest: wte.weihgt", "no entry reads it"],
    ),
    "prefixed": (
        {"wte.weight": None, "transformer.wte.weight": np.zeros((8, 8), np.float32)},
        "MD0550",
        ["nearest: transformer.wte.weight"],
    ),
    "surplus": (
        {f"h.{n}.gate": np.zeros(2, np.float32) for n in range(30)},
        "MD0550",
        ["h.*.gate (30)", 'ignore "h.*.gate"'],
    ),
    "transposed": (
        {"h.1.kv.weight": np.zeros((6, 8), np.float32), "h.3.up": np.zeros((1, 8, 12), np.float32)},
        "MD0550",
        ["f32[6, 8]", "other sizes", "transposed?"],
    ),
    "mistyped": (
        {"wte.weight": np.zeros((8, 8), np.int64)},
        "MD0550",
        ["i64[8, 8]", "is int, not float"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_model_that_does_not_fit_is_one_table(tmp_path, case):
    changes, code, phrases = WRONG[case]
    _, model = params_and_model()
    for key, value in changes.items():
        if value is None:
            del model[key]
        else:
            model[key] = value
    told = refused(write_folder(tmp_path / "m", model))
    assert told.code == code
    for phrase in phrases:
        assert phrase in f"{told.message}\n{told.help}"


def refused(path: Path, text: str = PROGRAM, block: str | None = None) -> Any:
    """The diagnostic of a model that is refused before anything is read."""
    with pytest.raises(DiagnosticError) as error:
        mapped_model(str(path), compile_text(text), block)
    (told,) = error.value.diagnostics
    return told


def test_damaged_and_foreign_files_are_refused(tmp_path):
    _, model = params_and_model()
    folder = write_folder(tmp_path / "m", model, 3)
    shard = folder / "model-00002-of-00003.safetensors"
    _shorter(shard)
    assert "lies outside the file" in refused(folder).message
    shard.unlink()
    assert f"cannot read {shard}" in refused(folder).message
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../x"}}')
    assert "not the name of a file beside it" in refused(folder).message
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "no table `weight_map`" in refused(folder).message
    state = write_torch(tmp_path / "s.pt", model)
    _shorter(state)
    assert "it ends early" in refused(state).message
    torch.save({"wte.weight": 3}, state)
    assert "holds a int under `wte.weight`" in refused(state).message
    torch.save(torch.zeros(2), state)
    assert "save the `state_dict()`" in refused(state).help
    torch.save({"a": torch.zeros(2)}, state, _use_new_zipfile_serialization=False)
    assert "since 2020" in refused(state).message
    assert "save it again" in refused(state).help
    torch.save({"a": torch.nn.Linear(2, 2)}, state)
    assert "holds objects other than tensors" in refused(state).message
    assert "save the `state_dict()`" in refused(state).help
    with zipfile.ZipFile(state, "w") as archive:
        archive.writestr("archive/data.pkl", b"no pickle")
    assert "not a sound state dict" in refused(state).message
    assert {d.code for d in (refused(folder), refused(state))} == {"MD0553"}


def rewritten(path: Path, **records: Any) -> None:
    """Write a file of torch again: each record by what makes its new content of the old one."""
    with zipfile.ZipFile(path) as archive:
        content = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in content.items():
            change = records.get(Path(name).stem, bytes)
            archive.writestr(name, change(data))


def test_state_dicts_whose_bytes_are_not_the_values_are_refused(tmp_path, caplog):
    """Another order of bytes, signs kept apart, sparse tensors, and places of other tensors."""
    path, values = tmp_path / "s.bin", torch.ones(2, 3)
    torch.save({"a": torch.complex(values, values).conj().imag}, path)
    assert "tensor a is float32, torch.strided: not supported" in refused(path).message
    torch.save({"a": values.to_sparse()}, path)
    assert "tensor a is float32, torch.sparse_coo: not supported" in refused(path).message
    torch.save({"a": values, "b": values + 1}, path)
    rewritten(path, byteorder=lambda data: b"big")
    assert "is big-endian" in refused(path).message
    torch.save({"a": torch.ones(7)[4:], "b": values}, path)
    rewritten(path, data=lambda data: data.replace(b"K\x04K\x03", b"K\x05K\x03"))
    assert "tensor a lies outside of its bytes" in refused(path).message
    rewritten(path, data=lambda data: data.replace(b"K\x02K\x03", b"J\xfa\xff\xff\xffK\x03"))
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)
    assert "not a sound state dict" in refused(path).message
    log.removeHandler(caplog.handler)
    assert not caplog.records


def test_a_file_that_becomes_shorter_while_it_is_read_is_refused(tmp_path, models):
    _, model = params_and_model()
    path = write_folder(tmp_path / "m", model) / "model.safetensors"
    arrays = mapped_model(str(path), compiled(), None).arrays
    os.truncate(path, 200)
    with pytest.raises(Refused, match="has become shorter"):
        _ = arrays["wte.weight" if "wte.weight" in arrays else "embed"][()]


GROUPED = """
dim io = 4, vocab = 6, layers = 2, more = 8
weights hf {
  under "model." or "" {
    embed: "embed"[vocab = more, io]
    under "h.{layers}." {
      w: "w"[io]
      ignore "bias"
    }
  }
  head: "head"[vocab = 5, io] or embed
}
program p(x[io]) {
  param embed[vocab, io]
  param head[vocab, io]
  repeat layers {
    param w[io]
    x = x * w
  }
  return sum(x * embed * head)
}
"""


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_groups_of_keys_and_dims_of_other_sizes(tmp_path, prefix):
    """Either prefix is read, the first is written; what has no counterpart is told, and 0."""
    draw = np.random.default_rng(0)
    model: dict[str, Any] = {f"{prefix}embed": draw.random((8, 4), np.float32)}
    model["head"] = draw.random((5, 4), np.float32)
    for layer in range(2):
        model[f"{prefix}h.{layer}.w"] = draw.random(4, np.float32)
        model[f"{prefix}h.{layer}.bias"] = np.zeros(1, np.float32)
    made = compiled(text=GROUPED)
    folder = write_folder(tmp_path / "m", model)
    mapped = mapped_model(str(folder), made, None)
    assert [note.message for note in mapped.notes if note.code == "MD0555"] == [
        "the last 2 of 8 along `vocab` in the model are not in `embed`: they are not read",
        "the last 1 of 6 along `vocab` of `head` are not in the model: they are 0",
    ]
    params = {name: array[()].astype(np.float32) for name, array in mapped.arrays.items()}
    np.testing.assert_array_equal(params["embed"], model[f"{prefix}embed"][:6])
    np.testing.assert_array_equal(
        params["head"], np.pad(model["head"], ((0, 1), (0, 0))).astype(np.float32)
    )
    specs, weights = load(made.emitted.text).PARAMS, chosen_weights(made, None)
    write_model(str(tmp_path / "o"), weights, specs, lambda name: torch.from_numpy(params[name]))
    written = theirs(tmp_path / "o")
    assert written.keys() == {"model.embed", "head", "model.h.0.w", "model.h.1.w"}
    assert (written["model.embed"].shape, written["head"].shape) == ((8, 4), (5, 4))
    assert not written["model.embed"][6:].any()
    told = [note.message for note in check_writable(weights, made.named)]
    assert told[0].endswith("in the model are not in `embed`: they are 0")
    assert told[1].endswith("of `head` are not in the model: they are not written")
    del model[f"{prefix}h.1.w"]
    model["head"] = draw.random((7, 4))
    message = refused(write_folder(tmp_path / "n", model), GROUPED).message
    assert f"\n  {prefix}h.1.w " in message
    assert "other sizes; if padded: `vocab = 7`" in message


def test_which_block_is_meant(tmp_path, models):
    path = models[1]["folder"]
    assert "no `weights nix`" in refused(path, block="nix").message
    assert "write `--as hf`: " in refused(path, block="hf:bf16").help
    plain = PROGRAM[: PROGRAM.index("weights")] + PROGRAM[PROGRAM.index("program") :]
    assert refused(path, plain).code == "MD0552"
    with pytest.raises(DiagnosticError) as error:
        run(compile_text(plain), "local", InputSource(None, str(models[1]["file"]), 0))
    assert "declare a `weights` block" in str(error.value.diagnostics[0].help)
    twice = PROGRAM.replace("program p", 'weights other { embed: "e"[vocab, model] }\nprogram p')
    assert "choose one: `--as hf`" in refused(path, twice).help
    assert "no entry in `weights other`" in refused(path, twice, "other").message


ENTRIES = {
    'wq: "h.{layers}.q"[(kv = 2.5, group, key), model]': "`2.5` is no size",
    'wq: init or "h.{layers}.q.weight"[(kv, group, key), model]': "behind `init` is never read",
    'wq: "h.{layers - 1}.q.weight"[(kv, group, key), model]': "`{layers - 1}` begins at -1",
    'wq: "h.{0 * layers}.q"[(kv, group, key), model]': "is one number for all indices",
}


@pytest.mark.parametrize("entry", ENTRIES)
def test_entries_that_say_nothing_are_refused(models, entry):
    (line,) = (line for line in PROGRAM.splitlines() if line.startswith("  wq:"))
    told = refused(models[1]["folder"], PROGRAM.replace(line, f"  {entry}"))
    assert (told.code, ENTRIES[entry] in told.message) == ("MD0147", True)


def test_casts_are_told(models):
    mapped = mapped_model(str(models[1]["folder"]), compiled(dtype="bf16"), None)
    assert [n.message for n in mapped.notes] == ["6 parameters of f32 read as bf16, rounded"]
    (whole,) = cast_notes({("i64", "i32"): 1}, "read")
    assert (mapped.notes[0].help or "").startswith("`--dtype f32`")
    assert whole.help is None, "`--dtype` is for floats"
    mapped = mapped_model(str(models[1]["folder"]), compiled(dtype="f64"), None)
    assert [n.message for n in mapped.notes] == ["6 parameters of f32 read as f64, exactly"]


# --- the command line ----------------------------------------------------------------------------

TRAINED = """
dim batch = 4, io = 4, hidden = 6
weights hf {
  w: "layer.weight"[hidden, io]
  v: "head.weight"[io, hidden] or init
  lora: init
}
program p(x[batch, io], target[batch, io]) {
  param w[io, hidden]
  param v[hidden, io]
  param lora[io] = zeros()
  y = einsum(relu(einsum(x, w -> [batch, hidden])), v -> [batch, io])
  loss = mean((y + lora - target)^2)
  return loss
  minimize loss with sgd(lr=0.1)
}
"""


def test_a_model_is_trained_from_folder_to_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((6, 4)).astype(np.float32)
    folder = write_folder(tmp_path / "from", {"layer.weight": weight})
    (folder / "config.json").write_text('{"torch_dtype": "float16"}')
    (tmp_path / "p.mdsl").write_text(TRAINED)
    x = draw.standard_normal((4, 4)).astype(np.float32)
    np.savez("data.npz", x=x, target=x)
    command = ["train", "p.mdsl", "--data", "data.npz", "--steps", "1", "--params", "from"]

    def trained(*more: str) -> tuple[int, str]:
        done = CliRunner().invoke(app, [*command, *more])
        return done.exit_code, done.output

    code, told = trained("--out", "to", "--as", "hf")
    assert code == 0, told
    assert "`lora`: no key, so not in the model" in told
    assert sorted(path.name for path in Path("to").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    written = theirs(Path("to"))
    assert {key: tensor.shape for key, tensor in written.items()} == {
        "layer.weight": (6, 4),
        "head.weight": (4, 6),
    }
    assert 0 < np.abs(written["layer.weight"] - weight).max() < 1
    assert json.loads(Path("to/config.json").read_text()) == {"torch_dtype": "float32"}
    code, told = trained("--out", "narrow.bin", "--as", "hf:bf16")
    assert code == 0, told
    assert "2 parameters of f32 written as bf16, rounded" in told
    narrow = torch.load("narrow.bin", weights_only=True)
    for key, tensor in narrow.items():
        assert tensor.equal(torch.from_numpy(written[key]).bfloat16())
    assert "f16 has a smaller range" in trained("--out", "half.bin", "--as", "hf:f16")[1]
    code, told = trained("--out", "to", "--as", "hf")
    assert code != 0
    assert "MD0554" in told
    assert "add `--force`" in told
    assert trained("--out", "to", "--as", "hf", "--force")[0] == 0
    assert "MD0552" in trained("--out", "other", "--as", "nix")[1]
    Path("to.bin").mkdir()
    assert "to.bin is a folder" in trained("--out", "to.bin", "--as", "hf", "--force")[1]
    (Path("to") / "latest").write_text("step-1")
    assert "to holds a checkpoint" in trained("--out", "to", "--as", "hf", "--force")[1]


def test_a_draft_is_read_after_it_was_corrected(tmp_path, models, monkeypatch):
    """What has no counterpart is a comment, and a run says so."""
    monkeypatch.chdir(tmp_path)
    params, paths = models
    plain = PROGRAM[: PROGRAM.index("weights")] + PROGRAM[PROGRAM.index("program") :]
    Path("p.mdsl").write_text(plain)
    done = CliRunner().invoke(app, ["weights", "p.mdsl", str(paths["folder"]), "--name", "mine"])
    assert done.exit_code == 0, done.output
    text = f"{done.output}\n{plain}"
    table = refused(paths["folder"], text).message
    assert all(word in table for word in ("extra", "head", "h.*.q.bias (4)", "sizes[0]"))
    for line, corrected in {
        "# no tensor of the sizes of extra: [model=8]": "extra: init",
        "# no tensor of the sizes of head: [vocab=8, model=8]": "head: embed",
        "# no parameter of these sizes: 'h.*.q.bias' f32[3], 4 tensors": 'ignore "*.bias"',
        "# no parameter of these sizes: 'sizes[0]' f32[3]": 'ignore "sizes[0]"',
        '(wk, wv): "kv.weight"[(kv, key) + (kv, key), model]':
        '(wk, wv): "kv.weight"[model, (kv, key) + (kv, key)]',
    }.items():  # fmt: skip
        assert line in text
        text = text.replace(line, corrected)
    assert 'under "h.{2 * layers + 1}." {\n    up: "up"[hidden, model, 1]' in text
    arrays = read(paths["folder"], compiled(text=text))
    assert all(np.array_equal(array, params[name]) for name, array in arrays.items())


PATTERNS = {
    ("h.0.a", "h.1.a", "h.2.a", "e"): ["h.{n0}.a", "e"],
    ("h.0.m.0.w", "h.0.m.2.w", "h.1.m.0.w", "h.1.m.2.w"): ["h.{n0}.m.0.w", "h.{n0}.m.2.w"],
    ("h.1.x", "h.3.x", "h.5.x"): ["h.{2 * n0 + 1}.x"],
    ("l.0.e.0.w", "l.0.e.1.w", "l.2.e.0.w", "l.2.e.1.w"): ["l.0.e.{n0}.w", "l.2.e.{n0}.w"],
    ("0.w", "1.w", "00.w"): ["{n0}.w", "00.w"],
    ("h.0.x", "h.5.x"): ["h.0.x", "h.5.x"],
}


@pytest.mark.parametrize("keys", PATTERNS)
def test_keys_that_differ_in_numbers_are_patterns(keys):
    tensors = {key: ModelTensor("", "f32", "<f4", (2,), 0, (4,)) for key in keys}
    found = [p.text([f"n{i}" for i in range(len(p.numbers))]) for p in patterns_of(tensors)]
    assert found == PATTERNS[keys]


def test_plans_load_and_save(tmp_path, models):
    params, paths = models
    (tmp_path / "p.mdsl").write_text(PROGRAM)
    plan = md.load(tmp_path / "p.mdsl").compile(layout="tensor")
    plan.load_weights(paths["shards"])
    assert all(np.array_equal(plan.params[name], value) for name, value in params.items())
    plan.save_weights(tmp_path / "m.pt")
    other = md.load(tmp_path / "p.mdsl").compile()
    other.load_weights(tmp_path / "m.pt", "hf")
    assert all(np.array_equal(other.params[name], value) for name, value in params.items())
    entries = {name: f'"{name}"[{", ".join(plan.named.params[n].value.type.names)}]'
               for n, name in enumerate(str(p.value.name) for p in plan.named.params)}  # fmt: skip
    plan.save_weights(tmp_path / "plain", entries, dtype="f64")
    plain = theirs(tmp_path / "plain")
    assert plain.keys() == params.keys()
    assert all(np.array_equal(plain[n].astype(np.float32), params[n]) for n in params)
    assert {tensor.dtype for tensor in plain.values()} == {np.dtype(np.float64)}
    half = md.load(tmp_path / "p.mdsl").compile(dtype="bf16")
    with pytest.warns(md.ProgramWarning, match="6 parameters of f32 read as bf16, rounded"):
        half.load_weights(paths["folder"])
    with pytest.raises(md.ProgramError, match="MD0146"):
        plan.load_weights(paths["folder"], {"embed": '"wte.weight"[vocab]'})
    with pytest.raises(md.ProgramError, match="MD0554"):
        plan.save_weights(tmp_path / "plain", entries)


def test_a_block_is_not_named_in_vain(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.mdsl").write_text(TRAINED)
    for command, wanted in (
        ("run p.mdsl --as hf", "MD0601"),
        ("train p.mdsl --data d.npz --steps 1 --as hf", "MD0516"),
    ):
        done = CliRunner().invoke(app, command.split())
        assert done.exit_code == 2
        assert wanted in done.output
        assert "--params FOLDER" in done.output


PARAMS = """
dim io = 4, layers = 3
weights hf { %s }
def f(x[io]) -> [io] {
  param w[io]
  return x * w
}
program p(x[io]) {
  param v[io]
  repeat layers {
    x = f(x)
  }
  return x * v
}
"""

HELPED = {
    "MD0145": ('w: "a.{layers}"[io]\nv: init', 'f.w: "a.{layers}"[io]\nv: init'),
    "MD0146": ('f.w: "a"[io]\nv: init', 'f.w: "a.{layers}"[io]\nv: init'),
    "MD0147 number": ('v: "a"[io, 2]\nf.w: init', 'v: "a"[io, 1]\nf.w: init'),
    "MD0147 two": ('v: "a"[io]\nv: "b"[io]\nf.w: init', 'v: "a"[io] or "b"[io]\nf.w: init'),
    "MD0149": ('f.w: "a.{layers}"[io]', 'f.w: "a.{layers}"[io]\nv: "KEY"[io]'),
    "MD0149 of layers": ('v: "a"[io]', 'v: "a"[io]\nf.w: "KEY"[layers, io]'),
    "MD0005": ('v: init\nf.w: "a"[layers, io] or\ninit', 'v: init\nf.w: "a"[layers, io] or init'),
}
"""Entries with a mistake, and those that the help leads to."""


@pytest.mark.parametrize("case", HELPED)
def test_the_help_on_an_entry_mends_it(case):
    wrong, mended = HELPED[case]
    told = analyse(Source("p.mdsl", PARAMS % wrong), Options()).diagnostics
    assert case[:6] in [d.code for d in told]
    help = next(d.help for d in told if d.code == case[:6])
    assert help is not None
    if case.startswith("MD0149"):
        assert help.partition("`")[2].partition("`")[0] == mended.splitlines()[-1]
    assert not analyse(Source("p.mdsl", PARAMS % mended), Options()).diagnostics
