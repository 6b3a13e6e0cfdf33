"""The local engine: matching answers, and every way to fail within a second."""

from __future__ import annotations

import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from meshdsl.backends.engines import local_devices
from meshdsl.backends.engines.in_process import Emitted, LocalSession, run_local
from meshdsl.backends.engines.local_devices import LocalRunError
from meshdsl.backends.torch.emitter import ProgramText
from tests.waiting import devices_end, until

MATMUL = """
y = inputs["x"] @ params["w"]
y = all_reduce(y, groups["c"], "sum")
return {"y": y}
"""
TABLES = {
    "groups": (("c",),),
    "inputs": "{'x': Spec('f32', {'a': 6, 'k': 8}, {'a': ('r',), 'k': ('c',)}, ('normal', 1.0))}",
    "params": "{'w': Spec('f32', {'k': 8, 'b': 5}, {'k': ('c',)}, ('normal', 0.5))}",
    "outputs": "{'y': Spec('f32', {'a': 6, 'b': 5}, {'a': ('r',)})}",
    "use": ("all_reduce",),
}


def failing(emit, body, devices=2, **options):
    """The error of a program whose devices share one group."""
    use = (
        "all_reduce",
        "all_reduce_start",
        "all_gather",
        "all_gather_start",
        "check_index",
        "IndexOutOfRange",
    )
    mesh, groups = options.pop("mesh", {"r": devices}), options.pop("groups", (("r",),))
    outputs = "{'y': Spec('f32', {'n': 4}, {})}"
    text = emit(body, mesh, groups=groups, outputs=outputs, use=use)
    number = text.split("\n").index("def device(rank, groups, inputs, params):") + 1
    places = {number + i: f"a.mdsl:{i}" for i in range(100)}  # line i of the body
    with devices_end(), pytest.raises(LocalRunError) as caught:
        run_local(text, lines=places, **options)
    return caught.value


def test_contraction_split_over_columns_batch_over_rows(emit):
    text = emit(MATMUL, {"r": 2, "c": 4}, **TABLES)
    x = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    w = np.random.default_rng(1).standard_normal((8, 5)).astype(np.float32)
    found = run_local(text, {"x": x}, {"w": w})
    np.testing.assert_allclose(found.outputs["y"], x @ w, rtol=1e-5, atol=1e-6)
    assert found.device_outputs[0]["y"].shape == (3, 5)
    assert not found.disagreements()
    assert {found.wire_bytes(rank) for rank in range(8)} == {2 * 3 * 60 // 4}
    ((sent, count),) = found.sent[5].items()
    assert (sent.kind, sent.op, sent.axes, sent.size, count) == ("all_reduce", "sum", ("c",), 4, 1)


def test_made_up_values_do_not_depend_on_the_mesh(emit):
    one = run_local(emit(MATMUL, {"r": 1, "c": 1}, **TABLES), seed=4).outputs["y"]
    for mesh in ({"r": 2, "c": 4}, {"r": 3, "c": 2}, {"r": 1, "c": 8}):
        found = run_local(emit(MATMUL, mesh, **TABLES), seed=4).outputs["y"]
        np.testing.assert_allclose(found, one, rtol=1e-5, atol=1e-6)


def test_bf16_and_truth_values_come_back_as_numpy_has_them(emit):
    text = emit(
        "return {'y': inputs['x'] * 2, 'p': inputs['x'] > 0}",
        {"r": 2},
        inputs="{'x': Spec('bf16', {'n': 4}, {'n': ('r',)})}",
        outputs="""{
            'y': Spec('bf16', {'n': 4}, {'n': ('r',)}),
            'p': Spec('bool', {'n': 4}, {'n': ('r',)}),
        }""",
    )
    found = run_local(text, {"x": np.array([1.001, -2, 3, 0], np.float32)}).outputs
    np.testing.assert_array_equal(found["y"], np.array([2, -4, 6, 0], np.float32))
    np.testing.assert_array_equal(found["p"], [True, False, True, False])


def test_the_users_arrays_are_never_written_to(emit):
    text = emit(
        "return {'y': all_reduce(inputs['x'], groups['r'], 'sum')}",
        {"r": 2},
        groups=(("r",),),
        inputs="{'x': Spec('f32', {'n': 4}, {})}",
        outputs="{'y': Spec('f32', {'n': 4}, {})}",
        use=("all_reduce",),
    )
    x = np.ones(4, np.float32)
    x.flags.writeable = False
    np.testing.assert_array_equal(run_local(text, {"x": x}).outputs["y"], [2, 2, 2, 2])


def test_arrays_that_do_not_fit_are_refused_with_a_table(emit):
    text = emit(MATMUL, {"r": 2, "c": 4}, **TABLES)
    with pytest.raises(LocalRunError) as caught:
        run_local(text, {"x": np.zeros((6, 1)), "z": np.zeros(3)})
    assert caught.value.code == "MD0501"
    assert "dim k is 1, not 8" in caught.value.message
    assert "z     -              f64[3]" in caught.value.message


def test_an_exception_on_one_device_releases_the_others(emit):
    error = failing(
        emit,
        """
        x = torch.ones(4)
        if rank == 2:
            raise ValueError("no luck")
        return {"y": all_reduce(x, groups["r"], "sum")}
        """,
        4,
    )
    assert (error.code, error.device, error.place) == ("MD0701", 2, "a.mdsl:3")
    assert error.message == "device 2 failed at a.mdsl:3: ValueError: no luck"


def test_an_exception_deep_in_a_helper_names_the_line_of_the_program(emit):
    error = failing(emit, "return {'y': all_gather(torch.ones(4), rank * 7, groups['r'])}")
    assert (error.code, error.device, error.place) == ("MD0701", 1, "a.mdsl:1")


def test_a_device_that_ends_early_is_a_mismatched_collective(emit):
    error = failing(
        emit,
        """
        x = torch.ones(4)
        if rank == 1:
            return {"y": x}
        x = all_reduce(x, groups["r"], "sum")
        return {"y": all_reduce(x, groups["r"], "sum")}
        """,
        3,
    )
    assert (error.code, error.device, error.place) == ("MD0702", 0, "a.mdsl:4")
    assert "device 0 waits in all_reduce sum of float32[4] over r at a.mdsl:4" in error.message
    assert "for device 1, which ended without joining" in error.message


MISMATCHES = {
    "shape": ("all_reduce(torch.ones(4 + rank), g, 'sum')", "float32[4]", "float32[5]"),
    "dtype": ("all_reduce(torch.ones(4, dtype=d), g, 'sum')", "float32[4]", "float64[4]"),
    "op": (
        "all_reduce(torch.ones(4), g, ['sum', 'max'][rank])",
        "all_reduce sum",
        "all_reduce max",
    ),
    "kind": ("f(rank)(torch.ones(4), g)", "all_reduce sum", "all_gather"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_a_mismatched_collective_names_both_sides(emit, case):
    call, one, other = MISMATCHES[case]
    error = failing(
        emit,
        f"""
        g = groups["r"]
        d = [torch.float32, torch.float64][rank]
        def f(rank):
            if rank:
                return lambda x, g: all_gather(x, 0, g)
            return lambda x, g: all_reduce(x, g, "sum")
        return {{"y": {call}}}
        """,
    )
    assert error.code == "MD0702"
    first, _, second = error.message.partition(" while ")
    line = 6 if case == "kind" else 7  # of a function inside of the device's, or of that itself
    assert first.startswith(f"device 0 is in all_reduce sum of float32[4] over r at a.mdsl:{line}")
    assert one in first
    assert second.startswith("device 1 is in ")
    assert other in second


def test_the_same_collectives_in_another_order_are_a_mismatch(emit):
    error = failing(
        emit,
        """
        x = torch.ones(4)
        if rank:
            x = all_reduce(x, groups["r"], "sum")
        else:
            x = all_reduce(x, groups["r"], "sum")
        return {"y": x}
        """,
    )
    assert error.code == "MD0702"
    assert "at a.mdsl:5 while device 1" in error.message


def test_devices_that_wait_for_each_other_in_different_groups(emit):
    error = failing(
        emit,
        """
        x = torch.ones(4)
        first, second = ("a", "a+b") if rank == 0 else ("a+b", "a")
        x = all_reduce(x, groups[first], "sum")
        x = all_reduce(x, groups[second], "sum")
        return {"y": x}
        """,
        mesh={"a": 2, "b": 1},
        groups=(("a",), ("a", "b")),
    )
    assert error.code == "MD0702"
    assert "device 0 waits in all_reduce sum of float32[4] over a at" in error.message
    assert "for device 1, which waits in all_reduce sum of float32[4] over a, b at" in error.message


UNDER_WAY = {
    "an error between start and wait": (
        """
        work = all_reduce_start(torch.ones(4), groups["r"], "sum")
        if rank == 1:
            raise ValueError("no luck")
        return {"y": work.wait()}
        """,
        "MD0701",
        "device 1 failed at a.mdsl:3: ValueError: no luck",
    ),
    "an error before the start": (
        """
        if rank == 1:
            raise ValueError("no luck")
        work = all_reduce_start(torch.ones(4), groups["r"], "sum")
        return {"y": work.wait()}
        """,
        "MD0701",
        "device 1 failed at a.mdsl:2: ValueError: no luck",
    ),
    "another order": (
        """
        def one():
            return all_reduce_start(torch.ones(4), groups["r"], "sum")
        def other():
            return all_gather_start(torch.ones(1), 0, groups["r"])
        first = one() if rank == 0 else other()
        second = other() if rank == 0 else one()
        return {"y": first.wait() + second.wait().sum()}
        """,
        "MD0702",
        "device 0 is in all_reduce sum of float32[4] over r at a.mdsl:2 while device 1 is in "
        "all_gather of float32[1] over r at a.mdsl:4",
    ),
    "one device waits, the other ended": (
        """
        work = all_reduce_start(torch.ones(4), groups["r"], "sum") if rank == 0 else None
        return {"y": work.wait() if work else torch.ones(4)}
        """,
        "MD0702",
        "device 0 waits in all_reduce sum of float32[4] over r at a.mdsl:1 for device 1, which "
        "ended without joining",
    ),
    "one waits for the first, the other for the second": (
        """
        first = all_reduce_start(torch.ones(4), groups["r"], "sum")
        if rank == 0:
            first.wait()
        second = all_reduce_start(torch.ones(4), groups["r"], "max")
        if rank == 1:
            second.wait()
            third = all_reduce(torch.ones(4), groups["r"], "min")
        return {"y": second.wait() if rank == 0 else third}
        """,
        "MD0702",
        "device 1 waits in all_reduce min of int32[4] over r at a.mdsl:7 for device 0, which "
        "ended without joining",
    ),
}


@pytest.mark.parametrize("case", UNDER_WAY)
def test_collectives_under_way_fail_like_others(emit, case):
    body, code, message = UNDER_WAY[case]
    error = failing(emit, body)
    assert (error.code, error.message) == (code, message)


def test_a_result_is_there_when_it_is_waited_for(emit):
    body = """
    time.sleep(0.05 * rank)
    parts = [torch.full((4,), 10.0**i * rank) for i in range(3)]
    works = [all_reduce_start(part, groups["r"], "sum") for part in parts]
    last = all_gather(torch.ones(1) * rank, 0, groups["r"])
    return {"y": sum(work.wait() for work in reversed(works)) + 1000 * last.sum()}
    """
    outputs = "{'y': Spec('f32', {'n': 4}, {})}"
    use = ("all_reduce_start", "all_gather")
    found = run_local(emit(body, {"r": 3}, groups=(("r",),), outputs=outputs, use=use))
    np.testing.assert_array_equal(found.outputs["y"], [3333] * 4)
    assert not found.disagreements()
    assert [sum(sent.values()) for sent in found.sent] == [4] * 3


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_releases_what_is_under_way(emit):
    body = """
    work = all_reduce_start(torch.ones(4), groups["r"], "sum") if rank != 1 else None
    if rank == 1:
        os.kill(os.getpid(), 2)
    while rank == 1:
        time.sleep(0.001)
    return {"y": work.wait()}
    """
    text = emit(body, {"r": 3}, groups=(("r",),), use=("all_reduce_start",))
    with devices_end(), pytest.raises(KeyboardInterrupt):
        run_local(text)


def test_a_device_that_computes_on_and_on_is_stopped_after_a_failure(emit, monkeypatch):
    monkeypatch.setattr(local_devices, "GRACE", 0.1)
    error = failing(
        emit,
        """
        while rank == 0:
            time.sleep(0.001)
        raise ValueError("no luck")
        """,
    )
    assert (error.code, error.device) == ("MD0701", 1)


@pytest.mark.parametrize("late", range(3))
def test_the_first_bad_index_in_program_order_wins_whoever_is_first(emit, late):
    error = failing(
        emit,
        f"""
        time.sleep(0.15 * (rank == {late}))
        x = torch.ones(4)
        for layer in range(3):
            if layer == 1 and rank == 0:
                check_index(torch.tensor([0, 9]), "v", 5, "a.mdsl:9", ("b",), (2 * rank,))
            if layer == 1 - (rank == 0) and rank != 1:
                check_index(torch.tensor([0, 8]), "v", 5, "a.mdsl:8", ("b",), (2 * rank,))
            if rank != 0:
                check_index(torch.tensor([7, 8]), "v", 5, "a.mdsl:7", ("b",), (2 * rank,))
        return {{"y": x}}
        """,
        3,
    )
    assert error.code == "MD0801"
    assert error.message == "a.mdsl:8: index 8 at [b=1] is out of range for dim `v` of size 5"


@pytest.mark.parametrize("late", range(2))
def test_of_one_statement_the_smallest_position_wins(emit, late):
    error = failing(
        emit,
        f"""
        time.sleep(0.1 * (rank == {late}))
        check_index(torch.tensor([0, 9]), "v", 5, "a.mdsl:9", ("b",), (2 * (1 - rank),))
        return {{"y": all_reduce(torch.ones(4), groups["r"], "sum")}}
        """,
    )
    assert error.message.startswith("a.mdsl:9: index 9 at [b=1]")
    assert error.device == 1


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_passes_through_and_releases_every_device(emit):
    body = """
    if rank == 1:
        os.kill(os.getpid(), 2)
    while rank == 1:
        time.sleep(0.001)
    return {"y": all_reduce(torch.ones(4), groups["r"], "sum")}
    """
    text = emit(body, {"r": 3}, groups=(("r",),), use=("all_reduce",))
    with devices_end(), pytest.raises(KeyboardInterrupt):
        run_local(text)


def test_too_many_devices_are_refused(emit):
    with pytest.raises(LocalRunError, match="at most 1024 devices, not 1000000000"):
        run_local(emit("return {}", {"r": 1000, "c": 10**6}))


def test_threads_of_torch_are_as_before(emit):
    import torch

    before = torch.get_num_threads()
    run_local(emit("return {}", {"r": 8}))
    assert torch.get_num_threads() == before


def test_the_engines_do_not_import_torch_before_they_run():
    modules = ("engines.in_process", "engines.torchrun", "torch.inliner", "engines.reference")
    imports = "; ".join(f"import meshdsl.backends.{name}" for name in modules)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_session_keeps_nothing_of_a_run(emit):
    text = emit("return {}", {"r": 1})
    session = LocalSession(Emitted(ProgramText(text, {})).load(), lasting=True)
    result = weakref.ref(session.run(lambda ranks: torch.ones(3))[0])
    until(lambda: result() is None)  # its thread may still be about to drop it
