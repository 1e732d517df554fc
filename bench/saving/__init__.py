"""Saving a sharded state in the background, beside torch's distributed checkpoint: `python -m bench.saving`."""
