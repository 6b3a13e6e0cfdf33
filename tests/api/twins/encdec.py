# mypy: disable-error-code="type-arg,valid-type,index"
"""A transformer of encoder and decoder and its training step, in Python."""

import meshdsl as md

batch, source, target, seen, before = md.dims(batch=64, source=32, target=32, seen=32, before=32)
model, heads, key, hidden = md.dims(model=64, heads=4, key=16, hidden=256)
vocab, layers = md.dims(vocab=512, layers=2)


@md.function
def attend(x: md.Tensor, of: md.Tensor, mask: md.Tensor, q: md.Dim, mem: md.Dim):
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    query = md.einsum(x, wq, out=[batch, heads, q, key])
    k = md.einsum(of, wk, out=[batch, heads, mem, key])
    v = md.einsum(of, wv, out=[batch, heads, mem, key])
    o = md.attention[key, mem](query, k, v, mask)
    return md.dropout(md.einsum(o, wo, out=[batch, q, model]), 0.1)


@md.function
def mlp(x: md.Tensor, q: md.Dim):
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    h = md.relu(md.einsum(x, w1, out=[batch, q, hidden]))
    return md.dropout(md.einsum(h, w2, out=[batch, q, model]), 0.1)


@md.program
def translate(
    read: md.i32[batch, source], written: md.i32[batch, target], next: md.i32[batch, target]
):
    embed = md.param([vocab, model], init=md.normal(0.1))
    read_at = md.param([source, model], init=md.normal(0.1))
    written_at = md.param([target, model], init=md.normal(0.1))

    words = read[source >> seen] != 0
    x = md.dropout(embed.gather(vocab, read) + read_at, 0.1)

    def encode(x):
        a = md.layer_norm[model](x)
        x = x + attend(a, a[source >> seen], words, source, seen)
        x = x + mlp(md.layer_norm[model](x), source)
        return x

    x = md.repeat(layers, encode, x)
    heard = md.layer_norm[model](x)[source >> seen]

    y = md.dropout(embed.gather(vocab, written) + written_at, 0.1)

    def decode(y):
        b = md.layer_norm[model](y)
        earlier = md.iota[target] >= md.iota[before]
        y = y + attend(b, b[target >> before], earlier, target, before)
        y = y + attend(md.layer_norm[model](y), heard, words, target, seen)
        y = y + mlp(md.layer_norm[model](y), target)
        return y

    y = md.repeat(layers, decode, y)
    logits = md.einsum(md.layer_norm[model](y), embed, out=[batch, target, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, next))
    md.minimize(loss, md.adam(lr=3e-3, clip=1.0))
    return loss
