"""Analyses of functions and blocks, which do not change a program.

functions.py: walk a function, find its mesh, its view, its names. groups.py: sharding groups.
roles.py: what is retained between steps, which results become which arguments. aliasing.py: which
results share the memory of an operand. storages.py: which values share memory, and until when they
are read.
"""
