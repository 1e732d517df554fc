"""Numbers of mpar's tasks beside those of TRL's trainers, of one or several versions, on the same models and rows.

    python -m tools.trl /path/to/trl-1.16/bin/python /path/to/trl-0.24/bin/python

Each version of TRL is in an environment of its own, where nothing of mpar is needed. The command prints a table in markdown, the
one in docs/post_training.md, and ends with 1 if a number that should be equal is not, or the other way round.
"""
