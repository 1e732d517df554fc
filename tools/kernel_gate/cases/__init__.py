"""Calls of kernels as production makes them, one file for each family."""
