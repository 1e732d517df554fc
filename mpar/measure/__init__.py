"""Measure: the rates of this machine as a hardware profile, by which `mpar plan` predicts."""

from mpar.measure._facts import facts_of
from mpar.measure._profile import profile_of, profile_text
from mpar.measure._ranks import Machine, measure_machine

__all__ = ["Machine", "facts_of", "measure_machine", "profile_of", "profile_text"]
