"""Proofs: checks that every program must pass before it may run."""

from mpar.proof._dataflow import in_order
from mpar.proof._verify import events, verify

__all__ = ["events", "in_order", "verify"]
