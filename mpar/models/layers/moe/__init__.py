"""Mixture of experts: its config, its parameters, the router, the side losses, the ways to compute the experts."""
