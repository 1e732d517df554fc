"""Decoders: what mpar does with every causal type of transformers that it has no declaration of.

    python -m tools.decoders run            # all types, each in a process of its own: about an hour on one core
    python -m tools.decoders run stablelm   # these types only; the other rows stay as they are
    python -m tools.decoders table          # write the table into docs/any_decoder.md

The rows are in `docs/any_decoder.json`, with the date, the commit and the versions of the run.
"""
