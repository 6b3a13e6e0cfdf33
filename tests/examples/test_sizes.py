"""The files of sizes beside the models of `examples/models`."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from meshdsl.api.programs import read
from meshdsl.diagnostics import Source
from meshdsl.named.size_files import read_size_file
from meshdsl.pipeline import Compilation, Options
from meshdsl.syntax.parse import read_source
from tests.project import ROOT


def test_files_of_sizes_have_the_parameters_that_the_page_says():
    """Each file is in the table of docs/weights.md, with the parameters of its model."""
    page = (ROOT / "docs" / "weights.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `(\w+)[.]mdsl` \| (\w+)[.]mdsl\b.* \| ([0-9,]+) \|$", page, re.MULTILINE
    )
    folder = ROOT / "examples" / "models"
    assert {f"{name}.mdsl" for name, _, _ in rows} == {p.name for p in (folder / "sizes").iterdir()}
    for name, model, parameters in rows:
        set_sizes = read_size_file(folder / "sizes" / f"{name}.mdsl")
        options = Options(set_dims=set_sizes.sizes, set_in=set_sizes.places)
        made = Compilation(read_source(folder / f"{model}.mdsl"), options)
        sizes = (param.value.type.shape for param in made.written.params)
        assert f"{sum(map(math.prod, sizes)):,}" == parameters


def test_positions_of_llama_are_stretched_as_its_configuration_says():
    """Slow turns by `stretch`, fast ones not, those between in part: `rope_type` llama3."""
    text = (ROOT / "examples" / "models" / "llama.mdsl").read_text(encoding="utf-8")
    text = text[: text.index("weights hf")] + text[text.index("# The rotation") :]
    text = text[: text.index("program ")] + "program turns(x[half]) { return x * frequency() }"
    sizes = read_size_file(ROOT / "examples" / "models" / "sizes" / "llama3_1b.mdsl").sizes
    program = read(Source("turns.mdsl", text), "turns", sizes)
    (found,) = program.compile({"one": 1}, "", dtype="f64")(x=np.ones(32))
    plain = 500000.0 ** -(np.arange(32) / 32)
    wave = 2 * np.pi / plain
    smooth = (8192 / wave - 1) / (4 - 1)
    between = (1 - smooth) * plain / 32 + smooth * plain
    wanted = np.where(wave < 8192 / 4, plain, np.where(wave > 8192, plain / 32, between))
    assert np.abs(found / wanted - 1).max() < 1e-12
    assert 0 < np.sum((wave > 8192 / 4) & (wave < 8192)) < np.sum(wave > 8192)


@pytest.mark.parametrize("model", ["llama_lora", "llama_dpo"])
def test_the_llama_with_adapters_is_that_of_1b(model):
    """Its sizes are those of the file that the script takes, and its functions those of Llama."""
    folder = ROOT / "examples" / "models"
    texts = [(folder / f"{n}.mdsl").read_text(encoding="utf-8") for n in ("llama", model)]
    set_dims = read_size_file(folder / "sizes" / "llama3_1b.mdsl").sizes
    sizes = [
        Compilation(Source("f.mdsl", text), Options(set_dims=given)).declarations.sizes
        for text, given in zip(texts, (set_dims, {}), strict=True)
    ]
    own = ("rank", "answer", "seq", "mem")
    assert {n: s for n, s in sizes[1].items() if n not in own} == {
        n: s for n, s in sizes[0].items() if n not in own
    }
    for name in ("frequency", "turned", *(["attention"] if model == "llama_lora" else [])):
        bodies = [text.partition(f"\ndef {name}(")[2].partition("\n}")[0] for text in texts]
        assert bodies[0] == bodies[1] != ""
