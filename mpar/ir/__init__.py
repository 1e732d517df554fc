"""The program as data."""
