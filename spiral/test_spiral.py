"""Tests of spiral.mdsl: run them with `pytest`."""

from pathlib import Path

import numpy as np

import meshdsl as md

FILE = Path(__file__).with_name("spiral.mdsl")


def test_the_file_is_fine_and_its_expectations_hold():
    md.check(FILE)


def test_both_layouts_give_the_same_numbers():
    program = md.load(FILE)
    data_parallel = program.compile("line", "data_parallel")
    tensor_parallel = program.compile("line", "tensor_parallel")

    inputs = data_parallel.sample()
    one, other = data_parallel(**inputs), tensor_parallel(**inputs)
    np.testing.assert_allclose(one.loss, other.loss, rtol=1e-5)
    np.testing.assert_allclose(one.accuracy, other.accuracy)
