# mypy: disable-error-code="type-arg,valid-type"
"""A language model of characters and its training step, in Python."""

import meshdsl as md

batch, seq, model, heads, key = md.dims(batch=16, seq=64, model=128, heads=4, key=32)
hidden, vocab, layers = md.dims(hidden=512, vocab=256, layers=3)
mem = md.dim("mem", like=seq)


@md.function
def project(x: md.Tensor[batch, seq, model]):
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    q = md.einsum(x, wq, out=[batch, heads, seq, key])
    k = md.einsum(x, wk, out=[batch, heads, seq, key])
    v = md.einsum(x, wv, out=[batch, heads, seq, key])
    return q, k, v


@md.function
def joined(o: md.Tensor[batch, heads, seq, key]) -> md.Tensor[batch, seq, model]:
    wo = md.param([heads, key, model])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    return md.einsum(
        md.gelu(md.einsum(x, w1, out=[batch, seq, hidden])), w2, out=[batch, seq, model]
    )


@md.program
def lm(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.05))
    position = md.param([seq, model], init=md.normal(0.05))
    x = embed.gather(vocab, tokens) + position

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        q, k, v = project(md.rms_norm[model](x, g1))
        s = md.einsum(q, k[seq >> mem], out=[batch, heads, seq, mem]) / md.sqrt(key)
        s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
        o = md.einsum(md.softmax[mem](s), v[seq >> mem], out=[batch, heads, seq, key])
        x = x + joined(o)
        x = x + mlp(md.rms_norm[model](x, g2))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.rms_norm[model](x), embed, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    rate = md.cosine(3e-3, 1000, warmup=50, final=1e-4)
    md.minimize(loss, md.adamw(lr=rate, clip=1.0))
    return loss
