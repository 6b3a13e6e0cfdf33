"""Models of other programs: read by keys and dims, each device its own bytes; written the same."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import random
import re
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from meshdsl.api.errors import in_python
from meshdsl.backends.engines.execution import InputSource, run
from meshdsl.backends.engines.in_process import load, local_tensors
from meshdsl.backends.runtime.array_files import Refused, read_arrays
from meshdsl.backends.train.exported_params import export_params
from meshdsl.backends.weights import writing
from meshdsl.backends.weights.model_files import tensors_of
from meshdsl.backends.weights.params import chosen_weights, mapped_model, params_file
from meshdsl.backends.weights.reading import cast_notes, mapped_params
from meshdsl.backends.weights.writing import check_writable, write_model
from meshdsl.diagnostics import DiagnosticError, Diagnostics
from tests.backends.weight_models import (
    LAYOUTS,
    PROGRAM,
    compiled,
    params_and_model,
    read,
    refused,
    theirs,
    write_folder,
    write_torch,
)
from tests.compiling import compile_text


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


@pytest.mark.parametrize("seed", range(int(os.environ.get("MESHDSL_CASES", "12"))))
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


def test_a_model_of_other_sizes_names_the_settings(tmp_path):
    """Following the help once reads the model; in Python it is written as arguments."""
    sizes = {"io": 6, "layers": 3, "hidden": 5}
    draw = np.random.default_rng(0)
    model = {f"h.{n}.w": draw.normal(size=(5, 6)).astype(np.float32) for n in range(3)}
    model |= {n.replace("w", "v"): w.T for n, w in model.items()}
    folder = write_folder(tmp_path / "m", model)

    with pytest.raises(DiagnosticError) as raised:
        mapped_model(str(folder), compile_text(LARGE), None)
    (told,) = raised.value.diagnostics
    assert told.code == "MD0550"
    help = str(told.help)
    (settings, _) = re.findall(r"`--set ([^`]+)`", help)
    assert dict(s.split("=") for s in settings.split()) == {n: str(s) for n, s in sizes.items()}
    assert "`--set sizes.mdsl`" in help
    in_words = str(in_python(told).help)
    assert f"`{settings.replace(' ', ', ')}`" in in_words
    assert '`dims=md.sizes("sizes.mdsl")`' in in_words
    assert mapped_model(str(folder), compile_text(LARGE, set_dims=sizes), None).arrays


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
    assert "write `--as hf`" in refused(path, twice).help
    assert "no entry in `weights other`" in refused(path, twice, "other").message


ENTRIES = {
    'wq: "h.{layers}.q"[(kv = 2.5, group, key), model]': "`2.5` is no size",
    'wq: init or "h.{layers}.q.weight"[(kv, group, key), model]': "after `init` is never read",
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
