"""The numpy interpreters of both views, which define what a program computes."""

from shardir.interpret.equivalence import check_pass, random_arguments
from shardir.interpret.evaluator import run

__all__ = ["check_pass", "random_arguments", "run"]
