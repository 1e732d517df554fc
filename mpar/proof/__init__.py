"""Proofs: what must hold of every program before it may run."""
