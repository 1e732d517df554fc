"""Training steps whose sequence is spread over ranks, beside torch: `python -m bench.context gloo --ranks 4`."""
