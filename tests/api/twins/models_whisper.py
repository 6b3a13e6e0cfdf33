# mypy: disable-error-code="type-arg,valid-type,misc,no-redef"
"""Whisper in Python."""

import meshdsl as md

batch, mel, time, tap, source = md.dims(batch=32, mel=128, time=3000, tap=3, source=1500)
target, context, model, heads, key = md.dims(target=448, context=448, model=1280, heads=20, key=64)
hidden, vocab, layers, decoders = md.dims(hidden=5120, vocab=51866, layers=32, decoders=32)
seen = md.dim("seen", like=source)
before = md.dim("before", like=target)
wide = md.dim("wide", like=model)


@md.function
def attend(x: md.Tensor, of: md.Tensor, mask: md.Tensor, q: md.Dim, mem: md.Dim):
    wq = md.param([model, heads, key], init=md.normal(0.02))
    wk = md.param([model, heads, key], init=md.normal(0.02))
    wv = md.param([model, heads, key], init=md.normal(0.02))
    wo = md.param([heads, key, model], init=md.normal(0.02))
    bq = md.param([heads, key], init=md.zeros())
    bv = md.param([heads, key], init=md.zeros())
    bo = md.param([model], init=md.zeros())
    query = md.einsum(x, wq, out=[batch, heads, q, key]) + bq
    k = md.einsum(of, wk, out=[batch, heads, mem, key])
    v = md.einsum(of, wv, out=[batch, heads, mem, key]) + bv
    s = md.einsum(query, k, out=[batch, heads, q, mem]) / md.sqrt(key)
    o = md.einsum(md.softmax[mem](md.where(mask, s, -1e9)), v, out=[batch, heads, q, key])
    return md.einsum(o, wo, out=[batch, q, model]) + bo


@md.function
def mlp(x: md.Tensor, q: md.Dim):
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    b1 = md.param([hidden], init=md.zeros())
    b2 = md.param([model], init=md.zeros())
    h = md.gelu(md.einsum(x, w1, out=[batch, q, hidden]) + b1)
    return md.einsum(h, w2, out=[batch, q, model]) + b2


@md.program
def whisper(
    sound: md.f32[batch, mel, time], written: md.i32[batch, target], targets: md.i32[batch, target]
):
    kernel1 = md.param([wide, mel, tap], init=md.normal(0.02))
    shift1 = md.param([wide], init=md.zeros())
    kernel2 = md.param([model, wide, tap], init=md.normal(0.02))
    shift2 = md.param([model], init=md.zeros())
    moments = md.param([source, model], init=md.normal(0.02))
    early = md.gelu(md.conv[time.by(tap)](sound, kernel1, pad=1) + shift1)
    x = md.gelu(
        md.conv[time.by(tap) >> source](early, kernel2, stride=2, pad=1, out=[batch, source, model])
        + shift2
    )
    x = x + moments
    everything = md.iota[seen] >= 0

    def layer(x):
        g1 = md.param([model], init=md.ones())
        b1 = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.ones())
        b2 = md.param([model], init=md.zeros())
        a = md.layer_norm[model](x, g1, b1)
        x = x + attend(a, a[source >> seen], everything, source, seen)
        x = x + mlp(md.layer_norm[model](x, g2, b2), source)
        return x

    x = md.repeat(layers, layer, x)
    ge = md.param([model], init=md.ones())
    be = md.param([model], init=md.zeros())
    heard = md.layer_norm[model](x, ge, be)[source >> seen]

    embed = md.param([vocab, model], init=md.normal(0.02))
    position = md.param([context, model], init=md.normal(0.02))
    y = embed.gather(vocab, written) + position.slice(context, None, target, target)

    def layer(y):
        g3 = md.param([model], init=md.ones())
        b3 = md.param([model], init=md.zeros())
        g4 = md.param([model], init=md.ones())
        b4 = md.param([model], init=md.zeros())
        g5 = md.param([model], init=md.ones())
        b5 = md.param([model], init=md.zeros())
        b = md.layer_norm[model](y, g3, b3)
        y = y + attend(b, b[target >> before], md.iota[target] >= md.iota[before], target, before)
        y = y + attend(md.layer_norm[model](y, g4, b4), heard, everything, target, seen)
        y = y + mlp(md.layer_norm[model](y, g5, b5), target)
        return y

    y = md.repeat(decoders, layer, y)
    gf = md.param([model], init=md.ones())
    bf = md.param([model], init=md.zeros())
    logits = md.einsum(md.layer_norm[model](y, gf, bf), embed, out=[batch, target, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(
        loss, md.adamw(lr=md.cosine(1e-5, 5000, warmup=500), clip=1.0), {"moments": "frozen"}
    )
    return loss, logits
