"""Layers: what a decoder is made of. Attention, feed-forward layers, experts, scans, norms, rotations; each with its config."""
