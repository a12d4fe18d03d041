"""Layer 1: meshes, layouts, factors, strategies, redistribution. Plain Python on plain values.

A compiler that needs this package only can copy it: its one dependency is Lark, for the notation.
"""
