"""Ranks behind slow links on one machine, where communication takes time and no CPU: `python -m bench.slow_links`."""
