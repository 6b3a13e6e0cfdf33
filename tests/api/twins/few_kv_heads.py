# mypy: disable-error-code="type-arg,valid-type"
"""Grouped queries with 2 key and value heads on 8 devices, in Python."""

import meshdsl as md

batch, seq, model, kv, group = md.dims(batch=4, seq=16, model=64, kv=2, group=8)
key, hidden, vocab, layers = md.dims(key=8, hidden=128, vocab=64, layers=2)
mem = md.dim("mem", like=seq)

node = md.mesh(tp=8)
pod = md.mesh(data=2, tp=8)

heads = md.layout(kv="tp.2", group="tp.2.4", hidden="tp", vocab="tp")
zero = md.layout(
    {"batch": "data", "params: model": "data", "grads: model": "data", "state: model": "data"},
    extends=heads,
)
eight = md.layout(group="tp", hidden="tp", vocab="tp")


@md.function
def attend(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, kv, group, key], init=md.normal(0.02))
    wk = md.param([model, kv, key], init=md.normal(0.02))
    wv = md.param([model, kv, key], init=md.normal(0.02))
    wo = md.param([kv, group, key, model], init=md.normal(0.02))
    q = md.einsum(x, wq, out=[batch, kv, group, seq, key])
    k = md.einsum(x, wk, out=[batch, kv, seq, key])[seq >> mem]
    v = md.einsum(x, wv, out=[batch, kv, seq, key])[seq >> mem]
    o = md.attention[key, mem](q, k, v, md.iota[seq] >= md.iota[mem])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    gate = md.param([model, hidden], init=md.normal(0.02))
    up = md.param([model, hidden], init=md.normal(0.02))
    down = md.param([hidden, model], init=md.normal(0.02))
    g = md.einsum(x, gate, out=[batch, seq, hidden])
    h = md.silu(g) * md.einsum(x, up, out=[batch, seq, hidden])
    return md.einsum(h, down, out=[batch, seq, model])


@md.program
def few_kv_heads(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        x = x + attend(md.rms_norm[model](x, g1))
        x = x + mlp(md.rms_norm[model](x, g2))
        return x

    x = md.repeat(layers, layer, x)
    head = md.param([vocab, model], init=md.normal(0.02))
    logits = md.einsum(x, head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=1e-3))
    return loss
