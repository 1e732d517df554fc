"""Training steps whose experts are spread over ranks, beside torch: `python -m bench.experts gloo --ranks 4`."""
