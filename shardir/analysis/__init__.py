"""Questions about functions and blocks; nothing here changes a program.

functions.py: walk a function, find its mesh, its view, its names. groups.py: sharding groups.
roles.py: which results become which arguments.
"""
