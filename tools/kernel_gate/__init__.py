"""The gate of kernels: it compiles the calls that production makes for every chip, without a GPU, or checks them on a GPU."""

from tools.kernel_gate._case import Case, all_cases, calling
from tools.kernel_gate._checks import failures
from tools.kernel_gate._unit import entry_names, record
from tools.kernel_gate._worker import compiled_facts, launch_table

__all__ = ["Case", "all_cases", "calling", "compiled_facts", "entry_names", "failures", "launch_table", "record"]
