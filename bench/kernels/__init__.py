"""Kernels: checked against float64 and timed beside their peers, on a GPU. `tools/kernel_gate` compiles them without one."""
