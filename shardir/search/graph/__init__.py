"""The cost graph of a function: candidates, layouts, redistributions and bytes as a problem."""
