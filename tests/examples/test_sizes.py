"""The files of sizes beside the models of `examples/models`."""

from __future__ import annotations

import math
import re

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
