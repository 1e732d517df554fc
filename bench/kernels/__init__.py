"""Kernels: compiled for every chip without a GPU and checked; timed beside their peers on a GPU."""
