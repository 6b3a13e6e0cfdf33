# mypy: disable-error-code="type-arg,valid-type"
"""Layouts and meshes in every form that Python has for them: one plan."""

from __future__ import annotations

from typing import Any

import pytest

import meshdsl as md

batch, io, hidden = md.dims(batch=8, io=4, hidden=8)


@md.program
def mlp(x: md.Tensor[batch, io]):
    w = md.param([io, hidden])
    h = md.relu(md.einsum(x, w, out=[batch, hidden]))
    return h


base = md.layout(batch="a")

LAYOUTS: dict[str, Any] = {
    "a dict": {"batch": "a", "hidden": "b"},
    "a dict of dims": {batch: "a", hidden: ("b",)},
    "Mesh-TensorFlow": "batch:a,hidden:b",
    "Mesh-TensorFlow, with ;": " batch:a ; hidden : b ",
    "rules": ["batch -> a", "hidden -> b"],
    "one string of rules": "batch -> a, hidden -> b",
    "made before": md.layout(batch="a", hidden="b"),
    "extended": md.layout("hidden -> b", extends=base),
    "with none": {"batch": "a", "hidden": "b", "io": None},
    "displaced": md.layout({"batch": "b", "hidden": None}, extends=None) and "batch:a,hidden:b",
}
SETTINGS = ("grads: reduce = bf16", "state: memory = disk")
SETTING = md.layout(", ".join(SETTINGS), extends=md.layout(batch="a"))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_is_written_as_in_the_language(setting: str) -> None:
    assert repr(SETTING) == f"layout SETTING extends batch -> a {{ {', '.join(SETTINGS)} }}"
    plan = mlp.compile(mesh="a:2", layout=["batch -> a", setting])
    assert plan.explain().json["layout"] == f"batch -> a, {setting}"


def test_a_printed_layout_keeps_its_name() -> None:
    """In an expression; a variable that it is assigned to names it."""
    printed = repr(base)
    assert printed == "layout base { batch -> a }"
    assert [repr(md.layout(printed))] == [printed]
    other = md.layout(printed)
    assert other.name == "other"
    assert mlp.compile(mesh="a:2", layout=printed).explain().json["layout"] == "base"


def test_states_lie_on_disk() -> None:
    @md.program
    def trained(x: md.Tensor[batch, io]):
        w = md.param([io, hidden])
        loss = md.mean(md.square(md.einsum(x, w, out=[batch, hidden])))
        md.minimize(loss, md.adam(lr=0.1))
        return loss

    plan = trained.compile(mesh="a:2", layout=["batch -> a", "state: memory = disk"])
    assert plan.explain().json["disk"]["read"] == 8 * 4 * 8
    assert plan.memory["state"] == 4


@pytest.mark.parametrize("has_rules", [False, True])
def test_remedies_do_not_edit_a_layout_in_python(has_rules: bool) -> None:
    """Its call may look like a declaration, and have no braces."""
    layout = md.layout
    of_base = layout(batch="a", hidden="b")
    chosen = of_base if has_rules else layout(extends=of_base)

    @md.program
    def two_layers(x: md.Tensor[batch, io]):
        w, v = md.param([io, hidden]), md.param([hidden, io])
        y = md.einsum(md.einsum(x, w, out=[batch, hidden]), v, out=[batch, io])
        return y

    explained = two_layers.compile(mesh="a:2,b:2", layout=chosen).explain().json
    assert explained["remedies"]
    assert all(not remedy["fixes"] for remedy in explained["remedies"])


WRONG: dict[str, Any] = {
    "MD0302": ["batch -> a", "hidden -> a"],
    "MD0305": md.layout(batch="a", hiddne="b"),
    "MD0306": md.layout({"batch": "a", "z: hidden": "b"}),
    "MD0312": md.layout("batch -> a, grads: reduse = bf16"),
    "MD0313": md.layout("batch -> a, gaads: reduce = bf16"),
    "MD0314": md.layout("batch -> a, grads: reduce = bf17"),
    "MD0315": md.layout("batch -> a, grads: reduce = bf16, grads: reduce = f32"),
}


@pytest.mark.filterwarnings("ignore::meshdsl.ProgramWarning")
@pytest.mark.parametrize("code", WRONG)
def test_what_is_wrong_with_a_layout_in_python_edits_no_text(code: str) -> None:
    """Neither the text of a declaration, which no file has, nor the arguments of the call."""
    try:
        diagnostics = list(mlp.compile(mesh="a:2,b:2", layout=WRONG[code])._made.diagnostics)
    except md.ProgramError as error:
        diagnostics = list(error.diagnostics)
    assert code in {d.code for d in diagnostics}
    assert not [fix for d in diagnostics for fix in d.fixes]


MESHES: dict[str, Any] = {
    "a dict": {"a": 2, "b": 4},
    "made before": md.mesh(a=2, b=4),
    "from a dict": md.mesh({"a": 2, "b": 4}),
    "a string": "a:2,b:4",
}


def placements(plan: md.Plan) -> dict[str, Any]:
    return {t["name"]: t["placement"] for t in plan.explain().json["tensors"] if t["name"]}


WANTED = {
    "x": {"a": "S(batch)", "b": "B"},
    "w": {"a": "B", "b": "S(hidden)"},
    "h": {"a": "S(batch)", "b": "S(hidden)"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_a_layout_says_the_same(layout: str) -> None:
    assert placements(mlp.compile({"a": 2, "b": 4}, LAYOUTS[layout])) == WANTED


@pytest.mark.parametrize("mesh", MESHES)
def test_every_form_of_a_mesh_says_the_same(mesh: str) -> None:
    assert placements(mlp.compile(MESHES[mesh], "batch:a,hidden:b")) == WANTED


def test_selectors_several_axes_and_keep() -> None:
    plan = mlp.compile({"a": 2, "b": 2}, {"batch": ("b", "a"), "params: io": "a"})
    found = {t["name"]: t["order"] for t in plan.explain().json["tensors"] if t["name"]}
    assert found["x"] == {"batch": ["b", "a"]}
    assert found["w"] == {"io": ["a"]}
    kept = mlp.compile({"a": 2}, "params: io -> a keep")
    assert kept.explain().json["layout"] == "params: io -> a keep"


def test_an_extended_layout_displaces_rules() -> None:
    other = md.layout(batch=None, hidden="a", extends=base)
    found = placements(mlp.compile({"a": 2}, other))
    assert found["h"] == {"a": "S(hidden)"}


def test_a_dim_is_a_number_and_an_arrow() -> None:
    whole = [4 * io, io - 1, io // 2, io % 3, io**2, 1 + io, 9 - io, 2**io, 9 // io, 9 % io, -io]
    assert list(map(int, whole)) == [16, 3, 2, 1, 16, 5, 5, 16, 2, 1, -4]
    assert list(map(float, [io / 8, 8 / io, io * 0.5, io**-0.5])) == [0.5, 2.0, 2.0, 0.5]
    assert (int(io), float(io)) == (4, 4.0)
    assert 4 * io == 16 < 5 * io != 16
    assert list(range(io)) == [0, 1, 2, 3]
    assert repr((batch, io) >> hidden) == "(batch, io) >> hidden"
    assert repr(hidden >> (batch, io)) == "hidden >> (batch, io)"
    with pytest.raises(TypeError):
        io + "x"  # type: ignore[operator]


def test_another_name_of_a_dim_has_its_size() -> None:
    mem = md.dim("mem", like=io)
    (also,) = md.dims(also=io)
    assert (mem.size, also.size) == (4, 4)
