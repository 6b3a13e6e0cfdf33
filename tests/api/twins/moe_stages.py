# mypy: disable-error-code="type-arg,valid-type"
"""A mixture of experts in a pipeline, and its training step, in Python."""

import meshdsl as md

group, token, model = md.dims(group=8, token=8, model=16)
experts, slot, inner, layers = md.dims(experts=4, slot=4, inner=16, layers=4)


@md.function
def expert(
    inside: md.Tensor[experts, group, slot, model],
) -> md.Tensor[experts, group, slot, model]:
    wi = md.param([experts, model, inner])
    wo = md.param([experts, inner, model])
    h = md.silu(md.einsum(inside, wi, out=[experts, group, slot, inner]))
    o = md.einsum(h, wo, out=[experts, group, slot, model])
    return o


@md.program
def moe(
    x: md.Tensor[group, token, model],
    target: md.Tensor[group, token, model],
):
    def layer(x):
        wg = md.param([model, experts])
        bias = md.param([experts], init=md.zeros())
        scores = md.einsum(x, wg, out=[group, token, experts])
        gating = md.top2_gating[token, experts, slot]
        combine, dispatch, _ = gating(scores + md.stop_gradient(bias))
        picked = md.one_hot[experts](md.argmax[experts](scores + bias))
        load = md.mean[group, token](picked)
        md.update(bias, bias + 0.01 * md.sign(1 / experts - load))
        out = expert(md.einsum(dispatch, x, out=[experts, group, slot, model]))
        x = x + md.einsum(combine, out, out=[group, token, model])
        return x

    x = md.repeat(layers, layer, x)
    loss = md.mean((x - target) ** 2)
    md.minimize(loss, md.adam(lr=1e-3, clip=1.0))
    return loss
