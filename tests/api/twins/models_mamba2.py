# mypy: disable-error-code="type-arg,valid-type,misc,index"
"""Mamba-2 in Python."""

import meshdsl as md

batch, seq, chunk, pos, model = md.dims(batch=8, seq=2048, chunk=8, pos=256, model=768)
groups, heads, part, state, tap = md.dims(groups=1, heads=24, part=64, state=128, tap=4)
vocab, layers = md.dims(vocab=50288, layers=24)
place = md.dim("place", like=pos)


@md.function
def scan(
    x: md.Tensor[batch, seq, groups, heads, part],
    dt: md.Tensor[batch, seq, groups, heads],
    b: md.Tensor[batch, seq, groups, state],
    c: md.Tensor[batch, seq, groups, state],
    rate: md.Tensor[groups, heads],
) -> md.Tensor[batch, seq, groups, heads, part]:
    v = (x * dt)[seq >> (chunk, place)]
    k = b[seq >> (chunk, place)]
    q = c[seq >> (chunk, pos)]
    decay = (-md.exp(rate) * dt)[seq >> (chunk, pos)]
    until = md.cumsum[pos](decay)
    total = md.sum[pos](decay)

    between = until - until[pos >> place]
    fade = md.exp(md.where(md.iota[pos] >= md.iota[place], between, -1e9))
    scores = md.einsum(q, k, out=[batch, chunk, groups, pos, place]) * fade
    near = md.einsum(scores, v, out=[batch, chunk, pos, groups, heads, part])
    kept = v * md.exp(total - until[pos >> place])
    added = md.einsum(kept, k, out=[batch, chunk, groups, heads, state, part])
    states = md.linear_recurrence[chunk](md.exp(total), added)
    earlier = md.shift[chunk](states, 1)
    far = md.einsum(q, earlier, out=[batch, chunk, pos, groups, heads, part]) * md.exp(until)
    return (near + far)[(chunk, pos) >> seq]


@md.function
def before(x: md.Tensor[batch, seq, ...]) -> md.Tensor[batch, seq, tap, ...]:
    return md.window[seq.by(4) >> tap](x, before=tap - 1)


@md.function
def mixer(y: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wz = md.param([model, groups, heads, part], init=md.normal(0.02))
    wx = md.param([model, groups, heads, part], init=md.normal(0.02))
    wb = md.param([model, groups, state], init=md.normal(0.02))
    wc = md.param([model, groups, state], init=md.normal(0.02))
    wt = md.param([model, groups, heads], init=md.normal(0.02))
    kx = md.param([groups, heads, part, tap], init=md.normal(0.3))
    kb = md.param([groups, state, tap], init=md.normal(0.3))
    kc = md.param([groups, state, tap], init=md.normal(0.3))
    sx = md.param([groups, heads, part], init=md.zeros())
    sb = md.param([groups, state], init=md.zeros())
    sc = md.param([groups, state], init=md.zeros())
    bias = md.param([groups, heads], init=md.ones())
    rate = md.param([groups, heads], init=md.zeros())
    skip = md.param([groups, heads], init=md.ones())
    scale = md.param([groups, heads, part], init=md.ones())
    wo = md.param([groups, heads, part, model], init=md.normal(0.02))
    x = before(md.einsum(y, wx, out=[batch, seq, groups, heads, part]))
    b = before(md.einsum(y, wb, out=[batch, seq, groups, state]))
    c = before(md.einsum(y, wc, out=[batch, seq, groups, state]))
    x = md.silu(md.einsum(x, kx, out=[batch, seq, groups, heads, part]) + sx)
    b = md.silu(md.einsum(b, kb, out=[batch, seq, groups, state]) + sb)
    c = md.silu(md.einsum(c, kc, out=[batch, seq, groups, state]) + sc)
    dt = md.softplus(md.einsum(y, wt, out=[batch, seq, groups, heads]) + bias)
    gate = md.silu(md.einsum(y, wz, out=[batch, seq, groups, heads, part]))
    h = (scan(x, dt, b, c, rate) + x * skip) * gate
    h = h * md.rsqrt(md.mean[groups, heads, part](md.square(h)) + 1e-5) * scale
    return md.einsum(h, wo, out=[batch, seq, model])


@md.program
def mamba2(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens)

    def layer(x):
        g = md.param([model], init=md.ones())
        x = x + mixer(md.rms_norm[model](x, g, eps=1e-5))
        return x

    x = md.repeat(layers, layer, x)
    gf = md.param([model], init=md.ones())
    y = md.rms_norm[model](x, gf, eps=1e-5)
    head = md.param([vocab, model], init=md.normal(0.02))
    logits = md.einsum(y, head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    lr = md.cosine(6e-4, 4800, warmup=480)
    md.minimize(loss, md.adamw(lr=lr, weight_decay=0.1, clip=1.0))
    return loss, logits
