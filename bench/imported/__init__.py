"""Imported: training steps of models that are traced from transformers, beside their declarations and transformers with FSDP2."""
