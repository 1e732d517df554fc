"""Proofs: checks that every program must pass before it may run."""

from mpar.proof._verify import events, verify

__all__ = ["events", "verify"]
