"""What stays wide where products are narrow (`compute=`)."""

from __future__ import annotations

import pytest
import torch

from meshdsl.backends.engines.in_process import load, local_tensors
from meshdsl.diagnostics import Diagnostics, Source
from meshdsl.ir.rewrite import makers
from meshdsl.ir.types import F32
from meshdsl.named.ir import NamedOp, uses_of
from meshdsl.pipeline import Options, compile_source

COUNTED = """
dim group = 1, token = 600, model = 4, experts = 2, slot = 600, choice = 2
program p(x[group, token, model]) {
  param w[model, experts] = normal(1.0)
  logits = einsum(x, w -> [group, token, experts])
  combine, dispatch, balance = GATING(logits)
  most = max[experts, slot](sum[token](dispatch))
  loss = mean(combine^2) + balance
  minimize loss with sgd(compute="DTYPE")
  return loss, most
}"""
GATINGS = ("top2_gating[token, experts, slot]", "top_k_gating[token, experts, choice, slot]")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("gating", GATINGS)
def test_a_sum_of_products_counts_exactly(gating: str, dtype: str) -> None:
    """Places in a queue, `sum(queue * chosen)`, are numbers beyond those that bf16 tells apart."""
    text = COUNTED.replace("GATING", gating).replace("DTYPE", dtype)
    options = Options(mesh="d:1", layout="group:d")
    program = load(compile_source(Source("p.mdsl", text), options, Diagnostics()).text)
    specs = (program.INPUTS, program.PARAMS, program.STATES)
    tables = [local_tensors(program.MESH, table, {}, 0, range(1))[0] for table in specs]
    with torch.inference_mode():
        results = program.device(0, {}, *tables)
    assert float(results["most"]) == 1, "two tokens are in one slot"


@pytest.mark.parametrize("evaluate", [False, True], ids=["step", "evaluation"])
def test_products_are_not_stored_for_their_sums(evaluate: bool) -> None:
    """They are contracted behind what becomes narrow, or at once where nothing does."""
    text = COUNTED.replace("GATING", GATINGS[0]).replace("DTYPE", "bf16")
    options = Options(mesh="d:1", layout="group:d", evaluate=evaluate)
    program = compile_source(Source("p.mdsl", text), options, Diagnostics()).named
    read, made = uses_of(program), makers(program.body)
    sums = [op for op in program.body if isinstance(op, NamedOp) and op.name == "sum"]
    summed = [made[op.ins[0]] for op in sums if op.ins[0] in made and read[op.ins[0]] == 1]
    assert not [op for op in summed if op.name == "mul" and op.out.name is None]
    assert [op for op in made.values() if op.name == "einsum" and op.out.type.dtype == F32]
