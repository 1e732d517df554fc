"""Forecasts: what a step will need and take."""
