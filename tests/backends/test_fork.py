"""A process that was forked after a run can run as well: it has none of the threads before."""

from __future__ import annotations

import os
import signal

import numpy as np

from meshdsl.backends.engines.in_process import run_local
from meshdsl.backends.engines.persistent import PersistentEngine
from tests.compiling import compile_text

TEXT = """
dim m = 96, k = 96
mesh two = { x: 2 }
layout split { m -> x }
program p(u[m, k]) {
  param v[k]
  return exp(einsum(u, v -> [m]))
}
"""


def test_a_forked_process_runs() -> None:
    made = compile_text(TEXT, layout="split")
    engine = PersistentEngine(made.emitted)
    values = {"u": np.ones((96, 96), np.float32), "v": np.ones(96, np.float32)}
    inputs, held = {"u": values["u"]}, engine.parameters({"v": values["v"]})
    (name,) = engine.run(inputs, held)
    run_local(made.text)
    engine.session._lock.acquire()  # as of a thread that runs just now
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 1
        try:
            run_local(made.text)
            code = 0 if name in engine.run(inputs, held) else 2
        finally:
            os._exit(code)
    engine.session._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert engine.run(inputs, held)
