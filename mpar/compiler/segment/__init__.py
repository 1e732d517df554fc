"""Segments: functions of the chain as code."""
