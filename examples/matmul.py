"""One matrix product under every way to split it, in Python; matmul.mdsl says the same."""

import meshdsl as md

rows, inner, cols = md.dims(rows=4, inner=5, cols=8)


@md.program
def matmul(x: md.Tensor[rows, inner], w: md.Tensor[inner, cols]):
    """Sum over `inner`."""
    y = md.einsum(x, w, out=[rows, cols])
    return y


if __name__ == "__main__":
    for layout in ({"rows": "a"}, {"cols": "a"}, {"rows": "a", "cols": "b"}):
        plan = matmul.compile({"a": 2, "b": 2}, layout)
        inputs = plan.sample()
        assert abs(plan(**inputs).y - inputs["x"] @ inputs["w"]).max() < 1e-5
        print(f"{plan!r}: {plan.cost().wire_bytes} B sent per device")
