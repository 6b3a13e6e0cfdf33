# mypy: disable-error-code="type-arg,valid-type"
"""The training step of LLaMA-3 8B, in Python."""

import meshdsl as md

batch, seq, model, kv, group, key = md.dims(batch=16, seq=8192, model=4096, kv=8, group=4, key=128)
hidden, vocab, layers = md.dims(hidden=14336, vocab=128256, layers=32)
mem = md.dim("mem", like=seq)


@md.function
def attend(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    wq = md.param([model, kv, group, key], init=md.normal(0.02))
    wk = md.param([model, kv, key], init=md.normal(0.02))
    wv = md.param([model, kv, key], init=md.normal(0.02))
    wo = md.param([kv, group, key, model], init=md.normal(0.02))
    q = md.einsum(x, wq, out=[batch, kv, group, seq, key])
    k = md.einsum(x, wk, out=[batch, kv, seq, key])
    v = md.einsum(x, wv, out=[batch, kv, seq, key])
    past = md.iota[seq] >= md.iota[mem]
    o = md.attention[key, mem](q, k[seq >> mem], v[seq >> mem], past)
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    w1 = md.param([model, hidden], init=md.normal(0.02))
    w3 = md.param([model, hidden], init=md.normal(0.02))
    w2 = md.param([hidden, model], init=md.normal(0.02))
    h = md.silu(md.einsum(x, w1, out=[batch, seq, hidden])) * md.einsum(
        x, w3, out=[batch, seq, hidden]
    )
    return md.einsum(h, w2, out=[batch, seq, model])


@md.program
def llama3(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    embed = md.param([vocab, model], init=md.normal(0.02))
    head = md.param([model, vocab], init=md.normal(0.02))
    g = md.param([model], init=md.ones())
    x = embed.gather(vocab, tokens)

    def layer(x):
        g1 = md.param([model], init=md.ones())
        g2 = md.param([model], init=md.ones())
        with md.recompute():
            x = x + attend(md.rms_norm[model](x, g1))
            x = x + mlp(md.rms_norm[model](x, g2))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.rms_norm[model](x, g), head, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    md.minimize(loss, md.adamw(lr=3e-4, clip=1.0))
    return loss
