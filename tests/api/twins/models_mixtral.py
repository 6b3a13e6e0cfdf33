# mypy: disable-error-code="type-arg,valid-type,misc"
"""Mixtral in Python."""

import meshdsl as md

batch, seq, model, kv, group = md.dims(batch=8, seq=4096, model=4096, kv=8, group=4)
half, key, hidden = md.dims(half=64, key=128, hidden=14336)
vocab, layers, two = md.dims(vocab=32000, layers=32, two=2)
experts, choice, pairs, slots, places = md.dims(
    experts=8, choice=2, pairs=8192, slots=32768, places=32769
)
mem, slot = md.dim("mem", like=seq), md.dim("slot", like=seq)


@md.function
def turned(x: md.Tensor[..., seq, key]) -> md.Tensor[..., seq, key]:
    angle = md.cast(md.iota[seq], md.f32) * 1000000.0 ** (-md.cast(md.iota[half], md.f32) / half)
    a = x[key >> (two, half)].pick(two, 0)
    b = x[key >> (two, half)].pick(two, 1)
    first = a * md.cos(angle) - b * md.sin(angle)
    second = b * md.cos(angle) + a * md.sin(angle)
    return md.concat[half >> key](first, second)


@md.function
def attention(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, kv, group, key], init=md.normal(0.02))
    wk = md.param([model, kv, key], init=md.normal(0.02))
    wv = md.param([model, kv, key], init=md.normal(0.02))
    wo = md.param([kv, group, key, model], init=md.normal(0.02))
    q = turned(md.einsum(x, wq, out=[batch, kv, group, seq, key]))
    k = turned(md.einsum(x, wk, out=[batch, kv, seq, key]))
    v = md.einsum(x, wv, out=[batch, kv, seq, key])
    s = md.einsum(q, k[seq >> mem], out=[batch, kv, group, seq, mem]) / md.sqrt(key)
    s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
    o = md.einsum(md.softmax[mem](s), v[seq >> mem], out=[batch, kv, group, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def expert(
    x: md.Tensor[batch, experts, slot, model],
) -> md.Tensor[batch, experts, slot, model]:
    gate = md.param([experts, model, hidden], init=md.normal(0.02))
    up = md.param([experts, model, hidden], init=md.normal(0.02))
    down = md.param([experts, hidden, model], init=md.normal(0.02))
    h = md.silu(md.einsum(x, gate, out=[batch, experts, slot, hidden]))
    h = h * md.einsum(x, up, out=[batch, experts, slot, hidden])
    return md.einsum(h, down, out=[batch, experts, slot, model])


@md.function
def moe(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    router = md.param([model, experts], init=md.normal(0.02))
    scores = md.einsum(x, router, out=[batch, seq, experts])
    shares, to, source, full, _ = md.top_k_routing[
        seq, experts, choice, slot, pairs, slots, places
    ](scores)
    y = expert((x.gather(seq, source) * full)[slots >> (experts, slot)])
    return md.sum[choice](shares * y[(experts, slot) >> slots].gather(slots, to))


@md.program
def mixtral(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        x = x + attention(md.rms_norm[model](x, g1, eps=1e-5))
        x = x + moe(md.rms_norm[model](x, g2, eps=1e-5))
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.ones())
    head = md.param([vocab, model], init=md.normal(0.02))
    logits = md.einsum(md.rms_norm[model](x, gf, eps=1e-5), head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=md.cosine(3e-4, 100_000, warmup=2000), clip=1.0))
    return loss, logits
