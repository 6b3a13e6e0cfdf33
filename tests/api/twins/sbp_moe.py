# mypy: disable-error-code="type-arg,valid-type"
"""GShard's mixture of experts, in Python."""

import meshdsl as md

group, token, experts, slot = md.dims(group=8, token=32, experts=8, slot=8)
model, hidden = md.dims(model=16, hidden=64)


@md.function
def mlp(inside: md.Tensor[experts, group, slot, model]) -> md.Tensor[experts, group, slot, model]:
    wi = md.param([experts, model, hidden])
    wo = md.param([experts, hidden, model])
    h = md.relu(md.einsum(inside, wi, out=[experts, group, slot, hidden]))
    return md.einsum(h, wo, out=[experts, group, slot, model])


@md.program
def moe(x: md.Tensor[group, token, model]):
    wg = md.param([model, experts])

    scores = md.einsum(x, wg, out=[group, token, experts])
    gate = md.max[experts](md.softmax[experts](scores))
    chosen = md.one_hot[experts](md.argmax[experts](scores))
    place = md.cumsum[token](chosen) * chosen
    dispatch = md.where(place == md.cast(md.iota[slot], md.f32) + 1.0, 1.0, 0.0)

    inside = md.einsum(dispatch, x, out=[experts, group, slot, model])
    out = mlp(inside)
    y = md.einsum(dispatch, out, out=[group, token, model]) * gate
    return y
