# mypy: disable-error-code="type-arg,valid-type"
"""The Megatron MLP, in Python."""

import meshdsl as md

batch, io = md.dims(batch=64, io=512)
hidden = md.dim("hidden", 4 * io)


@md.program
def mlp(x: md.Tensor[batch, io]):
    w1 = md.param([io, hidden])
    b1 = md.param([hidden], init=md.normal(0.1))
    w2 = md.param([hidden, io])
    b2 = md.param([io], init=md.normal(0.1))
    h = md.relu(md.einsum(x, w1, out=[batch, hidden]) + b1)
    y = md.einsum(h, w2, out=[batch, io]) + b2
    return y
