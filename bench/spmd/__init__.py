"""mpar, torch, torchtitan and the floors on several local ranks: `python -m bench.spmd run --config nano --mesh tp4_sp`."""
