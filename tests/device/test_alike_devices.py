"""The memory of a pipeline, of whose devices those in the middle are walked once."""

import pytest

from meshdsl.device.alike import alike_devices
from meshdsl.device.memory import memory, walks
from meshdsl.diagnostics import Source
from meshdsl.pipeline import Compilation, Options

TEXT = """
dim batch = 16, io = 8, hidden = 16, layers = 16
program net(x[batch, io], t[batch, io]) {{
  repeat layers {{
    param w[io, hidden]
    x = x + mean[hidden](tanh(einsum(x, w -> [batch, hidden]))) * x
  }}
  loss = mean(square(x - t))
  return loss
  minimize loss with adamw(lr=0.01)
}}
layout staged {{ layers -> pipe }} with {schedule}[batch](8)
"""
SCHEDULES = ("one_f_one_b", "gpipe", "zb_h1", "interleaved", "zb_v")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_device_holds_more_than_the_memory_of_all(schedule: str) -> None:
    """Each device walked alone: the most of them is what is said of the program."""
    text = TEXT.format(schedule=schedule)
    options = Options(mesh="pipe:8", layout="staged")
    program = Compilation(Source("net.mdsl", text), options).device
    together = alike_devices(program, in_memory=True)
    assert sorted(d for devices in together for d in devices) == list(range(8))
    assert len(together) < 8
    most = max(sum(walk.stored.values()) + walk.walked().most for walk in walks(program))
    assert memory(program)["peak"] == most
