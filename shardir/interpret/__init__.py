"""Floor 3: the numpy interpreters. What a program means, in both views."""

from shardir.interpret.equivalence import check_pass, random_arguments
from shardir.interpret.evaluator import run

__all__ = ["check_pass", "random_arguments", "run"]
