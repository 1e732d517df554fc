"""Forecasts: the memory and the time of a step, from the program alone: bytes exactly, times by a hardware profile."""

from mpar.forecast._durations import instruction_durations, message_durations
from mpar.forecast._memory import memory_timeline
from mpar.forecast._predict import Prediction, predict, predicted_times
from mpar.forecast._times import StepTimes, step_times

__all__ = [
    "Prediction",
    "StepTimes",
    "instruction_durations",
    "memory_timeline",
    "message_durations",
    "predict",
    "predicted_times",
    "step_times",
]
