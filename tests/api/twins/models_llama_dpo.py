# mypy: disable-error-code="type-arg,valid-type,misc"
"""Llama 3.2 trained on preferences in Python."""

import meshdsl as md

batch, seq, model, kv, group = md.dims(batch=8, seq=1024, model=2048, kv=8, group=4)
half, key, hidden, rank = md.dims(half=32, key=64, hidden=8192, rank=8)
vocab, layers, two, answer = md.dims(vocab=128256, layers=16, two=2, answer=2)
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
def attention(
    q: md.Tensor[batch, answer, kv, group, seq, key],
    k: md.Tensor[batch, answer, kv, seq, key],
    v: md.Tensor[batch, answer, kv, seq, key],
    wo: md.Tensor[kv, group, key, model],
) -> md.Tensor[batch, answer, seq, model]:
    past = turned(k, md.iota[seq])[seq >> mem]
    s = md.einsum(turned(q, md.iota[seq]), past, out=[batch, answer, kv, group, seq, mem])
    s = s / md.sqrt(key)
    s = md.softmax[mem](md.where(md.iota[seq] >= md.iota[mem], s, -1e9))
    o = md.einsum(s, v[seq >> mem], out=[batch, answer, kv, group, seq, key])
    return md.einsum(o, wo, out=[batch, answer, seq, model])


@md.function
def mlp(
    x: md.Tensor[batch, answer, seq, model],
    gate: md.Tensor[model, hidden],
    up: md.Tensor[model, hidden],
    down: md.Tensor[hidden, model],
) -> md.Tensor[batch, answer, seq, model]:
    wide = [batch, answer, seq, hidden]
    h = md.silu(md.einsum(x, gate, out=wide)) * md.einsum(x, up, out=wide)
    return md.einsum(h, down, out=[batch, answer, seq, model])


@md.function
def log_probability(
    x: md.Tensor[batch, answer, seq, model],
    targets: md.i32[batch, answer, seq],
    gf: md.Tensor[model],
    head: md.Tensor[vocab, model],
) -> md.Tensor[batch, answer]:
    logits = md.einsum(md.rms_norm[model](x, gf, eps=1e-5), head, out=[batch, answer, seq, vocab])
    return -md.sum[seq](md.cross_entropy[vocab](logits, targets, ignore_index=-100))


@md.program
def llama_dpo(tokens: md.i32[batch, answer, seq], targets: md.i32[batch, answer, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    policy = embed.gather(vocab, tokens)
    reference = embed.gather(vocab, tokens)

    def layer(policy, reference):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        wq = md.param([model, kv, group, key], init=md.normal(0.02))
        wk = md.param([model, kv, key], init=md.normal(0.02))
        wv = md.param([model, kv, key], init=md.normal(0.02))
        wo = md.param([kv, group, key, model], init=md.normal(0.02))
        gate = md.param([model, hidden], init=md.normal(0.02))
        up = md.param([model, hidden], init=md.normal(0.02))
        down = md.param([hidden, model], init=md.normal(0.02))
        qa = md.param([model, rank], init=md.normal(0.02))
        qb = md.param([rank, kv, group, key], init=md.zeros())
        va = md.param([model, rank], init=md.normal(0.02))
        vb = md.param([rank, kv, key], init=md.zeros())
        queries, keys = [batch, answer, kv, group, seq, key], [batch, answer, kv, seq, key]
        y = md.rms_norm[model](policy, g1, eps=1e-5)
        lq = md.einsum(md.einsum(y, qa, out=[batch, answer, seq, rank]), qb, out=queries)
        lv = md.einsum(md.einsum(y, va, out=[batch, answer, seq, rank]), vb, out=keys)
        q = md.einsum(y, wq, out=queries) + 2 * lq
        k = md.einsum(y, wk, out=keys)
        v = md.einsum(y, wv, out=keys) + 2 * lv
        policy = policy + attention(q, k, v, wo)
        policy = policy + mlp(md.rms_norm[model](policy, g2, eps=1e-5), gate, up, down)

        z = md.rms_norm[model](reference, g1, eps=1e-5)
        q = md.einsum(z, wq, out=queries)
        k = md.einsum(z, wk, out=keys)
        v = md.einsum(z, wv, out=keys)
        reference = reference + attention(q, k, v, wo)
        reference = reference + mlp(md.rms_norm[model](reference, g2, eps=1e-5), gate, up, down)
        return policy, reference

    policy, reference = md.repeat(layers, layer, policy, reference)
    gf = md.param([model], init=md.ones())
    head = md.param([vocab, model], init=md.normal(0.02))
    ends = targets, gf, head
    log_ratio = log_probability(policy, *ends) - log_probability(reference, *ends)
    margin = 0.1 * (log_ratio.pick(answer, 0) - log_ratio.pick(answer, 1))
    loss = md.mean(md.softplus(-margin))
    accuracy = md.mean(md.cast(margin > 0.0, md.f32))
    groups = {"params": "frozen", ("qa", "qb", "va", "vb"): "trained"}
    optimizer = md.adamw(lr=1e-4, weight_decay=0, clip=1.0, compute="bf16")
    md.minimize(loss, optimizer, groups)
    return loss, accuracy
