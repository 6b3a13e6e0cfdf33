# mypy: disable-error-code="type-arg,valid-type"
"""A transformer block in two dimensions, in Python."""

import meshdsl as md

batch, seq, model, heads = md.dims(batch=8, seq=128, model=256, heads=8)
key, hidden = md.dims(key=32, hidden=1024)
mem = md.dim("mem", like=seq)


@md.program
def block(x: md.Tensor[batch, seq, model]):
    scale1 = md.param([model], init=md.ones())
    scale2 = md.param([model], init=md.ones())
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    a = md.layer_norm[model](x, scale1)
    q = md.einsum(a, wq, out=[batch, heads, seq, key])
    k = md.einsum(a, wk, out=[batch, heads, seq, key]).rename(seq, mem)
    v = md.einsum(a, wv, out=[batch, heads, seq, key])[seq >> mem]
    s = md.softmax[mem](md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key))
    o = md.einsum(s, v, out=[batch, heads, seq, key])
    h = x + md.einsum(o, wo, out=[batch, seq, model])
    g = md.gelu(md.einsum(md.layer_norm[model](h, scale2), w1, out=[batch, seq, hidden]))
    y = h + md.einsum(g, w2, out=[batch, seq, model])
    return y
