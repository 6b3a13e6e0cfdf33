# mypy: disable-error-code="type-arg,valid-type"
"""Gradients of one weight, added up over micro-batches, in Python."""

import meshdsl as md

steps, batch, m, k = md.dims(steps=5, batch=8, m=64, k=128)


@md.program
def accumulate(x: md.Tensor[steps, batch, m], dy: md.Tensor[steps, batch, k]):
    dw = md.zeros[m, k]()

    def add(dw):
        dw = dw + md.einsum(x, dy, out=[m, k])
        return dw

    dw = md.repeat(steps, add, dw)
    return dw
