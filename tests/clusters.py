"""A profile of a cluster, for tests."""

SMALL = """\
[device]
flops = { f32 = 1e12 }
mm_eff = 0.5
gemm_half = [10, 20]
hbm = 1e12
hbm_eff = 0.5
launch = 1e-6
memory = 1e9
overlap_slowdown = 1.0

[[levels]]
size = 4
kind = "switch"
alpha = 1e-6
bandwidth = 1e9
nominal = 2e9
"""
"""Four devices at a switch."""
