"""`-t stablehlo`: a function of either view as a module of StableHLO, with Shardy's shardings.

    literals.py      element types and constants as MLIR's text
    writer.py        the ops of a function, as they are written
    traced.py        values that numpy's functions and operators are written with
    functions.py     what each function of numpy is in StableHLO
    ops/             ops that are not what their numpy says: one function each, by family
    collectives.py   the collectives of the local view
    export.py        functions, their arguments, results and layouts
    target.py        the target of the tools

An op is written by its entry in ops/, else by its own definition in numpy, which runs on traced
values, else by its decomposition. So an op of a package needs no entry.
"""
