# mypy: disable-error-code="type-arg,valid-type"
"""A mixture of experts that drops no token, in Python."""

import meshdsl as md

group, token, model, choice = md.dims(group=4, token=16, model=32, choice=2)
blocks, each, experts, hidden = md.dims(blocks=4, each=2, experts=8, hidden=64)
pairs, row, rows = md.dims(pairs=32, row=32, rows=128)


@md.function
def expert(
    inside: md.Tensor[group, blocks, row, model], sizes: md.i32[group, blocks, each]
) -> md.Tensor[group, blocks, row, model]:
    wi = md.param([blocks, each, model, hidden])
    wo = md.param([blocks, each, hidden, model])
    h = md.relu(md.grouped_einsum(inside, wi, sizes, rows=pairs, out=[group, blocks, row, hidden]))
    o = md.grouped_einsum(h, wo, sizes, rows=pairs, out=[group, blocks, row, model])
    return o


@md.program
def moe(input: md.Tensor[group, token, model], target: md.Tensor[group, token, model]):
    wg = md.param([model, experts])
    s = md.einsum(input, wg, out=[group, token, experts])
    g, src, to, sizes, aux = md.sorted_routing[
        token, experts, choice, blocks, each, row, pairs, rows
    ](s)
    inside = md.mask_padding[row](input.gather(token, src)[rows >> (blocks, row)], sizes)
    out = md.mask_padding[row](expert(inside, sizes), sizes)
    x = input + md.sum[choice](g * out[(blocks, row) >> rows].gather(rows, to))
    loss = md.mean((x - target) ** 2) + 0.01 * aux
    md.minimize(loss, md.adam(lr=1e-3))
    return loss, x
