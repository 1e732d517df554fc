"""The small Llama that these tests compile."""

from tests.small_llama import batch, make_model, make_state

__all__ = ["batch", "make_model", "make_state"]
