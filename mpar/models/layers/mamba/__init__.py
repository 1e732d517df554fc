"""The Mamba-2 mixer: its config, its parameters and how fresh ones start, its function."""
