"""Mutants of compat: what is private in xDSL and in torch."""

from mutants import Mutant

MUTANTS = [
    Mutant(
        "the uses of an op have one index",
        "All uses of a new op are those of its first operand.",
        "shardir/compat/xdsl.py",
        "give_operands",
        "tuple([Use(op, i) for i",
        "tuple([Use(op, 0) for i",
        "test/dialects/test_creation.py",
    ),
]
