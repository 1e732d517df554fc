"""Training steps with the sequence or the experts spread over ranks, beside torch: `python -m bench.parallel context|experts`."""
