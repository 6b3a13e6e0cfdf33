# mypy: disable-error-code="type-arg,valid-type"
"""A model of a trillion parameters with layers that are computed again, in Python."""

import meshdsl as md

batch, seq, model, heads, key = md.dims(batch=3072, seq=2048, model=25600, heads=160, key=160)
hidden, vocab, layers = md.dims(hidden=102400, vocab=51200, layers=128)
mem = md.dim("mem", like=seq)


@md.function
def attend(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    wo = md.param([heads, key, model], init=md.normal(0.02))
    q = md.einsum(x, wq, out=[batch, heads, seq, key])
    k = md.einsum(x, wk, out=[batch, heads, seq, key])
    v = md.einsum(x, wv, out=[batch, heads, seq, key])
    past = md.iota[seq] >= md.iota[mem]
    o = md.attention[key, mem](q, k[seq >> mem], v[seq >> mem], past)
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    return md.einsum(
        md.gelu(md.einsum(x, w1, out=[batch, seq, hidden])), w2, out=[batch, seq, model]
    )


@md.program
def gpt(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    position = md.param([seq, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens) + position

    def layer(x):
        with md.recompute():
            x = x + attend(md.layer_norm[model](x))
            x = x + mlp(md.layer_norm[model](x))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.layer_norm[model](x), embed, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=6e-5, clip=1.0))
    return loss
