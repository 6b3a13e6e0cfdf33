# mypy: disable-error-code="type-arg,valid-type"
"""The network that Alpa's intra-operator pass is tested on, in Python."""

import meshdsl as md

batch, io, hidden = md.dims(batch=256, io=32, hidden=32)


@md.function
def pair(x: md.Tensor[batch, io]):
    w = md.param([io, hidden])
    b = md.param([hidden], init=md.zeros())
    v = md.param([hidden, io])
    e = md.param([io], init=md.zeros())
    h = md.relu(md.einsum(x, w, out=[batch, hidden]) + b)
    return md.einsum(h, v, out=[batch, io]) + e


@md.program
def alpa_mlp(x: md.Tensor[batch, io], target: md.Tensor[batch, io]):
    y = pair(md.relu(pair(md.relu(pair(x)))))
    loss = md.mean((y - target) ** 2)
    md.minimize(loss, md.adam(lr=1e-2))
    return loss
