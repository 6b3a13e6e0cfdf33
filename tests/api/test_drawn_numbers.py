# mypy: disable-error-code="type-arg,valid-type,misc"
"""Random numbers in Python: the same forms, plans and modules that draw, and drop."""

from __future__ import annotations

import numpy as np
import torch

import meshdsl as md

batch, io = md.dims(batch=4, io=16)


def test_a_module_drops_while_it_trains():
    @md.program
    def net(x: md.Tensor[batch, io]):
        return md.dropout(x, 0.5)

    module, x = net.compile().module(), torch.ones(4, 16)
    one, other = module(x)[0], module(x)[0]
    assert not torch.equal(one, other)
    assert torch.equal(module(x, seed=torch.tensor(4))[0], module(x, seed=torch.tensor(4))[0])
    assert torch.equal(module.eval()(x)[0], x)


def test_python_writes_them_as_the_language_does():
    @md.program
    def net(x: md.Tensor[batch, io]):
        y = md.dropout(x, 0.25) + md.dropout[io](x, rate=0.5, seed=3)
        return (
            y
            + md.uniform[batch]()
            + md.normal[io](std=0.5)
            + md.cast(md.sample[io](x, seed=3), md.f32)
        )

    text = net.to_mdsl()
    for form in ("dropout(x, 0.25)", "dropout[io](x, rate=0.5, seed=3)", "normal[io](std=0.5)"):
        assert form in text
    plan = net.compile()
    x = np.ones((4, 16), np.float32)
    np.testing.assert_array_equal(plan(x), plan(x, seed=0))
    np.testing.assert_allclose(plan(x), plan.reference(x), rtol=1e-5)
