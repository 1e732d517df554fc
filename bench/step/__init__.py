"""A training step on one GPU, beside transformers."""
