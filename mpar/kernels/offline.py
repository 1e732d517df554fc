"""Offline: what kernels would launch on a chip that is not here. Importing it needs Triton."""

from mpar.kernels._launch import Launch, Recording, recording
from mpar.kernels._table import Tuning, classes, kernels, tuning

__all__ = ["Launch", "Recording", "Tuning", "classes", "kernels", "recording", "tuning"]
