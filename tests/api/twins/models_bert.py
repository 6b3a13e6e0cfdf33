# mypy: disable-error-code="type-arg,valid-type,misc"
"""BERT in Python."""

import meshdsl as md

batch, seq, context, model = md.dims(batch=32, seq=512, context=512, model=768)
heads, key, hidden, vocab = md.dims(heads=12, key=64, hidden=3072, vocab=30522)
segments, layers = md.dims(segments=2, layers=12)
mem, inner = md.dim("mem", like=seq), md.dim("inner", like=model)


@md.function
def attention(
    x: md.Tensor[batch, seq, model], present: md.Tensor[batch, seq]
) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    wo = md.param([heads, key, model], init=md.normal(0.02))
    bq = md.param([heads, key], init=md.zeros())
    bk = md.param([heads, key], init=md.zeros())
    bv = md.param([heads, key], init=md.zeros())
    bo = md.param([model], init=md.zeros())
    q = md.einsum(x, wq, out=[batch, heads, seq, key]) + bq
    k = (md.einsum(x, wk, out=[batch, heads, seq, key]) + bk)[seq >> mem]
    v = (md.einsum(x, wv, out=[batch, heads, seq, key]) + bv)[seq >> mem]
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    s = md.where(present[seq >> mem] > 0, s, -1e9)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model]) + bo


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    b1 = md.param([hidden], init=md.zeros())
    b2 = md.param([model], init=md.zeros())
    up = md.gelu(md.einsum(x, w1, out=[batch, seq, hidden]) + b1)
    return md.einsum(up, w2, out=[batch, seq, model]) + b2


@md.function
def predicted(
    x: md.Tensor[batch, seq, model], word: md.Tensor[vocab, model]
) -> md.Tensor[batch, seq, vocab]:
    w = md.param([model, inner], init=md.normal(0.02))
    b = md.param([inner], init=md.zeros())
    g = md.param([model], init=md.ones())
    shift = md.param([model], init=md.zeros())
    bias = md.param([vocab], init=md.zeros())
    y = md.gelu(md.einsum(x, w, out=[batch, seq, inner]) + b)
    return (
        md.einsum(
            md.layer_norm[model](y[inner >> model], g, shift, eps=1e-12),
            word,
            out=[batch, seq, vocab],
        )
        + bias
    )


@md.program
def bert(
    tokens: md.i32[batch, seq],
    segment_ids: md.i32[batch, seq],
    present: md.i32[batch, seq],
    targets: md.i32[batch, seq],
    scored: md.f32[batch, seq],
):
    word = md.param([vocab, model], init=md.normal(0.02))
    position = md.param([context, model], init=md.normal(0.02))
    segment = md.param([segments, model], init=md.normal(0.02))
    g0 = md.param([model], init=md.ones())
    b0 = md.param([model], init=md.zeros())
    x = word.gather(vocab, tokens) + position.slice(context, None, seq, seq)
    x = md.layer_norm[model](x + segment.gather(segments, segment_ids), g0, b0, eps=1e-12)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        b1 = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.ones())
        b2 = md.param([model], init=md.zeros())
        x = md.layer_norm[model](x + attention(x, present), g1, b1, eps=1e-12)
        x = md.layer_norm[model](x + mlp(x), g2, b2, eps=1e-12)
        return x

    x = md.repeat(layers, layer, x)
    logits = predicted(x, word)
    losses = md.cross_entropy[vocab](logits, targets)
    loss = md.sum(losses * scored) / md.sum(scored)
    md.minimize(loss, md.adamw(lr=md.cosine(1e-4, 1_000_000, warmup=10_000), clip=1.0))
    return loss, logits
