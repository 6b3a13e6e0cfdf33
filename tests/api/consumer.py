"""How others use the package: never run, `make lint` checks its types, and finds the mistakes.

mypy complains of an `ignore` without an error on its line.
"""

from __future__ import annotations

from typing import Annotated

import meshdsl as md

batch, io, hidden, layers = md.dims(batch=64, io=512, hidden=2048, layers=2)
wide = md.dim("wide", like=io)
sizes: tuple[int, float] = (4 * io, io / 2)
square = md.mesh(rows=2, cols=2)
hybrid = md.layout({"batch": "rows"}, hidden="cols")


@md.function
def block(x: Annotated[md.Tensor, batch, io]) -> md.Tensor:
    w = md.param([io, hidden], init=md.normal(0.02))
    v = md.param("v", [hidden, io], init=md.zeros(), dtype=md.f32)
    h = md.relu(md.einsum(x, w, out=[batch, hidden]) * 2 + 1.0)
    return x + md.einsum(h, v, out=[batch, io]) / io**0.5


@md.program
def mlp(
    x: Annotated[md.Tensor, md.f32[batch @ "rows", io]], ids: Annotated[md.Tensor, md.i32[batch]]
) -> tuple[md.Tensor, md.Tensor]:
    y: md.Tensor = md.repeat(layers, block, x)
    n: md.Tensor = md.softmax[io](y)[io >> wide]
    z = md.where((md.iota[batch] >= 3) & ~(ids == 2), n.pick(wide, 0), 0.0)
    loss = md.mean(z**2) + md.sum[batch](z) + md.sum(md.zeros[batch, io](dtype=md.f32))
    return loss, md.name("out", block(y), [io, batch])


def use(program: md.Program) -> float:
    plan = program.compile(square, hybrid, reduce="immediate")
    loss, y = plan(x=None, ids=None)
    print(
        loss, y, plan(None, None).y, plan.explain().json, plan.code, plan.compare("batch:rows").same
    )
    return plan.cost().wire_bytes


use(md.load("file.mdsl"))
text: str = mlp.to_mdsl()

softmaxx = md.softmaxx  # type: ignore[attr-defined]
md.relu()  # type: ignore[call-arg]
md.softmax(3)  # type: ignore[operator]
md.dims(batch="x")  # type: ignore[arg-type]
md.cast(3.0)  # type: ignore[call-arg]
md.iota[3]  # type: ignore[index]
