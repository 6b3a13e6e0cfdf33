# mypy: disable-error-code="type-arg,valid-type,misc"
"""Gemma 2 in Python."""

import meshdsl as md

batch, seq, window, model, kv = md.dims(batch=8, seq=8192, window=4096, model=3584, kv=8)
group, half, key, hidden, vocab = md.dims(group=2, half=128, key=256, hidden=14336, vocab=256000)
layers, two = md.dims(layers=42, two=2)
mem = md.dim("mem", like=seq)
scalar = md.dim("scalar", like=key)


@md.function
def turned(x: md.Tensor[..., seq, key]) -> md.Tensor[..., seq, key]:
    angle = md.cast(md.iota[seq], md.f32) * 10000.0 ** (-md.cast(md.iota[half], md.f32) / half)
    a = x[key >> (two, half)].pick(two, 0)
    b = x[key >> (two, half)].pick(two, 1)
    first = a * md.cos(angle) - b * md.sin(angle)
    second = b * md.cos(angle) + a * md.sin(angle)
    return md.concat[half >> key](first, second)


@md.function
def norm(x: md.Tensor[..., model], g: md.Tensor[model]) -> md.Tensor[..., model]:
    return md.rms_norm[model](x, 1.0 + g)


@md.function
def attention(
    x: md.Tensor[batch, seq, model], seen: md.Tensor[seq, mem]
) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, kv, group, key], init=md.normal(0.02))
    wk = md.param([model, kv, key], init=md.normal(0.02))
    wv = md.param([model, kv, key], init=md.normal(0.02))
    wo = md.param([kv, group, key, model], init=md.normal(0.02))
    q = turned(md.einsum(x, wq, out=[batch, kv, group, seq, key]))
    k = turned(md.einsum(x, wk, out=[batch, kv, seq, key]))
    v = md.einsum(x, wv, out=[batch, kv, seq, key])
    s = md.einsum(q, k[seq >> mem], out=[batch, kv, group, seq, mem]) / md.sqrt(scalar)
    s = md.where(seen, 50.0 * md.tanh(s / 50.0), -1e9)
    o = md.einsum(md.softmax[mem](s), v[seq >> mem], out=[batch, kv, group, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    gate = md.param([model, hidden], init=md.normal(0.02))
    up = md.param([model, hidden], init=md.normal(0.02))
    down = md.param([hidden, model], init=md.normal(0.02))
    h = md.gelu(md.einsum(x, gate, out=[batch, seq, hidden]), approximate="tanh")
    h = h * md.einsum(x, up, out=[batch, seq, hidden])
    return md.einsum(h, down, out=[batch, seq, model])


@md.program
def gemma2(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens) * md.sqrt(model)
    back = md.iota[seq] - md.iota[mem]
    everywhere = md.iota[layers] % 2 == 1

    def layer(x):
        g1 = md.param([model], init=md.zeros())
        g2 = md.param([model], init=md.zeros())
        g3 = md.param([model], init=md.zeros())
        g4 = md.param([model], init=md.zeros())
        seen = (back >= 0) & (everywhere | (back < window))
        x = x + norm(attention(norm(x, g1), seen), g2)
        x = x + norm(mlp(norm(x, g3)), g4)
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.zeros())
    logits = md.einsum(norm(x, gf), embed, out=[batch, seq, vocab])
    logits = 30.0 * md.tanh(logits / 30.0)
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=md.cosine(3e-4, 100_000, warmup=2000), clip=1.0))
    return loss, logits
