"""Architectures: what tells one Hugging Face model type from another, one declaration for each, and the table of them."""
