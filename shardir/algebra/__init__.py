"""Floor 1: meshes, layouts, factors, strategies, redistribution. Plain Python on plain values.

A compiler that wants this room alone can take it: it needs Lark for the notation, nothing else.
"""
