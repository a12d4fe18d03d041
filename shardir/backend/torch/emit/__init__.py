"""Emission of programs: names, variables, lines, and the plan beside the program."""
