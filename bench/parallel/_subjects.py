"""All subjects, by the names that the command line has for them."""

from bench.parallel._context import CONTEXT
from bench.parallel._experts import EXPERTS

__all__ = ["SUBJECTS"]

SUBJECTS = {subject.name: subject for subject in (CONTEXT, EXPERTS)}
