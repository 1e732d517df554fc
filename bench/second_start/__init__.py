"""From the command to the first step of `mpar train`, without and with a kept program: `python -m bench.second_start`."""
