"""From launch to the end of the first step, and resident memory, of mpar's workers and of torch's: `python -m bench.startup`."""
