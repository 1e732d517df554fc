"""Offline: what kernels would launch on a chip that this machine does not have. Importing this module needs Triton."""

from mpar.kernels._launch import Launch, Recording, recording
from mpar.kernels._table import TABLE, Tuning, classes, kernels, replaced, tuning

__all__ = ["TABLE", "Launch", "Recording", "Tuning", "classes", "kernels", "recording", "replaced", "tuning"]
