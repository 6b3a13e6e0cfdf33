# mypy: disable-error-code="type-arg,valid-type"
"""Handwritten digits, in Python."""

import meshdsl as md

batch, pixels, hidden, classes = md.dims(batch=120, pixels=64, hidden=64, classes=10)


@md.program
def digits(images: md.Tensor[batch, pixels], labels: md.i32[batch]):
    w1 = md.param([pixels, hidden])
    b1 = md.param([hidden], init=md.zeros())
    w2 = md.param([hidden, classes])
    b2 = md.param([classes], init=md.zeros())

    h = md.relu(md.einsum(images, w1, out=[batch, hidden]) + b1)
    logits = md.einsum(h, w2, out=[batch, classes]) + b2
    digit = md.argmax[classes](logits)
    loss = md.mean(md.cross_entropy[classes](logits, labels))
    md.minimize(loss, md.adamw(lr=md.cosine(0.01, 400), weight_decay=1.0))
    return digit, logits, loss
