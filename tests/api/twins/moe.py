# mypy: disable-error-code="type-arg,valid-type"
"""A block of GShard's transformer and its training step, in Python."""

import meshdsl as md

group, token, model, hidden = md.dims(group=4, token=16, model=32, hidden=16)
experts, slot, inner, layers = md.dims(experts=4, slot=8, inner=64, layers=2)


@md.function
def dense(x: md.Tensor[group, token, model]) -> md.Tensor[group, token, model]:
    w1 = md.param([model, hidden])
    w2 = md.param([hidden, model])
    return md.einsum(
        md.relu(md.einsum(x, w1, out=[group, token, hidden])), w2, out=[group, token, model]
    )


@md.function
def expert(
    inside: md.Tensor[experts, group, slot, model],
) -> md.Tensor[experts, group, slot, model]:
    wi = md.param([experts, model, inner])
    wo = md.param([experts, inner, model])
    h = md.relu(md.einsum(inside, wi, out=[experts, group, slot, inner]))
    o = md.einsum(h, wo, out=[experts, group, slot, model])
    return o


@md.program
def moe(input: md.Tensor[group, token, model], target: md.Tensor[group, token, model]):
    x = md.rms_norm[model](input)

    auxiliary = md.zeros[()]()

    def layer(x, auxiliary):
        x = x + dense(x)
        wg = md.param([model, experts])
        logits = md.einsum(x, wg, out=[group, token, experts])
        combine, dispatch, balance = md.top2_gating[token, experts, slot](logits)
        inside = md.einsum(dispatch, x, out=[experts, group, slot, model])
        out = expert(inside)
        x = x + md.einsum(combine, out, out=[group, token, model])
        auxiliary = auxiliary + balance
        return x, auxiliary

    x, auxiliary = md.repeat(layers, layer, x, auxiliary)
    loss = md.mean((x - target) ** 2) + 0.01 * auxiliary
    md.minimize(loss, md.adam(lr=1e-3))
    return loss, auxiliary
