# mypy: disable-error-code="type-arg,valid-type,misc,index,no-redef,arg-type"
"""T5 in Python."""

import meshdsl as md

batch, source, target, model, heads = md.dims(
    batch=16, source=512, target=512, model=4096, heads=64
)
key, hidden, vocab, layers, buckets = md.dims(
    key=64, hidden=10240, vocab=32128, layers=24, buckets=32
)
near, near_before, reach = md.dims(near=8, near_before=16, reach=128)
seen = md.dim("seen", like=source)
before = md.dim("before", like=target)


@md.function
def bucket(distance: md.Tensor, exact: md.Dim):
    far = md.cast(md.maximum(distance, exact), md.f32) / exact
    shared = exact + md.cast(md.log(far) / md.log(reach / exact) * exact, md.i32)
    return md.where(distance < exact, distance, md.minimum(shared, 2 * exact - 1))


@md.function
def attend(
    x: md.Tensor,
    of: md.Tensor,
    bias: md.Tensor,
    mask: md.Tensor,
    q: md.Dim,
    mem: md.Dim,
):
    wq = md.param([model, heads, key], init=md.normal(0.002))
    wk = md.param([model, heads, key], init=md.normal(0.015))
    wv = md.param([model, heads, key], init=md.normal(0.015))
    wo = md.param([heads, key, model], init=md.normal(0.015))
    query = md.einsum(x, wq, out=[batch, heads, q, key])
    k = md.einsum(of, wk, out=[batch, heads, mem, key])
    v = md.einsum(of, wv, out=[batch, heads, mem, key])
    s = md.einsum(query, k, out=[batch, heads, q, mem]) + bias
    o = md.einsum(md.softmax[mem](md.where(mask, s, -1e9)), v, out=[batch, heads, q, key])
    return md.einsum(o, wo, out=[batch, q, model])


@md.function
def mlp(x: md.Tensor, q: md.Dim):
    gate = md.param([model, hidden], init=md.normal(0.015))
    up = md.param([model, hidden], init=md.normal(0.015))
    down = md.param([hidden, model], init=md.normal(0.01))
    h = md.gelu(md.einsum(x, gate, out=[batch, q, hidden]), approximate="tanh")
    h = h * md.einsum(x, up, out=[batch, q, hidden])
    return md.einsum(h, down, out=[batch, q, model])


@md.program
def t5(
    words: md.i32[batch, source], written: md.i32[batch, target], targets: md.i32[batch, target]
):
    embed = md.param([vocab, model], init=md.normal(1.0))
    table = md.param([buckets, heads], init=md.normal(0.015))
    table_before = md.param([buckets, heads], init=md.normal(0.015))
    there = words[source >> seen] != 0
    ahead = md.iota[seen] - md.iota[source]
    bias = table.gather(buckets, bucket(md.abs(ahead), near) + md.where(ahead > 0, 2 * near, 0))
    x = embed.gather(vocab, words)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        a = md.rms_norm[model](x, g1)
        x = x + attend(a, a[source >> seen], bias, there, source, seen)
        x = x + mlp(md.rms_norm[model](x, g2), source)
        return x

    x = md.repeat(layers, layer, x)
    encoded = md.param([model], init=md.ones())
    read = md.rms_norm[model](x, encoded)[source >> seen]

    back = md.iota[target] - md.iota[before]
    bias_before = table_before.gather(buckets, bucket(md.maximum(back, 0), near_before))
    y = embed.gather(vocab, written)

    def layer(y):
        g3 = md.param([model], init=md.ones())
        g4 = md.param([model], init=md.ones())
        g5 = md.param([model], init=md.ones())
        b = md.rms_norm[model](y, g3)
        y = y + attend(b, b[target >> before], bias_before, back >= 0, target, before)
        y = y + attend(md.rms_norm[model](y, g4), read, 0.0, there, target, seen)
        y = y + mlp(md.rms_norm[model](y, g5), target)
        return y

    y = md.repeat(layers, layer, y)
    gf = md.param([model], init=md.ones())
    head = md.param([vocab, model], init=md.normal(1.0))
    logits = md.einsum(md.rms_norm[model](y, gf), head, out=[batch, target, vocab])
    scored = md.cast(targets != 0, md.f32)
    loss = md.sum(md.cross_entropy[vocab](logits, targets) * scored) / md.sum(scored)
    md.minimize(loss, md.adamw(lr=md.cosine(1e-4, 100_000, warmup=1000), clip=1.0))
    return loss, logits
