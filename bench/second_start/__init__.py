"""From a command to the first step of `mpar train`, or to the end of an answer of `mpar generate`, without and with what is kept:
`python -m bench.second_start`."""
