"""Time that compile_step takes, from nano to a 405B model on 16,384 ranks: `python -m bench.compile_time`."""
