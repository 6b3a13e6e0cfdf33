# mypy: disable-error-code="type-arg,valid-type,misc"
"""Llama 3.2 with adapters in Python."""

import meshdsl as md

batch, seq, model, kv, group = md.dims(batch=8, seq=2048, model=2048, kv=8, group=4)
half, key, hidden, rank = md.dims(half=32, key=64, hidden=8192, rank=8)
vocab, layers, two = md.dims(vocab=128256, layers=16, two=2)
stretch, trained = md.dims(stretch=32, trained=8192)
mem = md.dim("mem", like=seq)


@md.function
def frequency() -> md.Tensor[half]:
    plain = 500000.0 ** (-md.cast(md.iota[half], md.f32) / half)
    turns = trained * plain / 6.283185307179586
    share = md.minimum(md.maximum((turns - 1.0) / 3.0, 0.0), 1.0)
    return plain * (share + (1.0 - share) / stretch)


@md.function
def turned(x: md.Tensor[..., key], pos: md.i32[...]) -> md.Tensor[..., key]:
    angle = md.cast(pos, md.f32) * frequency()
    a = x[key >> (two, half)].pick(two, 0)
    b = x[key >> (two, half)].pick(two, 1)
    first = a * md.cos(angle) - b * md.sin(angle)
    second = b * md.cos(angle) + a * md.sin(angle)
    return md.concat[half >> key](first, second)


@md.function
def keys(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, kv, seq, key]:
    wk = md.param([model, kv, key], init=md.normal(0.02))
    return md.einsum(x, wk, out=[batch, kv, seq, key])


@md.function
def joined(o: md.Tensor[batch, kv, group, seq, key]) -> md.Tensor[batch, seq, model]:
    wo = md.param([kv, group, key, model], init=md.normal(0.02))
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def attention(
    q: md.Tensor[batch, kv, group, seq, key],
    k: md.Tensor[batch, kv, mem, key],
    v: md.Tensor[batch, kv, mem, key],
):
    s = md.einsum(q, k, out=[batch, kv, group, seq, mem]) / md.sqrt(key)
    s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
    return md.einsum(md.softmax[mem](s), v, out=[batch, kv, group, seq, key])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    gate = md.param([model, hidden], init=md.normal(0.02))
    up = md.param([model, hidden], init=md.normal(0.02))
    down = md.param([hidden, model], init=md.normal(0.02))
    h = md.silu(md.einsum(x, gate, out=[batch, seq, hidden])) * md.einsum(
        x, up, out=[batch, seq, hidden]
    )
    return md.einsum(h, down, out=[batch, seq, model])


@md.program
def llama_lora(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        wq = md.param([model, kv, group, key], init=md.normal(0.02))
        wv = md.param([model, kv, key], init=md.normal(0.02))
        qa = md.param([model, rank], init=md.normal(0.02))
        qb = md.param([rank, kv, group, key], init=md.zeros())
        va = md.param([model, rank], init=md.normal(0.02))
        vb = md.param([rank, kv, key], init=md.zeros())
        y = md.rms_norm[model](x, g1, eps=1e-5)
        lq = md.einsum(
            md.einsum(y, qa, out=[batch, seq, rank]), qb, out=[batch, kv, group, seq, key]
        )
        lv = md.einsum(md.einsum(y, va, out=[batch, seq, rank]), vb, out=[batch, kv, seq, key])
        q = turned(md.einsum(y, wq, out=[batch, kv, group, seq, key]) + 2 * lq, md.iota[seq])
        k = turned(keys(y), md.iota[seq])
        v = md.einsum(y, wv, out=[batch, kv, seq, key]) + 2 * lv
        x = x + joined(attention(q, k[seq >> mem], v[seq >> mem]))
        x = x + mlp(md.rms_norm[model](x, g2, eps=1e-5))
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.ones())
    head = md.param([vocab, model], init=md.normal(0.02))
    logits = md.einsum(md.rms_norm[model](x, gf, eps=1e-5), head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    groups = {"params": "frozen", ("qa", "qb", "va", "vb"): "trained"}
    optimizer = md.adamw(lr=1e-3, weight_decay=0, clip=1.0, compute="bf16")
    md.minimize(loss, optimizer, groups)
    return loss
