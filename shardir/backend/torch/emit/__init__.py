"""The text of programs: names, values in variables, lines, and the plan beside the program."""
