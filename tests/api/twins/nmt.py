# mypy: disable-error-code="type-arg,valid-type"
"""A translator of two LSTMs with attention and its training step, in Python."""

import meshdsl as md

batch, source, target, vocab = md.dims(batch=64, source=10, target=10, vocab=16)
model, hidden, last, gate = md.dims(model=32, hidden=64, last=64, gate=4)


@md.function
def lstm(
    x: md.Tensor[batch, gate, hidden],
    said: md.Tensor[batch, hidden],
    memory: md.Tensor[batch, hidden],
    u: md.Tensor[last, gate, hidden],
):
    g = x + md.einsum(said[hidden >> last], u, out=[batch, gate, hidden])
    kept = memory * md.sigmoid(g.pick(gate, 0) + 1) + md.sigmoid(g.pick(gate, 1)) * md.tanh(
        g.pick(gate, 2)
    )
    return md.sigmoid(g.pick(gate, 3)) * md.tanh(kept), kept


@md.program
def nmt(read: md.i32[batch, source], before: md.i32[batch, target], answer: md.i32[batch, target]):
    embed = md.param([vocab, model], init=md.normal(1.0))
    reads = md.param([model, gate, hidden])
    reads_on = md.param([last, gate, hidden])
    writes = md.param([model, gate, hidden])
    writes_on = md.param([last, gate, hidden])
    out = md.param([hidden, vocab])
    out_seen = md.param([hidden, vocab])

    x = md.einsum(embed.gather(vocab, read), reads, out=[batch, source, gate, hidden])
    y = md.einsum(embed.gather(vocab, before), writes, out=[batch, target, gate, hidden])
    h = md.zeros[batch, hidden]()
    c = md.zeros[batch, hidden]()

    def hear(h, c):
        h, c = lstm(x, h, c, reads_on)
        return h, c, md.name("heard", h)

    def say(h, c):
        h, c = lstm(y, h, c, writes_on)
        return h, c, md.name("said", h)

    h, c, heard = md.repeat(source, hear, h, c)
    h, c, said = md.repeat(target, say, h, c)
    look = md.softmax[source](md.einsum(said, heard, out=[batch, target, source]) / md.sqrt(hidden))
    seen = md.einsum(look, heard, out=[batch, target, hidden])
    logits = md.einsum(said, out, out=[batch, target, vocab]) + md.einsum(
        seen, out_seen, out=[batch, target, vocab]
    )
    loss = md.mean(md.cross_entropy[vocab](logits, answer))
    right = md.mean(md.cast(md.argmax[vocab](logits) == answer, "f32"))
    md.minimize(loss, md.adam(lr=1e-2, clip=1.0))
    return loss, right
