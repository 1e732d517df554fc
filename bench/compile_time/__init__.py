"""How long compile_step takes, from the nano model to a 405B model on 16,384 ranks: `python -m bench.compile_time`."""
