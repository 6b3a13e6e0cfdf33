# mypy: disable-error-code="type-arg,valid-type"
"""GPT-2 in Python."""

import meshdsl as md

batch, seq, context, model = md.dims(batch=8, seq=1024, context=1024, model=768)
heads, key, hidden, vocab, layers = md.dims(heads=12, key=64, hidden=3072, vocab=50257, layers=12)
mem = md.dim("mem", like=seq)


@md.function
def project(x: md.Tensor[batch, seq, model]):
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    bq = md.param([heads, key], init=md.zeros())
    bk = md.param([heads, key], init=md.zeros())
    bv = md.param([heads, key], init=md.zeros())
    q = md.einsum(x, wq, out=[batch, heads, seq, key]) + bq
    k = md.einsum(x, wk, out=[batch, heads, seq, key]) + bk
    v = md.einsum(x, wv, out=[batch, heads, seq, key]) + bv
    return q, k, v


@md.function
def joined(o: md.Tensor[batch, heads, seq, key]) -> md.Tensor[batch, seq, model]:
    wo = md.param([heads, key, model], init=md.normal(0.02))
    bo = md.param([model], init=md.zeros())
    return md.einsum(o, wo, out=[batch, seq, model]) + bo


@md.function
def attention(
    q: md.Tensor[batch, heads, seq, key],
    k: md.Tensor[batch, heads, mem, key],
    v: md.Tensor[batch, heads, mem, key],
):
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
    return md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    b1 = md.param([hidden], init=md.zeros())
    b2 = md.param([model], init=md.zeros())
    h = md.gelu(md.einsum(x, w1, out=[batch, seq, hidden]) + b1, approximate="tanh")
    return md.einsum(h, w2, out=[batch, seq, model]) + b2


@md.program
def gpt2(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    wte = md.param([vocab, model], init=md.normal(0.02))
    wpe = md.param([context, model], init=md.normal(0.02))
    x = wte.gather(vocab, tokens) + wpe.slice(context, None, seq, seq)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        b1 = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.ones())
        b2 = md.param([model], init=md.zeros())
        q, k, v = project(md.layer_norm[model](x, g1, b1))
        x = x + joined(attention(q, k[seq >> mem], v[seq >> mem]))
        x = x + mlp(md.layer_norm[model](x, g2, b2))
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.ones())
    bf = md.param([model], init=md.zeros())
    logits = md.einsum(md.layer_norm[model](x, gf, bf), wte, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=md.cosine(6e-4, 600_000, warmup=2000), clip=1.0))
    return loss, logits
