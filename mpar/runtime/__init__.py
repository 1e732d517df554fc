"""The runtime: one rank's run, its device and its communication."""
