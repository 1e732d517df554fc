"""Hugging Face folders: reading any part of any leaf from safetensors, and writing what transformers loads."""
