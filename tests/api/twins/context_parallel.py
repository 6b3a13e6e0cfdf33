# mypy: disable-error-code="type-arg,valid-type"
"""A causal language model with its positions split, in Python."""

import meshdsl as md

batch, seq, model, kv, group, key = md.dims(batch=2, seq=128, model=64, kv=2, group=2, key=16)
mem = md.dim("mem", like=seq)
hidden = md.dim("hidden", 4 * model)
layers, vocab = md.dims(layers=2, vocab=256)


@md.function
def attend(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, kv, group, key])
    wk = md.param([model, kv, key])
    wv = md.param([model, kv, key])
    wo = md.param([kv, group, key, model])
    q = md.einsum(x, wq, out=[batch, kv, group, seq, key])
    k = md.einsum(x, wk, out=[batch, kv, seq, key])[seq >> mem]
    v = md.einsum(x, wv, out=[batch, kv, seq, key])[seq >> mem]
    o = md.attention[key, mem](q, k, v, md.iota[seq] >= md.iota[mem])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    up = md.param([model, hidden])
    down = md.param([hidden, model])
    h = md.gelu(md.einsum(x, up, out=[batch, seq, hidden]))
    return md.einsum(h, down, out=[batch, seq, model])


@md.program
def lm(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    place = md.param([seq, model], init=md.normal(0.02))
    head = md.param([model, vocab])
    x = embed.gather(vocab, tokens) + place

    def layer(x):
        x = x + attend(md.rms_norm[model](x))
        x = x + mlp(md.rms_norm[model](x))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.rms_norm[model](x), head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=3e-3))
    return loss
