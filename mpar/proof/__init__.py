"""Proofs: what must hold of every program before it may run."""

from mpar.proof._verify import events, verify

__all__ = ["events", "verify"]
