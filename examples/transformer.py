"""A decoder-only transformer, forward, in Python; transformer.mdsl says the same."""

import meshdsl as md

batch, seq, model, heads, key = md.dims(batch=8, seq=128, model=256, heads=8, key=32)
hidden, vocab, layers = md.dims(hidden=1024, vocab=512, layers=4)
mem = md.dim("mem", like=seq)

square = md.mesh(data=2, tp=2)
megatron = md.layout(batch="data", heads="tp", hidden="tp", vocab="tp")
hybrid = md.layout("params: model -> data", extends=megatron)


@md.function
def attention(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    """Attention of every position to those before it."""
    wq = md.param([model, heads, key])
    wk = md.param([model, heads, key])
    wv = md.param([model, heads, key])
    wo = md.param([heads, key, model])
    q = md.einsum(x, wq, out=[batch, heads, seq, key])
    k = md.einsum(x, wk, out=[batch, heads, seq, key])[seq >> mem]
    v = md.einsum(x, wv, out=[batch, heads, seq, key])[seq >> mem]
    s = md.einsum(q, k, out=[batch, heads, seq, mem]) / md.sqrt(key)
    s = md.where(md.iota[seq] >= md.iota[mem], s, -1e9)
    o = md.einsum(md.softmax[mem](s), v, out=[batch, heads, seq, key])
    return md.einsum(o, wo, out=[batch, seq, model])


@md.function
def mlp(x: md.Tensor[batch, seq, model]) -> md.Tensor[batch, seq, model]:
    """Two layers on every position."""
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    return md.einsum(
        md.gelu(md.einsum(x, w1, out=[batch, seq, hidden])), w2, out=[batch, seq, model]
    )


@md.program
def lm(tokens: md.i32[batch, seq], targets: md.i32[batch, seq]):
    """The mean cross entropy of the next tokens."""
    embed = md.param([vocab, model], init=md.normal(0.02))
    x = embed.gather(vocab, tokens)

    def layer(x):
        x = x + attention(md.rms_norm[model](x))
        x = x + mlp(md.rms_norm[model](x))
        return x

    x = md.repeat(layers, layer, x)
    logits = md.einsum(md.rms_norm[model](x), embed, out=[batch, seq, vocab])
    loss = md.mean(md.cross_entropy[vocab](logits, targets))
    return loss, logits


if __name__ == "__main__":
    plan = lm.compile(square, megatron)
    print(plan.explain())
    print(plan.compare(hybrid))
    print(f"loss {plan(**plan.sample()).loss:.4f}")
