# mypy: disable-error-code="type-arg,valid-type"
"""A language model of gated linear attention, in Python."""

import meshdsl as md

batch, chunk, pos, model = md.dims(batch=4, chunk=8, pos=16, model=64)
heads, key, value, vocab = md.dims(heads=4, key=16, value=16, vocab=256)
time = md.dim("time", chunk * pos)
place = md.dim("place", like=pos)
hidden = md.dim("hidden", 4 * model)
layers = md.dim("layers", 2)


@md.function
def linear_attention(x: md.Tensor[batch, time, model]) -> md.Tensor[batch, time, model]:
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, value])
    wg = md.param([model, heads])
    wo = md.param([heads, value, model])
    q = md.einsum(x, wq, out=[batch, time, heads, key])[time >> (chunk, pos)]
    k = md.einsum(x, wk, out=[batch, time, heads, key])[time >> (chunk, place)] / md.sqrt(key)
    v = md.einsum(x, wv, out=[batch, time, heads, value])[time >> (chunk, place)]
    g = -md.softplus(md.einsum(x, wg, out=[batch, time, heads]))[time >> (chunk, pos)]
    until = md.cumsum[pos](g)
    total = md.sum[pos](g)

    is_before = md.iota[pos] >= md.iota[place]
    fade = md.exp(md.where(is_before, until - until[pos >> place], -1e9))
    scores = md.einsum(q, k, out=[batch, chunk, heads, pos, place]) * fade
    near = md.einsum(scores, v, out=[batch, chunk, pos, heads, value])
    kept = k * md.exp(total - until[pos >> place])
    added = md.einsum(kept, v, out=[batch, chunk, heads, key, value])
    states = md.linear_recurrence[chunk](md.exp(total), added)
    before = md.shift[chunk](states, 1)
    far = md.einsum(q * md.exp(until), before, out=[batch, chunk, pos, heads, value])
    return md.einsum((near + far)[(chunk, pos) >> time], wo, out=[batch, time, model])


@md.function
def mlp(x: md.Tensor[batch, time, model]) -> md.Tensor[batch, time, model]:
    up = md.param([model, hidden])
    down = md.param([hidden, model])
    h = md.gelu(md.einsum(x, up, out=[batch, time, hidden]))
    return md.einsum(h, down, out=[batch, time, model])


@md.program
def lm(tokens: md.i32[batch, time], targets: md.i32[batch, time]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    head = md.param([model, vocab])
    x = embed.gather(vocab, tokens)

    def layer(x):
        x = x + linear_attention(md.rms_norm[model](x))
        x = x + mlp(md.rms_norm[model](x))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.rms_norm[model](x), head, out=[batch, time, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=3e-3))
    return loss
