"""Predicted speed beside measured speed: published ones of large machines."""
