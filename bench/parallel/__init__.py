"""Training steps with one thing spread over ranks, beside torch: `python -m bench.parallel context`, or `experts`."""
