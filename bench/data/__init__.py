"""How fast rows become tokens, in how much memory, and how long steps wait for them: `python -m bench.data`."""
